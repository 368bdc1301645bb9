"""How (1/N) Σⱼ ∇₁κ(θᵢ, θⱼ), the repulsion of particle i by all others, is summed."""

from functools import singledispatch

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from measureflow.kernels import AbstractKernel, AbstractRadialKernel, KernelCombination, PullBack
from measureflow.pytrees import Particles, add, particle_count, scale, squared_distances


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
    slopes = kernel.slope(squared_distances(particles, particles))
    # The matrix is symmetric, and columns are summed faster than rows.
    row_sums = jnp.sum(slopes, axis=0)
    factor = 2 / particle_count(particles)

    def on_leaf(leaf: Array) -> Array:
        # Differences do not see the mean; without it fewer digits cancel.
        rows = leaf.reshape(leaf.shape[0], -1)
        rows = rows - jnp.mean(rows, axis=0, keepdims=True)
        pull = row_sums[:, None] * rows
        mixed = jnp.matmul(slopes, rows, precision=jax.lax.Precision.HIGHEST)
        return (factor * (pull - mixed)).astype(leaf.dtype).reshape(leaf.shape)

    return jax.tree.map(on_leaf, particles)


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


def interaction_mean(kernel: AbstractKernel, particles: Particles) -> Float[Array, ""]:
    """(1/N²) Σᵢⱼ κ(θᵢ, θⱼ), the diagonal included: ∬ κ dQ dQ of the empirical measure."""
    if isinstance(kernel, PullBack):
        return interaction_mean(kernel.kernel, jax.vmap(kernel.features)(particles))
    if isinstance(kernel, AbstractRadialKernel):
        return jnp.mean(kernel.profile(squared_distances(particles, particles)))
    if isinstance(kernel, KernelCombination):
        means = [interaction_mean(term, particles) for term in kernel.kernels]
        return jnp.sum(jnp.stack(kernel.weights) * jnp.stack(means))
    rows = jax.vmap(lambda theta: jax.vmap(kernel, in_axes=(None, 0))(theta, particles))
    return jnp.mean(rows(particles))
