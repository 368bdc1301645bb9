"""A law of positive numbers whose density keeps its digits in float32, however narrow it is.

NumPyro subtracts terms as large as α log α: where the deviation is a hundredth of the mean, log p is off by
0.01.
"""

import math
from typing import Any

import jax.numpy as jnp
import numpyro.distributions as dist
from jax.scipy.special import gammaln
from jaxtyping import Array, Float
from numpyro.distributions.util import validate_sample

from measureflow.core.pytrees import strong
from measureflow.networks.counts import deviance, remainder

# From here on, four terms of Stirling's series are as good as float32.
_LARGE = 10.0


class PreciseGamma(dist.Gamma):
    """Gamma(α, β) by its saddle point: with r = βy/α and the remainder δ of Stirling's formula,

    log p(y) = −α (r − 1 − log r) − log y + ½ log(α/2π) − δ(α)."""

    @validate_sample
    def log_prob(self, value: Any) -> Float[Array, "..."]:
        """log p(value)."""
        given = (strong(value), strong(self.concentration), strong(self.rate))
        y, alpha, rate = jnp.broadcast_arrays(*given)
        ratio, one = rate * y / alpha, jnp.ones_like(alpha)
        large = alpha >= _LARGE
        few, many = jnp.where(large, 1.0, alpha), jnp.where(large, alpha, _LARGE)
        stirling = jnp.log(many / (2 * math.pi)) / 2 - remainder(many)
        constant = jnp.where(large, stirling, few * jnp.log(few) - few - gammaln(few))
        return constant - alpha * deviance(one - ratio, one, ratio) - jnp.log(y)
