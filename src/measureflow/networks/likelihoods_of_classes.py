"""Laws of classes, with and without an order."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax.nn import log_sigmoid, softplus
from jaxtyping import Array, Float
from numpyro.distributions import Distribution
from numpyro.distributions.discrete import BernoulliLogits, CategoricalLogits

from measureflow.core.validation import require_count
from measureflow.networks.likelihood import MARGIN, AbstractLikelihood
from measureflow.saving.registry import saved


def _number_of_classes(value: Any) -> int:
    return require_count("classes", value, 2, "it counts the classes, whose names are 0, 1, ….")


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
        gaps = softplus(constants[..., 1:] + jnp.asarray(begun, constants.dtype)) + MARGIN
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
