"""Laws of counts that NumPyro lacks, and laws whose densities keep their digits in float32, for any counts.

NumPyro subtracts terms as large as y log y: of a Poisson count of 10⁶, log p is off by 1, of 10⁸ by 270.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax.nn import log_sigmoid, sigmoid
from jax.scipy.special import gammaln
from jaxtyping import Array, Float
from numpyro.distributions import constraints
from numpyro.distributions.util import promote_shapes, validate_sample

from measureflow.core.pytrees import strong

# From here on, four terms of Stirling's series are as good as float32.
_LARGE = 10.0


class PrecisePoisson(dist.Poisson):
    """Poisson(λ) by its saddle point (Loader, 2000): with D(y, λ) = y log(y/λ) − y + λ and the remainder δ of
    Stirling's formula, log p(y) = −D(y, λ) − ½ log(2πy) − δ(y)."""

    @validate_sample
    def log_prob(self, value: Any) -> Float[Array, "..."]:
        """log p(value), within 10⁻⁵ of the truth, or 10⁻⁶ of it."""
        y, rate = jnp.broadcast_arrays(strong(value), strong(self.rate))
        large = y >= _LARGE
        small, many = jnp.where(large, 0.0, y), jnp.where(large, y, _LARGE)
        tiny = jnp.finfo(rate.dtype).tiny
        few = small * jnp.log(jnp.maximum(rate, tiny)) - rate - gammaln(small + 1)
        saddle = -deviance(many - rate, many, rate) - jnp.log(2 * math.pi * many) / 2 - remainder(many)
        return jnp.where(large, saddle, few)


_ARGUMENTS = {
    "mean": constraints.positive,
    "concentration": constraints.positive,
    "gate_logits": constraints.real,
}


class HurdleNegativeBinomial2(dist.Distribution):
    """0 with probability g; else a negative binomial count of mean μ and variance μ + μ²/α that is not 0:

        P(0) = g,   P(y) = (1 − g) NB(y)/(1 − NB(0)),   NB(0) = (1 + μ/α)^(−α).

    Parameters
    ----------
    mean, concentration
        μ and α, of the count before 0 is taken out.
    gate_logits
        log g/(1 − g).
    validate_args
        As in NumPyro.
    """

    arg_constraints = _ARGUMENTS
    pytree_data_fields = ("_mean", "concentration", "gate_logits")

    def __init__(self, mean: Any, concentration: Any, gate_logits: Any, *, validate_args: bool | None = None):
        shape = jnp.broadcast_shapes(*map(jnp.shape, (mean, concentration, gate_logits)))
        self._mean, self.concentration, self.gate_logits = promote_shapes(
            mean, concentration, gate_logits, shape=shape
        )
        super().__init__(shape, validate_args=validate_args)

    @property
    def support(self) -> Any:
        """0, 1, 2, …."""
        return constraints.nonnegative_integer

    def get_args(self) -> dict[str, Any]:
        """What it was made of; `mean` is that of the law."""
        return {
            "mean": self._mean,
            "concentration": self.concentration,
            "gate_logits": self.gate_logits,
        }

    @property
    def whole(self) -> dist.NegativeBinomial2:
        """The law of counts that 0 is taken out of."""
        return dist.NegativeBinomial2(self._mean, self.concentration)

    @property
    def log_zero(self) -> Float[Array, "..."]:
        """log NB(0)."""
        alpha = strong(self.concentration)
        return -alpha * jnp.log1p(strong(self._mean) / alpha)

    @validate_sample
    def log_prob(self, value: Any, intermediates: Any = None) -> Float[Array, "..."]:
        """log P(value)."""
        del intermediates
        gate, is_zero = strong(self.gate_logits), jnp.asarray(value) == 0
        # What is not chosen is computed, too, and must be finite.
        count = self.whole.log_prob(jnp.where(is_zero, 1, value)) - jnp.log(-jnp.expm1(self.log_zero))
        return jnp.where(is_zero, log_sigmoid(gate), log_sigmoid(-gate) + count)

    def sample(self, key: Any, sample_shape: tuple[int, ...] = ()) -> Any:
        """Draws. A count that is not 0 is one of a Poisson process on [0, 1] with a rate R of Gamma law: for
        its first event T, drawn from its law given T < 1,

            P(T > t) = (1 + tμ/α)^(−α),   R | T ~ Gamma(α + 1, α/μ + T),   y = 1 + Poisson((1 − T) R).
        """
        shape = sample_shape + self.batch_shape
        first, second, third, fourth = jax.random.split(key, 4)
        alpha, ratio = strong(self.concentration), strong(self.concentration) / strong(self._mean)
        u = jax.random.uniform(first, shape)
        time = ratio * jnp.expm1(-jnp.log1p(u * jnp.expm1(self.log_zero)) / alpha)
        time = jnp.clip(time, 0.0, 1.0)
        rate = jax.random.gamma(second, jnp.broadcast_to(alpha + 1, shape)) / (ratio + time)
        counts = 1 + dist.Poisson((1 - time) * rate).sample(third)
        return jnp.where(jax.random.bernoulli(fourth, sigmoid(strong(self.gate_logits)), shape), 0, counts)

    def _share(self) -> Float[Array, "..."]:
        """(1 − g)/(1 − NB(0))."""
        return sigmoid(-strong(self.gate_logits)) / -jnp.expm1(self.log_zero)

    @property
    def mean(self) -> Any:
        """(1 − g) μ/(1 − NB(0))."""
        return self._share() * strong(self._mean)

    @property
    def variance(self) -> Any:
        """c (μ + μ²/α) + c (1 − c) μ², with c = (1 − g)/(1 − NB(0))."""
        share, square = self._share(), jnp.square(strong(self._mean))
        # Where all counts are 1, two equal numbers are subtracted.
        return jnp.maximum(share * self.whole.variance + share * (1 - share) * square, 0.0)

    def cdf(self, value: Any) -> Any:
        """P(Y ≤ value)."""
        floor = jnp.floor(strong(value))
        above = self._share() * (1 - self.whole.cdf(jnp.maximum(floor, 0.0)))
        return jnp.where(floor < 0, 0.0, 1 - above)


def deviance(
    gap: Float[Array, "..."], x: Float[Array, "..."], mean: Float[Array, "..."]
) -> Float[Array, "..."]:
    """x log(x/m) − (x − m), with gap = x − m; by its series where x ≈ m (Loader, 2000)."""
    ratio = gap / (x + mean)
    near = jnp.abs(ratio) < 0.1
    r = jnp.where(near, ratio, 0.0)
    series = 1 / 3 + r**2 * (1 / 5 + r**2 * (1 / 7 + r**2 * (1 / 9 + r**2 / 11)))
    tiny = jnp.finfo(mean.dtype).tiny
    return jnp.where(near, gap * r + 2 * x * r**3 * series, x * jnp.log(x / jnp.maximum(mean, tiny)) - gap)


def remainder(y: Float[Array, "..."]) -> Float[Array, "..."]:
    """δ(y) = log y! − (y + ½) log y + y − ½ log 2π, for large y."""
    return (1 / 12 - (1 / 360 - (1 / 1260 - 1 / (1680 * y**2)) / y**2) / y**2) / y
