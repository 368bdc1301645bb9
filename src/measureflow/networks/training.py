"""What a network does in training and not in prediction: BatchNorm's statistics of the batch, Dropout."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, PyTree

from measureflow.core.pytrees import Parameters
from measureflow.core.statistics import WithStatistics
from measureflow.networks.functions import RowsOfOutputs


class Training(eqx.Module):
    """(θ, s, x, key) ↦ (f, s′): how a network is applied in training, where that is different.

    Parameters
    ----------
    apply
        A function of (θ, statistics, inputs, key) that gives outputs, and the statistics after this batch.
    statistics
        s of every particle at the start: a pytree of floating-point arrays; () where there are none, as for
        Dropout alone.
    """

    apply: Callable[..., tuple[Array, PyTree]]
    statistics: PyTree[Float[Array, "..."]]

    def __init__(self, apply: Callable, statistics: PyTree = ()):
        if not callable(apply):
            raise TypeError(
                f"Training apply must be a function, got {apply!r}; pass apply(θ, statistics, inputs, key) "
                "-> (outputs, statistics)."
            )
        for path, leaf in jax.tree_util.tree_leaves_with_path(statistics):
            if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
                raise TypeError(
                    f"statistics must be floating-point arrays, got {jnp.result_type(leaf)} at "
                    f"statistics{jax.tree_util.keystr(path)}; keep counts as floats."
                )
        self.apply = apply
        self.statistics = jax.tree.map(jnp.asarray, statistics)

    def __call__(
        self, theta: Parameters, statistics: PyTree, inputs: PyTree, key: Key[Array, ""]
    ) -> tuple[Float[Array, "rows outputs"], PyTree]:
        """Outputs, one row per row of inputs, and the statistics after this batch."""
        after: list[PyTree] = []

        def outputs(theta: Parameters, inputs: PyTree) -> Array:
            found, changed = self.apply(theta, statistics, inputs, key)
            after.append(changed)
            return found

        rows = RowsOfOutputs(outputs)(theta, inputs)
        before, changed = jax.tree.structure(statistics), jax.tree.structure(after[0])
        if before != changed:
            raise ValueError(
                f"Training apply must give back statistics of the same structure, got {changed} for "
                f"{before}; return (outputs, statistics)."
            )
        kept = jax.tree.map(lambda new, old: jnp.asarray(new, old.dtype), after[0], statistics)
        return rows, kept


class PointApply(eqx.Module):
    """f_(θ, s)(x): `function`(`WithStatistics`, inputs), in prediction."""

    function: Callable

    def __call__(self, point: Any, inputs: PyTree) -> Array:
        if not isinstance(point, WithStatistics):
            raise TypeError(
                "the network is trained with BatchNorm or Dropout, and its parameters alone do not say what "
                f"it predicts, got {type(point).__name__} where WithStatistics was expected. Such networks "
                "are trained by mf.WassersteinFlow on Problem(loss, regulariser); predict with "
                "solution.measure.particles, which carry statistics; for other flows, objectives, and "
                "repulsion between functions use a network without training-time state (GroupNorm for "
                "BatchNorm), or frozen statistics (leave `training` out)."
            )
        return self.function(point, inputs)


def require_training(training: Any) -> None:
    """A Training, or None."""
    if training is not None and not isinstance(training, Training):
        raise TypeError(
            f"training must say how the network is applied in training, got {training!r}; pass "
            "mf.Training(apply, statistics)."
        )


def as_floats(tree: PyTree) -> PyTree:
    """Counts and truth values as floats, so that particles are floats throughout; back by `like`."""
    kind = jnp.result_type(float)
    return jax.tree.map(
        lambda leaf: leaf if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf.astype(kind), tree
    )
