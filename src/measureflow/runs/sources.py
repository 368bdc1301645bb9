"""Where batches come from: arrays on the device, an iterator, or arrays on a disk.

What is not on the device is made on the host a stack of batches at a time, the next one while the device
computes.
"""

import abc
import copy
import dataclasses
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from measureflow.runs.background import Background, result
from measureflow.runs.batches import (
    STREAMED,
    AbstractBatches,
    Stacked,
    on_device,
    on_host,
)
from measureflow.runs.fingerprints import OfType

# A stack of batches has no more than this, unless one batch has.
_STACK_BYTES = 2**28
# How many seconds someone who pressed Ctrl-C twice waits for an iterator.
_PATIENCE = 1.0


class AbstractSource(abc.ABC):
    """Where the batches of a run come from. Its steps are asked for in order."""

    #: How many steps one compiled call may take.
    most: int

    @abc.abstractmethod
    def made_of(self) -> Any:
        """What tells these batches from others."""

    @abc.abstractmethod
    def position(self, step: int) -> Any:
        """Where the source is before the batch of `step`, in JSON; None if a count of steps says it all."""

    @abc.abstractmethod
    def skip(self, step: int, count: int, position: Any) -> None:
        """Go to `step`, where `position` was taken, `count` batches from the beginning."""

    @abc.abstractmethod
    def prefetch(self, step: int, count: int) -> int:
        """How many of the `count` steps from `step` on have a batch, of those that can be taken together.
        A step may be asked for again until the call that takes it has ended."""

    @abc.abstractmethod
    def ahead(self, size: Callable[[int], int]) -> None:
        """Begin to make the batches after those that were taken, and return at once. The call that begins at
        some step will take `size(step)` steps, as far as is known: never more than the run still needs."""

    @abc.abstractmethod
    def take(self, step: int, count: int) -> AbstractBatches:
        """The batches of `count` steps from `step` on; of none, to look at one."""

    @abc.abstractmethod
    def close(self) -> None:
        """Let go of everything: the run has ended, with or without an error."""


class Arrays(AbstractSource):
    """Data that lies on the device: the same batches for every call."""

    most = 4096

    def __init__(self, data: PyTree, batch_size: int | None):
        self.batches = on_device(data, batch_size)

    def made_of(self) -> Any:
        return self.batches

    def position(self, step: int) -> None:
        return

    def skip(self, step: int, count: int, position: Any) -> None:
        pass

    def prefetch(self, step: int, count: int) -> int:
        return count

    def ahead(self, size: Callable[[int], int]) -> None:
        pass

    def take(self, step: int, count: int) -> AbstractBatches:
        return self.batches

    def close(self) -> None:
        pass


#: The leaves of a batch, and where the source was after it.
Batch: TypeAlias = tuple[list[np.ndarray], Any]


@dataclasses.dataclass(frozen=True)
class Stack:
    """The batches of `count` steps from `first` on, and where the source was before and after each."""

    batches: Stacked
    first: int
    count: int
    positions: list[Any]

    @property
    def end(self) -> int:
        return self.first + self.count


class AbstractStream(AbstractSource):
    """Batches that are made on the host, a stack at a time. While the device works on one stack, a thread
    makes the next and sends it to the device. The two threads never touch the data at the same time."""

    def __init__(self, batch: PyTree, share: float):
        paths, self.structure = jax.tree_util.tree_flatten_with_path(batch)
        self.paths, leaves = zip(*paths, strict=True) if paths else ((), ())
        self.shapes = [leaf.shape for leaf in leaves]
        self.dtypes = [leaf.dtype.newbyteorder("=") for leaf in leaves]
        size = sum(math.prod(shape) * dtype.itemsize for shape, dtype in self._kinds())
        self.most = min(STREAMED, max(1, _STACK_BYTES // max(size, 1)))
        self.share = share
        self.stack: Stack | None = None
        self.next: Future | None = None
        self.background: Background | None = None
        self.closed = False

    @abc.abstractmethod
    def _making(self, first: int, count: int) -> Callable[[], Stack]:
        """What makes the stack of `count` steps from `first` on, or of fewer where the data end."""

    @abc.abstractmethod
    def _look(self, step: int) -> Stack:
        """A batch to look at, of no steps: it is not used up."""

    def prefetch(self, step: int, count: int) -> int:
        if self._left(step) == 0:
            if self.next is None:
                stack = self._making(step, min(count, self.most))()
            else:
                made, self.next = self.next, None
                stack = result(made)
            self.stack = stack if stack.count else self.stack
        return min(count, self._left(step))

    def ahead(self, size: Callable[[int], int]) -> None:
        if self.stack is None or self.next is not None:
            return
        first = self.stack.end
        count = min(self.most, size(first))
        if count > 0:
            self.background = self.background or Background()
            self.next = self.background.submit(self._making(first, count))

    def take(self, step: int, count: int) -> AbstractBatches:
        if self.stack is None:
            self.stack = self._look(step)
        return self.stack.batches

    def close(self) -> None:
        """The thread ends with the batch that it is at. After a second Ctrl-C nothing waits for that."""
        self.closed = True
        if self.background is None:
            return
        stopped = sys.exception()
        try:
            self.background.end(_PATIENCE if type(stopped) is KeyboardInterrupt else math.inf)
        except KeyboardInterrupt:
            # The second one, perhaps: what the first one raised holds the run so far.
            if not isinstance(stopped, KeyboardInterrupt):
                raise

    def _left(self, step: int) -> int:
        return 0 if self.stack is None else self.stack.end - step

    def _kinds(self) -> list[tuple[tuple[int, ...], np.dtype]]:
        return list(zip(self.shapes, self.dtypes, strict=True))

    def _stacked(self, first: int, before: Any, batches: Iterable[Batch]) -> Stack:
        """Batches, stacked and sent to the device."""
        columns = [np.zeros((self.most, *shape), dtype) for shape, dtype in self._kinds()]
        positions = [before]
        for count, (batch, after) in enumerate(batches):
            if self.closed:
                raise CancelledError
            for column, leaf in zip(columns, batch, strict=True):
                column[count] = leaf
            positions.append(after)
        count = len(positions) - 1
        for column in columns if count else []:
            # The record after the last step looks at its batch again.
            column[count : count + 1] = column[count - 1]
        stack = jax.tree.unflatten(self.structure, map(jnp.asarray, columns))
        return Stack(Stacked(stack, jnp.asarray(first, jnp.int32), self.share), first, count, positions)


class Stream(AbstractStream):
    """Batches of an iterator; a loader, which can be iterated over again, starts over at its end.

    Except for the first batches, it is asked in another thread while the device computes, but never for more
    than the run needs: one that finishes after k steps has used k batches. One that does not, for an error or
    Ctrl-C, may have asked for up to two stacks more. What the iterator raises, the run raises, once the
    steps of the batches before are taken.
    """

    def __init__(self, data: Iterable):
        self.data = data
        self.iterator: Any = iter(data)
        # Where the iterator stood after the last batch that went into a stack.
        self.at = self._position()
        self.error: Exception | None = None
        try:
            batch = jax.tree_util.tree_map_with_path(on_host, self._asked())
        except StopIteration:
            raise ValueError(
                f"data is an iterator that yields no batch, got {data!r}; pass one that does."
            ) from None
        # Batches that were asked for and are not in a stack yet: at most one, to look at.
        self.waiting = [(jax.tree.leaves(batch), self._position())]
        super().__init__(batch, 0.0)

    def made_of(self) -> Any:
        """Its type: what an iterator will yield cannot be compared."""
        return OfType(self.data)

    def position(self, step: int) -> Any:
        """Where the iterator stood before the batch of `step`; None if it cannot say so in JSON."""
        state = self.at if self.stack is None else self.stack.positions[step - self.stack.first]
        state = {"bytes": state.hex()} if isinstance(state, bytes) else state
        try:
            return state if json.loads(json.dumps(state)) == state else None
        except (TypeError, ValueError):
            return None

    def skip(self, step: int, count: int, position: Any) -> None:
        """At once if the iterator can, else batch by batch."""
        if position is not None and hasattr(self.iterator, "set_state"):
            is_bytes = isinstance(position, dict) and set(position) == {"bytes"}
            self.iterator.set_state(bytes.fromhex(position["bytes"]) if is_bytes else position)
            self.waiting, self.at = [], self._position()
            return
        last = None
        for done in range(count):
            try:
                last = self._next()
            except StopIteration:
                raise ValueError(
                    f"data is an iterator that ended after {done} batches, but the run to be resumed used "
                    f"{count} of them; pass it from its beginning."
                ) from None
        if last is not None:
            self.at = last[1]
            self.stack = self._stacked(step - 1, None, [last])

    def _making(self, first: int, count: int) -> Callable[[], Stack]:
        def make() -> Stack:
            stack = self._stacked(first, self.at, self._up_to(count))
            self.at = stack.positions[-1]
            return stack

        return make

    def _look(self, step: int) -> Stack:
        self.waiting = self.waiting or [self._next()]
        return dataclasses.replace(self._stacked(step, self.at, self.waiting), count=0)

    def _up_to(self, count: int) -> Iterator[Batch]:
        """The next batches: `count`, or those before the end, or those before an error, which is then due."""
        for done in range(count):
            try:
                batch = self._next()
            except StopIteration:
                return
            except Exception as error:
                self.error = error
                if done == 0:
                    raise
                return
            yield batch

    def _next(self) -> Batch:
        if self.waiting:
            return self.waiting.pop()
        if self.error is not None:
            raise self.error
        return self._checked(self._asked()), self._position()

    def _asked(self) -> PyTree:
        try:
            return next(self.iterator)
        except StopIteration:
            if isinstance(self.data, Iterator):
                raise
            self.iterator = iter(self.data)
            return next(self.iterator)

    def _position(self) -> Any:
        # A copy: an iterator may hand out the very state that it goes on with.
        return copy.deepcopy(self.iterator.get_state()) if hasattr(self.iterator, "get_state") else None

    def _checked(self, batch: PyTree) -> list[np.ndarray]:
        """The leaves of a batch that is like the first one, so that there is one program."""
        leaves, structure = jax.tree.flatten(batch)
        if structure != self.structure:
            raise ValueError(
                f"data yields batches of different structures, got {self.structure} and {structure}; yield "
                "the same pytree every time."
            )
        leaves = list(map(on_host, self.paths, leaves))
        shapes, dtypes = [leaf.shape for leaf in leaves], [leaf.dtype for leaf in leaves]
        if shapes != self.shapes:
            raise ValueError(
                f"data yields batches of different shapes, got {self.shapes} and {shapes}; drop the short "
                "one (drop_last=True in a loader), so that there is one program."
            )
        if dtypes != self.dtypes and not all(map(_fits, leaves, self.dtypes)):
            first, then = ", ".join(map(str, self.dtypes)), ", ".join(map(str, dtypes))
            raise ValueError(
                f"data yields batches of different dtypes, got {first} and then {then}; yield the same every "
                "time."
            )
        return leaves


def _fits(leaf: np.ndarray, first: np.dtype) -> bool:
    """Whether its numbers are numbers of the type of the first batch, up to the rounding of floats."""
    if np.can_cast(leaf.dtype, first) or not np.can_cast(leaf.dtype, first, "same_kind"):
        return np.can_cast(leaf.dtype, first)
    with np.errstate(over="ignore"):
        cast = leaf.astype(first)
    return bool(np.all(np.isfinite(cast) == np.isfinite(leaf) if first.kind == "f" else cast == leaf))
