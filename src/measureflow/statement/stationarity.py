"""How far particles are from stationary, with no grid and in any dimension."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from measureflow.core.pytrees import (
    Particles,
    as_matrix,
    centred,
    inner_products,
    particle_count,
    particle_dimension,
    root_mean_square_norm,
    scale,
    squared_distances,
)
from measureflow.spaces.kernels import InverseMultiquadric, median_heuristic
from measureflow.statement.free_energy import FreeEnergy


def stationarity(energy: FreeEnergy, particles: Particles) -> Float[Array, ""]:
    """Distance of Q_N from a stationary measure of F.

    At a stationary measure q has the score s_Q = −(∇V + ∫∇₁W dQ)/τ. So for τ > 0 this is the kernel
    Stein discrepancy (Liu et al., 2016; Gorham & Mackey, 2017) of the particles against their own
    s_Q, a kernel gradient discrepancy (Chazal, Kanagawa, Shen, Korba, Oates, 2025), in coordinates that the
    particles whiten; for τ = 0 it is the norm of the Wasserstein gradient in L²(Q_N).
    """
    gradient = energy.wasserstein_gradient(particles)
    if energy.temperature is None:
        return root_mean_square_norm(gradient)
    score = scale(-1 / energy.temperature, gradient)
    return kernel_stein_discrepancy(*whitened(particles, score))


def whitened(particles: Particles, score: Particles) -> tuple[Float[Array, "n J"], Float[Array, "n J"]]:
    """z with θ = m + L z and L Lᵀ the particles' covariance, and the score Lᵀs; where there are not twice as
    many particles as dimensions, L is diagonal. A kernel with one lengthscale sees nothing of a posterior
    whose coordinates differ in scale, or are correlated."""
    rows, slopes = as_matrix(centred(particles)), as_matrix(score)
    n, number = rows.shape
    deviations = jnp.sqrt(jnp.mean(jnp.square(rows), axis=0))
    # Collapsed particles have no scale of their own.
    deviations = jnp.where(deviations > 0, deviations, 1.0)[None]
    rows, slopes = rows / deviations, slopes * deviations
    if n <= 2 * number:
        return rows, slopes
    exact = jax.lax.Precision.HIGHEST
    correlations = jnp.matmul(rows.T, rows, precision=exact) / n
    ridge = 4 * number * jnp.finfo(rows.dtype).eps
    factor = jnp.linalg.cholesky(correlations + ridge * jnp.eye(number, dtype=rows.dtype))
    z = jax.scipy.linalg.solve_triangular(factor, rows.T, lower=True).T
    return z, jnp.matmul(slopes, factor, precision=exact)


def kernel_stein_discrepancy(particles: Particles, score: Particles) -> Float[Array, ""]:
    """√((1/N²) Σᵢⱼ u(θᵢ, θⱼ)), with κ the inverse multiquadric at the particles' median heuristic and

        u(x, y) = s(x)·s(y) κ + s(x)·∇₂κ + s(y)·∇₁κ + tr ∇₁∇₂κ.

    The diagonal is kept, so N draws from the exact law score about √(mean u(x, x)/N), never zero.
    """
    if particle_count(particles) < 2:
        raise ValueError(
            "stationarity at τ > 0 compares particles with one another and needs at least 2, got 1; "
            "use more particles."
        )
    lengthscale = median_heuristic(particles)
    # Collapsed particles have no scale of their own; any lengthscale finds them far from q*.
    kernel = InverseMultiquadric(jnp.where(lengthscale > 0, lengthscale, 1.0))
    distance = squared_distances(particles, particles)
    slope, curvature = jax.jvp(kernel.slope, (distance,), (jnp.ones_like(distance),))
    # ∇₁κ = 2φ′(x − y) = −∇₂κ, so the middle terms are −2φ′ (s(x) − s(y))·(x − y).
    own = jnp.sum(
        jnp.stack(
            [
                jnp.sum((a * b).reshape(a.shape[0], -1), axis=1)
                for a, b in zip(jax.tree.leaves(score), jax.tree.leaves(centred(particles)), strict=True)
            ]
        ),
        axis=0,
    )
    cross = inner_products(score, centred(particles))
    drift = own[:, None] + own[None, :] - cross - cross.T
    number = particle_dimension(particles)
    stein = (
        inner_products(score, score) * kernel.profile(distance)
        - 2 * slope * drift
        - 4 * curvature * distance
        - 2 * number * slope
    )
    return jnp.sqrt(jnp.maximum(jnp.mean(stein), 0.0))
