"""Σⱼ [κ(θ′ⱼ, θᵢ) f′ⱼ − τ ∇₁κ(θ′ⱼ, θᵢ)], the sum over pairs of Stein's flow, of one tile of pairs."""

from typing import TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from measureflow.core import products
from measureflow.core.pytrees import (
    OtherParticles,
    Parameters,
    Particles,
    near_squared_distances,
    scale,
    subtract,
)
from measureflow.spaces.kernels import AbstractKernel, AbstractRadialKernel, PullBack, SquaredExponential

Temperature: TypeAlias = Float[Array, ""] | None

# Rows of a kernel on features for which gradients of all others exist at once.
_ROWS = 16


def stein_sum(
    kernel: AbstractKernel,
    temperature: Temperature,
    rows: tuple[Particles, Particles],
    others: tuple[OtherParticles, OtherParticles],
) -> Particles:
    """For every row i; `rows` and `others` are particles, seen from the first where κ is radial, and their
    forces f. Radial kernels are matrix work. A kernel on features takes N² vector-Jacobian products, one for
    each pair; any other kernel is differentiated pair by pair."""
    if isinstance(kernel, AbstractRadialKernel):
        return _radial(kernel, temperature, rows[0], *others)
    return _by_pairs(kernel, temperature, rows[0], *others)


def _radial(
    kernel: AbstractRadialKernel,
    temperature: Temperature,
    rows: Particles,
    others: OtherParticles,
    forces: OtherParticles,
) -> Particles:
    """Φf + 2τ(rowsum(φ′)ᵢ θᵢ − (φ′θ′)ᵢ), since ∇₁κ(θ′ⱼ, θᵢ) = −2φ′ᵢⱼ(θᵢ − θ′ⱼ)."""
    distances = near_squared_distances(rows, others)
    values = kernel.profile(distances)
    if temperature is None:
        return jax.tree.map(lambda leaf: _mixed(values, leaf), forces)
    if isinstance(kernel, SquaredExponential):
        rate = temperature.astype(distances.dtype) / kernel.lengthscale**2
        return _proportional(values, rate, rows, others, forces)
    slopes = 2 * temperature.astype(distances.dtype) * kernel.slope(distances)
    row_sums = jnp.sum(slopes, axis=1)
    if rows is others:
        # The matrix of pairs does the subtraction, and particles are read once.
        weights = jnp.concatenate([values, jnp.diag(row_sums) - slopes], axis=1)
        return jax.tree.map(lambda f, x: _mixed(weights, jnp.concatenate([f, x])), forces, others)

    def on_leaf(force: Array, row: Array, leaf: Array) -> Array:
        own = row_sums.reshape(-1, *[1] * (row.ndim - 1)) * row
        return _mixed(values, force) + own.astype(row.dtype) - _mixed(slopes, leaf)

    return jax.tree.map(on_leaf, forces, rows, others)


def _proportional(
    values: Float[Array, "n m"],
    rate: Float[Array, ""],
    rows: Particles,
    others: OtherParticles,
    forces: OtherParticles,
) -> Particles:
    """Where 2τφ′ = −cφ, one product with the matrix of pairs is enough: Φ(f + cθ′) − c rowsum(Φ)ᵢ θᵢ."""
    row_sums = rate * jnp.sum(values, axis=1)

    def on_leaf(force: Array, row: Array, leaf: Array) -> Array:
        own = row_sums.reshape(-1, *[1] * (row.ndim - 1)) * row
        return _mixed(values, force + rate.astype(leaf.dtype) * leaf) - own.astype(row.dtype)

    return jax.tree.map(on_leaf, forces, rows, others)


def _mixed(weights: Float[Array, "n m"], leaf: Float[Array, "m ..."]) -> Float[Array, "n ..."]:
    product = products.matmul(weights, leaf.reshape(leaf.shape[0], -1))
    return product.astype(leaf.dtype).reshape(weights.shape[0], *leaf.shape[1:])


def _by_pairs(
    kernel: AbstractKernel,
    temperature: Temperature,
    rows: Particles,
    others: OtherParticles,
    forces: OtherParticles,
) -> Particles:
    """Features are computed once, and differentiated where θ′ⱼ is."""
    if isinstance(kernel, PullBack):
        inner, (places, pull_back) = kernel.kernel, jax.vjp(jax.vmap(kernel.features), others)
        rows = jax.vmap(kernel.features)(rows)
    else:
        inner, places, pull_back = kernel, others, lambda slopes: (slopes,)

    def at(point: Parameters) -> Parameters:
        pairs = jax.vmap(jax.value_and_grad(inner), in_axes=(0, None))
        values, slopes = pairs(places, point)
        attraction = jax.tree.map(lambda f: jnp.tensordot(values.astype(f.dtype), f, axes=1), forces)
        if temperature is None:
            return attraction
        repulsion = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), pull_back(slopes)[0])
        return subtract(attraction, scale(temperature, repulsion))

    return jax.lax.map(at, rows, batch_size=_ROWS)
