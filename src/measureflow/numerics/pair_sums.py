"""Sums over all pairs of some particles with others: Σⱼ ∇₁κ(θᵢ, θ′ⱼ) and Σⱼ κ(θᵢ, θ′ⱼ), in memory O(N).

A tile of pairs at a time; for radial kernels a tile is matrix work. Where there are few dimensions, or few
particles, that is little arithmetic for what it moves through memory, and on GPUs kernels of our own, in
`gpu`, sum the pairs instead.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from measureflow.core import platforms, products
from measureflow.core.pytrees import (
    OtherParticles,
    Parameters,
    Particles,
    add,
    as_matrix,
    from_first,
    like_rows,
    near_squared_distances,
    particle_count,
    particle_dimension,
)
from measureflow.spaces.kernels import AbstractKernel, AbstractRadialKernel

# Rows, and particles that a row meets, of one tile: what exists at once.
_ROWS, _COLUMNS = 512, 16_384
# Up to so many coordinates of differences, a GPU sums them as they are.
_DIRECT = 2**23


def well_conditioned(kernel: AbstractKernel, particles: Particles) -> Particles:
    """Seen from the first particle, if only differences matter to the kernel: far from the origin, sums of
    radial kernels cancel."""
    return from_first(particles) if isinstance(kernel, AbstractRadialKernel) else particles


def own_gradient_sum(kernel: AbstractKernel, particles: Particles) -> Particles:
    """Σⱼ ∇₁κ(θᵢ, θⱼ) for every particle i, wherever they are."""
    return _on_gpu_or("many dimensions", "gradient_sum", _own_gradients, kernel, particles)


def gradient_sum(kernel: AbstractKernel, rows: Particles, others: OtherParticles) -> Particles:
    """Σⱼ ∇₁κ(θᵢ, θ′ⱼ) for every row i, of `well_conditioned` particles."""
    return _on_gpu_or("few dimensions", "gradient_sum", _tiled_gradients, kernel, rows, others)


def value_sum(kernel: AbstractKernel, rows: Particles, others: OtherParticles) -> Float[Array, " n"]:
    """Σⱼ κ(θᵢ, θ′ⱼ) for every row i, of `well_conditioned` particles."""
    return _on_gpu_or("few dimensions", "value_sum", _tiled_values, kernel, rows, others)


def _on_gpu_or(
    case: str, name: str, plain: Callable[..., PyTree], kernel: AbstractKernel, *particles: Particles
) -> PyTree:
    """The kernel for GPUs, where there is one and it fits; elsewhere `plain`, which is the same function."""
    if platforms.compute_capability() < platforms.HOPPER:
        return plain(kernel, *particles)
    # Only there: not every machine can import what they are written in.
    from measureflow.numerics.gpu import few_dimensions, many_dimensions

    kernels = {"few dimensions": few_dimensions, "many dimensions": many_dimensions}[case]
    if not kernels.fits(kernel, particles[0]):
        return plain(kernel, *particles)
    return platforms.by_platform(getattr(kernels, name), plain, kernel, *particles)


def _own_gradients(kernel: AbstractKernel, particles: Particles) -> Particles:
    conditioned = well_conditioned(kernel, particles)
    return gradient_sum(kernel, conditioned, conditioned)


def _tiled_gradients(kernel: AbstractKernel, rows: Particles, others: OtherParticles) -> Particles:
    return in_tiles(eqx.Partial(_gradients, kernel), rows, others)


def _tiled_values(kernel: AbstractKernel, rows: Particles, others: OtherParticles) -> Float[Array, " n"]:
    return in_tiles(eqx.Partial(_values, kernel), rows, others)


def _gradients(kernel: AbstractKernel, rows: Particles, others: OtherParticles) -> Particles:
    """Of one tile: matrix work for radial kernels, autodiff of all kernel values for any other."""
    if isinstance(kernel, AbstractRadialKernel):
        directly = _are_few_on_gpu(rows, others)
        return (direct_gradients if directly else _radial_gradients)(kernel, rows, others)

    def at_one(theta: Parameters) -> Parameters:
        gradients = jax.vmap(jax.grad(kernel), in_axes=(None, 0))(theta, others)
        return jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), gradients)

    return jax.vmap(at_one)(rows)


def _radial_gradients(kernel: AbstractRadialKernel, rows: Particles, others: OtherParticles) -> Particles:
    """Σⱼ 2φ′ᵢⱼ(θᵢ − θ′ⱼ) = 2(rowsum(φ′)ᵢ θᵢ − (φ′θ′)ᵢ)."""
    slopes = 2 * kernel.slope(near_squared_distances(rows, others))
    row_sums = jnp.sum(slopes, axis=1)

    def mixed(weights: Array, leaf: Array) -> Array:
        product = products.matmul(weights, leaf.reshape(leaf.shape[0], -1))
        return product.astype(leaf.dtype).reshape(weights.shape[0], *leaf.shape[1:])

    if rows is others and particle_dimension(rows) > particle_count(rows):
        # The matrix of pairs is smaller than the particles: it does the subtraction, and they are read once.
        weights = jnp.diag(row_sums) - slopes
        return jax.tree.map(lambda leaf: mixed(weights, leaf), others)

    def on_leaf(row: Array, leaf: Array) -> Array:
        own = row_sums.reshape(-1, *[1] * (row.ndim - 1)) * row
        return own.astype(row.dtype) - mixed(slopes, leaf)

    return jax.tree.map(on_leaf, rows, others)


def _are_few_on_gpu(rows: Particles, others: OtherParticles) -> bool:
    """Whether a GPU would wait for kernels to begin, and not for their arithmetic."""
    size = particle_count(rows) * particle_count(others) * particle_dimension(rows)
    kinds = {leaf.dtype for leaf in jax.tree.leaves((rows, others))}
    return size <= _DIRECT and len(kinds) == 1 and platforms.compute_capability() >= platforms.AMPERE


def direct_gradients(kernel: AbstractRadialKernel, rows: Particles, others: OtherParticles) -> Particles:
    """Σⱼ 2φ′ᵢⱼ(θᵢ − θ′ⱼ), of all differences: three kernels of a GPU, whatever the number of leaves."""
    x, y = _ravelled(rows, others)
    slopes = 2 * kernel.slope(_direct_distances(x, y))
    return like_rows(jnp.sum(slopes[:, :, None] * (x[:, None] - y[None]), axis=1), rows)


def direct_values(
    kernel: AbstractRadialKernel, rows: Particles, others: OtherParticles
) -> Float[Array, " n"]:
    """Σⱼ κ(θᵢ, θ′ⱼ), of all differences."""
    return jnp.sum(kernel.profile(_direct_distances(*_ravelled(rows, others))), axis=1)


def _ravelled(rows: Particles, others: OtherParticles) -> tuple[Float[Array, "n J"], Float[Array, "m J"]]:
    """Copies: a compiler would look for each number among the leaves again, for every pair."""
    x = jax.lax.optimization_barrier(as_matrix(rows))
    return x, x if rows is others else jax.lax.optimization_barrier(as_matrix(others))


def _direct_distances(x: Float[Array, "n J"], y: Float[Array, "m J"]) -> Float[Array, "n m"]:
    return jnp.sum(jnp.square(x[:, None] - y[None]), axis=2)


def _values(kernel: AbstractKernel, rows: Particles, others: OtherParticles) -> Float[Array, " n"]:
    if isinstance(kernel, AbstractRadialKernel) and _are_few_on_gpu(rows, others):
        return direct_values(kernel, rows, others)
    if isinstance(kernel, AbstractRadialKernel):
        return jnp.sum(kernel.profile(near_squared_distances(rows, others)), axis=1)
    values = jax.vmap(lambda theta: jax.vmap(kernel, in_axes=(None, 0))(theta, others))
    return jnp.sum(values(rows), axis=1)


def in_tiles(
    summed: Callable[[Particles, OtherParticles], PyTree], rows: Particles, others: OtherParticles
) -> PyTree:
    """`summed`(rows, others), a tile of rows and a block of others at a time. Few particles are one tile."""
    n = particle_count(rows)
    if n <= _ROWS:
        return _over_blocks(summed, rows, others)
    tiles = -(-n // _ROWS)
    # Tiles of one size, as even as they can be: what fills up the last is computed for nothing.
    size = -(-n // tiles)
    padded = jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf[: tiles * size - n]]), rows)
    cut = jax.tree.map(lambda leaf: leaf.reshape(tiles, size, *leaf.shape[1:]), padded)
    results = jax.lax.map(lambda tile: _over_blocks(summed, tile, others), cut)
    return jax.tree.map(lambda leaf: leaf.reshape(tiles * size, *leaf.shape[2:])[:n], results)


def _over_blocks(
    summed: Callable[[Particles, OtherParticles], PyTree], rows: Particles, others: OtherParticles
) -> PyTree:
    n = particle_count(others)
    if n <= _COLUMNS:
        return summed(rows, others)

    def block(first: Any, length: int) -> PyTree:
        cut = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, first, length), others)
        return summed(rows, cut)

    # What is left over comes first, so that the loop has something to add to.
    first = n % _COLUMNS or _COLUMNS
    return jax.lax.fori_loop(
        0,
        (n - first) // _COLUMNS,
        lambda index, total: add(total, block(first + index * _COLUMNS, _COLUMNS)),
        block(0, first),
    )
