"""Which cases the loss sees at a step. Pure functions of (key, step), so that resuming is exact."""

import abc
import copy
import json
from collections.abc import Iterable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key, PyTree, UInt32

from measureflow.validation import require_count, require_leading_axis

# How many batches are taken from an iterator at a time: a fixed shape, so that there is one program.
STREAMED = 64
# Of swap-or-not: a case that no round moves has probability 2⁻³².
_ROUNDS = 32


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
    """A fresh permutation each epoch, cut into batches on the device; the remainder is dropped."""

    data: PyTree
    batch_size: int = eqx.field(static=True)

    def at(self, step: Int[Array, ""], key: Key[Array, ""]) -> PyTree:
        cases = self._cases()
        epoch, batch = jnp.divmod(step, cases // self.batch_size)
        positions = batch * self.batch_size + jnp.arange(self.batch_size, dtype=step.dtype)
        rows = permuted(positions, cases, jax.random.fold_in(key, epoch))
        return jax.tree.map(lambda leaf: leaf[rows], self.data)

    def sampled_share(self) -> float:
        return self.batch_size / self._cases()

    def _cases(self) -> int:
        return jax.tree.leaves(self.data)[0].shape[0]


class Stacked(AbstractBatches):
    """Batches that came from an iterator, stacked: batch k belongs to step `first` + k."""

    data: PyTree
    first: Int[Array, ""]

    def at(self, step: Int[Array, ""], key: Key[Array, ""]) -> PyTree:
        return jax.tree.map(lambda leaf: leaf[step - self.first], self.data)

    def sampled_share(self) -> float:
        return 0.0


def permuted(positions: Int[Array, " b"], n: int, key: Key[Array, ""]) -> Int[Array, " b"]:
    """Where a random permutation of 0, …, n − 1 sends some positions, without the other n − b.

    Swap-or-not (Hoang, Morris and Rogaway, 2012): in every round each x has the partner pivot − x mod n, and
    a hash of the pair decides whether the two change places. A table of the permutation would need sorting
    once an epoch, in a branch of the loop, at which a GPU waits for its host.
    """
    if n == 1:
        return positions
    pivots, salts = jax.random.bits(key, (2, _ROUNDS), jnp.uint32)
    x, pivots = positions.astype(jnp.uint32), pivots % jnp.uint32(n)
    for pivot, salt in zip(pivots, salts, strict=True):
        partner = pivot - x + jnp.where(x > pivot, jnp.uint32(n), jnp.uint32(0))
        swap = _hash(jnp.maximum(x, partner) ^ salt) & 1
        x = jnp.where(swap == 1, partner, x)
    return x.astype(positions.dtype)


def _hash(x: UInt32[Array, " b"]) -> UInt32[Array, " b"]:
    """An avalanche of 32 bits (Wellons, 2018: the constants with the least bias found)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def split_in_half(batch: PyTree) -> tuple[PyTree, PyTree] | None:
    """Two halves of a batch (an odd case is left out), or None if it is not made of two cases or more."""
    lengths = {leaf.shape[:1] for leaf in jax.tree.leaves(batch)}
    if len(lengths) != 1 or next(iter(lengths)) in ((), (0,), (1,)):
        return None
    half = next(iter(lengths))[0] // 2
    return (
        jax.tree.map(lambda leaf: leaf[:half], batch),
        jax.tree.map(lambda leaf: leaf[half : 2 * half], batch),
    )


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
    data = jax.tree.map(jnp.asarray, require_leading_axis("data", data, "case"))
    if batch_size is None:
        return Whole(data)
    cases = jax.tree.leaves(data)[0].shape[0]
    batch_size = require_count("batch_size", batch_size, 1, "100 is a start.")
    if batch_size > cases:
        raise ValueError(f"batch_size={batch_size} exceeds the {cases} cases of data; use at most {cases}.")
    return Shuffled(data, batch_size)


class Arrays:
    """Data that lies on the device: the same batches for every call."""

    #: How many steps one compiled call may take.
    most = 4096

    def __init__(self, data: PyTree, batch_size: int | None):
        self.batches = on_device(data, batch_size)

    def made_of(self) -> Any:
        """What tells these batches from others."""
        return self.batches

    def position(self) -> None:
        """Where the source is: batches here are a function of the step."""
        return

    def skip(self, count: int, position: Any) -> None:
        """Go to where `position` was taken, `count` batches from the beginning."""

    def give_back(self, count: int) -> None:
        """The last `count` batches that were taken were not used."""

    def prefetch(self, count: int) -> int:
        """How many of the next `count` steps have a batch."""
        return count

    def take(self, first: int, count: int) -> AbstractBatches:
        """The batches of `count` steps from `first` on."""
        return self.batches


class Stream:
    """Data that comes from an iterator, a stack of batches at a time; a loader starts over at its end."""

    most = STREAMED

    def __init__(self, data: Iterable):
        self.data = data
        self.iterator: Any = iter(data)
        self.waiting: list[PyTree] = []
        self.taken: list[PyTree] = []
        self.last: AbstractBatches | None = None
        # Where the iterator stood after each batch that is waiting, and after the last one taken.
        self.positions: list[Any] = []
        self.after_taken: list[Any] = [self._position()]

    def made_of(self) -> Any:
        """Its type: what an iterator will yield cannot be compared."""
        return self.data

    def _position(self) -> Any:
        # A copy: an iterator may hand out the very state that it goes on with.
        return copy.deepcopy(self.iterator.get_state()) if hasattr(self.iterator, "get_state") else None

    def position(self) -> Any:
        """Where the iterator stood after the last batch that was taken; None if it cannot say so in JSON."""
        state = self.after_taken[-1]
        state = {"bytes": state.hex()} if isinstance(state, bytes) else state
        try:
            return state if json.loads(json.dumps(state)) == state else None
        except (TypeError, ValueError):
            return None

    def skip(self, count: int, position: Any) -> None:
        """Go to where `position` was taken: at once if the iterator can, else batch by batch."""
        if position is not None and hasattr(self.iterator, "set_state"):
            is_bytes = isinstance(position, dict) and set(position) == {"bytes"}
            self.iterator.set_state(bytes.fromhex(position["bytes"]) if is_bytes else position)
            self.waiting, self.positions = [], []
            self.after_taken = [self._position()]
            return
        for done in range(count):
            if self.prefetch(1) == 0:
                raise ValueError(
                    f"data is an iterator that ended after {done} batches, but the run to be resumed used "
                    f"{count} of them; pass it from its beginning."
                )
            if done == count - 1:
                self.take(done, 1)
            else:
                self.waiting, self.positions = self.waiting[1:], self.positions[1:]

    def give_back(self, count: int) -> None:
        """The last `count` batches that were taken were not used."""
        if count:
            self.waiting = self.taken[-count:] + self.waiting
            self.positions = self.after_taken[-count:] + self.positions
            self.after_taken = self.after_taken[:-count]

    def prefetch(self, count: int) -> int:
        """How many of the next `count` steps have a batch, after asking the iterator for them."""
        while len(self.waiting) < count:
            try:
                self.waiting.append(self._next())
                self.positions.append(self._position())
            except StopIteration:
                break
        return min(count, len(self.waiting))

    def take(self, first: int, count: int) -> AbstractBatches:
        """The batches of `count` steps from `first` on. No steps look at what was taken last, or at the
        first batch and leave it there: as many batches are used up as steps are taken."""
        if count == 0 and self.last is not None:
            return self.last
        taken = self.waiting[: max(count, 1)]
        self.waiting = self.waiting[count:]
        if count:
            self.taken = taken
            self.after_taken = [self.after_taken[-1], *self.positions[:count]]
            self.positions = self.positions[count:]
        padded = taken + [taken[-1]] * (STREAMED - len(taken))
        shapes = {tuple(np.shape(leaf) for leaf in jax.tree.leaves(batch)) for batch in taken}
        if len(shapes) > 1:
            raise ValueError(
                f"data yields batches of different shapes, got {sorted(shapes)}; drop the short one "
                "(drop_last=True in a loader), so that there is one program."
            )
        stack = jax.tree.map(lambda *leaves: jnp.asarray(np.stack([np.asarray(x) for x in leaves])), *padded)
        self.last = Stacked(stack, jnp.asarray(first, jnp.int32))
        return self.last

    def _next(self) -> PyTree:
        try:
            return next(self.iterator)
        except StopIteration:
            if isinstance(self.data, Iterator):
                raise
            self.iterator = iter(self.data)
            return next(self.iterator)


def batch_source(data: Any, batch_size: int | None) -> Arrays | Stream:
    """Where batches come from, for `data` and `batch_size` as a user gives them."""
    arrays = hasattr(data, "shape") or isinstance(data, dict | list | tuple | eqx.Module)
    if isinstance(data, Iterable) and not arrays:
        if batch_size is not None:
            raise ValueError(
                f"batch_size={batch_size} was given with an iterator of batches; let the iterator batch."
            )
        stream = Stream(data)
        if stream.prefetch(1) == 0:
            raise ValueError(f"data is an iterator that yields no batch, got {data!r}; pass one that does.")
        return stream
    return Arrays(data, batch_size)
