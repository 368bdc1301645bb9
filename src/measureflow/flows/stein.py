"""Stein variational gradient descent, of any free energy."""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Key, PyTree

from measureflow.core.pytrees import Particles, root_mean_square_norm
from measureflow.core.validation import require_particles
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
from measureflow.flows.drifts import drift, pairs_key
from measureflow.flows.flow import AbstractFlow, finite_state, optimiser_step
from measureflow.flows.integrators import euler_maruyama
from measureflow.flows.observing import observed
from measureflow.flows.preconditioners import AbstractPreconditioner
from measureflow.flows.scalings import AbstractScaling, Identity
from measureflow.flows.wasserstein import ParticleState
from measureflow.numerics.interactions import AbstractInteractions, ExactInteractions
from measureflow.numerics.pair_sums import well_conditioned
from measureflow.numerics.stein_sums import stein_sum
from measureflow.spaces.bandwidths import KernelOrBandwidth, kernel_at, require_kernel
from measureflow.spaces.empirical import Empirical
from measureflow.spaces.kernels import AbstractRadialKernel
from measureflow.statement.problem import Problem

# What belongs to flows with noise.
_OF_NOISE = ("integrator", "metropolis", "momentum", "entropy")
_EXACT = ExactInteractions()


def _refuse(noise: dict[str, Any]) -> None:
    for name, value in noise.items():
        if name not in _OF_NOISE:
            raise TypeError(f"SteinFlow.__init__() got an unexpected keyword argument '{name}'")
        raise ValueError(
            f"{name}={value} was given to SteinFlow, which draws no noise: its kernel realises the entropy, "
            f"and both at once would count it twice; leave {name} out, or use mf.WassersteinFlow(step_size, "
            f"{name}=...)."
        )


class SteinFlow(AbstractFlow):
    """SVGD (Liu and Wang, 2016) of F(Q) = ∫V dQ + ½∬W dQdQ + τ∫log q dQ + R(Q), on N particles:

        θᵢ ← θᵢ − η (1/N) Σⱼ [k(θⱼ, θᵢ) f(θⱼ) − τ ∇₁k(θⱼ, θᵢ)],   f = ∇V + ∫∇₁W dQ + ∇_W R.

    It descends F in the geometry of the kernel's function space, and draws no noise: one particle finds a
    mode, and few are spread as evenly as the kernel sees. For interactions and nonlinear functionals it is
    the variational gradient descent of Chazal, Kanagawa, Shen, Korba and Oates (2025). With the kernel 1 +
    x·y and a Gaussian q*, mean and covariance of J + 2 particles are exact (Liu and Wang, 2018). With a
    squared exponential kernel in many dimensions, variances come out too small unless N is far above J (Ba et
    al., 2022).

    Parameters
    ----------
    kernel
        k: any kernel, or `MedianBandwidth()`, whose lengthscale follows the particles. Radial kernels are
        matrix products. A kernel on features takes a vector-Jacobian product for every pair.
    step_size
        η, a number or any Optax schedule.
    optimiser
        Any Optax optimiser may take the steps instead, for each particle on its own, also where τ > 0.
    preconditioner
        g = LLᵀ: the matrix-valued kernel g k(L⁻¹θ, L⁻¹θ′) (Wang, Tang, Bajaj and Liu, 2019), for radial k.
        With `EnsemblePreconditioner` the flow is affine-equivariant.
    interactions
        How sums over j are made: exactly by default, or by `RandomBatches`, which are unbiased.
    """

    kernel: KernelOrBandwidth
    step_size: StepSize = eqx.field(converter=step_size_or_schedule, default=None)
    optimiser: optax.GradientTransformation | None = None
    preconditioner: AbstractPreconditioner | None = None
    interactions: AbstractInteractions = _EXACT
    remedy: ClassVar[str] = "a smaller step_size, or a schedule that starts smaller"

    def __init__(
        self,
        kernel: KernelOrBandwidth,
        step_size: Any = None,
        optimiser: optax.GradientTransformation | None = None,
        preconditioner: AbstractPreconditioner | None = None,
        interactions: AbstractInteractions = _EXACT,
        **noise: Any,
    ):
        _refuse(noise)
        self.kernel, self.step_size, self.optimiser = kernel, step_size, optimiser
        self.preconditioner, self.interactions = preconditioner, interactions

    def __check_init__(self) -> None:
        require_kernel("SteinFlow kernel", self.kernel)
        require_mover(self)
        require_preconditioner(self.preconditioner)
        require_interactions(self.interactions)
        require_alone(self, "preconditioner")

    def init(self, problem: Problem, initial: Any) -> ParticleState:
        particles = require_particles("initial", initial, problem.template())
        self._require_radial(particles)
        memory = None
        if self.optimiser is not None:
            memory = jax.vmap(self.optimiser.init)(particles)
        if self.preconditioner is not None:
            memory = self.preconditioner.init(particles)
        return ParticleState(particles, jnp.zeros((), jnp.int32), memory)

    def _require_radial(self, particles: Particles) -> None:
        kernel = kernel_at(self.kernel, particles)
        if self.preconditioner is not None and not isinstance(kernel, AbstractRadialKernel):
            raise ValueError(
                f"preconditioner={self.preconditioner} was given with a kernel that is not radial, "
                f"{kernel}: it is to be seen in other coordinates; use a radial kernel, or leave one of them "
                "out."
            )

    def step(
        self, problem: Problem, state: ParticleState, batch: PyTree, key: Key[Array, ""]
    ) -> ParticleState:
        step_key = jax.random.fold_in(key, state.step)
        gradient, memory = self._gradient(problem, state, batch, step_key)
        if self.optimiser is not None:
            move = eqx.Partial(optimiser_step, self.optimiser)
            particles, memory = jax.vmap(move)(gradient, memory, state.particles)
            return ParticleState(particles, state.step + 1, memory)
        step_size = step_size_at(self.step_size, state.step)
        particles = euler_maruyama(state.particles, gradient, step_size, None, None, step_key)
        return ParticleState(particles, state.step + 1, memory)

    def _gradient(
        self, problem: Problem, state: ParticleState, batch: PyTree, step_key: Key[Array, ""]
    ) -> tuple[Particles, PyTree]:
        """What is descended, and what the preconditioner or the optimiser remembers."""
        energy, memory, scaling = problem.free_energy(batch), state.memory, Identity()
        forces = drift(energy, state.particles, self.interactions, step_key)
        if self.preconditioner is not None:
            forces = self.preconditioner.limited(memory, forces, state.step)
            memory = self.preconditioner.update(memory, state.particles, forces, state.step)
            scaling = self.preconditioner.scaling(memory, state.step)
        return self.descended(state.particles, forces, energy.temperature, scaling, step_key), memory

    def descended(
        self,
        particles: Particles,
        forces: Particles,
        temperature: Float[Array, ""] | None,
        scaling: AbstractScaling,
        step_key: Key[Array, ""],
    ) -> Particles:
        """(1/N) Σⱼ [k(θⱼ, θᵢ) f(θⱼ) − τ ∇₁k(θⱼ, θᵢ)]: in z = L⁻¹θ the forces are Lᵀf, and Lv moves θ."""
        particles, forces = scaling.root_inverse(particles), scaling.root_transposed(forces)
        kernel = kernel_at(self.kernel, particles)
        summed = eqx.Partial(stein_sum, kernel, temperature)
        # Apart from the batches in which particles of the statement's interaction meet.
        key = jax.random.fold_in(pairs_key(step_key), 1)
        conditioned = well_conditioned(kernel, particles)
        return scaling.root(self.interactions.mean_over_pairs(summed, (conditioned, forces), key))

    def promises(self, problem: Problem) -> list[str]:
        if problem.temperature() is None:
            return ["Particles descend together, smoothed by the kernel: no entropy holds them apart."]
        return [
            "It draws no noise: particles reach q* as N → ∞, t → ∞ and η → 0, and lie more evenly than draws "
            "in few dimensions; in many, variances come out too small unless N is far above J."
        ]

    def measure(self, state: ParticleState) -> Empirical:
        return Empirical(state.particles)

    def finite(self, state: ParticleState) -> Bool[Array, " n"]:
        return finite_state(state.particles, state.memory if self.preconditioner is not None else None)

    def on(self, mesh: Mesh) -> "SteinFlow":
        return round_the_ring(self, mesh)

    def tabulated(self, first: int, used: int, length: int) -> "SteinFlow":
        return tabulated_step_size(self, first, used, length)

    def observe(
        self,
        problem: Problem,
        state: ParticleState,
        batch: PyTree,
        key: Key[Array, ""],
        sampled_share: float,
    ) -> dict[str, Float[Array, ""]]:
        """Energies and forces as all flows of particles; and `velocity`, the size of what is descended, which
        is 0 where the flow stands still."""
        step_key = jax.random.fold_in(key, state.step)
        found = observed(problem, state.particles, batch, self.interactions, pairs_key(step_key))
        gradient, _ = self._gradient(problem, state, batch, step_key)
        return found | {"velocity": root_mean_square_norm(gradient)}
