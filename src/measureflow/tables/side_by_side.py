"""Many ensembles at the same time: those of some tables, each with some trials.

On a CPU every ensemble is a call of its own, and JAX runs calls on all cores at once: the operations of one
step are too small to be shared among cores. All ensembles of one shape are then one program, which choosing
and final training have in common. Elsewhere they are one call.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree


def side_by_side(
    method: Any, of_ensembles: PyTree, of_tables: PyTree, shared: PyTree, *, at_once: bool
) -> Any:
    """`method(*of_ensemble, *of_table, *shared)` for every ensemble (table, trial, ...) and its table, as
    (table, trial, ...). Tables are (table, ...), or `apart` where ensembles are not run at once."""
    if at_once:
        return _together(method, of_ensembles, of_tables, shared)
    places = jax.tree.leaves(of_ensembles)[0].shape[:2]
    tables = of_tables or [()] * places[0]
    found = [
        _alone(method, _at(of_ensembles, place), tables[place[0]], shared) for place in np.ndindex(*places)
    ]
    return jax.tree.map(lambda *leaves: _joined(leaves, places), *found)


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
