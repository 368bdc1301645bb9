"""Which cases the loss sees at a step. Pure functions of (key, step), so that resuming is exact."""

import abc
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key, PyTree

from measureflow.core.permutations import permuted
from measureflow.core.validation import (
    require_count,
    require_leading_axis,
    require_not_lost,
    require_representable,
)

# How many batches are made on the host at a time, if so many are not too large: a fixed shape, so that there
# is one program.
STREAMED = 64


class AbstractBatches(eqx.Module):
    """A rule step ↦ batch."""

    @abc.abstractmethod
    def at(self, step: Int[Array, ""], key: Key[Array, ""]) -> PyTree:
        """The batch of this step."""

    @abc.abstractmethod
    def sampled_share(self) -> float:
        """Batch size over number of cases; 0 where that number is not known."""


class Whole(AbstractBatches):
    """All data at every step; no data is `Whole(None)`."""

    data: PyTree

    def at(self, step: Int[Array, ""], key: Key[Array, ""]) -> PyTree:
        return self.data

    def sampled_share(self) -> float:
        return 1.0


class Shuffled(AbstractBatches):
    """A fresh permutation each epoch, cut into batches on the device; the remainder is dropped. Where there
    are fewer cases than a batch has, some are in it twice."""

    data: PyTree
    batch_size: int = eqx.field(static=True)
    #: The first so many rows, which may be traced; None is all.
    cases: Int[Array, ""] | None = None

    def at(self, step: Int[Array, ""], key: Key[Array, ""]) -> PyTree:
        cases = self._all() if self.cases is None else self.cases
        rows = shuffled_rows(step, key, cases, self.batch_size)
        return jax.tree.map(lambda leaf: leaf[rows], self.data)

    def sampled_share(self) -> float:
        return self.batch_size / self._all()

    def _all(self) -> int:
        return jax.tree.leaves(self.data)[0].shape[0]


class Stacked(AbstractBatches):
    """Batches that were made on the host, stacked: batch k belongs to step `first` + k."""

    data: PyTree
    first: Int[Array, ""]
    share: float = eqx.field(static=True, default=0.0)

    def at(self, step: Int[Array, ""], key: Key[Array, ""]) -> PyTree:
        return jax.tree.map(lambda leaf: leaf[step - self.first], self.data)

    def sampled_share(self) -> float:
        return self.share


def shuffled_rows(
    step: Int[Array, ""], key: Key[Array, ""], cases: int | Int[Array, ""], batch_size: int
) -> Int[Array, " {batch_size}"]:
    """Which of the cases are the batch of this step: a fresh permutation each epoch, cut."""
    cases = jnp.asarray(cases, step.dtype)
    epoch, batch = jnp.divmod(step, jnp.maximum(cases // batch_size, 1))
    positions = (batch * batch_size + jnp.arange(batch_size, dtype=step.dtype)) % cases
    return permuted(positions, cases, jax.random.fold_in(key, epoch))


def data_key(key: Key[Array, ""]) -> Key[Array, ""]:
    """The stream of randomness that orders the data, apart from the one that moves the particles."""
    # Steps are folded in as int32, so none of them is this number.
    return jax.random.fold_in(key, jnp.uint32(2**32 - 1))


def on_device(data: PyTree, batch_size: int | None) -> AbstractBatches:
    """Batches of arrays that lie on the device: all cases, or `batch_size` of them at a time."""
    if data is None:
        if batch_size is not None:
            raise ValueError(f"batch_size={batch_size} was given without data; pass data=(X, y).")
        return Whole(None)
    data = jax.tree_util.tree_map_with_path(_loaded, require_leading_axis("data", data, "case"))
    if batch_size is None:
        return Whole(data)
    cases = jax.tree.leaves(data)[0].shape[0]
    return Shuffled(data, require_batch_size(batch_size, cases))


def require_batch_size(batch_size: Any, cases: int) -> int:
    """`batch_size` as a count of at most `cases`."""
    batch_size = require_count("batch_size", batch_size, 1, "100 is a start.")
    if batch_size > cases:
        raise ValueError(f"batch_size={batch_size} exceeds the {cases} cases of data; use at most {cases}.")
    return batch_size


def is_on_disk(leaf: Any) -> bool:
    """Whether rows are read when they are asked for: a memory-mapped array, or one of h5py, Zarr and such.
    What a method turns into NumPy is in memory: tensors, and columns of a table."""
    if isinstance(leaf, np.memmap):
        return True
    if isinstance(leaf, np.ndarray | np.generic | jax.Array):
        return False
    is_array = all(hasattr(leaf, name) for name in ("shape", "dtype", "__getitem__"))
    return is_array and not hasattr(leaf, "numpy") and not hasattr(leaf, "to_numpy")


def _loaded(path: tuple, leaf: Any) -> Array:
    if isinstance(leaf, jax.Array):
        return leaf
    return jnp.asarray(require_not_lost(f"data{jax.tree_util.keystr(path)}", on_host(path, leaf)))


def on_host(path: tuple, leaf: Any) -> np.ndarray:
    """The array at `path` of the data, of any library, in NumPy: numbers that JAX can hold. Tensors of
    PyTorch and TensorFlow have a method for it."""
    if is_on_disk(leaf):
        leaf = leaf[:]
    values, name = np.asarray(leaf.numpy() if hasattr(leaf, "numpy") else leaf), jax.tree_util.keystr(path)
    if values.dtype.kind in "OSUMmT":
        raise TypeError(
            f"data{name} must hold numbers, got {leaf!r} of type {type(leaf).__name__}; leave it out, or "
            "encode it."
        )
    return require_representable(f"data{name}", values)
