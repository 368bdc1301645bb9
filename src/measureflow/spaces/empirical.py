"""The measure that particles are."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import digamma
from jaxtyping import Array, Float, Key, PyTree

from measureflow.core.pytrees import (
    Parameters,
    Particles,
    dimension,
    particle_count,
    squared_distances,
    strong,
)
from measureflow.core.showing import counted, or_fields
from measureflow.core.statistics import WithStatistics, parameters_of
from measureflow.core.validation import require_count, require_particles, require_positive
from measureflow.saving.registry import saved
from measureflow.spaces.measures import AbstractMeasure, Gaussian


def _masses(weights: Any, n: int) -> Float[Array, " n"]:
    """`weights` as numbers that sum to 1."""
    remedy = "give one number > 0 for each particle, and leave out particles without mass."
    if getattr(weights, "shape", None) != (n,) and np.shape(weights) != (n,):
        raise ValueError(
            f"Empirical weights have shape {np.shape(weights)}, but there are {n} particles; {remedy}"
        )
    require_positive("Empirical weights", weights, remedy)
    masses = strong(weights)
    return masses / jnp.sum(masses)


saved(WithStatistics)


@saved
class Empirical(AbstractMeasure):
    """Σᵢ wᵢ δ(θᵢ): the measure that particles are.

    Parameters
    ----------
    particles
        A pytree whose leaves share a leading axis, one row per particle.
    weights
        wᵢ > 0, one per particle; they are divided by their sum. None is 1/N for each.
    """

    particles: Particles
    weights: Float[Array, " n"] | None

    def __init__(self, particles: PyTree, weights: Any = None):
        self.particles = require_particles("Empirical particles", particles, with_statistics=True)
        n = particle_count(self.particles)
        self.weights = None if weights is None else _masses(weights, n)

    @or_fields
    def __repr__(self) -> str:
        weighted = "" if self.weights is None else ", weighted"
        n, number = particle_count(self.particles), dimension(parameters_of(self.template()))
        return f"Empirical({counted(n, 'particle')} in {counted(number, 'dimension')}{weighted})"

    @property
    def has_full_support(self) -> bool:
        return False

    def sample(self, key: Key[Array, ""], n: int) -> Particles:
        """n draws with replacement."""
        shape, count = (require_count("n", n, 1, "it counts the draws."),), particle_count(self.particles)
        if self.weights is None:
            chosen = jax.random.randint(key, shape, 0, count)
        else:
            chosen = jax.random.choice(key, count, shape, p=self.weights)
        return jax.tree.map(lambda leaf: leaf[chosen], self.particles)

    def masses(self) -> Float[Array, " n"]:
        """wᵢ, also where all are the same."""
        n = particle_count(self.particles)
        return jnp.full((n,), 1 / n) if self.weights is None else self.weights

    def integrate(self, function: Callable[[Parameters], PyTree]) -> PyTree:
        """∫ f dQ = Σᵢ wᵢ f(θᵢ), for f with values in any pytree of arrays.

        Parameters
        ----------
        function
            f, a function of one θ.
        """
        masses, exact = self.masses(), jax.lax.Precision.HIGHEST
        return jax.tree.map(
            lambda leaf: jnp.tensordot(masses.astype(leaf.dtype), leaf, axes=1, precision=exact),
            jax.vmap(function)(self.particles),
        )

    def log_density(self, theta: Parameters) -> Float[Array, ""]:
        raise ValueError("an Empirical measure has no density; use a Gaussian, or MMD², which needs none.")

    def moment_matched(self) -> Gaussian:
        """The Gaussian with the particles' means and standard deviations, coordinate by coordinate."""
        mean = jax.tree.map(lambda leaf: jnp.average(leaf, axis=0, weights=self.weights), self.particles)
        squares = jax.tree.map(lambda leaf, m: jnp.square(leaf - m[None]), self.particles, mean)
        variance = jax.tree.map(lambda leaf: jnp.average(leaf, axis=0, weights=self.weights), squares)
        return Gaussian(mean, jax.tree.map(jnp.sqrt, variance))

    def entropy(self, neighbour: int = 5) -> Float[Array, ""]:
        """The Kozachenko–Leonenko estimate of −∫ q log q from distances to the k-th neighbour:

            ψ(N) − ψ(k) + log |B_J| + (J/N) Σᵢ log ρₖ(i).

        Its bias grows quickly with the dimension, so N ≥ 20·2ᴶ is required. Where more than k particles
        coincide it is −∞, as for atoms.
        """
        n, number = particle_count(self.particles), dimension(self.template())
        if self.weights is not None:
            raise ValueError(
                "the entropy of particles with weights cannot be estimated; draw from the measure with "
                "mf.Empirical(measure.sample(key, n)), or use problem.stationarity, which needs no density."
            )
        if n < 20 * 2**number:
            raise ValueError(
                f"the entropy of {n} particles in {number} dimensions cannot be estimated (it takes "
                f"N ≥ 20·2^J); use problem.stationarity, which needs no density, or a Gaussian measure."
            )
        distances = _neighbour_distances(self.particles, neighbour)
        log_ball = 0.5 * number * math.log(math.pi) - math.lgamma(number / 2 + 1)
        psi = digamma(jnp.asarray(float(n))) - digamma(jnp.asarray(float(neighbour)))
        return psi + log_ball + 0.5 * number * jnp.mean(jnp.log(distances))

    def template(self) -> Parameters:
        return jax.tree.map(lambda leaf: leaf[0], self.particles)


def _neighbour_distances(particles: Particles, neighbour: int) -> Float[Array, " n"]:
    """Squared distances to the k-th neighbour: one pass over all points, each inserted into every
    particle's sorted list of the nearest so far (itself among them). Memory O(N)."""

    def insert(nearest: tuple[Array, ...], point: Parameters) -> tuple[tuple[Array, ...], None]:
        distance = squared_distances(particles, jax.tree.map(lambda leaf: leaf[None], point))[:, 0]
        kept = []
        for near in nearest:
            kept.append(jnp.minimum(near, distance))
            distance = jnp.maximum(near, distance)
        return tuple(kept), None

    dtype = jnp.result_type(*jax.tree.leaves(particles))
    first = jnp.full((particle_count(particles),), jnp.inf, dtype)
    return jax.lax.scan(insert, (first,) * (neighbour + 1), particles)[0][-1]
