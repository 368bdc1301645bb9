"""How (1/N) Σⱼ ∇₁κ(θᵢ, θⱼ), the repulsion of particle i by all others, is summed."""

from collections.abc import Callable
from functools import singledispatch

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from measureflow.kernels import AbstractKernel, AbstractRadialKernel, KernelCombination, PullBack
from measureflow.pytrees import OtherParticles, Particles, add, particle_count, scale, squared_distances

_TILE = 512


@singledispatch
def interaction_gradient(kernel: AbstractKernel, particles: Particles) -> Particles:
    """(1/N) Σⱼ ∇₁κ(θᵢ, θⱼ) for every i, by autodiff of N² kernel values: for kernels of any form."""

    def at_one(theta: Particles) -> Particles:
        gradients = jax.vmap(jax.grad(kernel), in_axes=(None, 0))(theta, particles)
        return jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), gradients)

    return jax.vmap(at_one)(particles)


@interaction_gradient.register
def _(kernel: AbstractRadialKernel, particles: Particles) -> Particles:
    """Radial kernels are matrix work: Σⱼ 2φ′ᵢⱼ(θᵢ − θⱼ) = 2(rowsum(φ′)ᵢ θᵢ − (φ′θ)ᵢ)."""
    # Differences do not see the mean; without it fewer digits cancel.
    particles = jax.tree.map(lambda leaf: leaf - jnp.mean(leaf, axis=0, keepdims=True), particles)
    factor = 2 / particle_count(particles)

    def on_rows(rows: OtherParticles) -> OtherParticles:
        slopes = kernel.slope(squared_distances(rows, particles))
        row_sums = jnp.sum(slopes, axis=1)

        def on_leaf(row: Array, leaf: Array) -> Array:
            row_matrix, matrix = row.reshape(row.shape[0], -1), leaf.reshape(leaf.shape[0], -1)
            mixed = jnp.matmul(slopes, matrix, precision=jax.lax.Precision.HIGHEST)
            return (factor * (row_sums[:, None] * row_matrix - mixed)).astype(leaf.dtype).reshape(row.shape)

        return jax.tree.map(on_leaf, rows, particles)

    return _in_tiles(on_rows, particles)


def _in_tiles(function: Callable[[Particles], PyTree], particles: Particles) -> PyTree:
    """`function` of all particles, a tile of rows at a time: N² numbers never exist at once, and those
    that do stay in the cache. Few particles are one tile."""
    n = particle_count(particles)
    if n <= _TILE:
        return function(particles)
    tiles = -(-n // _TILE)
    padded = jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf[: tiles * _TILE - n]]), particles)
    rows = jax.tree.map(lambda leaf: leaf.reshape(tiles, _TILE, *leaf.shape[1:]), padded)
    results = jax.lax.map(function, rows)
    return jax.tree.map(lambda leaf: leaf.reshape(tiles * _TILE, *leaf.shape[2:])[:n], results)


@interaction_gradient.register
def _(kernel: KernelCombination, particles: Particles) -> Particles:
    gradients = [
        scale(weight, interaction_gradient(term, particles))
        for weight, term in zip(kernel.weights, kernel.kernels, strict=True)
    ]
    result = gradients[0]
    for gradient in gradients[1:]:
        result = add(result, gradient)
    return result


@interaction_gradient.register
def _(kernel: PullBack, particles: Particles) -> Particles:
    """∇₁κ_f(θ, θ′) = Df(θ)ᵀ ∇₁κ(f(θ), f(θ′)): N features and one vector-Jacobian product each."""
    features, pull_back = jax.vjp(jax.vmap(kernel.features), particles)
    return pull_back(interaction_gradient(kernel.kernel, features))[0]


@singledispatch
def interaction_mean(kernel: AbstractKernel, particles: Particles) -> Float[Array, ""]:
    """(1/N²) Σᵢⱼ κ(θᵢ, θⱼ), the diagonal included: ∬ κ dQ dQ of the empirical measure."""
    rows = jax.vmap(lambda theta: jax.vmap(kernel, in_axes=(None, 0))(theta, particles))
    return jnp.mean(rows(particles))


@interaction_mean.register
def _(kernel: AbstractRadialKernel, particles: Particles) -> Float[Array, ""]:
    def row_means(rows: OtherParticles) -> Float[Array, " m"]:
        return jnp.mean(kernel.profile(squared_distances(rows, particles)), axis=1)

    return jnp.mean(_in_tiles(row_means, particles))


@interaction_mean.register
def _(kernel: KernelCombination, particles: Particles) -> Float[Array, ""]:
    means = [interaction_mean(term, particles) for term in kernel.kernels]
    return jnp.sum(jnp.stack(kernel.weights) * jnp.stack(means))


@interaction_mean.register
def _(kernel: PullBack, particles: Particles) -> Float[Array, ""]:
    return interaction_mean(kernel.kernel, jax.vmap(kernel.features)(particles))
