"""∫ f dQ by a finite sum: exact for particles, quadrature or Monte Carlo for a Gaussian."""

from collections.abc import Callable
from itertools import product

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Key

from measureflow.core.pytrees import Parameters, Particles, dimension, particle_count
from measureflow.numerics.interactions import interaction_mean
from measureflow.spaces.kernels import AbstractKernel
from measureflow.spaces.measures import Empirical, Gaussian

_QUADRATURE_DIMENSIONS = 2
_QUADRATURE_NODES = 64


class Integral(eqx.Module):
    """∫ f dQ ≈ Σᵢ wᵢ f(θᵢ). `independent`: the points are draws from Q, not Q itself, so that a double
    sum has to leave out its diagonal to be unbiased."""

    points: Particles
    weights: Float[Array, " n"]
    independent: bool = eqx.field(static=True)

    def mean(self, function: Callable[[Parameters], Float[Array, ""]]) -> Float[Array, ""]:
        """∫ f dQ."""
        return jnp.sum(self.weights * jax.vmap(function)(self.points))

    def double(self, kernel: AbstractKernel) -> Float[Array, ""]:
        """∬ κ dQ dQ."""
        if self.independent:
            n = particle_count(self.points)
            diagonal = jnp.mean(jax.vmap(lambda theta: kernel(theta, theta))(self.points))
            return (n * interaction_mean(kernel, self.points) - diagonal) / (n - 1)
        # Kernels without a closed form have cusps or features of any kind: no fixed rule is safe for them.
        raise ValueError(
            f"∬ κ dQ dQ of a Gaussian has no closed form for {type(kernel).__name__}; pass key= for Monte "
            "Carlo."
        )


def draws(points: Particles) -> Integral:
    """Monte Carlo with these independent draws."""
    n = particle_count(points)
    return Integral(points, jnp.full((n,), 1 / n), independent=True)


def integral(measure: Empirical | Gaussian, key: Key[Array, ""] | None, samples: int) -> Integral:
    """Exact for particles; for a Gaussian, Gauss–Hermite in up to two dimensions, else Monte Carlo."""
    if isinstance(measure, Empirical):
        n = particle_count(measure.particles)
        return Integral(measure.particles, jnp.full((n,), 1 / n), independent=False)
    if key is not None:
        return draws(measure.sample(key, samples))
    number = dimension(measure.mean)
    if number > _QUADRATURE_DIMENSIONS:
        raise ValueError(
            f"the loss of a Gaussian in {number} dimensions is estimated by Monte Carlo; pass key=."
        )
    nodes, weights = np.polynomial.hermite_e.hermegauss(_QUADRATURE_NODES)
    grid = np.array(list(product(nodes, repeat=number)))
    mass = np.prod(np.array(list(product(weights / weights.sum(), repeat=number))), axis=1)
    flat, unravel = ravel_pytree(measure.mean)
    points = jax.vmap(lambda z: measure.from_standard(unravel(z)))(jnp.asarray(grid, flat.dtype))
    return Integral(points, jnp.asarray(mass, flat.dtype), independent=False)
