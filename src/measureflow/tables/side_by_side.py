"""Many ensembles at the same time: those of some tables, each with some trials.

On a CPU every ensemble is a call of its own, and calls run in as many threads as there are cores: the
operations of one step are too small to be shared among cores. All ensembles of one shape are then one
program, which choosing and final training have in common. Elsewhere they are one call.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree


class SideBySide:
    """`self(method, of_ensembles, of_tables, shared)` is `method(*of_ensemble, *of_table, *shared)` for every
    ensemble (table, trial, ...) and its table, as (table, trial, ...). Tables are (table, ...), or `apart`
    where ensembles are not run `at_once`."""

    def __init__(self, *, at_once: bool):
        self.at_once = at_once
        # Methods whose programs are compiled.
        self.compiled: set[str] = set()

    def __call__(self, method: Any, of_ensembles: PyTree, of_tables: PyTree = (), shared: PyTree = ()) -> Any:
        if self.at_once:
            return _together(method, of_ensembles, of_tables, shared)
        places = jax.tree.leaves(of_ensembles)[0].shape[:2]
        tables = of_tables or [()] * places[0]

        def call(place: tuple[int, ...]) -> Any:
            found = _alone(method, _at(of_ensembles, place), tables[place[0]], shared)
            return jax.block_until_ready(found)

        rest = list(np.ndindex(*places))
        found = []
        if method.__name__ not in self.compiled:
            # By itself: threads would all compile it.
            found, rest = [call(rest[0])], rest[1:]
            self.compiled.add(method.__name__)
        found += _in_threads(call, rest)
        return jax.tree.map(lambda *leaves: _joined(leaves, places), *found)


def _in_threads(call: Callable[[Any], Any], places: list[Any]) -> list[Any]:
    """One after the other where JAX has settings that hold in this thread alone, as in
    `with jax.enable_x64():`."""
    with ThreadPoolExecutor(_cores()) as pool:
        if pool.submit(lambda: jax.config.values).result() == jax.config.values:
            return list(pool.map(call, places))
    return [call(place) for place in places]


def _cores() -> int:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def apart(of_tables: PyTree) -> list[PyTree]:
    """(table, ...) as one of each, once for all calls."""
    return [jax.device_put(_at(of_tables, (table,))) for table in range(len(jax.tree.leaves(of_tables)[0]))]


@eqx.filter_jit
def _together(method: Any, of_ensembles: PyTree, of_tables: PyTree, shared: PyTree) -> Any:
    def one(of_ensemble: PyTree, of_table: PyTree) -> Any:
        return method(*of_ensemble, *of_table, *shared)

    return jax.vmap(jax.vmap(one, (0, None)))(of_ensembles, of_tables)


@eqx.filter_jit
def _alone(method: Any, of_ensemble: PyTree, of_table: PyTree, shared: PyTree) -> Any:
    return method(*of_ensemble, *of_table, *shared)


def _at(tree: PyTree, place: tuple[int, ...]) -> PyTree:
    """On a CPU NumPy sees the numbers where they lie: that needs no program for each place."""

    def one(leaf: Array) -> Any:
        if not _is_key(leaf):
            return np.asarray(leaf)[place]
        words = np.asarray(jax.random.key_data(leaf))[place]
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(leaf))

    return jax.tree.map(one, tree)


def _joined(leaves: tuple[Array, ...], places: tuple[int, int]) -> Array:
    shape = (*places, *leaves[0].shape)
    if _is_key(leaves[0]):
        return jnp.stack(leaves).reshape(shape)
    return jax.device_put(np.stack([np.asarray(leaf) for leaf in leaves]).reshape(shape))


def _is_key(leaf: Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
