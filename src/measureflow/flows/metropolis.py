"""Metropolis adjustment: proposals accepted by the problem's own exp(−V/τ): no step size bends the law."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key

from measureflow.core.pytrees import Particles, add, squared_sizes
from measureflow.flows.integrators import moved, noise_like
from measureflow.flows.scalings import AbstractScaling
from measureflow.statement.free_energy import FreeEnergy, Potential


class Proposal(NamedTuple):
    """Where each particle would go, and the probability that it does."""

    particles: Particles
    acceptance: Float[Array, " n"]


def require_potential(
    energy: FreeEnergy, temperature: Float[Array, ""] | None
) -> tuple[Potential, Float[Array, ""]]:
    """V and τ, where exp(−V/τ) is all there is to q*."""
    if temperature is None:
        raise ValueError(
            "metropolis=True was given for a problem without temperature: there is no law to be exact about; "
            "leave metropolis out, or give the problem a KL term."
        )
    for name, part in (("an interaction", energy.interaction), ("a nonlinear functional", energy.rest)):
        if part is not None:
            raise ValueError(
                f"metropolis=True was given for a problem with {name}: the particles move one another, so no "
                "particle has a density of its own to be accepted by; leave metropolis out: the default "
                "integrator mf.LeimkuhlerMatthews() has an error of second order in the step size."
            )
    assert energy.potential is not None
    return energy.potential, temperature


def require_all_cases(sampled_share: float) -> None:
    """No batches: a ratio of densities on some of the cases is another law's."""
    if sampled_share < 1:
        raise ValueError(
            "metropolis=True was given together with batches: acceptance by some of the cases is not that of "
            "q*; leave batch_size out so that every step sees all cases, or leave metropolis out."
        )


def values_and_gradients(potential: Potential, particles: Particles) -> tuple[Float[Array, " n"], Particles]:
    """V(θᵢ) and ∇V(θᵢ)."""
    return jax.vmap(jax.value_and_grad(potential))(particles)


def mala_proposal(
    potential: Potential,
    temperature: Float[Array, ""],
    particles: Particles,
    step_size: Float[Array, ""],
    scaling: AbstractScaling,
    step_key: Key[Array, ""],
) -> Proposal:
    """An Euler–Maruyama step θ′ with noise Z, accepted with probability

        min(1, exp(−(V(θ′) − V(θ))/τ + (‖Z‖² − ‖Z′‖²)/2)),   Z′ = √(η/2τ) Lᵀ(f + f′) − Z,

    Z′ the noise that would lead back, g = L Lᵀ (Roberts and Tweedie, 1996).
    """
    value, gradient = values_and_gradients(potential, particles)
    noise = noise_like(step_key, particles)
    proposed = moved(particles, gradient, step_size, temperature, scaling, noise)
    new_value, new_gradient = values_and_gradients(potential, proposed)
    size = jnp.sqrt(step_size / (2 * temperature.astype(step_size.dtype)))
    pull = scaling.root_transposed(add(gradient, new_gradient))
    back = jax.tree.map(lambda p, z: size.astype(p.dtype) * p - z, pull, noise)
    ratio = (value - new_value) / temperature + 0.5 * (squared_sizes(noise) - squared_sizes(back))
    return Proposal(proposed, acceptance(ratio))


def acceptance(log_ratio: Float[Array, " n"]) -> Float[Array, " n"]:
    """min(1, e^r); what is not a number is not accepted."""
    return jnp.exp(jnp.minimum(jnp.where(jnp.isnan(log_ratio), -jnp.inf, log_ratio), 0.0))


def accepted(probability: Float[Array, " n"], step_key: Key[Array, ""]) -> Bool[Array, " n"]:
    """Who moves."""
    uniform = jax.random.uniform(jax.random.fold_in(step_key, 2), probability.shape, probability.dtype)
    return uniform < probability


def where(chosen: Bool[Array, " n"], first: Particles, second: Particles) -> Particles:
    """The first of those that are chosen, the second of the others."""
    return jax.tree.map(lambda a, b: jnp.where(chosen.reshape(-1, *(1,) * (a.ndim - 1)), a, b), first, second)
