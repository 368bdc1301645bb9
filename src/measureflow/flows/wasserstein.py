"""Wasserstein gradient flow of a free energy, realised by interacting particles."""

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from measureflow.core.noise import standard_normal
from measureflow.core.pytrees import (
    Parameters,
    Particles,
    add,
    dimension,
    particle_count,
    split_in_half,
    strong,
    subtract,
    total,
)
from measureflow.core.showing import one_line
from measureflow.core.validation import positive_number, require_particles, require_positive
from measureflow.flows.flow import (
    AbstractFlow,
    finite_particles,
    in_files,
    optimiser_step,
    require_optimiser,
)
from measureflow.flows.observing import observed
from measureflow.flows.preconditioners import AbstractPreconditioner
from measureflow.flows.schedules import Tabulated
from measureflow.numerics.interactions import AbstractInteractions, ExactInteractions, RandomBatches
from measureflow.numerics.ring import RingInteractions
from measureflow.spaces.empirical import Empirical
from measureflow.statement.free_energy import FreeEnergy
from measureflow.statement.problem import Problem


@in_files
class ParticleState(eqx.Module):
    """The state of a `WassersteinFlow`.

    Parameters
    ----------
    particles
        Where they are.
    step
        The number of steps taken.
    memory
        What the preconditioner or the optimiser remembers.
    drift
        The running mean of the moves, where there is momentum.
    """

    particles: Particles
    step: Int[Array, ""]
    memory: PyTree = None
    drift: Particles | None = None

    def __repr__(self) -> str:
        return one_line(self)


def _step_size(value: Any) -> Any:
    if value is None or callable(value):
        return value
    return positive_number("step_size", value, "1e-3 is a start.")


def _momentum(value: Any) -> Float[Array, ""] | None:
    if value is None:
        return None
    return positive_number("momentum", value, "0.9 averages over 10 steps; None leaves it out.")


class WassersteinFlow(AbstractFlow):
    """The flow of F(Q) = ∫V dQ + ½∬W dQdQ + τ∫log q dQ + R(Q), by Euler–Maruyama on N particles:

        θᵢ ← θᵢ + uᵢ,  uᵢ = −η g (∇V(θᵢ) + (1/N) Σⱼ ∇₁W(θᵢ, θⱼ) + ∇_W R(θᵢ)) + √(2ητg) Zᵢ

    Parameters
    ----------
    step_size
        η, a number or any Optax schedule.
    preconditioner
        g, which scales drift and noise alike; 1 by default.
    optimiser
        Where τ = 0, any Optax optimiser may take the steps instead, for each particle on its own.
    momentum
        β: the running mean m ← βm + (1 − β)u of the moves, divided by 1 − βᵗ, takes the move's place.
        Drift and noise go through the same mean, which is kinetic Langevin dynamics with steps of length
        √((1 − β)η): for V = aθ²/2 the variance is τ/(a(1 − ηa(1 − β)/(2(1 + β)))), nearer to τ/a than
        without. (Were the drift alone averaged, as an optimiser does it, the chain would be heated.)
    interactions
        How the sum over j is made: exactly by default, or by `RandomBatches` or `RandomFeatures`, which are
        unbiased.
    """

    step_size: Float[Array, ""] | Callable[[Int[Array, ""]], Any] | None = eqx.field(
        converter=_step_size, default=None
    )
    preconditioner: AbstractPreconditioner | None = None
    optimiser: optax.GradientTransformation | None = None
    momentum: Float[Array, ""] | None = eqx.field(converter=_momentum, default=None)
    interactions: AbstractInteractions = ExactInteractions()
    remedy: ClassVar[str] = "a smaller step_size, or a schedule that starts smaller"

    def __check_init__(self) -> None:
        if (self.step_size is None) == (self.optimiser is None):
            raise ValueError(
                f"give WassersteinFlow either step_size or optimiser, got step_size={self.step_size} and "
                f"optimiser={self.optimiser}; an Optax optimiser brings its own learning rate."
            )
        if self.optimiser is not None:
            require_optimiser(self.optimiser)
        if self.preconditioner is not None and not isinstance(self.preconditioner, AbstractPreconditioner):
            raise TypeError(
                f"preconditioner must be a preconditioner, got {self.preconditioner!r}; for a constant one "
                "pass mf.FixedPreconditioner(scale)."
            )
        if not isinstance(self.interactions, AbstractInteractions):
            raise TypeError(
                f"interactions must say how pairs are summed, got {self.interactions!r}; pass "
                "mf.ExactInteractions(), mf.RandomBatches(size) or mf.RandomFeatures(count)."
            )
        if self.momentum is not None:
            require_positive("1 − momentum", 1 - self.momentum, "0.9 averages over 10 steps.")
        for name in ("preconditioner", "momentum"):
            if getattr(self, name) is not None and self.optimiser is not None:
                raise ValueError(
                    f"give WassersteinFlow either {name} or optimiser, got {getattr(self, name)} and "
                    f"{self.optimiser}; an Optax optimiser brings its own."
                )

    def init(self, problem: Problem, initial: Any) -> ParticleState:
        particles = require_particles("initial", initial, problem.template())
        memory = None
        if self.optimiser is not None:
            self._require_no_temperature(problem)
            memory = jax.vmap(self.optimiser.init)(particles)
        if self.preconditioner is not None:
            memory = self.preconditioner.init(particles)
        drift = None if self.momentum is None else jax.tree.map(jnp.zeros_like, particles)
        return ParticleState(particles, jnp.zeros((), jnp.int32), memory, drift)

    def _require_no_temperature(self, problem: Problem) -> None:
        temperature = problem.temperature()
        if temperature is not None:
            raise ValueError(
                f"optimiser was given for a problem with temperature τ = {temperature}: noise through an "
                "optimiser is not Langevin, and its law is not q*; use step_size=, with "
                "preconditioner=mf.RMSPreconditioner(adapt_steps) for adaptive steps, or leave KL out."
            )

    def step(
        self, problem: Problem, state: ParticleState, batch: PyTree, key: Key[Array, ""]
    ) -> ParticleState:
        energy, step_key = problem.free_energy(batch), jax.random.fold_in(key, state.step)
        gradient = self._gradient(energy, state.particles, step_key)
        if self.optimiser is not None:
            self._require_no_temperature(problem)
            move = eqx.Partial(optimiser_step, self.optimiser)
            particles, memory = jax.vmap(move)(gradient, state.memory, state.particles)
            return ParticleState(particles, state.step + 1, memory)
        memory, precondition = state.memory, None
        if self.preconditioner is not None:
            memory = self.preconditioner.update(memory, gradient, state.step)
            precondition = self.preconditioner.diagonal(memory, state.step)

        def moved(start: Particles) -> Particles:
            eta = self.step_size_at(state.step)
            return euler_maruyama(start, gradient, eta, energy.temperature, precondition, step_key)

        if self.momentum is None:
            return ParticleState(moved(state.particles), state.step + 1, memory)
        move = moved(jax.tree.map(jnp.zeros_like, state.particles))
        drift, mean = _running_mean(self.momentum, state.drift, move, state.step)
        return ParticleState(add(state.particles, mean), state.step + 1, memory, drift)

    def _gradient(self, energy: FreeEnergy, particles: Particles, step_key: Key[Array, ""]) -> Particles:
        """The drift, its interaction summed as this flow sums pairs."""
        gradient = energy.potential_gradient(particles)
        if energy.interaction is not None:
            force = self.interactions.gradient(energy.interaction, particles, _pairs_key(step_key))
            gradient = add(gradient, force)
        if energy.rest is None:
            return gradient
        self._require_all_particles()
        return add(gradient, energy.rest_gradient(particles))

    def _require_all_particles(self) -> None:
        some_only = isinstance(self.interactions, RandomBatches)
        if some_only:
            raise ValueError(
                f"interactions={self.interactions} sees some particles at a time, and a nonlinear functional "
                "of them is biased then; use mf.ExactInteractions()."
            )

    def step_size_at(self, step: Int[Array, ""]) -> Float[Array, ""]:
        """η of this step."""
        assert self.step_size is not None
        return strong(self.step_size(step)) if callable(self.step_size) else self.step_size

    def measure(self, state: ParticleState) -> Empirical:
        return Empirical(state.particles)

    def finite(self, state: ParticleState) -> Bool[Array, " n"]:
        finite = finite_particles(state.particles)
        if self.preconditioner is None:
            return finite
        # One that has overflowed is 0 for ever: all particles would stand still, and be finite.
        known = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(state.memory)]
        return functools.reduce(jnp.logical_and, known, finite)

    def on(self, mesh: Mesh) -> "WassersteinFlow":
        if not isinstance(self.interactions, ExactInteractions):
            return self
        return eqx.tree_at(lambda flow: flow.interactions, self, RingInteractions(mesh))

    def tabulated(self, first: int, used: int, length: int) -> "WassersteinFlow":
        if self.step_size is None or not callable(self.step_size):
            return self
        table = Tabulated(self.step_size, first, used, length)
        return eqx.tree_at(lambda flow: flow.step_size, self, table)

    def observe(
        self,
        problem: Problem,
        state: ParticleState,
        batch: PyTree,
        key: Key[Array, ""],
        sampled_share: float,
    ) -> dict[str, Float[Array, ""]]:
        """Energies and forces as `observed` has them; and relative to τ, by how much batches heat the chain,
        where that is defined."""
        pairs_key = _pairs_key(jax.random.fold_in(key, state.step))
        found = observed(problem, state.particles, batch, self.interactions, pairs_key)
        if self.step_size is None or problem.temperature() is None:
            return found
        return found | self._batch_noise(problem, state, batch, key, sampled_share)

    def _batch_noise(
        self,
        problem: Problem,
        state: ParticleState,
        batch: PyTree,
        key: Key[Array, ""],
        sampled_share: float,
    ) -> dict[str, Float[Array, ""]]:
        """η·tr(gC)/(2Jτ), C the covariance of the batch gradient: the share by which batches heat each
        particle's law. All particles see the same batch, so most of it moves the ensemble as a whole and
        shows less in its spread. Two halves of a batch have mean gradients whose difference d has E dᵢ² =
        4S/b, with S the variance over cases; drawing b of n cases without replacement makes C = S/b·(1 −
        b/n).
        """
        halves = split_in_half(batch)
        if halves is None:
            return {}
        temperature, particles = problem.temperature(), state.particles
        step_key = jax.random.fold_in(key, state.step)
        gradient = self._gradient(problem.free_energy(batch), particles, step_key)
        g = self._diagonal_after(state, gradient)
        assert temperature is not None
        # Per particle and coordinate, in units of τ.
        unit = self.step_size_at(state.step) / (dimension(particles) * temperature)
        first, second = (problem.objective_energy(half).wasserstein_gradient(particles) for half in halves)
        difference = _square(g, subtract(first, second))
        return {"batch_noise": unit * difference * (1 - sampled_share) / 8}

    def _diagonal_after(self, state: ParticleState, gradient: Particles) -> Parameters | None:
        """g of the step that comes next."""
        if self.preconditioner is None:
            return None
        memory = self.preconditioner.update(state.memory, gradient, state.step)
        return self.preconditioner.diagonal(memory, state.step)


def _pairs_key(step_key: Key[Array, ""]) -> Key[Array, ""]:
    """For sums over pairs: apart from the noise, which is drawn with the step's key itself."""
    return jax.random.fold_in(step_key, 1)


def _square(diagonal: Parameters | None, x: Particles) -> Float[Array, ""]:
    """Σᵢ ⟨xᵢ, g xᵢ⟩."""
    weighted = x if diagonal is None else jax.tree.map(jnp.multiply, _like(diagonal, x), x)
    return total(jax.tree.map(jnp.multiply, x, weighted))


def _running_mean(
    decay: Float[Array, ""], mean: Particles | None, move: Particles, step: Int[Array, ""]
) -> tuple[Particles, Particles]:
    """m ← βm + (1 − β)·move, and m/(1 − βᵗ), which does not remember that it started at zero."""
    started_at_zero = 1 - decay ** (step + 1).astype(decay.dtype)
    mean = jax.tree.map(lambda m, u: decay.astype(u.dtype) * m + (1 - decay).astype(u.dtype) * u, mean, move)
    return mean, jax.tree.map(lambda m: m / started_at_zero.astype(m.dtype), mean)


def _like(diagonal: Parameters, particles: Particles) -> PyTree[Float[Array, "1 ..."]]:
    """The diagonal g against particles: one leading axis more, scalars spread out."""
    return jax.tree.map(
        lambda g, x: jnp.broadcast_to(g.astype(x.dtype), x.shape[1:])[None], diagonal, particles
    )


def euler_maruyama(
    particles: Particles,
    gradient: Particles,
    step_size: Float[Array, ""],
    temperature: Float[Array, ""] | None,
    precondition: Parameters | None,
    key: Key[Array, ""],
) -> Particles:
    """θ − ηg·gradient + √(2ητg) Z, with Z standard normal and g = 1 where there is none."""
    diagonal = jax.tree.map(lambda _: jnp.ones((), step_size.dtype), gradient)
    if precondition is not None:
        diagonal = _like(precondition, particles)
    rate = jax.tree.map(lambda x, g: step_size.astype(x.dtype) * g.astype(x.dtype), particles, diagonal)
    moved = jax.tree.map(lambda x, r, drift: x - r * drift, particles, rate, gradient)
    if temperature is None:
        return moved
    noise = standard_normal(key, particle_count(particles), jax.tree.map(lambda x: x[0], particles))
    return jax.tree.map(
        lambda x, r, z: x + jnp.sqrt(2 * temperature.astype(x.dtype) * r) * z, moved, rate, noise
    )
