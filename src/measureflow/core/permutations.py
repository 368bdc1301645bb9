"""Random permutations, position by position: no table of all of them is ever made."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Key, UInt32

# Of swap-or-not: a position that no round moves has probability 2⁻³².
_ROUNDS = 32


def permuted(positions: Int[Array, " b"], n: int | Int[Array, ""], key: Key[Array, ""]) -> Int[Array, " b"]:
    """Where a random permutation of 0, …, n − 1 sends some positions, without the other n − b.

    Swap-or-not (Hoang, Morris and Rogaway, 2012): in every round each x has the partner pivot − x mod n, and
    a hash of the pair decides whether the two change places. A table of the permutation would need sorting
    once an epoch, in a branch of the loop, at which a GPU waits for its host.
    """
    if isinstance(n, int) and n == 1:
        # XLA cannot compile a remainder by a constant 1.
        return positions
    n = jnp.asarray(n).astype(jnp.uint32)
    pivots, salts = jax.random.bits(key, (2, _ROUNDS), jnp.uint32)
    x, pivots = positions.astype(jnp.uint32), pivots % n
    for pivot, salt in zip(pivots, salts, strict=True):
        partner = pivot - x + jnp.where(x > pivot, n, jnp.uint32(0))
        swap = _hash(jnp.maximum(x, partner) ^ salt) & 1
        x = jnp.where(swap == 1, partner, x)
    return x.astype(positions.dtype)


def _hash(x: UInt32[Array, " b"]) -> UInt32[Array, " b"]:
    """An avalanche of 32 bits (Wellons, 2018: the constants with the least bias found)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
