"""Wasserstein gradient flow of a free energy, realised by interacting particles."""

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from measureflow.core.devices import PARTICLES, place
from measureflow.core.noise import standard_normal
from measureflow.core.pytrees import (
    Parameters,
    Particles,
    add,
    particle_count,
    particle_dimension,
    root_mean_square_norm,
    split_in_half,
    squared_norm,
    strong,
    subtract,
)
from measureflow.core.validation import positive_number, require_particles, require_positive
from measureflow.flows.flow import AbstractFlow, in_files, optimiser_step, require_optimiser, require_state
from measureflow.flows.preconditioners import AbstractPreconditioner
from measureflow.flows.schedules import Tabulated
from measureflow.numerics.interactions import AbstractInteractions, ExactInteractions
from measureflow.numerics.ring import RingInteractions
from measureflow.spaces.measures import Empirical
from measureflow.statement.free_energy import FreeEnergy
from measureflow.statement.problem import Problem


@in_files
class ParticleState(eqx.Module):
    """Particles, the number of steps taken, and what optimiser, or preconditioner and momentum, remember."""

    particles: Particles
    step: Int[Array, ""]
    memory: PyTree = None
    drift: Particles | None = None


def _step_size(value: Any) -> Any:
    if value is None or callable(value):
        return value
    return positive_number("step_size", value, "1e-3 is a start.")


def _momentum(value: Any) -> Float[Array, ""] | None:
    if value is None:
        return None
    return positive_number("momentum", value, "0.9 averages over 10 steps; None leaves it out.")


class WassersteinFlow(AbstractFlow):
    """The flow of F(Q) = ∫V dQ + ½∬W dQdQ + τ∫log q dQ, by Euler–Maruyama on N particles:

        θᵢ ← θᵢ − η g (∇V(θᵢ) + (1/N) Σⱼ ∇₁W(θᵢ, θⱼ)) + √(2ητg) Zᵢ

    `step_size` η is a number or any Optax schedule. `preconditioner` is g (default 1). `momentum` β puts the
    running mean m ← βm + (1 − β)(∇V + ∫∇₁W dQ), divided by 1 − βᵗ, in the drift's place: noise of batches
    is averaged out of it, the noise Z stays as it is, and the invariant law as η → 0 stays q*. Where τ = 0,
    any Optax `optimiser` may take the steps instead, for each particle on its own. `interactions` says how
    the sum over j is made: exactly by default, or by `RandomBatches` or `RandomFeatures`, which are unbiased.
    """

    step_size: Float[Array, ""] | Callable[[Int[Array, ""]], Any] | None = eqx.field(
        converter=_step_size, default=None
    )
    preconditioner: AbstractPreconditioner | None = None
    optimiser: optax.GradientTransformation | None = None
    momentum: Float[Array, ""] | None = eqx.field(converter=_momentum, default=None)
    interactions: AbstractInteractions = ExactInteractions()
    movers: ClassVar[str] = "particles"
    restarts: ClassVar[bool] = True
    remedy: ClassVar[str] = (
        "a smaller step_size, a schedule that starts smaller, or preconditioner=mf.RMSPreconditioner(...)"
    )

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

    def resume(self, problem: Problem, state: Any) -> ParticleState:
        return require_state(self, ParticleState, state, lambda: self.init(problem, state.particles))

    def _require_no_temperature(self, problem: Problem) -> None:
        temperature = problem.free_energy().temperature
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
        drift = None
        if self.momentum is not None:
            drift, gradient = _running_mean(self.momentum, state.drift, gradient, state.step)
        particles = euler_maruyama(
            state.particles,
            gradient,
            self.step_size_at(state.step),
            energy.temperature,
            precondition,
            step_key,
        )
        return ParticleState(particles, state.step + 1, memory, drift)

    def _gradient(self, energy: FreeEnergy, particles: Particles, step_key: Key[Array, ""]) -> Particles:
        # Apart from the noise, which is drawn with the step's key itself.
        return energy.wasserstein_gradient(particles, self.interactions, jax.random.fold_in(step_key, 1))

    def step_size_at(self, step: Int[Array, ""]) -> Float[Array, ""]:
        """η of this step."""
        assert self.step_size is not None
        return strong(self.step_size(step)) if callable(self.step_size) else self.step_size

    def measure(self, state: ParticleState) -> Empirical:
        return Empirical(state.particles)

    def finite(self, state: ParticleState) -> Bool[Array, " n"]:
        leaves = [leaf.reshape(leaf.shape[0], -1) for leaf in jax.tree.leaves(state.particles)]
        finite = functools.reduce(jnp.logical_and, [jnp.all(jnp.isfinite(leaf), axis=1) for leaf in leaves])
        if self.preconditioner is not None:
            # One that has overflowed is 0 for ever: all particles would stand still, and be finite.
            known = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(state.memory)]
            finite = functools.reduce(jnp.logical_and, known, finite)
        return finite

    def rearranged(self, state: ParticleState, sources: Int[Array, " n"]) -> ParticleState:
        memory = state.memory if self.optimiser is None else _picked(state.memory, sources)
        return ParticleState(
            _picked(state.particles, sources), state.step, memory, _picked(state.drift, sources)
        )

    def on(self, mesh: Mesh | None) -> "WassersteinFlow":
        if mesh is None or not isinstance(self.interactions, ExactInteractions):
            return self
        return eqx.tree_at(lambda flow: flow.interactions, self, RingInteractions(mesh))

    def spread(self, state: ParticleState, mesh: Mesh | None) -> ParticleState:
        each = PartitionSpec(PARTICLES)
        # An optimiser remembers something of every particle, a preconditioner of all together.
        memory = place(mesh, state.memory, PartitionSpec() if self.optimiser is None else each)
        particles, drift = place(mesh, (state.particles, state.drift), each)
        return ParticleState(particles, place(mesh, state.step), memory, drift)

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
        """Energies: `loss` ∫ℓ, `reference` ∫(V−ℓ), `interaction` ½∬W; L²(Q_N) norms of their gradients and
        of the sum; `repulsion`, the size of the interaction relative to the loss gradient; `batch_noise`
        relative to τ."""
        particles = state.particles
        loss, regulariser = problem.loss_energy(batch), FreeEnergy()
        if problem.regulariser is not None:
            regulariser = problem.regulariser.free_energy()
        of_loss = loss.potential_gradient(particles)
        of_reference = regulariser.potential_gradient(particles)
        step_key = jax.random.fold_in(jax.random.fold_in(key, state.step), 1)
        of_interaction = regulariser.interaction_gradient(particles, self.interactions, step_key)
        loss_norm = root_mean_square_norm(of_loss)
        interaction_norm = root_mean_square_norm(of_interaction)
        return {
            "loss": loss.potential_energy(particles),
            "reference": regulariser.potential_energy(particles),
            "interaction": regulariser.interaction_energy(particles, self.interactions, step_key),
            "loss_gradient_norm": loss_norm,
            "reference_gradient_norm": root_mean_square_norm(of_reference),
            "interaction_gradient_norm": interaction_norm,
            "gradient_norm": root_mean_square_norm(add(add(of_loss, of_reference), of_interaction)),
            "repulsion": interaction_norm / loss_norm,
            "batch_noise": self._batch_noise(problem, state, batch, sampled_share),
        }

    def _batch_noise(
        self, problem: Problem, state: ParticleState, batch: PyTree, sampled_share: float
    ) -> Float[Array, ""]:
        """η·tr(gC)/(2Jτ), C the covariance of the batch gradient; NaN where it cannot be known.

        It is the share by which batches heat each particle's law. All particles see the same batch, so
        most of it moves the ensemble as a whole and shows less in its spread.

        Two halves of a batch have mean gradients whose difference d has E dᵢ² = 4S/b, with S the
        variance over cases; drawing b of n cases without replacement makes C = S/b·(1 − b/n).
        """
        temperature = problem.free_energy(batch).temperature
        halves = split_in_half(batch)
        if temperature is None or halves is None or self.step_size is None:
            return jnp.full((), jnp.nan)
        first, second = (problem.loss_energy(half).potential_gradient(state.particles) for half in halves)
        difference = subtract(first, second)
        if self.preconditioner is not None:
            # The diagonal as the last step left it.
            g = self.preconditioner.diagonal(state.memory, jnp.maximum(state.step - 1, 0))
            difference = jax.tree.map(lambda d, s: jnp.sqrt(s) * d, difference, _like(g, difference))
            # Before the first step an adaptive diagonal has seen nothing.
            trace_known = (state.step > 0) | (not self.preconditioner.adaptive)
            difference = jax.tree.map(lambda d: jnp.where(trace_known, d, jnp.nan), difference)
        trace = squared_norm(difference) / (4 * particle_count(state.particles)) * (1 - sampled_share)
        number = particle_dimension(state.particles)
        return self.step_size_at(state.step) * trace / (2 * number * temperature)


def _picked(tree: PyTree, rows: Int[Array, " n"]) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[rows], tree)


def _running_mean(
    decay: Float[Array, ""], mean: Particles | None, gradient: Particles, step: Int[Array, ""]
) -> tuple[Particles, Particles]:
    """m ← βm + (1 − β)·gradient, and m/(1 − βᵗ), which does not remember that it started at zero."""
    started_at_zero = 1 - decay ** (step + 1).astype(decay.dtype)
    mean = jax.tree.map(
        lambda m, g: decay.astype(g.dtype) * m + (1 - decay).astype(g.dtype) * g, mean, gradient
    )
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
