"""Kinetic (underdamped) Langevin dynamics: particles with velocities, which do not walk at random."""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, Key, PyTree

from measureflow.core.pytrees import Particles, add, squared_sizes, strong
from measureflow.core.validation import positive_number, require_particles
from measureflow.flows.arguments import round_the_ring, tabulated_step_size
from measureflow.flows.drifts import drift, pairs_key
from measureflow.flows.flow import AbstractFlow
from measureflow.flows.integrators import noise_like
from measureflow.flows.metropolis import (
    acceptance,
    accepted,
    require_all_cases,
    require_potential,
    values_and_gradients,
    where,
)
from measureflow.flows.observing import observed
from measureflow.flows.preconditioners import AbstractPreconditioner
from measureflow.flows.scalings import AbstractScaling, Identity
from measureflow.numerics.interactions import AbstractInteractions, ExactInteractions
from measureflow.spaces.empirical import Empirical
from measureflow.statement.free_energy import FreeEnergy
from measureflow.statement.problem import Problem

_SCHEMES = ("BAOAB", "OBABO", "UBU")


class KineticState(eqx.Module):
    """Particles, their velocities w in coordinates where g is the identity (θ̇ = L w, g = L Lᵀ), the number of
    steps taken, and what the preconditioner remembers."""

    particles: Particles
    velocity: Particles
    step: Int[Array, ""]
    memory: PyTree = None


class Leap(NamedTuple):
    """Where a leapfrog step leads, and the probability that it is accepted."""

    particles: Particles
    velocity: Particles
    acceptance: Float[Array, " n"]


def _step_size(value: Any) -> Any:
    return value if callable(value) else positive_number("step_size", value, "0.1 is a start.")


def _friction(value: Any) -> Float[Array, ""]:
    return positive_number("friction", value, "1 forgets a velocity in about one unit of time.")


class KineticFlow(AbstractFlow):
    """θ̇ = v,   v̇ = −g f(θ) − γ v + √(2γτg) Ḃ,   f = ∇V + ∫∇₁W dQ + ∇_W R, whose law of θ is that of the
    Wasserstein flow. One gradient a step.

    Parameters
    ----------
    step_size
        η, a number or any Optax schedule: the step of a wave equation, so that η² here is what η is to
        `WassersteinFlow`.
    friction
        γ > 0.
    scheme
        How the kick B, the drift A and the noise O of a step follow one another. "BAOAB": for V = aθ²/2 the
        variance is τ/a for every stable η. "OBABO": τ/(a(1 − η²ga/4)). "UBU": A and O together, exactly, and
        B in the middle. B is taken once a step, at the particles that are recorded; so the velocity of a
        state is that of half a kick earlier.
    mass
        A preconditioner g, the inverse mass; 1 by default.
    metropolis
        Whether the steps of "OBABO" are accepted or rejected (generalised Hamiltonian Monte Carlo, Horowitz
        1991): then the law of θ is exp(−V/τ) for *any* η. For τ > 0, without interaction, without a nonlinear
        functional and without batches; two gradients a step. History records the `acceptance`.
    interactions
        How the sum over pairs is made.
    """

    step_size: Float[Array, ""] | Callable[[Int[Array, ""]], Any] = eqx.field(converter=_step_size)
    friction: Float[Array, ""] = eqx.field(converter=_friction)
    scheme: str = eqx.field(static=True, default="BAOAB")
    mass: AbstractPreconditioner | None = None
    metropolis: bool = eqx.field(static=True, default=False)
    interactions: AbstractInteractions = ExactInteractions()
    remedy: ClassVar[str] = "a smaller step_size"

    def __check_init__(self) -> None:
        if self.scheme not in _SCHEMES:
            raise ValueError(f"scheme must be one of {', '.join(_SCHEMES)}, got {self.scheme!r}.")
        if self.mass is not None and not isinstance(self.mass, AbstractPreconditioner):
            raise TypeError(
                f"mass must be a preconditioner, got {self.mass!r}; for a constant one pass "
                "mf.FixedPreconditioner(scale), scale being the inverse mass."
            )
        if self.mass is not None and self.mass.adaptive and self.scheme == "UBU":
            raise ValueError(
                f'scheme="UBU" moves before it sees a force, so its mass must stand still, got {self.mass}; '
                'pass mf.FixedPreconditioner(scale), or scheme="BAOAB".'
            )
        if self.mass is not None and self.mass.limits:
            raise ValueError(
                f"mass has a largest drift, got {self.mass}: it does not limit a velocity; "
                "leave largest= out, or use WassersteinFlow with momentum=."
            )
        if self.metropolis and self.scheme != "OBABO":
            raise ValueError(
                f'metropolis=True needs scheme="OBABO", whose step BAB leads back to where it came from, got '
                f'{self.scheme!r}; pass scheme="OBABO".'
            )

    def init(self, problem: Problem, initial: Any) -> KineticState:
        particles = require_particles("initial", initial, problem.template())
        if problem.temperature() is None:
            raise ValueError(
                "KineticFlow was given a problem without temperature: friction without noise ends in a "
                "minimum; use WassersteinFlow with an optimiser, or give the problem a KL term."
            )
        if self.metropolis:
            require_potential(problem.free_energy(), problem.temperature())
        memory = None if self.mass is None else self.mass.init(particles)
        velocity = jax.tree.map(jnp.zeros_like, particles)
        return KineticState(particles, velocity, jnp.zeros((), jnp.int32), memory)

    def step(self, problem: Problem, state: KineticState, batch: PyTree, key: Key[Array, ""]) -> KineticState:
        energy, step_key = problem.free_energy(batch), jax.random.fold_in(key, state.step)
        assert energy.temperature is not None
        velocity = _begun(state, energy.temperature, key)
        if self.scheme == "UBU":
            return self._ubu(energy, state, velocity, step_key)
        force = self._force(energy, state.particles, step_key)
        memory, scaling = self._scaling(state, force)
        if self.metropolis:
            leap = self._leap(problem, state, velocity, batch, scaling, step_key)
            moves = accepted(leap.acceptance, step_key)
            particles = where(moves, leap.particles, state.particles)
            # A velocity that led nowhere turns back.
            refreshed = self._noise(velocity, energy.temperature, state.step, step_key)
            velocity = where(moves, leap.velocity, jax.tree.map(jnp.negative, refreshed))
            return KineticState(particles, velocity, state.step + 1, memory)
        eta, pull = self.step_size_at(state.step), scaling.root_transposed(force)
        if self.scheme == "BAOAB":
            velocity = _plus(velocity, -eta, pull)
            particles = _plus(state.particles, eta / 2, scaling.root(velocity))
            velocity = self._noise(velocity, energy.temperature, state.step, step_key)
            particles = _plus(particles, eta / 2, scaling.root(velocity))
        else:
            velocity = _plus(velocity, -eta / 2, pull)
            velocity = self._noise(velocity, energy.temperature, state.step, step_key)
            velocity = _plus(velocity, -eta / 2, pull)
            particles = _plus(state.particles, eta, scaling.root(velocity))
        return KineticState(particles, velocity, state.step + 1, memory)

    def _noise(
        self, velocity: Particles, temperature: Float[Array, ""], step: Int[Array, ""], key: Key[Array, ""]
    ) -> Particles:
        """w ← e^{−γη} w + √((1 − e^{−2γη})τ) Z."""
        kept = jnp.exp(-self.friction * self.step_size_at(step))
        size = jnp.sqrt((1 - jnp.square(kept)) * temperature.astype(kept.dtype))
        return jax.tree.map(
            lambda w, z: kept.astype(w.dtype) * w + size.astype(w.dtype) * z,
            velocity,
            noise_like(key, velocity),
        )

    def _ubu(
        self, energy: FreeEnergy, state: KineticState, velocity: Particles, step_key: Key[Array, ""]
    ) -> KineticState:
        """U of η/2, a kick of η, U of η/2 (Zapatero, 2017; Sanz-Serna and Zygalakis, 2021)."""
        eta, tau = self.step_size_at(state.step), energy.temperature
        assert tau is not None
        scaling = Identity() if self.mass is None else self.mass.scaling(state.memory, state.step)
        first, second = jax.random.fold_in(step_key, 3), jax.random.fold_in(step_key, 4)
        particles, velocity = _free(state.particles, velocity, eta / 2, self.friction, tau, scaling, first)
        force = self._force(energy, particles, step_key)
        velocity = _plus(velocity, -eta, scaling.root_transposed(force))
        particles, velocity = _free(particles, velocity, eta / 2, self.friction, tau, scaling, second)
        return KineticState(particles, velocity, state.step + 1, state.memory)

    def _leap(
        self,
        problem: Problem,
        state: KineticState,
        velocity: Particles,
        batch: PyTree,
        scaling: AbstractScaling,
        step_key: Key[Array, ""],
    ) -> Leap:
        """Noise on the velocity, then BAB, accepted with probability min(1, exp(−ΔH/τ)), H = V + ½‖w‖²."""
        potential, tau = require_potential(problem.free_energy(batch), problem.temperature())
        eta = self.step_size_at(state.step)
        velocity = self._noise(velocity, tau, state.step, step_key)
        value, force = values_and_gradients(potential, state.particles)
        kicked = _plus(velocity, -eta / 2, scaling.root_transposed(force))
        particles = _plus(state.particles, eta, scaling.root(kicked))
        new_value, force = values_and_gradients(potential, particles)
        after = _plus(kicked, -eta / 2, scaling.root_transposed(force))
        gained = new_value - value + 0.5 * (squared_sizes(after) - squared_sizes(velocity))
        return Leap(particles, after, acceptance(-gained / tau))

    def _force(self, energy: FreeEnergy, particles: Particles, step_key: Key[Array, ""]) -> Particles:
        return drift(energy, particles, self.interactions, step_key)

    def _scaling(self, state: KineticState, force: Particles) -> tuple[PyTree, AbstractScaling]:
        if self.mass is None:
            return state.memory, Identity()
        memory = self.mass.update(state.memory, state.particles, force, state.step)
        return memory, self.mass.scaling(memory, state.step)

    def step_size_at(self, step: Int[Array, ""]) -> Float[Array, ""]:
        """η of this step."""
        return strong(self.step_size(step)) if callable(self.step_size) else self.step_size

    def promises(self, problem: Problem) -> list[str]:
        if self.metropolis:
            return ["Steps are accepted or rejected: the law of θ is exp(−V/τ) for any η."]
        return [
            "Velocity and friction have the same law of θ as noise alone, and forget the start sooner where "
            "curvatures differ; at a finite η it is off by O(η²)."
        ]

    def measure(self, state: KineticState) -> Empirical:
        return Empirical(state.particles)

    def require_share(self, sampled_share: float) -> None:
        if self.metropolis:
            require_all_cases(sampled_share)

    def on(self, mesh: Mesh) -> "KineticFlow":
        return round_the_ring(self, mesh)

    def tabulated(self, first: int, used: int, length: int) -> "KineticFlow":
        return tabulated_step_size(self, first, used, length)

    def observe(
        self, problem: Problem, state: KineticState, batch: PyTree, key: Key[Array, ""], sampled_share: float
    ) -> dict[str, Float[Array, ""]]:
        step_key = jax.random.fold_in(key, state.step)
        found = observed(problem, state.particles, batch, self.interactions, pairs_key(step_key))
        temperature = problem.temperature()
        assert temperature is not None
        if self.metropolis:
            velocity = _begun(state, temperature, key)
            force = self._force(problem.free_energy(batch), state.particles, step_key)
            _, scaling = self._scaling(state, force)
            leap = self._leap(problem, state, velocity, batch, scaling, step_key)
            found["acceptance"] = jnp.mean(leap.acceptance)
        return found


def _plus(x: Particles, rate: Float[Array, ""], y: Particles) -> Particles:
    """x + rate·y."""
    return jax.tree.map(lambda a, b: a + rate.astype(a.dtype) * b, x, y)


def _begun(state: KineticState, temperature: Float[Array, ""], key: Key[Array, ""]) -> Particles:
    """The velocities of a state; at its first step, drawn from their law N(0, τ)."""
    # Steps are folded in from 0 on, so −2 is the key of none.
    fresh = noise_like(jax.random.fold_in(key, jnp.uint32(2**32 - 2)), state.velocity)
    size = jnp.sqrt(temperature)
    return jax.tree.map(
        lambda w, z: jnp.where(state.step == 0, size.astype(z.dtype) * z, w), state.velocity, fresh
    )


def _free(
    particles: Particles,
    velocity: Particles,
    time: Float[Array, ""],
    friction: Float[Array, ""],
    temperature: Float[Array, ""],
    scaling: AbstractScaling,
    key: Key[Array, ""],
) -> tuple[Particles, Particles]:
    """θ̇ = Lw, ẇ = −γw + √(2γτ) Ḃ for a time t, exactly: with e = e^{−γt}, ∫w has mean (1 − e)w/γ and variance
    τ(2γt − 3 + 4e − e²)/γ², w has variance τ(1 − e²), and their covariance is τ(1 − e)²/γ."""
    decay = friction * time
    kept, lost = jnp.exp(-decay), -jnp.expm1(-decay)
    of_velocity = temperature * (1 - jnp.square(kept))
    covariance = temperature * jnp.square(lost) / friction
    of_path = temperature * _path_variance(decay) / jnp.square(friction)
    slope = covariance / jnp.sqrt(of_velocity)
    rest = jnp.sqrt(jnp.maximum(of_path - jnp.square(slope), 0.0))
    first, second = (noise_like(jax.random.fold_in(key, k), velocity) for k in (0, 1))
    path = jax.tree.map(
        lambda w, z, other: (
            (lost / friction).astype(w.dtype) * w + slope.astype(w.dtype) * z + rest.astype(w.dtype) * other
        ),
        velocity,
        first,
        second,
    )
    moved = jax.tree.map(
        lambda w, z: kept.astype(w.dtype) * w + jnp.sqrt(of_velocity).astype(w.dtype) * z, velocity, first
    )
    return add(particles, scaling.root(path)), moved


def _path_variance(decay: Float[Array, ""]) -> Float[Array, ""]:
    """2x − 3 + 4e^{−x} − e^{−2x}, by its series where x is small: single precision would cancel all of it."""
    exact = 2 * decay - 3 + 4 * jnp.exp(-decay) - jnp.exp(-2 * decay)
    series = decay**3 * (2 / 3 - decay / 2 + 7 * decay**2 / 30 - decay**3 / 12 + 31 * decay**4 / 1260)
    return jnp.where(decay < 0.3, series, exact)
