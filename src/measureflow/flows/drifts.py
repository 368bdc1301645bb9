"""The drift of the particles, with pairs summed as a flow sums them."""

import jax
from jaxtyping import Array, Key

from measureflow.core.pytrees import Particles, add
from measureflow.numerics.interactions import AbstractInteractions, RandomBatches
from measureflow.statement.free_energy import FreeEnergy


def drift(
    energy: FreeEnergy, particles: Particles, interactions: AbstractInteractions, step_key: Key[Array, ""]
) -> Particles:
    """∇V(θᵢ) + (1/N) Σⱼ ∇₁W(θᵢ, θⱼ) + ∇_W R(θᵢ)."""
    found = energy.potential_gradient(particles)
    if energy.interaction is not None:
        found = add(found, interactions.gradient(energy.interaction, particles, pairs_key(step_key)))
    if energy.rest is None:
        return found
    _require_all_particles(interactions)
    return add(found, energy.rest_gradient(particles))


def pairs_key(step_key: Key[Array, ""]) -> Key[Array, ""]:
    """For sums over pairs: apart from the noise, which is drawn with the step's key itself."""
    return jax.random.fold_in(step_key, 1)


def _require_all_particles(interactions: AbstractInteractions) -> None:
    some_only = isinstance(interactions, RandomBatches)
    if some_only:
        raise ValueError(
            f"interactions={interactions} sees some particles at a time, and a nonlinear functional of them "
            "is biased then; use mf.ExactInteractions()."
        )
