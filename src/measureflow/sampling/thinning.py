"""Few points for many: Stein thinning, and kernel herding."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from measureflow.core.medians import median_of_pairs
from measureflow.core.pytrees import (
    Particles,
    as_matrix,
    particle_count,
    scale,
    shapes_of,
    squared_distances,
)
from measureflow.core.validation import require_count, require_particles
from measureflow.numerics.density_sums import density_sum
from measureflow.numerics.interactions import EXACT
from measureflow.spaces.empirical import Empirical
from measureflow.spaces.kernels import AbstractRadialKernel, InverseMultiquadric
from measureflow.statement.problem import Problem
from measureflow.statement.stationarity import whitened

METHODS = ("stein", "herding")
# Among so many points the median distance is sought.
_MOST = 1000

#: A sum over the points that were chosen so far, at all points, of one more: a function of its index.
Row = Callable[[Int[Array, ""]], Float[Array, " n"]]


def thin(
    measure: Empirical | PyTree,
    problem: Problem,
    m: int,
    *,
    method: str = "stein",
    kernel: AbstractRadialKernel | None = None,
    batch: PyTree = None,
) -> Empirical:
    """m of the particles of a measure, some of them perhaps more than once, chosen one after the other: the
    first k of them are what thinning to k gives.

    "stein" minimises the kernel Stein discrepancy from q* (Riabiz et al., 2022): the next point is

        argminᵢ ½ u(θᵢ, θᵢ) + Σ_{chosen l} u(θᵢ, θ_l),
        u(x, y) = s(x)·s(y) κ + s(x)·∇₂κ + s(y)·∇₁κ + tr ∇₁∇₂κ,

    with the score s = −(∇V + ∫∇₁W dQ + ∇_W R)/τ, so that what is not stationary, such as the beginning of a
    chain, is corrected, too. "herding" minimises the MMD from the measure as it is, and needs no gradients
    (Chen, Welling and Smola, 2010): with the embedding μ(θ) = ∫κ(θ, θ′) dQ(θ′), the t-th point is

        argminᵢ ½ κ(θᵢ, θᵢ) + Σ_{chosen l} κ(θᵢ, θ_l) − t μ(θᵢ).

    Both see points in coordinates that they whiten themselves, and take time O(mN) beyond one gradient of
    every point, or the embedding.

    Parameters
    ----------
    measure
        An `Empirical`, such as `solution.measure` or that of `sample`; or particles; or draws with leading
        axes (particle, draw), where the problem's reference says how θ is shaped.
    problem
        What the measure is to minimise: it has the score.
    m
        How many points to choose, at most as many as there are.
    method
        "stein" or "herding".
    kernel
        κ, radial, in whitened coordinates; None is `InverseMultiquadric` at the median heuristic.
    batch
        The data that the objective sees: all of them.
    """
    measure = _as_measure(measure, problem)
    particles = measure.particles
    n = particle_count(particles)
    m = require_count("m", m, 1, "it counts the points to choose.")
    if m > n:
        raise ValueError(f"m must be at most the number of points, {n}, got {m}; they are few already.")
    if method not in METHODS:
        raise ValueError(f'method must be "stein" or "herding", got {method!r}; see their formulas.')
    if kernel is not None and not isinstance(kernel, AbstractRadialKernel):
        raise TypeError(
            f"kernel must be radial, got {kernel!r}; pass mf.InverseMultiquadric(lengthscale), or None."
        )
    if method == "herding":
        return _chosen(particles, _herded(particles, measure.masses(), kernel, m))
    return _chosen(particles, _stein_thinned(particles, _score(measure, problem, batch), kernel, m))


def _as_measure(given: Any, problem: Problem) -> Empirical:
    if isinstance(given, Empirical):
        require_particles("measure", given.particles, problem.template())
        return given
    template = problem.template()
    if template is not None and not hasattr(given, "log_density"):
        one = jax.tree.map(lambda leaf: jnp.empty(jnp.shape(leaf)[2:]), given)
        if shapes_of(one) == shapes_of(template):
            given = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), given)
    return Empirical(require_particles("measure", given, template))


def _score(measure: Empirical, problem: Problem, batch: PyTree) -> Particles:
    """−(∇V + ∫∇₁W dQ + ∇_W R)/τ."""
    temperature, energy = problem.temperature(), problem.free_energy(batch)
    if temperature is None:
        raise ValueError(
            'method="stein" was given for a problem without temperature, which has no law q* to be near to; '
            'use method="herding", which keeps to the measure itself.'
        )
    if measure.weights is not None and (energy.interaction is not None or energy.rest is not None):
        raise ValueError(
            "measure has weights, and the problem an interaction or a nonlinear functional, whose gradient "
            'is that of equal weights; pass mf.Empirical(measure.sample(key, n)), or use method="herding".'
        )
    score = scale(-1 / temperature, problem.wasserstein_gradient(measure.particles, batch))
    rows = np.asarray(as_matrix(score))
    unknown = int(np.sum(~np.all(np.isfinite(rows), axis=1)))
    if unknown:
        raise ValueError(
            f"the gradient is not finite at {unknown} of {len(rows)} points of measure; leave them out, or "
            'use method="herding".'
        )
    return score


def _chosen(particles: Particles, indices: Int[Array, " m"]) -> Empirical:
    return Empirical(jax.tree.map(lambda leaf: leaf[indices], particles))


def _kernel(points: Float[Array, "n J"], kernel: AbstractRadialKernel | None) -> AbstractRadialKernel:
    if kernel is not None:
        return kernel
    some = points[:: -(-len(points) // _MOST)]
    squares = median_of_pairs(squared_distances(some, some)) / 2 if len(some) > 1 else jnp.ones(())
    return InverseMultiquadric(jnp.sqrt(jnp.where(squares > 0, squares, 1.0)))


@eqx.filter_jit
def _stein_thinned(
    particles: Particles, score: Particles, kernel: AbstractRadialKernel | None, m: int
) -> Int[Array, " m"]:
    points, slopes = whitened(particles, score)
    used, number = _kernel(points, kernel), points.shape[1]

    def row(index: Int[Array, ""]) -> Float[Array, " n"]:
        """u(θᵢ, θ_index)."""
        return jax.vmap(lambda x, s: stein_kernel(used, x, s, points[index], slopes[index]))(points, slopes)

    at_zero = jnp.zeros((), points.dtype)
    own = jnp.sum(jnp.square(slopes), axis=1) * used.profile(at_zero) - 2 * number * used.slope(at_zero)
    return _greedy(0.5 * own, row, jnp.zeros_like(own), m)


@eqx.filter_jit
def _herded(
    particles: Particles, masses: Float[Array, " n"], kernel: AbstractRadialKernel | None, m: int
) -> Int[Array, " m"]:
    points, _ = whitened(particles, particles)
    used, n = _kernel(points, kernel), points.shape[0]
    summed = eqx.Partial(density_sum, used)
    embedding = n * EXACT.mean_over_pairs(summed, (points, masses.astype(points.dtype)))[0]

    def row(index: Int[Array, ""]) -> Float[Array, " n"]:
        """κ(θᵢ, θ_index)."""
        return used.profile(jnp.sum(jnp.square(points - points[index][None]), axis=1))

    own = jnp.full((n,), used.profile(jnp.zeros((), points.dtype)))
    return _greedy(0.5 * own, row, embedding, m)


def _greedy(own: Float[Array, " n"], row: Row, embedding: Float[Array, " n"], m: int) -> Int[Array, " m"]:
    """The t-th index is argminᵢ ownᵢ + Σ_{chosen l} row(l)ᵢ − t embeddingᵢ."""

    def choose(total: Float[Array, " n"], _: None) -> tuple[Float[Array, " n"], Int[Array, ""]]:
        index = jnp.argmin(total - embedding)
        return total - embedding + row(index), index

    return jax.lax.scan(choose, own, None, length=m)[1]


def stein_kernel(
    kernel: AbstractRadialKernel,
    x: Float[Array, " J"],
    x_score: Float[Array, " J"],
    y: Float[Array, " J"],
    y_score: Float[Array, " J"],
) -> Float[Array, ""]:
    """u(x, y), with κ = φ(d), d = ‖x − y‖²: s(x)·s(y) φ − 2φ′ (s(x) − s(y))·(x − y) − 4φ″ d − 2Jφ′."""
    difference = x - y
    distance = jnp.sum(jnp.square(difference))
    slope, curvature = jax.jvp(kernel.slope, (distance,), (jnp.ones_like(distance),))
    pull = jnp.sum((x_score - y_score) * difference)
    both = jnp.sum(x_score * y_score) * kernel.profile(distance)
    return both - 2 * slope * pull - 4 * curvature * distance - 2 * x.shape[0] * slope
