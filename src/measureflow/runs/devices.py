"""Batches on a mesh of devices."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int, Key, PyTree

from measureflow.core.devices import BATCH, place
from measureflow.core.pytrees import shown_shapes
from measureflow.runs.batches import AbstractBatches, Whole


class ShardedBatches(AbstractBatches):
    """The cases of every batch cut over the axis "batch"."""

    batches: AbstractBatches
    mesh: Mesh = eqx.field(static=True)

    def at(self, step: Int[Array, ""], key: Key[Array, ""]) -> PyTree:
        return place(self.mesh, self.batches.at(step, key), P(BATCH))

    def sampled_share(self) -> float:
        return self.batches.sampled_share()


def place_batches(mesh: Mesh | None, batches: AbstractBatches) -> AbstractBatches:
    """Data on every device, and what is computed of a batch cut over the axis "batch", if there is one."""
    if mesh is None or BATCH not in mesh.axis_names:
        return place(mesh, batches)
    parts = mesh.shape[BATCH]
    batch = jax.eval_shape(batches.at, jnp.zeros((), jnp.int32), jax.random.key(0))
    cases = {leaf.shape[:1] for leaf in jax.tree.leaves(batch)}
    if any(number == () or number[0] % parts for number in cases):
        raise ValueError(
            f"mesh cuts a batch over {parts} devices, got batches of shapes {shown_shapes(batch)}; use a "
            f"batch_size that is a multiple of {parts}, or a mesh without the axis {BATCH!r}."
        )
    # All cases at every step need not be on every device.
    placed = place(mesh, batches, P(BATCH) if isinstance(batches, Whole) else P())
    return ShardedBatches(placed, mesh)
