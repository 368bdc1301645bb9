"""Standard normal particles, by a counter: particle i's coordinate c is a function of (key, i, c) alone.

So noise does not depend on how many particles there are, how they are cut into leaves of the same order, or
on which device they lie; and it is arithmetic on indices, which the compiler fuses into whatever uses it,
where `jax.random.normal` on a CPU is a loop over arrays of its own.
"""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key, UInt32

from measureflow.core.pytrees import Parameters, Particles

_ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
_ROUNDS = 20


def standard_normal(key: Key[Array, ""], n: int, like: Parameters) -> Particles:
    """n draws of Z ~ N(0, I), each a pytree like θ."""
    leaves, structure = jax.tree.flatten(like)
    words = jax.random.bits(key, (2,), jnp.uint32)
    firsts = itertools.accumulate((leaf.size for leaf in leaves[:-1]), initial=0)
    drawn = [_on_leaf(words, n, leaf, first) for leaf, first in zip(leaves, firsts, strict=True)]
    return jax.tree.unflatten(structure, drawn)


def _on_leaf(words: UInt32[Array, "2"], n: int, leaf: Array, first: int) -> Float[Array, "n ..."]:
    shape = (n, *leaf.shape)
    particle = jax.lax.broadcasted_iota(jnp.uint32, shape, 0)
    coordinate = jnp.uint32(first) + jnp.arange(leaf.size, dtype=jnp.uint32).reshape(1, *leaf.shape)
    high, low = threefry(words, particle, jnp.broadcast_to(coordinate, shape))
    double = leaf.dtype == jnp.float64
    uniform = _from_64_bits(high, low) if double else _from_32_bits(high)
    # From (−1, 1), by the inverse of the distribution function.
    return (math.sqrt(2) * jax.lax.erf_inv(uniform)).astype(leaf.dtype)


def threefry(
    key: UInt32[Array, "2"], high: UInt32[Array, "..."], low: UInt32[Array, "..."]
) -> tuple[UInt32[Array, "..."], UInt32[Array, "..."]]:
    """Threefry-2×32 of counters (Salmon et al., 2011), JAX's own generator: two random words each."""
    keys = (key[0], key[1], key[0] ^ key[1] ^ jnp.uint32(0x1BD11BDA))
    high, low = high + keys[0], low + keys[1]
    for round_ in range(_ROUNDS):
        rotation = _ROTATIONS[round_ % 8]
        high = high + low
        low = ((low << rotation) | (low >> (32 - rotation))) ^ high
        if round_ % 4 == 3:
            injection = round_ // 4 + 1
            high = high + keys[injection % 3]
            low = low + keys[(injection + 1) % 3] + jnp.uint32(injection)
    return high, low


def _from_32_bits(bits: UInt32[Array, "..."]) -> Float[Array, "..."]:
    """Uniform on the middles of 2²³ equal parts of (−1, 1): symmetric, and never an end."""
    in_1_2 = jax.lax.bitcast_convert_type((bits >> 9) | jnp.uint32(0x3F800000), jnp.float32)
    return 2 * (in_1_2 - np.float32(1.5)) + np.float32(2**-23)


def _from_64_bits(high: UInt32[Array, "..."], low: UInt32[Array, "..."]) -> Float[Array, "..."]:
    bits = (high.astype(jnp.uint64) << 32) | low.astype(jnp.uint64)
    in_1_2 = jax.lax.bitcast_convert_type((bits >> 12) | jnp.uint64(0x3FF0000000000000), jnp.float64)
    return 2 * (in_1_2 - np.float64(1.5)) + np.float64(2**-52)
