"""Wasserstein gradient flow of a free energy, realised by interacting particles."""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from measureflow.core.pytrees import (
    Particles,
    add,
    dimension,
    root_mean_square_norm,
    scale,
    split_in_half,
    subtract,
    total,
)
from measureflow.core.showing import one_line
from measureflow.core.statistics import WithStatistics, carrying, parameters_of
from measureflow.core.validation import positive_number, require_particles, require_positive
from measureflow.flows.arguments import (
    StepSize,
    require_alone,
    require_interactions,
    require_mover,
    require_preconditioner,
    round_the_ring,
    step_size_at,
    step_size_or_schedule,
    tabulated_step_size,
)
from measureflow.flows.drifts import pairs_key
from measureflow.flows.entropies import AbstractEntropy, AbstractScore, Noise, require_entropy
from measureflow.flows.flow import (
    AbstractFlow,
    finite_state,
    in_files,
    optimiser_step,
)
from measureflow.flows.integrators import (
    AbstractIntegrator,
    EulerMaruyama,
    LeimkuhlerMatthews,
    euler_maruyama,
    leimkuhler_matthews,
)
from measureflow.flows.metropolis import (
    Proposal,
    accepted,
    mala_proposal,
    require_all_cases,
    require_potential,
    where,
)
from measureflow.flows.observing import observed
from measureflow.flows.preconditioners import AbstractPreconditioner
from measureflow.flows.promises import of_particles
from measureflow.flows.scalings import AbstractScaling, Identity
from measureflow.flows.training import drift_in_training, objective_gradient, objective_in_training
from measureflow.numerics.interactions import AbstractInteractions, ExactInteractions
from measureflow.spaces.empirical import Empirical
from measureflow.statement.problem import Problem
from measureflow.statement.training import with_statistics


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


def _momentum(value: Any) -> Float[Array, ""] | None:
    if value is None:
        return None
    return positive_number("momentum", value, "0.9 averages over 10 steps; None leaves it out.")


class WassersteinFlow(AbstractFlow):
    """The flow of F(Q) = ∫V dQ + ½∬W dQdQ + τ∫log q dQ + R(Q), on N particles:

        θᵢ ← θᵢ − η g (∇V(θᵢ) + (1/N) Σⱼ ∇₁W(θᵢ, θⱼ) + ∇_W R(θᵢ)) + √(2ητg) ζᵢ,

    with ζ the mean of the noise of this step and of the next (Leimkuhler and Matthews, 2013).

    Parameters
    ----------
    step_size
        η, a number or any Optax schedule.
    preconditioner
        g, which scales drift and noise alike; 1 by default. `EnsemblePreconditioner` is the particles' own
        covariance.
    optimiser
        Where there is no noise, any Optax optimiser may take the steps instead, for each particle on its own.
    momentum
        β: the running mean m ← βm + (1 − β)u of the moves, divided by 1 − βᵗ, takes the move's place.
        Drift and noise go through the same mean, which is kinetic Langevin dynamics with steps of length
        √((1 − β)η): for V = aθ²/2 the variance is τ/(a(1 − ηa(1 − β)/(2(1 + β)))), nearer to τ/a than
        without. (Were the drift alone averaged, as an optimiser does it, the chain would be heated.)
        Noise is that of Euler–Maruyama then.
    interactions
        How the sum over j is made: exactly by default, or by `RandomBatches` or `RandomFeatures`, which are
        unbiased.
    integrator
        `LeimkuhlerMatthews()` or `EulerMaruyama()`, where there is noise.
    metropolis
        Whether the step is a proposal that is accepted or rejected (MALA): then the law is exp(−V/τ) for
        *any* step size. For τ > 0, without interaction, without a nonlinear functional and without batches;
        two gradients a step. History records the `acceptance`, best near 0.57.
    entropy
        `Noise()`; or, in its place, an estimate of −τ∇log q from the particles themselves:
        `KernelDensity(kernel)`, `Blob(kernel)`, `SteinGradientEstimator(kernel)` or
        `SpectralSteinGradientEstimator(kernel)`. Then nothing is random, and optimisers are allowed at τ > 0.
    """

    step_size: StepSize = eqx.field(converter=step_size_or_schedule, default=None)
    preconditioner: AbstractPreconditioner | None = None
    optimiser: optax.GradientTransformation | None = None
    momentum: Float[Array, ""] | None = eqx.field(converter=_momentum, default=None)
    interactions: AbstractInteractions = ExactInteractions()
    integrator: AbstractIntegrator | None = None
    metropolis: bool = eqx.field(static=True, default=False)
    entropy: AbstractEntropy = Noise()
    remedy: ClassVar[str] = "a smaller step_size, or a schedule that starts smaller"
    carries_statistics: ClassVar[bool] = True

    def __check_init__(self) -> None:
        require_mover(self)
        require_preconditioner(self.preconditioner)
        require_interactions(self.interactions)
        if self.momentum is not None:
            require_positive("1 − momentum", 1 - self.momentum, "0.9 averages over 10 steps.")
        self._check_integrator()
        require_entropy(self)
        require_alone(self, "preconditioner", "momentum", "integrator")

    def _check_integrator(self) -> None:
        if self.integrator is not None and not isinstance(self.integrator, AbstractIntegrator):
            raise TypeError(
                f"integrator must say how noise enters, got {self.integrator!r}; pass "
                "mf.LeimkuhlerMatthews() or mf.EulerMaruyama()."
            )
        if not isinstance(self.metropolis, bool):
            raise TypeError(f"metropolis must be True or False, got {self.metropolis!r}.")
        averaged = isinstance(self.integrator, LeimkuhlerMatthews)
        if averaged and self.momentum is not None:
            raise ValueError(
                f"give WassersteinFlow either momentum or LeimkuhlerMatthews(), got momentum={self.momentum} "
                "with it: its law is known for the drift itself only; use mf.EulerMaruyama(), or leave "
                "momentum out."
            )
        if not self.metropolis:
            return
        for name, unwanted in (
            ("momentum", self.momentum is not None),
            ("optimiser", self.optimiser is not None),
            ("LeimkuhlerMatthews()", averaged),
            ("a preconditioner with largest", self.preconditioner is not None and self.preconditioner.limits),
        ):
            if unwanted:
                raise ValueError(
                    f"give WassersteinFlow either metropolis=True or {name}: a proposal is a step of "
                    "mf.EulerMaruyama(), whose density is known; leave one of them out."
                )

    def init(self, problem: Problem, initial: Any) -> ParticleState:
        found = problem.trained_loss()
        initial = with_statistics(None if found is None else found[0], initial)
        carried = require_particles(
            "initial", initial, problem.template(), with_statistics=not self.metropolis
        )
        particles, memory = parameters_of(carried), None
        if self.optimiser is not None:
            self._require_no_temperature(problem)
            memory = jax.vmap(self.optimiser.init)(particles)
        if self.preconditioner is not None:
            memory = self.preconditioner.init(particles)
        if self.metropolis:
            self._require_potential(problem)
        mean = None if self.momentum is None else jax.tree.map(jnp.zeros_like, particles)
        return ParticleState(carried, jnp.zeros((), jnp.int32), memory, mean)

    def _require_no_temperature(self, problem: Problem) -> None:
        temperature = problem.temperature()
        if temperature is not None and isinstance(self.entropy, Noise):
            raise ValueError(
                f"optimiser was given for a problem with temperature τ = {temperature}: noise through an "
                "optimiser is not Langevin, and its law is not q*; use step_size=, with "
                "preconditioner=mf.RMSPreconditioner(adapt_steps) for adaptive steps, or a flow without "
                "noise, entropy=mf.KernelDensity(kernel) or mf.SteinFlow(kernel, ...), or leave KL out."
            )

    def _require_potential(self, problem: Problem, batch: PyTree = None) -> tuple:
        return require_potential(problem.free_energy(batch), problem.temperature())

    def require_share(self, sampled_share: float) -> None:
        if self.metropolis:
            require_all_cases(sampled_share)

    def step(
        self, problem: Problem, state: ParticleState, batch: PyTree, key: Key[Array, ""]
    ) -> ParticleState:
        step_key, theta = jax.random.fold_in(key, state.step), parameters_of(state.particles)
        gradient, statistics = self._gradient(problem, state.particles, batch, step_key)
        if self.optimiser is not None:
            self._require_no_temperature(problem)
            move = eqx.Partial(optimiser_step, self.optimiser)
            particles, memory = jax.vmap(move)(gradient, state.memory, theta)
            return ParticleState(carrying(particles, statistics, state.particles), state.step + 1, memory)
        if self.preconditioner is not None:
            gradient = self.preconditioner.limited(state.memory, gradient, state.step)
        memory, scaling = self._scaling_after(state, gradient)
        noise = problem.free_energy(batch).temperature if isinstance(self.entropy, Noise) else None
        if self.metropolis:
            proposal = self._proposal(problem, state, batch, scaling, step_key)
            moves = accepted(proposal.acceptance, step_key)
            return ParticleState(where(moves, proposal.particles, state.particles), state.step + 1, memory)
        if self.momentum is None:
            particles = self._moved(state, theta, gradient, noise, scaling, key)
            return ParticleState(carrying(particles, statistics, state.particles), state.step + 1, memory)
        origin = jax.tree.map(jnp.zeros_like, theta)
        move = self._moved(state, origin, gradient, noise, scaling, key)
        drift, mean = _running_mean(self.momentum, state.drift, move, state.step)
        particles = carrying(add(theta, mean), statistics, state.particles)
        return ParticleState(particles, state.step + 1, memory, drift)

    def _moved(
        self,
        state: ParticleState,
        start: Particles,
        gradient: Particles,
        temperature: Float[Array, ""] | None,
        scaling: AbstractScaling | None,
        key: Key[Array, ""],
    ) -> Particles:
        """Where the step of this state leads from `start`."""
        step_size = self.step_size_at(state.step)
        plain = isinstance(self.integrator, EulerMaruyama) or self.momentum is not None
        if temperature is None or plain:
            step_key = jax.random.fold_in(key, state.step)
            return euler_maruyama(start, gradient, step_size, temperature, scaling, step_key)
        return leimkuhler_matthews(start, gradient, step_size, temperature, scaling, key, state.step)

    def _proposal(
        self,
        problem: Problem,
        state: ParticleState,
        batch: PyTree,
        scaling: AbstractScaling | None,
        step_key: Key[Array, ""],
    ) -> Proposal:
        potential, temperature = self._require_potential(problem, batch)
        step_size = self.step_size_at(state.step)
        return mala_proposal(
            potential, temperature, state.particles, step_size, scaling or Identity(), step_key
        )

    def _gradient(
        self, problem: Problem, particles: Particles, batch: PyTree, step_key: Key[Array, ""]
    ) -> tuple[Particles, PyTree]:
        """All that is descended, and the statistics after this step, where particles carry some."""
        found, statistics = drift_in_training(problem, particles, batch, self.interactions, step_key)
        temperature = problem.free_energy(batch).temperature
        if temperature is None or not isinstance(self.entropy, AbstractScore):
            return found, statistics
        score = self.entropy.score(parameters_of(particles), self.interactions)
        return add(found, scale(temperature, score)), statistics

    def step_size_at(self, step: Int[Array, ""]) -> Float[Array, ""]:
        """η of this step."""
        return step_size_at(self.step_size, step)

    def promises(self, problem: Problem) -> list[str]:
        return of_particles(self, problem)

    def measure(self, state: ParticleState) -> Empirical:
        return Empirical(state.particles)

    def finite(self, state: ParticleState) -> Bool[Array, " n"]:
        return finite_state(state.particles, None if self.preconditioner is None else state.memory)

    def on(self, mesh: Mesh) -> "WassersteinFlow":
        return round_the_ring(self, mesh)

    def tabulated(self, first: int, used: int, length: int) -> "WassersteinFlow":
        return tabulated_step_size(self, first, used, length)

    def observe(
        self,
        problem: Problem,
        state: ParticleState,
        batch: PyTree,
        key: Key[Array, ""],
        sampled_share: float,
    ) -> dict[str, Float[Array, ""]]:
        """Energies and forces as `observed` has them; and relative to τ, by how much batches heat the chain,
        where that is defined. Without noise, `velocity` is the size of all that is descended."""
        step_key = jax.random.fold_in(key, state.step)
        of_objective = None
        if isinstance(state.particles, WithStatistics):
            losses, slopes, _ = objective_in_training(problem, state.particles, batch, step_key)
            of_objective = jnp.mean(losses), slopes
        theta = parameters_of(state.particles)
        found = observed(problem, theta, batch, self.interactions, pairs_key(step_key), of_objective)
        if isinstance(self.entropy, AbstractScore):
            gradient, _ = self._gradient(problem, state.particles, batch, step_key)
            found["velocity"] = root_mean_square_norm(gradient)
        if self.metropolis:
            found["acceptance"] = self._acceptance(problem, state, batch, key)
        if self.step_size is None or problem.temperature() is None:
            return found
        return found | self._batch_noise(problem, state, batch, key, sampled_share)

    def _acceptance(
        self, problem: Problem, state: ParticleState, batch: PyTree, key: Key[Array, ""]
    ) -> Float[Array, ""]:
        """How probable the step that comes next is, on average over particles."""
        step_key = jax.random.fold_in(key, state.step)
        gradient, _ = self._gradient(problem, state.particles, batch, step_key)
        _, scaling = self._scaling_after(state, gradient)
        return jnp.mean(self._proposal(problem, state, batch, scaling, step_key).acceptance)

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
        if sampled_share == 1:
            # All cases at every step: there is nothing to compute.
            return {"batch_noise": jnp.zeros_like(self.step_size_at(state.step))}
        temperature, particles = problem.temperature(), state.particles
        step_key = jax.random.fold_in(key, state.step)
        gradient, _ = self._gradient(problem, particles, batch, step_key)
        g = self._scaling_after(state, gradient)[1] or Identity()
        assert temperature is not None
        # Per particle and coordinate, in units of τ.
        unit = self.step_size_at(state.step) / (dimension(parameters_of(particles)) * temperature)
        first, second = (
            objective_gradient(problem, particles, half, jax.random.fold_in(step_key, number))
            for number, half in enumerate(halves, start=3)
        )
        difference = _square(g, subtract(first, second))
        return {"batch_noise": unit * difference * (1 - sampled_share) / 8}

    def _scaling_after(
        self, state: ParticleState, gradient: Particles
    ) -> tuple[PyTree, AbstractScaling | None]:
        """What the preconditioner remembers of the step that comes next, and its g."""
        if self.preconditioner is None:
            return state.memory, None
        theta = parameters_of(state.particles)
        memory = self.preconditioner.update(state.memory, theta, gradient, state.step)
        return memory, self.preconditioner.scaling(memory, state.step)


def _square(scaling: AbstractScaling, x: Particles) -> Float[Array, ""]:
    """Σᵢ ⟨xᵢ, g xᵢ⟩."""
    return total(jax.tree.map(jnp.multiply, x, scaling.times(x)))


def _running_mean(
    decay: Float[Array, ""], mean: Particles | None, move: Particles, step: Int[Array, ""]
) -> tuple[Particles, Particles]:
    """m ← βm + (1 − β)·move, and m/(1 − βᵗ), which does not remember that it started at zero."""
    started_at_zero = 1 - decay ** (step + 1).astype(decay.dtype)
    mean = jax.tree.map(lambda m, u: decay.astype(u.dtype) * m + (1 - decay).astype(u.dtype) * u, mean, move)
    return mean, jax.tree.map(lambda m: m / started_at_zero.astype(m.dtype), mean)
