"""Laws of numbers; those of classes and counts come with them, so that all are in `mf.likelihoods`."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpyro.distributions as dist
from jax.nn import sigmoid, softplus
from jaxtyping import Array, Float
from numpyro.distributions import Distribution, MixtureSameFamily
from numpyro.distributions.discrete import CategoricalLogits

from measureflow.core.pytrees import is_concrete
from measureflow.core.validation import positive_number, require_count
from measureflow.networks.likelihood import LARGEST_MEAN as LARGEST_MEAN
from measureflow.networks.likelihood import MARGIN, AbstractLikelihood, bounded_exp
from measureflow.networks.likelihood import distribution_of as distribution_of
from measureflow.networks.likelihoods_of_classes import Bernoulli as Bernoulli
from measureflow.networks.likelihoods_of_classes import Categorical as Categorical
from measureflow.networks.likelihoods_of_classes import Ordinal as Ordinal
from measureflow.networks.likelihoods_of_classes import ordered_logits as ordered_logits
from measureflow.networks.likelihoods_of_counts import HurdleNegativeBinomial as HurdleNegativeBinomial
from measureflow.networks.likelihoods_of_counts import NegativeBinomial as NegativeBinomial
from measureflow.networks.likelihoods_of_counts import Poisson as Poisson
from measureflow.networks.likelihoods_of_counts import (
    ZeroInflatedNegativeBinomial as ZeroInflatedNegativeBinomial,
)
from measureflow.networks.positive import PreciseGamma
from measureflow.networks.rescaling import rescaled as rescaled
from measureflow.saving.registry import saved


def _smallest_scale(value: Any) -> Float[Array, ""]:
    return positive_number(
        "smallest_scale", value, "without a floor the density is unbounded; 1e-4 suits standardised targets."
    )


def _largest_scale(value: Any) -> Float[Array, ""] | None:
    return None if value is None else positive_number("largest_scale", value, "None is no bound.")


def _bounds(value: Any) -> Float[Array, "2"] | None:
    if value is None:
        return None
    bounds = jnp.asarray(value, jnp.result_type(float))
    if bounds.shape != (2,) or (is_concrete(bounds) and not bool(bounds[0] < bounds[1])):
        raise ValueError(f"bounds must be two numbers, low < high, got {value!r}; None is no bound.")
    return bounds


@saved
class Heteroscedastic(AbstractLikelihood):
    """Normal(o₁, softplus(o₂) + ε): the noise depends on the input.

    ε bounds the density by 1/(ε√2π); without it, one case that is met exactly has a loss of −∞.

    Parameters
    ----------
    targets
        How many numbers a case has to predict.
    smallest_scale
        ε > 0, in units of the targets that the network sees.
    largest_scale
        With a bound L, scales are L tanh(softplus(o)/L) + ε: for laws of log y, whose mean and variance grow
        as the exponential of a squared scale.
    bounds
        With numbers (l, h), locations are c + r x/(1 + x⁴)^¼ for the middle c and the half r of what is
        between them, and x = (o − c)/r: they stay there, and hardly change where they are far from the ends.
        For laws of log y, where a Normal of little weight far above all targets would make the mean.
    """

    smallest_scale: Float[Array, ""] = eqx.field(default=1e-4, kw_only=True, converter=_smallest_scale)
    largest_scale: Float[Array, ""] | None = eqx.field(default=None, kw_only=True, converter=_largest_scale)
    bounds: Float[Array, "2"] | None = eqx.field(default=None, kw_only=True, converter=_bounds)

    @property
    def outputs_per_target(self) -> int:
        return 2

    def law(self, outputs: Float[Array, "*batch k"]) -> Distribution:
        scale = _scale(outputs[..., 1], self.smallest_scale, self.largest_scale)
        return dist.Normal(_location(outputs[..., 0], self.bounds), scale)


@saved
class Homoscedastic(AbstractLikelihood):
    """Normal(o₁, softplus(o₂) + ε), where o₂ is a learned constant: the noise is the same for all inputs.

    Parameters
    ----------
    targets
        How many numbers a case has to predict.
    smallest_scale
        ε > 0, in units of the targets that the network sees.
    """

    smallest_scale: Float[Array, ""] = eqx.field(default=1e-4, kw_only=True, converter=_smallest_scale)

    @property
    def outputs_per_target(self) -> int:
        return 2

    @property
    def constants(self) -> int:
        return 1

    def law(self, outputs: Float[Array, "*batch k"]) -> Distribution:
        return dist.Normal(outputs[..., 0], _scale(outputs[..., 1], self.smallest_scale))


@saved
class StudentT(AbstractLikelihood):
    """Student's t with location o₁, scale softplus(o₂) + ε and 2.001 + softplus(o₃) degrees of freedom, where
    o₃ is a learned constant: outliers pull less, and the variance is finite.

    Parameters
    ----------
    targets
        How many numbers a case has to predict.
    smallest_scale
        ε > 0, in units of the targets that the network sees.
    """

    smallest_scale: Float[Array, ""] = eqx.field(default=1e-4, kw_only=True, converter=_smallest_scale)

    @property
    def outputs_per_target(self) -> int:
        return 3

    @property
    def constants(self) -> int:
        return 1

    def law(self, outputs: Float[Array, "*batch k"]) -> Distribution:
        freedom = 2 + MARGIN + softplus(outputs[..., 2])
        return dist.StudentT(freedom, outputs[..., 0], _scale(outputs[..., 1], self.smallest_scale))


def _number_of_components(value: Any) -> int:
    return require_count(
        "components", value, 1, "it counts the Normals that are mixed; 1 is Heteroscedastic."
    )


@saved
class NormalMixture(AbstractLikelihood):
    """Σₖ πₖ Normal(mₖ, sₖ) with K components: a law of any shape, skewed, with several peaks or heavy tails
    (Bishop, 1994, "Mixture density networks").

    Of its 3K outputs the first K are the logits of π, the next the means, the last the scales, through
    softplus(o) + ε.

    Parameters
    ----------
    components
        K, how many Normals.
    targets
        How many numbers a case has to predict.
    smallest_scale
        ε > 0, in units of the targets that the network sees.
    largest_scale
        With a bound L, scales are L tanh(softplus(o)/L) + ε: for laws of log y, whose mean and variance grow
        as the exponential of a squared scale.
    bounds
        With numbers (l, h), locations are c + r x/(1 + x⁴)^¼ for the middle c and the half r of what is
        between them, and x = (o − c)/r: they stay there, and hardly change where they are far from the ends.
        For laws of log y, where a Normal of little weight far above all targets would make the mean.
    """

    components: int = eqx.field(static=True, default=5, kw_only=True, converter=_number_of_components)
    smallest_scale: Float[Array, ""] = eqx.field(default=1e-4, kw_only=True, converter=_smallest_scale)
    largest_scale: Float[Array, ""] | None = eqx.field(default=None, kw_only=True, converter=_largest_scale)
    bounds: Float[Array, "2"] | None = eqx.field(default=None, kw_only=True, converter=_bounds)

    @property
    def outputs_per_target(self) -> int:
        return 3 * self.components

    def law(self, outputs: Float[Array, "*batch k"]) -> Distribution:
        logits, means, scales = jnp.split(outputs, 3, axis=-1)
        return MixtureSameFamily(
            CategoricalLogits(logits),
            dist.Normal(
                _location(means, self.bounds), _scale(scales, self.smallest_scale, self.largest_scale)
            ),
        )


def _smallest_ratio(value: Any) -> Float[Array, ""]:
    return positive_number(
        "smallest_ratio", value, "without a floor the density is unbounded; 0.01 is one per cent of the mean."
    )


@saved
class Gamma(AbstractLikelihood):
    """Positive numbers with mean μ = exp(o₁) and deviation cμ, c² = exp(−o₂) + ε²: noise in proportion to the
    mean.

    o₁ and o₂ are clipped to ±20, as in `Poisson`; 1/c² is at least 0.001.

    Parameters
    ----------
    targets
        How many numbers a case has to predict.
    smallest_ratio
        ε > 0, the smallest deviation in units of the mean.
    """

    smallest_ratio: Float[Array, ""] = eqx.field(default=1e-2, kw_only=True, converter=_smallest_ratio)

    @property
    def outputs_per_target(self) -> int:
        return 2

    def law(self, outputs: Float[Array, "*batch k"]) -> Distribution:
        concentration = _concentration(outputs[..., 1], self.smallest_ratio) + MARGIN
        return PreciseGamma(concentration, concentration / bounded_exp(outputs[..., 0]))


@saved
class Beta(AbstractLikelihood):
    """Shares between 0 and 1, with mean m = 1/(1 + exp(−o₁)) and deviation c √(m(1 − m)/(1 + c²)), where
    c² = exp(−o₂) + ε²: Beta(m/c² + 0.001, (1 − m)/c² + 0.001).

    Parameters
    ----------
    targets
        How many numbers a case has to predict.
    smallest_ratio
        ε > 0, the smallest c.
    """

    smallest_ratio: Float[Array, ""] = eqx.field(default=2e-2, kw_only=True, converter=_smallest_ratio)

    @property
    def outputs_per_target(self) -> int:
        return 2

    def law(self, outputs: Float[Array, "*batch k"]) -> Distribution:
        concentration = _concentration(outputs[..., 1], self.smallest_ratio)
        high, low = (sigmoid(sign * outputs[..., 0]) * concentration + MARGIN for sign in (1.0, -1.0))
        return dist.Beta(high, low)


def _location(output: Float[Array, "*batch"], bounds: Float[Array, "2"] | None) -> Float[Array, "*batch"]:
    if bounds is None:
        return output
    low, high = bounds.astype(output.dtype)
    middle, half = (low + high) / 2, (high - low) / 2
    x = (output - middle) / half
    # By 1/x⁴ where that is the smaller one: a fourth power is soon infinite.
    far = jnp.abs(x) > 1
    near_power = jnp.square(jnp.square(jnp.where(far, 1.0, x)))
    far_power = jnp.square(jnp.square(1 / jnp.where(far, x, 1.0)))
    clipped = jnp.where(far, jnp.sign(x) * (1 + far_power) ** -0.25, x * (1 + near_power) ** -0.25)
    return middle + half * clipped


def _scale(
    output: Float[Array, "*batch"], smallest: Float[Array, ""], largest: Float[Array, ""] | None = None
) -> Float[Array, "*batch"]:
    scale = softplus(output)
    if largest is not None:
        bound = largest.astype(output.dtype)
        scale = bound * jnp.tanh(scale / bound)
    return scale + smallest.astype(output.dtype)


def _concentration(output: Float[Array, "*batch"], smallest: Float[Array, ""]) -> Float[Array, "*batch"]:
    """1/c², with c² = exp(−o) + ε²: a network that knows nothing yet is neither very sure nor very unsure."""
    return 1 / (bounded_exp(-output) + jnp.square(smallest.astype(output.dtype)))
