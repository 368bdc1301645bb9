"""∫ f dQ of a Gaussian by a finite sum: quadrature in up to two dimensions, Monte Carlo in any.

The points of a sum and their weights are an empirical measure, so that a functional which can be evaluated
there can be evaluated for a Gaussian.
"""

from itertools import product

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Key

from measureflow.core.pytrees import dimension, particle_count
from measureflow.numerics.interactions import EXACT
from measureflow.spaces.empirical import Empirical
from measureflow.spaces.kernels import AbstractKernel
from measureflow.spaces.measures import Gaussian

_QUADRATURE_DIMENSIONS = 2
# Nodes on each axis and how far they reach, in standard deviations, by the number of dimensions. Two rules
# whose spacings have no common multiple: what one of them misses, the other sees.
_RULES = {1: ((4001, 10.0), (4801, 12.0 + 1e-2)), 2: ((161, 8.0), (189, 9.0 + 1e-2))}


class Points(eqx.Module):
    """A finite sum in the place of ∫ · dQ: the empirical measure of its points. `independent`: they are draws
    from Q, so that a double sum has to leave out its diagonal to be unbiased."""

    measure: Empirical
    independent: bool = eqx.field(static=True)

    def double(self, kernel: AbstractKernel) -> Float[Array, ""]:
        """∬ κ dQ dQ."""
        if self.independent:
            points = self.measure.particles
            n = particle_count(points)
            diagonal = jnp.mean(jax.vmap(lambda theta: kernel(theta, theta))(points))
            return (n * EXACT.mean(kernel, points) - diagonal) / (n - 1)
        # Kernels without a closed form have cusps or features of any kind: no fixed rule is safe for them.
        raise ValueError(
            f"∬ κ dQ dQ of a Gaussian has no closed form for {type(kernel).__name__}; pass key= for Monte "
            "Carlo."
        )


def draws(measure: Gaussian, key: Key[Array, ""], samples: int) -> Points:
    """Monte Carlo."""
    return Points(Empirical(measure.sample(key, samples)), independent=True)


def quadrature(measure: Gaussian) -> tuple[Points, Points]:
    """Two trapezoidal rules, to be compared. With a Gaussian's weights they are as good as exact where the
    integrand is smooth at the scale of their nodes, and disagree where it is not."""
    number = dimension(measure.mean)
    if number > _QUADRATURE_DIMENSIONS:
        raise ValueError(
            f"the integrals of a Gaussian in {number} dimensions are estimated by Monte Carlo; pass key=."
        )
    first, second = (_trapezoidal(measure, nodes, reach) for nodes, reach in _RULES[number])
    return first, second


def _trapezoidal(measure: Gaussian, nodes: int, reach: float) -> Points:
    number = dimension(measure.mean)
    flat, unravel = ravel_pytree(measure.mean)
    axis = np.linspace(-reach, reach, nodes)
    grid = np.array(list(product(axis, repeat=number)))
    weights = np.exp(-0.5 * np.sum(grid**2, axis=1))
    # A node without mass could only turn an overflow into NaN.
    kept = weights > np.finfo(np.float32).tiny
    points = jax.vmap(lambda z: measure.from_standard(unravel(z)))(jnp.asarray(grid[kept], flat.dtype))
    return Points(Empirical(points, jnp.asarray(weights[kept], flat.dtype)), independent=False)


def require_agreement(name: str, first: Float[Array, ""], second: Float[Array, ""]) -> None:
    """Two rules give the same, or neither is to be believed."""
    a, b = float(first), float(second)
    if not abs(a - b) <= 1e-4 * (abs(a) + abs(b)) / 2 + 1e-6:
        raise ValueError(
            f"quadrature does not resolve {name} under this Gaussian: two rules give {a:.6g} and {b:.6g}; "
            "pass "
            "key= for Monte Carlo."
        )
