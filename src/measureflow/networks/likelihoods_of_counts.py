"""Laws of counts."""

import numpyro.distributions as dist
from jax.nn import softplus
from jaxtyping import Array, Float
from numpyro.distributions import Distribution
from numpyro.distributions.discrete import ZeroInflatedLogits

from measureflow.networks.counts import HurdleNegativeBinomial2, PrecisePoisson
from measureflow.networks.likelihood import MARGIN, AbstractLikelihood, bounded_exp
from measureflow.saving.registry import saved


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
        return PrecisePoisson(bounded_exp(outputs[..., 0]))


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
        concentration = softplus(outputs[..., 1]) + MARGIN
        return HurdleNegativeBinomial2(bounded_exp(outputs[..., 0]), concentration, outputs[..., 2])


def _negative_binomial(outputs: Float[Array, "*batch k"]) -> Distribution:
    return dist.NegativeBinomial2(bounded_exp(outputs[..., 0]), softplus(outputs[..., 1]) + MARGIN)
