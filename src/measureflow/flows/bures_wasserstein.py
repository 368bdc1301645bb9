"""The Wasserstein gradient flow among Gaussians: forward in V, backward in the entropy."""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from measureflow.core.pytrees import Parameters, Particles, as_matrix, centred, squared_norm
from measureflow.core.showing import one_line
from measureflow.core.validation import require_count, require_particles
from measureflow.flows.arguments import StepSize, step_size_at, step_size_or_schedule, tabulated_step_size
from measureflow.flows.flow import AbstractFlow, in_files
from measureflow.flows.integrators import noise_like
from measureflow.flows.parametric import FullRankGaussian, moment_matched
from measureflow.numerics.integration import Points
from measureflow.spaces.empirical import Empirical
from measureflow.spaces.measures import Gaussian
from measureflow.spaces.mixtures import GaussianMixture
from measureflow.statement.free_energy import FreeEnergy
from measureflow.statement.problem import Problem, value_parts

_EXACT = jax.lax.Precision.HIGHEST


@in_files
class GaussianState(eqx.Module):
    """The state of a `BuresWassersteinFlow`.

    Parameters
    ----------
    mean
        m.
    factor
        L with Σ = LLᵀ, a lower-triangular matrix over the ravelled mean.
    step
        The number of steps taken.
    """

    mean: Parameters
    factor: Float[Array, "J J"]
    step: Int[Array, ""]

    def __repr__(self) -> str:
        return one_line(self)


class BuresWassersteinFlow(AbstractFlow):
    """The Wasserstein gradient flow of F(Q) = ∫V dQ + ½∬W dQdQ + τ∫log q dQ + R(Q) among Gaussians N(m, Σ),

        ṁ = −E∇U,   Σ̇ = −HΣ − ΣH + 2τI,   U = V + ∫W dQ + δR/δQ,   H = E∇²U,

    by forward–backward steps (Diao, Balasubramanian, Chewi and Salim, 2023), forward in U and backward in the
    entropy, for which the Gaussian q* of a quadratic V is the exact fixed point at every step size:

        m ← m − η E∇U,   S = (I − ηH) Σ (I − ηH),   Σ ← ½(S + 2ητI + (S(S + 4ητI))^½).

    Its convergence is proved for convex and smooth V. Expectations are means over draws in pairs m ± Lz,
    exact for a quadratic V. ∇²V is by autodiff, J Hessian-vector products a draw: for up to some hundred
    dimensions. The curvature of W and R is by Stein's identity, Σ⁻¹E[(θ − m)∇ᵀ].

    Parameters
    ----------
    step_size
        η, a number or any Optax schedule; at most 1 over the largest curvature of V.
    samples
        The number of draws per step, even.
    """

    step_size: StepSize = eqx.field(converter=step_size_or_schedule)
    samples: int = eqx.field(static=True, default=200)
    movers: ClassVar[str] = "Gaussians"
    remedy: ClassVar[str] = "a smaller step_size, or more samples"

    def __check_init__(self) -> None:
        if self.step_size is None:
            raise TypeError("step_size must be a number or a schedule, got None; 1e-2 is a start.")
        require_count("BuresWassersteinFlow samples", self.samples, 2, "200 is a start.")
        if self.samples % 2:
            raise ValueError(
                f"BuresWassersteinFlow samples must be even, got {self.samples}: draws come in pairs m ± Lz; "
                f"pass {self.samples + 1}."
            )

    def init(self, problem: Problem, initial: Any) -> GaussianState:
        energy = problem.regulariser_energy()
        if energy.temperature is None and energy.interaction is None and energy.rest is None:
            raise ValueError(
                "BuresWassersteinFlow was given a problem without a regulariser: its Gaussian would shrink "
                "to a point; give the problem a KL term."
            )
        if isinstance(initial, GaussianMixture):
            raise TypeError(
                f"BuresWassersteinFlow moves one Gaussian, got {initial!r}: mixtures are no manifold of "
                "that geometry; use mf.ParametricFlow(mf.MixtureOfGaussians(components), optimiser)."
            )
        if not isinstance(initial, Gaussian):
            particles = require_particles("initial", initial, problem.template())
            initial = moment_matched(FullRankGaussian(), particles)
        require_particles("initial", jax.tree.map(lambda leaf: leaf[None], initial.mean), problem.template())
        return GaussianState(initial.mean, initial.factor(), jnp.zeros((), jnp.int32))

    def step(
        self, problem: Problem, state: GaussianState, batch: PyTree, key: Key[Array, ""]
    ) -> GaussianState:
        energy, draws = problem.free_energy(batch), self._draws(state, key)
        eta = step_size_at(self.step_size, state.step)
        slope, curvature = _slope_and_curvature(energy, state, draws)
        mean, unravel = ravel_pytree(state.mean)
        eta = eta.astype(mean.dtype)
        pushed = state.factor - eta * jnp.matmul(curvature, state.factor, precision=_EXACT)
        factor = pushed
        if energy.temperature is not None:
            factor = _backward(pushed, eta * energy.temperature.astype(mean.dtype))
        return GaussianState(unravel(mean - eta * slope), _lower_triangular(factor), state.step + 1)

    def _draws(self, state: GaussianState, key: Key[Array, ""]) -> Particles:
        """m ± Lz."""
        shapes = jax.tree.map(lambda leaf: jnp.zeros((self.samples // 2, *leaf.shape)), state.mean)
        half = noise_like(jax.random.fold_in(key, state.step), shapes)
        both = jax.tree.map(lambda z: jnp.concatenate([z, -z]), half)
        return jax.vmap(self.measure(state).from_standard)(both)

    def promises(self, problem: Problem) -> list[str]:
        return [
            "It moves one Gaussian: q* itself where that is Gaussian, at any η, and else a local minimum of "
            "L among Gaussians."
        ]

    def measure(self, state: GaussianState) -> Gaussian:
        return Gaussian(state.mean, state.factor)

    def finite(self, state: GaussianState) -> Bool[Array, "1"]:
        leaves = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves((state.mean, state.factor))]
        return jnp.all(jnp.stack(leaves))[None]

    def tabulated(self, first: int, used: int, length: int) -> "BuresWassersteinFlow":
        return tabulated_step_size(self, first, used, length)

    def observe(
        self,
        problem: Problem,
        state: GaussianState,
        batch: PyTree,
        key: Key[Array, ""],
        sampled_share: float,
    ) -> dict[str, Float[Array, ""]]:
        """The estimated summands of L(Q), their sum `value`, and `gradient_norm`, the size of E∇U."""
        draws = self._draws(state, key)
        points = Points(Empirical(draws), independent=True)
        parts = value_parts(problem, self.measure(state), points, batch)
        slope = jnp.mean(as_matrix(problem.free_energy(batch).wasserstein_gradient(draws)), axis=0)
        total = sum(parts.values(), start=jnp.zeros(()))
        return {**parts, "value": total, "gradient_norm": jnp.sqrt(squared_norm(slope))}


def _slope_and_curvature(
    energy: FreeEnergy, state: GaussianState, draws: Particles
) -> tuple[Float[Array, " J"], Float[Array, "J J"]]:
    """E∇U and E∇²U."""
    slope = jnp.mean(as_matrix(energy.wasserstein_gradient(draws)), axis=0)
    _, unravel = ravel_pytree(state.mean)
    curvature = jnp.zeros_like(state.factor)
    potential = energy.potential
    if potential is not None:
        hessian = jax.hessian(lambda flat: potential(unravel(flat)))
        curvature = jnp.mean(jax.vmap(hessian)(as_matrix(draws)), axis=0)
    beyond = FreeEnergy(interaction=energy.interaction, rest=energy.rest)
    if beyond.interaction is None and beyond.rest is None:
        return slope, curvature
    forces, away = as_matrix(beyond.wasserstein_gradient(draws)), as_matrix(centred(draws))
    moments = jnp.matmul(away.T, forces, precision=_EXACT) / len(forces)
    found = jax.scipy.linalg.cho_solve((state.factor, True), moments)
    return slope, curvature + 0.5 * (found + found.T)


def _backward(pushed: Float[Array, "J J"], eta_tau: Float[Array, ""]) -> Float[Array, "J J"]:
    """A root of ½(S + 2ητI + (S(S + 4ητI))^½), S = pushed·pushedᵀ: in the eigenvectors of S, by numbers."""
    vectors, roots, _ = jnp.linalg.svd(pushed, full_matrices=False)
    values = jnp.square(roots)
    grown = 0.5 * (values + 2 * eta_tau + roots * jnp.sqrt(values + 4 * eta_tau))
    return vectors * jnp.sqrt(grown)[None]


def _lower_triangular(root: Float[Array, "J J"]) -> Float[Array, "J J"]:
    """L with LLᵀ = root·rootᵀ and a diagonal > 0: of QR = rootᵀ, with the signs of R's diagonal."""
    upper = jnp.linalg.qr(root.T, mode="r")
    signs = jnp.where(jnp.diagonal(upper) < 0, -1.0, 1.0).astype(upper.dtype)
    return jnp.tril((signs[:, None] * upper).T)
