"""Particles kept along the way."""

import math
import os
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Array, Int, PyTree

from measureflow.core.pytrees import Particles
from measureflow.core.validation import require_count
from measureflow.flows.flow import AbstractFlow
from measureflow.spaces.empirical import Empirical

# What one compiled call may keep on the device, and how many draws.
_BYTES, _MOST = 2**26, 64


class Draws(eqx.Module):
    """Keep the particles of steps after + every, after + 2·every, …, for `solve(..., collect=Draws(...))`.

    Parameters
    ----------
    after
        How many steps to let pass first: while a flow approaches q*, or adapts, its particles are not draws
        from q*.
    every
        How many steps lie between two draws of a particle.
    """

    after: int = eqx.field(static=True, default=0)
    every: int = eqx.field(static=True, default=1)

    def __init__(self, after: int = 0, every: int = 1):
        self.after = require_count("Draws after", after, 0, "it counts the steps before the first draw.")
        self.every = require_count("Draws every", every, 1, "it counts the steps from one draw to the next.")

    def up_to(self, step: int) -> int:
        """How many draws there are in the first `step` steps."""
        return max(step - self.after, 0) // self.every


class Buffer(NamedTuple):
    """The draws of one compiled call: rows from draw `first` on, and one row for what is not kept."""

    rows: PyTree[Array]
    first: Int[Array, ""]

    def keeping(self, collect: Draws, step: Int[Array, ""], particles: Particles) -> "Buffer":
        """With the particles of a state at this step, if they are to be kept."""
        since = step - collect.after
        last = jax.tree.leaves(self.rows)[0].shape[0] - 1
        is_kept = (since > 0) & (since % collect.every == 0)
        slot = jnp.where(is_kept, since // collect.every - 1 - self.first, last)
        return self._replace(rows=jax.tree.map(lambda row, x: row.at[slot].set(x), self.rows, particles))


class Collector:
    """The draws of a run so far, on the host."""

    def __init__(self, collect: Draws, flow: AbstractFlow, state: Any, first: int, end: int):
        measure = flow.measure(state)
        if not isinstance(measure, Empirical):
            raise TypeError(
                f"collect={collect} keeps particles, and {type(flow).__name__} has none; draw from its "
                "solution.measure instead."
            )
        self.collect, self.like = collect, measure.particles
        #: Draws before this one belong to an earlier run, which this one continues.
        self.before = collect.up_to(first)
        self.parts: list[PyTree[np.ndarray]] = []
        self._require_memory(collect.up_to(end) - self.before)
        self.capacity = max(1, min(_MOST, _BYTES // max(self._bytes(), 1)))

    def _bytes(self) -> int:
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.like))

    def _require_memory(self, number: int) -> None:
        # They are put together at the end, so that for a moment there are two copies.
        needed, free = 2 * number * self._bytes(), free_memory()
        if needed > free:
            raise ValueError(
                f"collect={self.collect} keeps {number:,} draws of all particles, which takes "
                f"{needed / 2**30:.3g} GiB of memory, and {free / 2**30:.3g} GiB are free; keep fewer, with "
                "a larger every."
            )

    def most_steps(self) -> int:
        """How many steps one call may take, for its draws to fit into its buffer."""
        return self.collect.every * self.capacity

    def buffer(self, step: int) -> Buffer:
        """An empty one, for a call that begins at `step`."""
        rows = jax.tree.map(lambda leaf: jnp.zeros((self.capacity + 1, *leaf.shape), leaf.dtype), self.like)
        return Buffer(rows, jnp.asarray(self.collect.up_to(step), jnp.int32))

    def add(self, buffer: Buffer, step: int) -> None:
        """Keep the draws of a call that ended at `step`."""
        number = self.collect.up_to(step) - int(buffer.first)
        if number > 0:
            # Copied, or a row that is kept would keep the whole buffer.
            self.parts.append(jax.tree.map(lambda leaf: _on_host(leaf)[:number].copy(), buffer.rows))

    def resume(self, leaves: dict[str, np.ndarray]) -> None:
        """The draws of an earlier part of the run."""
        if leaves:
            structure = jax.tree.structure(self.like)
            self.parts = [jax.tree.unflatten(structure, [leaves[name] for name in sorted(leaves)])]

    def leaves(self) -> dict[str, np.ndarray]:
        """All draws, by the leaf's number: for a checkpoint."""
        self._join()
        return {f"{i:05d}": leaf for part in self.parts for i, leaf in enumerate(jax.tree.leaves(part))}

    def draws(self) -> PyTree[np.ndarray]:
        """Leading axes (particle, draw)."""
        self._join()
        if not self.parts:
            return jax.tree.map(
                lambda leaf: np.zeros((leaf.shape[0], 0, *leaf.shape[1:]), leaf.dtype), self.like
            )
        return jax.tree.map(lambda leaf: np.ascontiguousarray(np.swapaxes(leaf, 0, 1)), self.parts[0])

    def _join(self) -> None:
        if len(self.parts) > 1:
            self.parts = [jax.tree.map(lambda *parts: np.concatenate(parts), *self.parts)]


def _on_host(leaf: Array) -> np.ndarray:
    if getattr(leaf, "is_fully_addressable", True):
        return np.asarray(leaf)
    return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))


def free_memory() -> float:
    """Bytes that are free, where the system says so."""
    try:
        with Path("/proc/meminfo").open(encoding="ascii") as lines:
            kilobytes = next(line.split()[1] for line in lines if line.startswith("MemAvailable"))
        return 1024.0 * int(kilobytes)
    except (OSError, StopIteration, ValueError):
        pass
    try:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (OSError, ValueError, AttributeError):
        return math.inf
