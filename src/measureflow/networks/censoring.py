"""Laws of numbers that are known by bounds only: P(low < Y ≤ high), where a law without it has a density."""

import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax.nn import log_softmax
from jax.scipy.special import log_ndtr, logsumexp
from jax.scipy.stats import norm
from jaxtyping import Array, Float
from numpyro.distributions import Distribution, MixtureSameFamily, constraints

from measureflow.core.pytrees import strong

# A logarithm of two masses that are equal in float32 stays finite.
_CLOSEST = 1e-6
# In scales: two bounds as near as this are.
_NARROW = 1e-3
# In scales: as far out as this, the slope of log Φ is its series.
_FAR = -20.0


class _TwoBounds(constraints.Constraint):
    """low ≤ high, which may be infinite."""

    is_discrete = False
    event_dim = 1

    def __call__(self, x: Any) -> Any:
        """Whether they are."""
        return x[..., 0] <= x[..., 1]

    def feasible_like(self, prototype: Any) -> Any:
        """Some that are."""
        return jnp.zeros_like(prototype)

    def tree_flatten(self) -> Any:
        """Nothing to transform."""
        return (), ((), {})


_TWO_BOUNDS = _TwoBounds()


class Censored(Distribution):
    """Of Y, two bounds are known, an event (low, high):

        log p(y) where both are y,   log P(Y > low) where high is ∞,   log P(Y ≤ high) where low is −∞,

    and log P(low < Y ≤ high) between two numbers.

    Parameters
    ----------
    base_dist
        The law of Y: Normal, or a mixture of Normals.
    validate_args
        As in NumPyro.
    """

    pytree_data_fields = ("base_dist",)

    def __init__(self, base_dist: Distribution, *, validate_args: bool | None = None):
        self.base_dist = base_dist
        super().__init__(base_dist.batch_shape, (2,), validate_args=validate_args)

    @property
    def support(self) -> Any:
        """Two bounds."""
        return _TWO_BOUNDS

    def log_prob(self, value: Any, intermediates: Any = None) -> Float[Array, "..."]:
        """Of the bounds."""
        del intermediates
        low, high = value[..., 0], value[..., 1]
        exact = low == high
        # What is not chosen is computed, too, and so are its derivatives: they must be finite.
        density = self.base_dist.log_prob(jnp.where(exact, low, 0.0))
        mass = log_mass(self.base_dist, jnp.where(exact, -jnp.inf, low), jnp.where(exact, 0.0, high))
        return jnp.where(exact, density, mass)

    @property
    def mean(self) -> Any:
        """E[Y], for each bound."""
        return self._twice(self.base_dist.mean)

    @property
    def variance(self) -> Any:
        """Var[Y], for each bound."""
        return self._twice(self.base_dist.variance)

    def _twice(self, numbers: Any) -> Float[Array, "... 2"]:
        return jnp.broadcast_to(jnp.asarray(numbers)[..., None], (*self.batch_shape, 2))


class CensoredLikelihood(eqx.Module):
    """likelihood(outputs), of which targets are bounds (low, high): see `Censored`."""

    likelihood: Callable[[Array], Distribution]

    def __call__(self, outputs: Array) -> Distribution:
        return Censored(self.likelihood(outputs))


def knows_masses(law: Distribution) -> bool:
    """Whether `log_mass` knows it."""
    if isinstance(law, MixtureSameFamily):
        law = law.component_distribution
    return isinstance(law, dist.Normal)


def log_mass(law: Any, low: Float[Array, "..."], high: Float[Array, "..."]) -> Float[Array, "..."]:
    """log P(low < Y ≤ high) of a Normal law, or of a mixture of them; one of the bounds may be infinite."""
    if isinstance(law, MixtureSameFamily):
        parts = log_mass(law.component_distribution, low[..., None], high[..., None])
        shares = log_softmax(jnp.asarray(law.mixing_distribution.logits), axis=-1)
        return logsumexp(shares + parts, axis=-1)
    loc, scale = map(strong, (law.loc, law.scale))
    no_low, no_high = jnp.isneginf(low), jnp.isposinf(high)
    one_sided = no_low | no_high
    # Derivatives of what is not chosen, too, must be finite.
    low, high = jnp.where(no_low, 0.0, low), jnp.where(no_high, 0.0, high)
    width = jnp.where(one_sided, 1.0, (high - low) / scale)
    low, high = (low - loc) / scale, (high - loc) / scale
    # Between near bounds the density is a line: Φ(b) and Φ(a) have the same digits there.
    middle = 0.5 * (low + high)
    narrow = width * jnp.maximum(1.0, jnp.abs(middle)) < _NARROW
    of_line = jnp.log(jnp.where(narrow, width, 1.0)) - 0.5 * (middle**2 + math.log(2 * math.pi))
    apart = one_sided | narrow
    of_one = _log_normal_cdf(jnp.where(no_high, -low, high))
    # Φ(b) − Φ(a) = Φ(−a) − Φ(−b): in the lower half, logarithms keep their digits.
    mirrored = low + high > 0
    low, high = jnp.where(mirrored, -high, low), jnp.where(mirrored, -low, high)
    below = _log_normal_cdf(jnp.where(apart, 0.0, high))
    ratio = _log_normal_cdf(jnp.where(apart, -1.0, low)) - below
    of_two = below + jnp.log(-jnp.expm1(jnp.minimum(ratio, -_CLOSEST)))
    return jnp.where(one_sided, of_one, jnp.where(narrow, of_line, of_two))


@jax.custom_jvp
def _log_normal_cdf(z: Float[Array, "..."]) -> Float[Array, "..."]:
    """log Φ(z), with a slope that has its digits: JAX's is exp(log φ − log Φ), of two numbers as large as
    z²/2, and wrong by a factor of 3 at z = −9,000."""
    return log_ndtr(z)


@_log_normal_cdf.defjvp
def _with_slope(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (z,), (moved,) = primals, tangents
    far, value = z < _FAR, log_ndtr(z)
    near, out = jnp.where(far, 0.0, z), jnp.where(far, z, _FAR)
    # φ(z)/Φ(z) = −z − 1/z + 2/z³ − …
    slope = jnp.where(far, -out - 1 / out + 2 / out**3, jnp.exp(norm.logpdf(near) - log_ndtr(near)))
    return value, slope * moved
