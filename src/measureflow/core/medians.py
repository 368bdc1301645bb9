"""The median of distances without sorting them: numbers ≥ 0 are in the order of their bits."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

_INTEGERS = {32: jnp.int32, 64: jnp.int64}


def median_of_pairs(matrix: Float[Array, "n n"]) -> Float[Array, ""]:
    """The median over i < j of a symmetric matrix whose entries are ≥ 0 and whose diagonal is 0, n ≥ 2.

    Of the n² entries sorted, the diagonal comes first and every pair stands twice. The one in the middle is
    found bit by bit: 32 passes over the matrix, where sorting it would take ten times as long.
    """
    n = matrix.shape[0]
    pairs = n * (n - 1) // 2
    lower, upper = (n + 2 * index for index in ((pairs - 1) // 2, pairs // 2))
    below = _order_statistic(matrix, lower)
    enough = jnp.sum(matrix <= below) > upper
    above = jnp.where(enough, below, jnp.min(jnp.where(matrix > below, matrix, jnp.inf)))
    return 0.5 * (below + above)


def _order_statistic(values: Float[Array, "n n"], index: int) -> Float[Array, ""]:
    """The entry of this index, from 0, in increasing order."""
    width = jnp.finfo(values.dtype).bits
    integer = _INTEGERS[width]
    bits = jax.lax.bitcast_convert_type(values, integer)

    def halved(_: Any, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        middle = low + (high - low) // 2
        reached = jnp.sum(bits <= middle) > index
        return jnp.where(reached, low, middle + 1), jnp.where(reached, middle, high)

    most = jnp.asarray(jnp.iinfo(integer).max, integer)
    low, _ = jax.lax.fori_loop(0, width, halved, (jnp.zeros((), integer), most))
    return jax.lax.bitcast_convert_type(low, values.dtype)
