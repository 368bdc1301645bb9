"""Σⱼ wⱼ κ(θᵢ, θ′ⱼ) and Σⱼ wⱼ ∇₁κ(θᵢ, θ′ⱼ) of one tile of pairs: what density estimates are made of; and the
matrix of all κ(θᵢ, θⱼ)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from measureflow.core import products
from measureflow.core.pytrees import (
    OtherParticles,
    Parameters,
    Particles,
    near_squared_distances,
    squared_distances,
)
from measureflow.spaces.kernels import AbstractKernel, AbstractRadialKernel


def density_sum(
    kernel: AbstractKernel,
    rows: tuple[Particles, Float[Array, " n"]],
    others: tuple[OtherParticles, Float[Array, " m"]],
) -> tuple[Float[Array, " n"], Particles]:
    """For every row i; `rows` and `others` are particles, seen from the first where κ is radial, and their
    weights."""
    points, (places, weights) = rows[0], others
    if isinstance(kernel, AbstractRadialKernel):
        return _radial(kernel, points, places, weights)

    def at(point: Parameters) -> tuple[Float[Array, ""], Parameters]:
        values, slopes = jax.vmap(jax.value_and_grad(kernel), in_axes=(None, 0))(point, places)
        summed = jax.tree.map(lambda leaf: jnp.tensordot(weights.astype(leaf.dtype), leaf, axes=1), slopes)
        return jnp.sum(weights * values), summed

    return jax.vmap(at)(points)


def _radial(
    kernel: AbstractRadialKernel, points: Particles, places: OtherParticles, weights: Float[Array, " m"]
) -> tuple[Float[Array, " n"], Particles]:
    """Σⱼ 2wⱼφ′ᵢⱼ(θᵢ − θ′ⱼ) = 2(rowsum(wφ′)ᵢ θᵢ − (wφ′θ′)ᵢ)."""
    distances = near_squared_distances(points, places)
    values = jnp.sum(weights[None] * kernel.profile(distances), axis=1)
    slopes = 2 * weights[None] * kernel.slope(distances)
    row_sums = jnp.sum(slopes, axis=1)

    def on_leaf(row: Array, leaf: Array) -> Array:
        own = row_sums.reshape(-1, *[1] * (row.ndim - 1)) * row
        mixed = products.matmul(slopes, leaf.reshape(leaf.shape[0], -1))
        return (own - mixed.reshape(row.shape)).astype(row.dtype)

    return values, jax.tree.map(on_leaf, points, places)


def gram_matrix(kernel: AbstractKernel, particles: Particles) -> Float[Array, "n n"]:
    """κ(θᵢ, θⱼ)."""
    if isinstance(kernel, AbstractRadialKernel):
        return kernel.profile(squared_distances(particles, particles))
    return jax.vmap(lambda x: jax.vmap(lambda y: kernel(x, y))(particles))(particles)
