"""Integrators of θ̇ = −g∇_W F + √(2τg) Ḃ: what a step does with the drift and with the noise."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from measureflow.core.noise import mean_normal_of_words, standard_normal, words_of_steps
from measureflow.core.pytrees import Particles, particle_count
from measureflow.flows.scalings import AbstractScaling, Diagonal


class AbstractIntegrator(eqx.Module):
    """How noise enters a step."""


class EulerMaruyama(AbstractIntegrator):
    """θ ← θ − ηg f + √(2ητg) Z_k.

    For V = aθ²/2 its variance is τ/(a(1 − ηga/2)): too wide, by half as much again at ηga = ⅔.
    """


class LeimkuhlerMatthews(AbstractIntegrator):
    """θ ← θ − ηg f + √(2ητg)(Z_k + Z_{k+1})/2 (Leimkuhler and Matthews, 2013).

    For V = aθ²/2 its variance is τ/a for every stable step size, at the price of Euler–Maruyama: one gradient
    a step. The error of its law is of second order in η where that of Euler–Maruyama is of first. Noise is
    made by counters, so Z_{k+1} is known at step k, and a run is resumed exactly without remembering it.
    """


def euler_maruyama(
    particles: Particles,
    gradient: Particles,
    step_size: Float[Array, ""],
    temperature: Float[Array, ""] | None,
    precondition: AbstractScaling | None,
    key: Key[Array, ""],
) -> Particles:
    """θ − ηg·gradient + √(2ητg) Z, with Z standard normal and g = 1 where there is none."""
    noise = None if temperature is None else noise_like(key, particles)
    return moved(particles, gradient, step_size, temperature, precondition, noise)


def leimkuhler_matthews(
    particles: Particles,
    gradient: Particles,
    step_size: Float[Array, ""],
    temperature: Float[Array, ""],
    precondition: AbstractScaling | None,
    key: Key[Array, ""],
    step: Int[Array, ""],
) -> Particles:
    """θ − ηg·gradient + √(2ητg)(Z_k + Z_{k+1})/2, where Z_k is the noise of `key` folded with k."""
    words = words_of_steps(key, step + jnp.arange(2, dtype=step.dtype))
    one = jax.tree.map(lambda x: x[0], particles)
    noise = mean_normal_of_words(words, particle_count(particles), one)
    return moved(particles, gradient, step_size, temperature, precondition, noise)


def noise_like(key: Key[Array, ""], particles: Particles) -> Particles:
    """Z, standard normal."""
    return standard_normal(key, particle_count(particles), jax.tree.map(lambda x: x[0], particles))


def moved(
    particles: Particles,
    gradient: Particles,
    step_size: Float[Array, ""],
    temperature: Float[Array, ""] | None,
    precondition: AbstractScaling | None,
    noise: Particles | None,
) -> Particles:
    """θ − ηg·gradient + √(2ητg)·noise."""
    if precondition is None or isinstance(precondition, Diagonal):
        return _moved_by_coordinate(particles, gradient, step_size, temperature, precondition, noise)
    drift = precondition.times(gradient)
    moved = jax.tree.map(lambda x, d: x - step_size.astype(x.dtype) * d, particles, drift)
    if temperature is None or noise is None:
        return moved
    size = jnp.sqrt(2 * step_size * temperature.astype(step_size.dtype))
    return jax.tree.map(lambda x, z: x + size.astype(x.dtype) * z, moved, precondition.root(noise))


def _moved_by_coordinate(
    particles: Particles,
    gradient: Particles,
    step_size: Float[Array, ""],
    temperature: Float[Array, ""] | None,
    precondition: Diagonal | None,
    noise: Particles | None,
) -> Particles:
    diagonal = jax.tree.map(lambda _: jnp.ones((), step_size.dtype), gradient)
    if precondition is not None:
        diagonal = precondition.like(particles)
    rate = jax.tree.map(lambda x, g: step_size.astype(x.dtype) * g.astype(x.dtype), particles, diagonal)
    moved = jax.tree.map(lambda x, r, drift: x - r * drift, particles, rate, gradient)
    if temperature is None or noise is None:
        return moved
    return jax.tree.map(
        lambda x, r, z: x + jnp.sqrt(2 * temperature.astype(x.dtype) * r) * z, moved, rate, noise
    )
