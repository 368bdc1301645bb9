"""Which cases the loss sees at a step. Pure functions of (key, step), so that resuming is exact."""

import abc

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Key, PyTree


class AbstractBatches(eqx.Module):
    """A rule step ↦ batch. `order` is what may be carried from one step to the next to save work; it
    never decides the result."""

    @abc.abstractmethod
    def order(self, step: Int[Array, ""], key: Key[Array, ""]) -> PyTree:
        """The order to start from at `step`."""

    @abc.abstractmethod
    def at(self, order: PyTree, step: Int[Array, ""], key: Key[Array, ""]) -> tuple[PyTree, PyTree]:
        """The batch of this step, and the order to go on with."""


class Whole(AbstractBatches):
    """All data at every step; no data is `Whole(None)`."""

    data: PyTree

    def order(self, step: Int[Array, ""], key: Key[Array, ""]) -> None:
        return None

    def at(self, order: None, step: Int[Array, ""], key: Key[Array, ""]) -> tuple[PyTree, None]:
        return self.data, None


class Shuffled(AbstractBatches):
    """A fresh permutation each epoch, cut into batches on the device; the remainder is dropped."""

    data: PyTree
    batch_size: int = eqx.field(static=True)

    @property
    def cases(self) -> int:
        return jax.tree.leaves(self.data)[0].shape[0]

    @property
    def epoch_length(self) -> int:
        return self.cases // self.batch_size

    def order(self, step: Int[Array, ""], key: Key[Array, ""]) -> tuple[Array, Array]:
        epoch = step // self.epoch_length
        return epoch, jax.random.permutation(jax.random.fold_in(key, epoch), self.cases)

    def at(
        self, order: tuple[Array, Array], step: Int[Array, ""], key: Key[Array, ""]
    ) -> tuple[PyTree, tuple[Array, Array]]:
        epoch = step // self.epoch_length
        order = jax.lax.cond(epoch == order[0], lambda: order, lambda: self.order(step, key))
        first = (step % self.epoch_length) * self.batch_size
        rows = jax.lax.dynamic_slice(order[1], (first,), (self.batch_size,))
        return jax.tree.map(lambda leaf: leaf[rows], self.data), order


class Stacked(AbstractBatches):
    """Batches that came from an iterator, stacked: batch k belongs to step `first` + k."""

    data: PyTree
    first: Int[Array, ""]

    def order(self, step: Int[Array, ""], key: Key[Array, ""]) -> None:
        return None

    def at(self, order: None, step: Int[Array, ""], key: Key[Array, ""]) -> tuple[PyTree, None]:
        return jax.tree.map(lambda leaf: leaf[step - self.first], self.data), None


def sampled_share(batches: AbstractBatches) -> float:
    """Batch size over number of cases; 0 where the number of cases is not known."""
    return batches.batch_size / batches.cases if isinstance(batches, Shuffled) else 0.0


def split_in_half(batch: PyTree) -> tuple[PyTree, PyTree] | None:
    """Two halves of a batch (an odd case is left out), or None if there are not two cases."""
    leaves = jax.tree.leaves(batch)
    if not leaves or any(leaf.ndim == 0 or leaf.shape[0] < 2 for leaf in leaves):
        return None
    half = leaves[0].shape[0] // 2
    return (
        jax.tree.map(lambda leaf: leaf[:half], batch),
        jax.tree.map(lambda leaf: leaf[half : 2 * half], batch),
    )


def data_key(key: Key[Array, ""]) -> Key[Array, ""]:
    """The stream of randomness that orders the data, apart from the one that moves the particles."""
    return jax.random.fold_in(key, jnp.uint32(0xDA7A))
