"""The normal form of every problem: F(Q) = ∫ V dQ + ½ ∬ W dQ dQ + τ ∫ log q dQ."""

from collections.abc import Callable
from typing import Any, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from measureflow.core.pytrees import Parameters, Particles, add, strong
from measureflow.numerics.interactions import (
    AbstractInteractions,
    ExactInteractions,
    interaction_gradient,
    interaction_mean,
)
from measureflow.spaces.kernels import AbstractKernel

Potential: TypeAlias = Callable[[Parameters], Float[Array, ""]]


class CombinedPotential(eqx.Module):
    """Σₖ wₖ Vₖ."""

    weights: tuple[Float[Array, ""], ...]
    potentials: tuple[Potential, ...]

    def __call__(self, theta: Parameters) -> Float[Array, ""]:
        values = [w * potential(theta) for w, potential in zip(self.weights, self.potentials, strict=True)]
        return sum(values[1:], start=values[0])


class FreeEnergy(eqx.Module):
    """F(Q) = ∫ V dQ + ½ ∬ W dQ dQ + τ ∫ log q dQ; a part that is None is absent (zero).

    Absence is part of the program, not a value: without a temperature no noise is drawn, without an
    interaction no pairs are summed.
    """

    potential: Potential | None = None
    interaction: AbstractKernel | None = None
    temperature: Float[Array, ""] | None = eqx.field(
        converter=lambda value: None if value is None else strong(value), default=None
    )

    def __add__(self, other: "FreeEnergy") -> "FreeEnergy":
        one = jnp.ones(())
        potentials = [v for v in (self.potential, other.potential) if v is not None]
        combined = CombinedPotential((one,) * len(potentials), tuple(potentials))
        return FreeEnergy(
            potential=combined if len(potentials) == 2 else next(iter(potentials), None),
            interaction=_sum(self.interaction, other.interaction),
            temperature=_sum(self.temperature, other.temperature),
        )

    def __rmul__(self, weight: Float[Array, ""]) -> "FreeEnergy":
        return FreeEnergy(
            potential=None if self.potential is None else CombinedPotential((weight,), (self.potential,)),
            interaction=None if self.interaction is None else weight * self.interaction,
            temperature=None if self.temperature is None else weight * self.temperature,
        )

    def potential_energy(self, particles: Particles) -> Float[Array, ""]:
        """∫ V dQ_N."""
        if self.potential is None:
            return jnp.zeros(())
        return jnp.mean(jax.vmap(self.potential)(particles))

    def interaction_energy(
        self,
        particles: Particles,
        interactions: AbstractInteractions | None = None,
        key: Key[Array, ""] | None = None,
    ) -> Float[Array, ""]:
        """½ ∬ W dQ_N dQ_N, exact, or summed as `interactions` says."""
        if self.interaction is None:
            return jnp.zeros(())
        summed = interactions or ExactInteractions()
        return 0.5 * interaction_mean(self.interaction, particles, summed, key)

    def potential_gradient(self, particles: Particles) -> Particles:
        """∇V(θᵢ)."""
        if self.potential is None:
            return jax.tree.map(jnp.zeros_like, particles)
        return jax.vmap(jax.grad(self.potential))(particles)

    def interaction_gradient(
        self,
        particles: Particles,
        interactions: AbstractInteractions | None = None,
        key: Key[Array, ""] | None = None,
    ) -> Particles:
        """∫ ∇₁W(θᵢ, θ′) dQ_N(θ′), exact, or summed as `interactions` says."""
        if self.interaction is None:
            return jax.tree.map(jnp.zeros_like, particles)
        return interaction_gradient(self.interaction, particles, interactions or ExactInteractions(), key)

    def wasserstein_gradient(
        self,
        particles: Particles,
        interactions: AbstractInteractions | None = None,
        key: Key[Array, ""] | None = None,
    ) -> Particles:
        """∇V(θᵢ) + ∫ ∇₁W(θᵢ, θ′) dQ_N(θ′): all of ∇_W F but the entropy's part, which is noise."""
        return add(
            self.potential_gradient(particles), self.interaction_gradient(particles, interactions, key)
        )


def _sum(x: Any, y: Any) -> Any:
    """x + y, where None is zero."""
    if x is None or y is None:
        return x if y is None else y
    return x + y
