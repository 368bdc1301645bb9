"""The normal form of every problem: F(Q) = ∫ V dQ + ½ ∬ W dQ dQ + τ ∫ log q dQ + R(Q)."""

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from measureflow.core import platforms
from measureflow.core.pytrees import Parameters, Particles, add, particle_count, scale, strong
from measureflow.core.showing import or_fields, shown
from measureflow.numerics.interactions import EXACT
from measureflow.spaces.embeddings import kernel_mean_embedding
from measureflow.spaces.empirical import Empirical
from measureflow.spaces.kernels import AbstractKernel

Potential: TypeAlias = Callable[[Parameters], Float[Array, ""]]
Rest: TypeAlias = Callable[[Empirical], Float[Array, ""]]


class Combination(eqx.Module):
    """Σₖ wₖ fₖ, of potentials or of functionals."""

    weights: tuple[Float[Array, ""], ...]
    functions: tuple[Callable[[Any], Float[Array, ""]], ...]

    def __call__(self, at: Any) -> Float[Array, ""]:
        values = [w * function(at) for w, function in zip(self.weights, self.functions, strict=True)]
        return sum(values[1:], start=values[0])


class FreeEnergy(eqx.Module):
    """F(Q) = ∫ V dQ + ½ ∬ W dQ dQ + τ ∫ log q dQ + R(Q); a part that is None is absent (zero).

    V, W and τ have a fast path: one gradient per particle, sums over pairs, noise. All else is the `rest` R,
    a functional of which only its value on a weighted empirical measure is known. For Q = Σᵢ wᵢ δ(θᵢ)

        δR/δQ(θᵢ) = ∂R/∂wᵢ up to a constant,   ∇_W R(θᵢ) = (1/wᵢ) ∂R/∂θᵢ,

    so JAX derives its part of the dynamics. Absence is part of the program, not a value: without a
    temperature no noise is drawn, without an interaction no pairs are summed.

    Parameters
    ----------
    potential
        V, a function of one θ.
    interaction
        W, a kernel.
    temperature
        τ.
    rest
        R, a function of an `Empirical` measure.
    """

    potential: Potential | None = None
    interaction: AbstractKernel | None = None
    temperature: Float[Array, ""] | None = eqx.field(
        converter=lambda value: None if value is None else strong(value), default=None
    )
    rest: Rest | None = None

    @or_fields
    def __repr__(self) -> str:
        parts = {"V": self.potential, "W": self.interaction, "rest": self.rest}
        temperature = [] if self.temperature is None else [f"τ={shown(self.temperature)}"]
        return f"FreeEnergy({', '.join([name for name in parts if parts[name] is not None] + temperature)})"

    def __add__(self, other: "FreeEnergy") -> "FreeEnergy":
        return FreeEnergy(
            potential=_both(self.potential, other.potential),
            interaction=_sum(self.interaction, other.interaction),
            temperature=_sum(self.temperature, other.temperature),
            rest=_both(self.rest, other.rest),
        )

    def __rmul__(self, weight: Float[Array, ""]) -> "FreeEnergy":
        return FreeEnergy(
            potential=None if self.potential is None else Combination((weight,), (self.potential,)),
            interaction=None if self.interaction is None else weight * self.interaction,
            temperature=None if self.temperature is None else weight * self.temperature,
            rest=None if self.rest is None else Combination((weight,), (self.rest,)),
        )

    def potential_energy(self, particles: Particles) -> Float[Array, ""]:
        """∫ V dQ_N."""
        if self.potential is None:
            return jnp.zeros(())
        return jnp.mean(jax.vmap(self.potential)(particles))

    def interaction_energy(self, particles: Particles) -> Float[Array, ""]:
        """½ ∬ W dQ_N dQ_N."""
        if self.interaction is None:
            return jnp.zeros(())
        return 0.5 * EXACT.mean(self.interaction, particles)

    def rest_energy(self, particles: Particles) -> Float[Array, ""]:
        """R(Q_N)."""
        return jnp.zeros(()) if self.rest is None else self.rest(_weighted(particles))

    def energy(self, particles: Particles) -> Float[Array, ""]:
        """∫ V dQ_N + ½ ∬ W dQ_N dQ_N + R(Q_N): all of F but the entropy's part."""
        energy = self.potential_energy(particles)
        energy = energy if self.interaction is None else energy + self.interaction_energy(particles)
        return energy if self.rest is None else energy + self.rest_energy(particles)

    def potential_gradient(self, particles: Particles) -> Particles:
        """∇V(θᵢ)."""
        if self.potential is None:
            return jax.tree.map(jnp.zeros_like, particles)
        return _gradient(self.potential, particles)

    def interaction_gradient(self, particles: Particles) -> Particles:
        """∫ ∇₁W(θᵢ, θ′) dQ_N(θ′)."""
        if self.interaction is None:
            return jax.tree.map(jnp.zeros_like, particles)
        return EXACT.gradient(self.interaction, particles)

    def rest_gradient(self, particles: Particles) -> Particles:
        """∇_W R(θᵢ) = N ∂R/∂θᵢ."""
        if self.rest is None:
            return jax.tree.map(jnp.zeros_like, particles)
        rest, number = self.rest, jnp.asarray(float(particle_count(particles)))
        return scale(number, jax.grad(lambda x: rest(_weighted(x)))(particles))

    def first_variation(self, measure: Empirical) -> Float[Array, " n"]:
        """δF/δQ(θᵢ) = V(θᵢ) + ∫W(θᵢ, θ′) dQ(θ′) + ∂R/∂wᵢ at each particle, without the entropy's part and up
        to a constant."""
        particles, found = measure.particles, jnp.zeros(())
        if self.potential is not None:
            found = found + jax.vmap(self.potential)(particles)
        if self.interaction is not None:
            embedding = kernel_mean_embedding(self.interaction, measure)
            assert embedding is not None
            found = found + jax.lax.map(embedding, particles, batch_size=256)
        if self.rest is not None:
            rest = self.rest
            found = found + jax.grad(lambda w: rest(Empirical(particles, w)))(measure.masses())
        return jnp.broadcast_to(found, (particle_count(particles),))

    def wasserstein_gradient(self, particles: Particles) -> Particles:
        """∇V(θᵢ) + ∫ ∇₁W(θᵢ, θ′) dQ_N(θ′) + ∇_W R(θᵢ): all of ∇_W F but the entropy's part, which is
        noise."""
        gradient = self.potential_gradient(particles)
        if self.interaction is not None:
            gradient = add(gradient, self.interaction_gradient(particles))
        return gradient if self.rest is None else add(gradient, self.rest_gradient(particles))


def _gradient(potential: Potential, particles: Particles) -> Particles:
    """∇V(θᵢ). On a GPU term by term: what a record has in common with a step is then computed once, where
    each kernel counts."""
    if isinstance(potential, Combination) and platforms.compute_capability() >= platforms.AMPERE:
        terms = zip(potential.weights, potential.functions, strict=True)
        return functools.reduce(add, [scale(weight, _gradient(term, particles)) for weight, term in terms])
    return jax.vmap(jax.grad(potential))(particles)


def _weighted(particles: Particles) -> Empirical:
    """Q_N, its weights written out: a functional reads them."""
    n = particle_count(particles)
    return Empirical(particles, jnp.full((n,), 1 / n))


def _both(first: Any, second: Any) -> Any:
    """f + g of functions, where None is zero."""
    present = tuple(function for function in (first, second) if function is not None)
    if len(present) < 2:
        return next(iter(present), None)
    return Combination((jnp.ones(()),) * 2, present)


def _sum(x: Any, y: Any) -> Any:
    """x + y, where None is zero."""
    if x is None or y is None:
        return x if y is None else y
    return x + y
