"""From the outputs of a network to a distribution of the target, and from there to a loss.

A likelihood is any function outputs ↦ NumPyro distribution; those here also say how many outputs they read.
"""

import abc
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax.nn import log_sigmoid, sigmoid, softplus
from jaxtyping import Array, Float
from numpyro.distributions import Distribution, MixtureSameFamily
from numpyro.distributions.discrete import BernoulliLogits, CategoricalLogits, ZeroInflatedLogits

from measureflow.core.showing import one_line
from measureflow.core.validation import positive_number, require_count
from measureflow.networks.counts import HurdleNegativeBinomial2, PrecisePoisson
from measureflow.networks.positive import PreciseGamma
from measureflow.networks.rescaling import rescaled as rescaled
from measureflow.saving.registry import saved

# Beyond exp(± this), float32 cannot tell a count from its neighbours.
_LARGEST_LOG_MEAN = 20.0
#: The largest mean of a count: larger ones are not predicted.
LARGEST_MEAN = math.exp(_LARGEST_LOG_MEAN)
# What keeps Student's variance, and the concentration of counts, finite and positive in float32.
_MARGIN = 1e-3


def _number_of_targets(value: Any) -> int:
    return require_count("targets", value, 1, "it counts the numbers to predict for each case.")


def _number_of_classes(value: Any) -> int:
    return require_count("classes", value, 2, "it counts the classes, whose names are 0, 1, ….")


def _smallest_scale(value: Any) -> Float[Array, ""]:
    return positive_number(
        "smallest_scale", value, "without a floor the density is unbounded; 1e-4 suits standardised targets."
    )


def _largest_scale(value: Any) -> Float[Array, ""] | None:
    return None if value is None else positive_number("largest_scale", value, "None is no bound.")


class AbstractLikelihood(eqx.Module):
    """outputs of a network ↦ p(y | outputs), for every case.

    A case has `targets` numbers y. For each of them it reads outputs o₁, o₂, …: first o₁ of all targets, then
    o₂ of all targets, and so on. The last `constants` of these are meant not to depend on the input;
    `network.with_constants(likelihood.constants * likelihood.targets)` appends them. One target is an event
    of shape (); several are independent given the outputs, and an event of shape (targets,).

    Parameters
    ----------
    targets
        How many numbers a case has to predict.
    """

    targets: int = eqx.field(static=True, default=1, kw_only=True, converter=_number_of_targets)

    def __repr__(self) -> str:
        return one_line(self)

    @property
    @abc.abstractmethod
    def outputs_per_target(self) -> int:
        """How many numbers it reads for one target of one case, constants included."""

    @property
    def constants(self) -> int:
        """How many of these do not depend on the input."""
        return 0

    @property
    def width(self) -> int:
        """How many numbers it reads for one case, constants included."""
        return self.outputs_per_target * self.targets

    @abc.abstractmethod
    def law(self, outputs: Float[Array, "*batch k"]) -> Distribution:
        """The distribution of one target, from its own k outputs."""

    def __call__(self, outputs: Float[Array, "*batch k"]) -> Distribution:
        if outputs.shape[-1] != self.width:
            raise ValueError(
                f"{type(self).__name__} of {self.targets} target(s) reads {self.width} outputs per case, got "
                f"outputs of shape {outputs.shape}; build the network with "
                f"{self.width - self.constants * self.targets} outputs"
                + (f" and .with_constants({self.constants * self.targets})." if self.constants else ".")
            )
        if self.targets == 1:
            return self.law(outputs)
        grouped = outputs.reshape(*outputs.shape[:-1], self.outputs_per_target, self.targets)
        return self.law(jnp.swapaxes(grouped, -1, -2)).to_event(1)


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
    """

    smallest_scale: Float[Array, ""] = eqx.field(default=1e-4, kw_only=True, converter=_smallest_scale)
    largest_scale: Float[Array, ""] | None = eqx.field(default=None, kw_only=True, converter=_largest_scale)

    @property
    def outputs_per_target(self) -> int:
        return 2

    def law(self, outputs: Float[Array, "*batch k"]) -> Distribution:
        return dist.Normal(outputs[..., 0], _scale(outputs[..., 1], self.smallest_scale, self.largest_scale))


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
        freedom = 2 + _MARGIN + softplus(outputs[..., 2])
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
    """

    components: int = eqx.field(static=True, default=5, kw_only=True, converter=_number_of_components)
    smallest_scale: Float[Array, ""] = eqx.field(default=1e-4, kw_only=True, converter=_smallest_scale)
    largest_scale: Float[Array, ""] | None = eqx.field(default=None, kw_only=True, converter=_largest_scale)

    @property
    def outputs_per_target(self) -> int:
        return 3 * self.components

    def law(self, outputs: Float[Array, "*batch k"]) -> Distribution:
        logits, means, scales = jnp.split(outputs, 3, axis=-1)
        return MixtureSameFamily(
            CategoricalLogits(logits),
            dist.Normal(means, _scale(scales, self.smallest_scale, self.largest_scale)),
        )


@saved
class Bernoulli(AbstractLikelihood):
    """P(y = 1) = 1/(1 + exp(−o₁)): two classes, 0 and 1.

    Parameters
    ----------
    targets
        How many numbers a case has to predict.
    """

    @property
    def outputs_per_target(self) -> int:
        return 1

    def law(self, outputs: Float[Array, "*batch k"]) -> Distribution:
        return BernoulliLogits(outputs[..., 0])


@saved
class Categorical(AbstractLikelihood):
    """P(y = c) ∝ exp(o_c): classes 0, 1, …; targets are integers.

    Parameters
    ----------
    classes
        The number of classes, at least 2.
    targets
        How many numbers a case has to predict.
    """

    classes: int = eqx.field(static=True, converter=_number_of_classes)

    @property
    def outputs_per_target(self) -> int:
        return self.classes

    def law(self, outputs: Float[Array, "*batch k"]) -> Distribution:
        return CategoricalLogits(outputs)


def _order(value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    numbers = tuple(int(number) for number in value)
    if sorted(numbers) != list(range(len(numbers))):
        raise ValueError(
            f"order must hold each of the classes 0, 1, … once, got {value!r}; None is that order itself."
        )
    return numbers


@saved
class Ordinal(AbstractLikelihood):
    """Classes in an order, by cutpoints c₁ < c₂ < … of a score o₁ (McCullagh, 1980; proportional odds):

        P(y ≤ the k-th class) = 1/(1 + exp(o₁ − c_k)).

    The other outputs are learned constants: c₁ = log 1/(K − 1) + o₂, and c_k − c_{k−1} is
    softplus(g_k + o_{k+1}) + 0.001, with g_k such that at 0 all classes are equally frequent, nearly.

    Parameters
    ----------
    classes
        K, the number of classes, at least 2.
    order
        The numbers of the classes, from the lowest to the highest; None is 0, 1, ….
    targets
        How many numbers a case has to predict.
    """

    classes: int = eqx.field(static=True, converter=_number_of_classes)
    order: tuple[int, ...] | None = eqx.field(static=True, default=None, kw_only=True, converter=_order)

    def __check_init__(self) -> None:
        if self.order is not None and len(self.order) != self.classes:
            raise ValueError(f"order has {len(self.order)} classes, not {self.classes}: {self.order!r}.")

    @property
    def outputs_per_target(self) -> int:
        return self.classes

    @property
    def constants(self) -> int:
        return self.classes - 1

    def law(self, outputs: Float[Array, "*batch k"]) -> Distribution:
        log_probabilities = ordered_logits(outputs[..., 0], *self._cutpoints(outputs[..., 1:]))
        if self.order is not None:
            log_probabilities = log_probabilities[..., np.argsort(self.order)]
        return CategoricalLogits(log_probabilities)

    def _cutpoints(
        self, constants: Float[Array, "*batch k"]
    ) -> tuple[Float[Array, "*batch k"], Float[Array, "*batch gaps"]]:
        """Cutpoints, and the gaps between them."""
        equal = np.log(np.arange(1, self.classes) / np.arange(self.classes - 1, 0, -1))
        begun = np.log(np.expm1(np.diff(equal))).reshape((1,) * (constants.ndim - 1) + (-1,))
        gaps = softplus(constants[..., 1:] + jnp.asarray(begun, constants.dtype)) + _MARGIN
        first = constants[..., :1] + jnp.asarray(equal[0], constants.dtype)
        return jnp.cumsum(jnp.concatenate([first, gaps], axis=-1), axis=-1), gaps


def ordered_logits(
    score: Float[Array, "*batch"], cutpoints: Float[Array, "*batch k"], gaps: Float[Array, "*batch gaps"]
) -> Float[Array, "*batch classes"]:
    """log P(y = k) = log (σ(b) − σ(a)) = log σ(b) + log σ(−a) + log(1 − e^{a − b}), with b = c_k − score and
    a = c_{k−1} − score: no difference of numbers that are nearly 1."""
    above = cutpoints - score[..., None]
    parts = [log_sigmoid(above[..., :1])]
    parts += [log_sigmoid(above[..., 1:]) + log_sigmoid(-above[..., :-1]) + jnp.log(-jnp.expm1(-gaps))]
    parts += [log_sigmoid(-above[..., -1:])]
    return jnp.concatenate(parts, axis=-1)


@saved
class Poisson(AbstractLikelihood):
    """Poisson(exp(o₁)): counts 0, 1, 2, … whose variance is their mean.

    o₁ is clipped to ±20, means from 10⁻⁹ to 5·10⁸: only a diverging run goes beyond.

    Parameters
    ----------
    targets
        How many numbers a case has to predict.
    """

    @property
    def outputs_per_target(self) -> int:
        return 1

    def law(self, outputs: Float[Array, "*batch k"]) -> Distribution:
        return PrecisePoisson(_mean_count(outputs[..., 0]))


@saved
class NegativeBinomial(AbstractLikelihood):
    """Counts with mean μ = exp(o₁) and variance μ + μ²/α, where α = softplus(o₂) + 0.001.

    o₁ is clipped to ±20, as in `Poisson`.

    Parameters
    ----------
    targets
        How many numbers a case has to predict.
    """

    @property
    def outputs_per_target(self) -> int:
        return 2

    def law(self, outputs: Float[Array, "*batch k"]) -> Distribution:
        return _negative_binomial(outputs)


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
        concentration = _concentration(outputs[..., 1], self.smallest_ratio) + _MARGIN
        return PreciseGamma(concentration, concentration / _mean_count(outputs[..., 0]))


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
        high, low = (sigmoid(sign * outputs[..., 0]) * concentration + _MARGIN for sign in (1.0, -1.0))
        return dist.Beta(high, low)


@saved
class ZeroInflatedNegativeBinomial(AbstractLikelihood):
    """Counts that are 0 with probability 1/(1 + exp(−o₃)), and else as `NegativeBinomial` has them: for more
    zeros than a law of counts explains (Lambert, 1992).

    Parameters
    ----------
    targets
        How many numbers a case has to predict.
    """

    @property
    def outputs_per_target(self) -> int:
        return 3

    def law(self, outputs: Float[Array, "*batch k"]) -> Distribution:
        return ZeroInflatedLogits(_negative_binomial(outputs), outputs[..., 2])


@saved
class HurdleNegativeBinomial(AbstractLikelihood):
    """Counts that are 0 with probability 1/(1 + exp(−o₃)), and else as `NegativeBinomial` has those above 0:
    for more zeros or fewer than a law of counts explains (Mullahy, 1986).

    Parameters
    ----------
    targets
        How many numbers a case has to predict.
    """

    @property
    def outputs_per_target(self) -> int:
        return 3

    def law(self, outputs: Float[Array, "*batch k"]) -> Distribution:
        concentration = softplus(outputs[..., 1]) + _MARGIN
        return HurdleNegativeBinomial2(_mean_count(outputs[..., 0]), concentration, outputs[..., 2])


def _negative_binomial(outputs: Float[Array, "*batch k"]) -> Distribution:
    return dist.NegativeBinomial2(_mean_count(outputs[..., 0]), softplus(outputs[..., 1]) + _MARGIN)


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
    return 1 / (_mean_count(-output) + jnp.square(smallest.astype(output.dtype)))


def _mean_count(output: Float[Array, "*batch"]) -> Float[Array, "*batch"]:
    return jnp.exp(jnp.clip(output, -_LARGEST_LOG_MEAN, _LARGEST_LOG_MEAN))


def distribution_of(
    likelihood: Callable[[Array], Distribution], outputs: Float[Array, "*batch k"]
) -> Distribution:
    """likelihood(outputs), one law for each case: more batch axes of its result become part of the event."""
    distribution = likelihood(outputs)
    if not isinstance(distribution, Distribution):
        raise TypeError(
            f"likelihood must return a NumPyro distribution, got {distribution!r}; for example "
            "lambda outputs: numpyro.distributions.Normal(outputs[..., 0], 1.0)."
        )
    cases = outputs.shape[:-1]
    if distribution.batch_shape[: len(cases)] != cases:
        raise ValueError(
            f"likelihood maps outputs of shape {outputs.shape} to a distribution with batch shape "
            f"{distribution.batch_shape}, but there must be one law for each of {cases}; "
            "let it act on the last axis only, as in outputs[..., 0]."
        )
    return distribution.to_event(len(distribution.batch_shape) - len(cases))
