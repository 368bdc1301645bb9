"""Losses of networks: means over the rows of a batch."""

import abc
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array, Float, Key, PyTree, Shaped
from numpyro.distributions import Distribution
from numpyro.distributions.discrete import CategoricalLogits, CategoricalProbs

from measureflow.core.pytrees import Parameters, shown_shapes, strong, weighted_mean
from measureflow.core.showing import one_line
from measureflow.core.validation import require_real
from measureflow.networks.likelihood import distribution_of
from measureflow.networks.network import Network
from measureflow.networks.training import Training
from measureflow.networks.validation import require_likelihood, require_network
from measureflow.statement.training import AbstractTrainedLoss


class _LossOfNetwork(AbstractTrainedLoss):
    """What losses of outputs share: training by the network's own statistics."""

    network: eqx.AbstractVar[Network]

    def statistics(self) -> PyTree | None:
        return _statistics(self.network)

    def trained(
        self, theta: Parameters, statistics: PyTree, batch: PyTree, key: Key[Array, ""]
    ) -> tuple[Float[Array, ""], PyTree]:
        inputs, targets, weights = _unpacked(batch)
        outputs, after = _training(self.network)(theta, statistics, inputs, key)
        return self._of(outputs, targets, weights), after

    @abc.abstractmethod
    def _of(self, outputs: Array, targets: Array, weights: Array | None) -> Float[Array, ""]:
        """The mean loss of outputs."""


class NegativeLogLikelihood(_LossOfNetwork):
    """ℓ(θ, batch) = (1/n) Σᵢ −wᵢ log p(yᵢ | f_θ(xᵢ)) over the n rows of a batch.

    A batch is (inputs, targets) or (inputs, targets, weights), weights 1 where there are none. The sum is
    divided by n, not by Σᵢ wᵢ: so batches are unbiased, and weights of mean 1 leave the scale of ℓ as it is.
    Targets have shape (rows,), or (rows, targets) where the distribution has several. A class or a count that
    is none (a label of K or more, −1, 0.5) makes the loss NaN, and a run raises; so does a weight < 0.

    Parameters
    ----------
    network
        f_θ.
    likelihood
        outputs ↦ NumPyro distribution: one of `mf.likelihoods`, or any function that acts on the last
        axis.
    """

    network: Network
    likelihood: Callable[[Array], Distribution]

    def __repr__(self) -> str:
        return one_line(self)

    def __check_init__(self) -> None:
        require_network(self.network)
        require_likelihood(self.likelihood)

    def __call__(self, theta: Parameters, batch: PyTree) -> Float[Array, ""]:
        return weighted_mean(jnp.negative(self.log_likelihood(theta, batch)), self.case_weights(batch))

    def _of(self, outputs: Array, targets: Array, weights: Array | None) -> Float[Array, ""]:
        return weighted_mean(jnp.negative(_log_densities(*self._laws(outputs, targets))), weights)

    def log_likelihood(self, theta: Parameters, batch: PyTree) -> Float[Array, " rows"]:
        """log p(yᵢ | f_θ(xᵢ)) of every row."""
        return _log_densities(*self.predicted(theta, batch))

    def case_weights(self, batch: PyTree) -> Float[Array, " rows"] | None:
        """The weights of a batch; None where it has none."""
        return _unpacked(batch)[2]

    def predicted(self, theta: Parameters, batch: PyTree) -> tuple[Distribution, Shaped[Array, "rows ..."]]:
        """The law of every row's target, and the targets."""
        inputs, targets, _ = _unpacked(batch)
        return self._laws(self.network.apply(theta, inputs), targets)

    def _laws(
        self, outputs: Float[Array, "rows outputs"], targets: Shaped[Array, "..."]
    ) -> tuple[Distribution, Shaped[Array, "rows ..."]]:
        distribution = distribution_of(self.likelihood, outputs)
        expected = distribution.batch_shape + distribution.event_shape
        if targets.shape != expected:
            remedy = "pass one target per row, and as many numbers per target as the likelihood has targets."
            if targets.shape == (*expected, 1):
                remedy = "drop the last axis with targets[..., 0]."
            raise ValueError(f"targets have shape {targets.shape}, but the distribution {expected}; {remedy}")
        return distribution, _as_values(distribution, targets, outputs)


class MeanSquaredError(_LossOfNetwork):
    """ℓ(θ, batch) = (1/n) Σᵢ wᵢ ‖f_θ(xᵢ) − yᵢ‖² over the n rows of a batch, batches as in
    `NegativeLogLikelihood`. Targets have the shape of the outputs, or (rows,) for one output.

    Parameters
    ----------
    network
        f_θ.
    """

    network: Network

    def __repr__(self) -> str:
        return one_line(self)

    def __check_init__(self) -> None:
        require_network(self.network)

    def __call__(self, theta: Parameters, batch: PyTree) -> Float[Array, ""]:
        inputs, targets, weights = _unpacked(batch)
        return self._of(self.network.apply(theta, inputs), targets, weights)

    def _of(self, outputs: Array, targets: Array, weights: Array | None) -> Float[Array, ""]:
        if targets.ndim == 1 and outputs.shape[1] == 1:
            targets = targets[:, None]
        if targets.shape != outputs.shape:
            raise ValueError(
                f"targets have shape {targets.shape}, but the network's outputs {outputs.shape}; give both "
                "one row per case and one column per target."
            )
        squares = jnp.square(outputs - _as_floats(targets, outputs))
        return weighted_mean(jnp.sum(squares, axis=1), weights)


def _statistics(network: Network) -> PyTree | None:
    return None if network.training is None else network.training.statistics


def _training(network: Network) -> Training:
    if network.training is None:
        raise ValueError(
            "the network is the same in training as in prediction, and carries no statistics; call loss(θ, "
            "batch)."
        )
    return network.training


def _log_densities(distribution: Distribution, values: Shaped[Array, "rows ..."]) -> Float[Array, " rows"]:
    densities = jnp.asarray(distribution.log_prob(values))
    if not distribution.is_discrete:
        return densities
    # A class or a count that does not exist would be taken for another one.
    support: Any = distribution.support
    return jnp.where(support(values), densities, jnp.nan)


def _unpacked(batch: PyTree) -> tuple[PyTree, Shaped[Array, "rows ..."], Float[Array, " rows"] | None]:
    """Inputs, targets, and weights or None."""
    if not isinstance(batch, tuple | list) or len(batch) not in (2, 3):
        raise TypeError(
            f"batch must be (inputs, targets) or (inputs, targets, weights), got {shown_shapes(batch)}; "
            "pass data=(X, y)."
        )
    inputs, targets, weights = (*batch, None)[:3]
    targets = jnp.asarray(require_real("targets", targets))
    if weights is None:
        return inputs, targets, None
    weights = strong(weights)
    if weights.shape != targets.shape[:1]:
        raise ValueError(
            f"weights have shape {weights.shape}, but there are targets of shape {targets.shape}; pass one "
            "weight per row."
        )
    # A negative weight would reward mistakes.
    return inputs, targets, jnp.where(weights >= 0, weights, jnp.nan)


def _as_floats(targets: Shaped[Array, "..."], outputs: Float[Array, "..."]) -> Float[Array, "..."]:
    """Integers and truth values as floats; floats stay as precise as they are."""
    return targets if jnp.issubdtype(targets.dtype, jnp.floating) else targets.astype(outputs.dtype)


def _as_values(
    distribution: Distribution, targets: Shaped[Array, "..."], outputs: Float[Array, "..."]
) -> Shaped[Array, "..."]:
    base = distribution.base_dist if isinstance(distribution, dist.Independent) else distribution
    if not isinstance(base, CategoricalLogits | CategoricalProbs):
        return _as_floats(targets, outputs)
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        raise TypeError(
            f"targets must be integers, the numbers of classes, got {targets.dtype}; pass y.astype(int)."
        )
    return targets
