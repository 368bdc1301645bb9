"""Where batches come from, for data as a user gives them; rows of arrays on a disk among them."""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key, PyTree

from measureflow.core.validation import require_leading_axis
from measureflow.runs.batches import (
    AbstractBatches,
    data_key,
    is_on_disk,
    on_host,
    require_batch_size,
    shuffled_rows,
)
from measureflow.runs.sources import AbstractSource, AbstractStream, Arrays, Batch, Stack, Stream

# Of data on a disk, larger than this, a checkpoint compares so many rows.
_HASHED_BYTES = 2**26
_HASHED_ROWS = 1024


class OnDisk(AbstractStream):
    """Rows of arrays on a disk: the batches of `Shuffled`, to the bit, gathered on the host.

    Of the data, only a few stacks of batches are ever in memory. A checkpoint compares such arrays by shape,
    dtype and a hash: of all rows up to 64 MB, and of 1024 rows spread evenly over larger ones,
    so that terabytes are not read; a change of other rows is not seen.
    """

    def __init__(self, data: PyTree, batch_size: int, key: Key[Array, ""]):
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), np.uint8), data)
        require_leading_axis("data", shapes, "case")
        self.cases = jax.tree.leaves(shapes)[0].shape[0]
        self.batch_size = require_batch_size(batch_size, self.cases)
        if self.cases > np.iinfo(np.int32).max:
            raise ValueError(
                f"data has {self.cases} cases, but steps count them in 32 bits; pass an iterator of batches."
            )
        self.data = jax.tree_util.tree_map_with_path(
            lambda path, leaf: leaf if is_on_disk(leaf) else on_host(path, leaf), data
        )
        self.key = data_key(key)
        batch = jax.tree_util.tree_map_with_path(
            lambda path, leaf: np.broadcast_to(on_host(path, leaf[:1]), (self.batch_size, *leaf.shape[1:])),
            self.data,
        )
        super().__init__(batch, self.batch_size / self.cases)

    def made_of(self) -> Any:
        return {"rows": jax.tree.map(_digest, self.data), "batch_size": self.batch_size}

    def position(self, step: int) -> None:
        return

    def skip(self, step: int, count: int, position: Any) -> None:
        pass

    def take(self, step: int, count: int) -> AbstractBatches:
        # Batches here are a function of the step, for the record after the last one, too.
        if self._left(step) == 0:
            self.stack = self._look(step)
        return super().take(step, count)

    def _look(self, step: int) -> Stack:
        return dataclasses.replace(self._making(step, 1)(), count=0)

    def _making(self, first: int, count: int) -> Callable[[], Stack]:
        # Asked for now, since a device takes one thing after the other: later, it is at work.
        rows = _rows(jnp.asarray(first, jnp.int32), self.key, self.cases, self.batch_size, self.most)
        return lambda: self._stacked(first, None, map(self._gathered, np.asarray(rows)[:count]))

    def _gathered(self, rows: np.ndarray) -> Batch:
        """In the order of the disk, which is faster, and the only one that h5py allows."""
        order = np.argsort(rows)
        places = np.argsort(order)
        leaves = zip(self.paths, jax.tree.leaves(self.data), strict=True)
        return [on_host(path, leaf[rows[order]])[places] for path, leaf in leaves], None


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _rows(
    first: Int[Array, ""], key: Key[Array, ""], cases: int, batch_size: int, count: int
) -> Int[Array, "{count} {batch_size}"]:
    """Which cases are the batches of `count` steps from `first` on."""
    steps = first + jnp.arange(count, dtype=first.dtype)
    return jax.vmap(lambda step: shuffled_rows(step, key, cases, batch_size))(steps)


def _digest(leaf: Any) -> str:
    """Shape, dtype, and a hash of some rows, in words."""
    cases, row = leaf.shape[0], np.asarray(leaf[:1])
    most = cases if cases * row.nbytes <= _HASHED_BYTES else min(_HASHED_ROWS, _HASHED_BYTES // row.nbytes)
    rows = np.unique(np.linspace(0, cases - 1, max(most, 1)).astype(int))
    values = hashlib.sha256(np.asarray(leaf[rows]).tobytes()).hexdigest()[:16]
    return f"{row.dtype}{list(leaf.shape)} sha256 of {len(rows)} rows {values}"


def batch_source(data: Any, batch_size: int | None, key: Key[Array, ""]) -> AbstractSource:
    """Where batches come from, for `data` and `batch_size` as a user gives them, and the key of the run."""
    arrays = hasattr(data, "shape") or isinstance(data, dict | list | tuple | eqx.Module)
    if isinstance(data, Iterable) and not arrays:
        if batch_size is not None:
            raise ValueError(
                f"batch_size={batch_size} was given with an iterator of batches; let the iterator batch."
            )
        return Stream(data)
    if batch_size is not None and any(map(is_on_disk, jax.tree.leaves(data))):
        return OnDisk(data, batch_size, key)
    return Arrays(data, batch_size)
