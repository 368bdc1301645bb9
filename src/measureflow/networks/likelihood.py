"""What a likelihood is: from the outputs of a network to a distribution of the target.

It is any function outputs ↦ NumPyro distribution; those of `mf.likelihoods` also say how many outputs they
read.
"""

import abc
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float
from numpyro.distributions import Distribution

from measureflow.core.showing import one_line
from measureflow.core.validation import require_count

# Beyond exp(± this), float32 cannot tell a count from its neighbours.
_LARGEST_LOG_MEAN = 20.0
#: The largest mean of a count: larger ones are not predicted.
LARGEST_MEAN = math.exp(_LARGEST_LOG_MEAN)
#: What keeps Student's variance, and the concentration of counts, finite and positive in float32.
MARGIN = 1e-3


def _number_of_targets(value: Any) -> int:
    return require_count("targets", value, 1, "it counts the numbers to predict for each case.")


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


def bounded_exp(output: Float[Array, "*batch"]) -> Float[Array, "*batch"]:
    """exp(o), of numbers that float32 can count to."""
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
