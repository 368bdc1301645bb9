"""Losses whose particles carry statistics: BatchNorm's running averages, and Dropout's keys."""

import abc
from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array, Float, Key, PyTree

from measureflow.core.pytrees import Parameters, Particles, particle_count
from measureflow.core.statistics import WithStatistics


class AbstractTrainedLoss(eqx.Module):
    """ℓ(θ, s, batch, key) ↦ (value, s′): a loss that is computed differently in training.

    The flow descends ∇_θ ℓ at the particle's own statistics s and with a key of its own, and s′ takes the
    place of s. Beside `statistics` and `trained` such a loss is called as any other: `loss(point, batch)`
    with a `WithStatistics` is its value where nothing is updated and nothing is random.
    """

    @abc.abstractmethod
    def statistics(self) -> PyTree[Float[Array, "..."]] | None:
        """s of one particle at the start: any pytree of floating-point arrays, or None where the loss is the
        same in training."""

    @abc.abstractmethod
    def trained(
        self, theta: Parameters, statistics: PyTree, batch: PyTree, key: Key[Array, ""]
    ) -> tuple[Float[Array, ""], PyTree]:
        """The value on a batch in training, and the statistics after it.

        Parameters
        ----------
        theta
            θ.
        statistics
            s.
        batch
            The batch of this step.
        key
            For what is random in training: one for each particle and step.
        """


def with_statistics(loss: AbstractTrainedLoss | None, initial: Any) -> Any:
    """`initial`, its particles with the statistics that they start from, where the loss carries some."""
    if loss is None:
        if isinstance(initial, WithStatistics):
            raise ValueError(
                "initial holds statistics, but the loss of the problem carries none; pass "
                "initial.parameters, or a loss of a network that has `training`."
            )
        return initial
    start = loss.statistics()
    if isinstance(initial, WithStatistics):
        found, expected = jax.tree.structure(initial.statistics), jax.tree.structure(start)
        if found != expected:
            raise ValueError(
                f"initial holds other statistics than the network has: {found}, expected {expected}; pass "
                "network.sample(key, n), or initial.parameters."
            )
        return initial
    n = particle_count(initial)
    return WithStatistics(initial, jax.tree.map(lambda leaf: jax.numpy.stack([leaf] * n), start))


def trained(
    loss: AbstractTrainedLoss,
    weight: Float[Array, ""],
    particles: WithStatistics,
    batch: PyTree,
    key: Key[Array, ""],
) -> tuple[Float[Array, " n"], Particles, PyTree]:
    """w·ℓ of each particle in training, w·∇_θ ℓ, and its statistics after it. Keys are by the number of the
    particle, so that they do not depend on the devices."""

    def one(theta: Parameters, statistics: PyTree, number: Array) -> tuple[Array, PyTree]:
        value, after = loss.trained(theta, statistics, batch, jax.random.fold_in(key, number))
        return weight.astype(value.dtype) * value, jax.lax.stop_gradient(after)

    numbers = jax.numpy.arange(particle_count(particles))
    (values, after), gradient = jax.vmap(jax.value_and_grad(one, has_aux=True))(
        particles.parameters, particles.statistics, numbers
    )
    return values, gradient, after
