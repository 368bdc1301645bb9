"""The least that a step could cost: plain JAX, one compiled `scan`, and nothing of measureflow."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.targets import STEP_SIZE, TEMPERATURE, Target


def gradient_steps(target: Target, steps: int, *, draws: bool) -> Callable[[], Any]:
    """The compiled steps of `compiled_steps`, from the target's particles."""
    run = compiled_steps(target, steps, draws=draws)
    return lambda: run(target.particles, target.data, jax.random.key(2))


def compiled_steps(target: Target, steps: int, *, draws: bool) -> Any:
    """θ ← θ − η∇ℓ(θ), vmapped; with `draws` + √(2ητ) Z, by `jax.random.normal`, one key a leaf."""
    gradient = jax.vmap(jax.grad(target.loss), in_axes=(0, None))
    noise_scale = (2 * STEP_SIZE * TEMPERATURE) ** 0.5

    @jax.jit
    def run(particles, data, key):
        def step(particles, key):
            moved = jax.tree.map(lambda x, g: x - STEP_SIZE * g, particles, gradient(particles, data))
            if not draws:
                return moved, None
            leaves, shape = jax.tree.flatten(moved)
            keys = jax.random.split(key, len(leaves))
            noise = [noise_scale * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)]
            return jax.tree.map(jnp.add, moved, shape.unflatten(noise)), None

        return jax.lax.scan(step, particles, jax.random.split(key, steps))[0]

    return run


def kernel_steps(particles: jax.Array, steps: int, lengthscale: float) -> Callable[[], jax.Array]:
    """Nothing but the repulsion and normal draws."""

    def step(x, key):
        noise = jax.random.normal(key, x.shape)
        return x + STEP_SIZE * repulsion(x, lengthscale) + STEP_SIZE * noise, None

    @jax.jit
    def run(x, key):
        return jax.lax.scan(step, x, jax.random.split(key, steps))[0]

    return lambda: run(particles, jax.random.key(2))


def repulsion(x: jax.Array, lengthscale: float) -> jax.Array:
    """−(1/N) Σⱼ ∇₁κ(xᵢ, xⱼ) of the squared exponential kernel, over all pairs, in few dimensions."""
    distances = sum((x[:, d, None] - x[None, :, d]) ** 2 for d in range(x.shape[1]))
    weights = jnp.exp(-0.5 * distances / lengthscale**2)
    return (jnp.sum(weights, axis=1)[:, None] * x - weights @ x) / (len(x) * lengthscale**2)
