"""Steps and records for a device that runs ahead of the host: short programs of fixed length, one after
another.

A GPU waits for the host after every turn of a loop whose length is data: as long as two steps of a small
network take. So here nothing has a length that is data: a record is a program, and so are ten steps, which
the host sends ahead and waits for once, at the end.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from measureflow.core.pytrees import as_matrix, like_rows

STEPS = 10
# Up to so many numbers, the particles of all leaves go from step to step as one matrix, which is moved by one
# kernel. Larger ones would be copied for their leaves.
_MOST_PACKED = 2**20


class Parts(NamedTuple):
    """What a run does to the whole of its arguments: `observe` looks at a carry, `step` moves it."""

    observe: Callable[[Any, Any], dict[str, Array]]
    step: Callable[[Any, Any], Any]


class _Programs(NamedTuple):
    empty: Callable[..., Any]
    record: Callable[..., Any]
    turn: Callable[..., Any]
    some: Callable[..., Any]


def sent_ahead(
    parts: Parts, arguments: Any, carry: Any, records: int, steps: int, length: int
) -> tuple[Any, dict[str, Array]]:
    """`records` times: record the carry, then take `steps` steps. The records are columns of this length.

    Parameters
    ----------
    parts
        Functions of (arguments, carry): the same ones for every call, so that they are compiled once.
    """
    arguments = jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, arguments)
    arrays, rest = eqx.partition(arguments, eqx.is_array)
    # Flat lists, which are sent many times, are sent without a word of Python about their structure.
    (leaves, arrays_as), (others, rest_as) = jax.tree.flatten(arrays), jax.tree.flatten(rest)
    moving, carry_as = jax.tree.flatten(carry)
    programs = _programs(parts, arrays_as, rest_as, tuple(others), carry_as, length)
    table = programs.empty(leaves, moving)
    turns, left = divmod(steps, STEPS)
    for _ in range(records):
        table = programs.record(leaves, moving, table)
        for _ in range(turns):
            moving = programs.turn(leaves, moving)
        if left:
            moving = programs.some(leaves, moving, left)
    return jax.tree.unflatten(carry_as, moving), table[1]


@functools.lru_cache(maxsize=64)
def _programs(
    parts: Parts, arrays_as: Any, rest_as: Any, others: tuple, carry_as: Any, length: int
) -> _Programs:
    def arguments(leaves: list[Array]) -> Any:
        rest = jax.tree.unflatten(rest_as, others)
        return eqx.combine(jax.tree.unflatten(arrays_as, leaves), rest)

    def observe(leaves: list[Array], moving: list[Array]) -> dict[str, Array]:
        return parts.observe(arguments(leaves), jax.tree.unflatten(carry_as, moving))

    def step(leaves: list[Array], moving: list[Array]) -> list[Array]:
        return jax.tree.leaves(parts.step(arguments(leaves), jax.tree.unflatten(carry_as, moving)))

    def empty(leaves: list[Array], moving: list[Array]) -> tuple[Array, dict[str, Array]]:
        kinds = jax.eval_shape(observe, leaves, moving)
        return jnp.zeros((), jnp.int32), {k: jnp.zeros((length,), kind.dtype) for k, kind in kinds.items()}

    def record(leaves: list[Array], moving: list[Array], table: tuple) -> tuple:
        slot, columns = table
        found = observe(leaves, moving)
        return slot + 1, {name: column.at[slot].set(found[name]) for name, column in columns.items()}

    def turn(leaves: list[Array], moving: list[Array]) -> list[Array]:
        pack, unpack = _packing(moving)

        def body(_: Array, packed: list[Array]) -> list[Array]:
            return pack(step(leaves, unpack(packed)))

        return unpack(jax.lax.fori_loop(0, STEPS, body, pack(moving)))

    def some(leaves: list[Array], moving: list[Array], count: Array) -> list[Array]:
        return jax.lax.fori_loop(0, count, lambda _, now: step(leaves, now), moving)

    return _Programs(*map(jax.jit, (empty, record, turn, some)))


def _packing(moving: list[Array]) -> tuple[Callable, Callable]:
    """Functions that put the leaves of the most common kind, by type and number of rows, into one matrix, and
    take it apart again; that change nothing where this is not worth it."""
    kinds = [(leaf.dtype, leaf.shape[0]) if _can_be_packed(leaf) else None for leaf in moving]
    known = [kind for kind in kinds if kind is not None]
    most = max(known, key=known.count, default=None)
    inside = [most is not None and kind == most for kind in kinds]
    packed = [leaf for leaf, is_in in zip(moving, inside, strict=True) if is_in]
    if len(packed) < 2 or sum(leaf.size for leaf in packed) > _MOST_PACKED:
        return list, list

    def pack(leaves: list[Array]) -> list[Array]:
        apart = [leaf for leaf, is_in in zip(leaves, inside, strict=True) if not is_in]
        return [as_matrix([leaf for leaf, is_in in zip(leaves, inside, strict=True) if is_in]), *apart]

    def unpack(leaves: list[Array]) -> list[Array]:
        rows, apart = iter(like_rows(leaves[0], packed)), iter(leaves[1:])
        return [next(rows if is_in else apart) for is_in in inside]

    return pack, unpack


def _can_be_packed(leaf: Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.ndim > 0 and leaf.size > 0
