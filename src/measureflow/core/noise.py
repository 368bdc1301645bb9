"""Standard normal particles, by a counter: particle i's coordinate c of J is a function of (key, i, c, J).

So noise does not depend on how many particles there are, how they are cut into leaves of the same order, or
on which device they lie; and it is arithmetic on indices, where `jax.random.normal` on a CPU is a loop over
arrays of its own.

Threefry makes two words at a time, and each is a coordinate: the first words are those of the first half of
θ, the second words those of the other half. For large θ both halves are made at once, which is half of the
arithmetic, and that is most of what noise costs. Elsewhere both words are made for every coordinate, inside
of whatever uses them: for small θ that costs less than a loop, or a kernel of its own. The numbers are the
same.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key, UInt32

from measureflow.core.pytrees import Parameters, Particles

#: A key, or keys, of Threefry: its two words.
Words: TypeAlias = tuple[UInt32[Array, "..."], UInt32[Array, "..."]]
#: Of the leaves of one particle.
Shapes: TypeAlias = tuple[tuple[int, ...], ...]

_ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
_ROUNDS = 20
# Noise of fewer coordinates costs less than a loop of its own; noise of fewer numbers, less than a kernel.
_FEWEST_IN_HALVES, _FEWEST_IN_A_KERNEL = 256, 2**25


def standard_normal(key: Key[Array, ""], n: int, like: Parameters) -> Particles:
    """n draws of Z ~ N(0, I), each a pytree like θ."""
    words = _words_of_key(key) if _is_threefry(key) else _bits(key)
    return mean_normal_of_words(words[None], n, like)


def words_of_steps(key: Key[Array, ""], steps: Int[Array, " k"]) -> UInt32[Array, "k 2"]:
    """For each step, the words that make the noise of `jax.random.fold_in(key, step)`.

    JAX folds and draws by a program of its own each, a kernel of a GPU or a loop of a CPU, which a small step
    would wait for longer than for its draws; the same arithmetic on a few numbers is one kernel.
    """
    if not _is_threefry(key):
        # One by one: under vmap other generators draw other numbers.
        return jnp.stack([_bits(jax.random.fold_in(key, steps[k])) for k in range(len(steps))])
    return _folded_words(key, steps.astype(jnp.uint32))


def mean_normal_of_words(words: UInt32[Array, "k 2"], n: int, like: Parameters) -> Particles:
    """(1/k) Σ Z, the mean of the draws that each two words make: n of Z ~ N(0, I), each a pytree like θ."""
    leaves, structure = jax.tree.flatten(like)
    shapes = tuple(leaf.shape for leaf in leaves)
    # Of a double, both words are digits.
    double = any(leaf.dtype == jnp.float64 for leaf in leaves)
    normal = (_doubles if double else _singles)(words, n, shapes)
    drawn = [one.astype(leaf.dtype) for one, leaf in zip(normal, leaves, strict=True)]
    return jax.tree.unflatten(structure, drawn)


def _is_threefry(key: Key[Array, ""]) -> bool:
    """Whether it is of JAX's default generator, used as it is by default."""
    settings: Any = jax.config
    return str(jax.random.key_impl(key)) == "threefry2x32" and bool(settings.jax_threefry_partitionable)


def _halves(key: Key[Array, ""]) -> Words:
    data = jax.random.key_data(key)
    return data[0], data[1]


@jax.jit
def _words_of_key(key: Key[Array, ""]) -> UInt32[Array, "2"]:
    return _barred(_words(_halves(key)))


@jax.jit
def _folded_words(key: Key[Array, ""], counters: UInt32[Array, " k"]) -> UInt32[Array, "k 2"]:
    return _barred(_words(threefry(_halves(key), jnp.zeros_like(counters), counters)))


def _bits(key: Key[Array, ""]) -> UInt32[Array, "2"]:
    return jax.random.bits(key, (2,), jnp.uint32)


def _words(keys: Words) -> UInt32[Array, "... 2"]:
    """The first two words of each key, as `jax.random.bits` has them: the counters 0 and 1."""
    counters = jnp.broadcast_to(jnp.arange(2, dtype=jnp.uint32), (*keys[0].shape, 2))
    high, low = threefry((keys[0][..., None], keys[1][..., None]), jnp.zeros_like(counters), counters)
    return high ^ low


def _barred(words: UInt32[Array, "... 2"]) -> UInt32[Array, "... 2"]:
    """Made once: a compiler would make them again for every coordinate that they are used for."""
    return jax.lax.optimization_barrier(words)


# Each is one program, also where nothing else is compiled: its operations one by one would be a hundred.


@functools.partial(jax.jit, static_argnums=(1, 2))
def _singles(words: UInt32[Array, "k 2"], n: int, shapes: Shapes) -> list[Float[Array, "n ..."]]:
    """For leaves of these shapes."""
    size, on_cpu = sum(map(math.prod, shapes)), jax.default_backend() == "cpu"
    if on_cpu and size >= _FEWEST_IN_HALVES:
        return _mean_over_words(_half_by_half, words, n, shapes)
    if not on_cpu and n * size >= _FEWEST_IN_A_KERNEL:
        return _in_a_kernel(words, n, shapes)
    return _mean_over_words(_leaf_by_leaf, words, n, shapes)


def _mean_over_words(
    draws: Callable[[Words, int, Shapes], list[Array]],
    words: UInt32[Array, "k 2"],
    n: int,
    shapes: Shapes,
) -> list[Float[Array, "n ..."]]:
    drawn = [draws((two[0], two[1]), n, shapes) for two in words]
    return [_mean(of_leaf) for of_leaf in zip(*drawn, strict=True)]


def _mean(drawn: Sequence[Array]) -> Array:
    return functools.reduce(jnp.add, drawn) / len(drawn)


def _in_a_kernel(words: UInt32[Array, "k 2"], n: int, shapes: Shapes) -> list[Float[Array, "n ..."]]:
    """Both halves of θ, each an array, and their mean over k: written to memory once, and then cut into
    leaves."""
    half = _half(sum(map(math.prod, shapes)))
    particle, coordinate = (jax.lax.broadcasted_iota(jnp.uint32, (n, half), axis) for axis in (0, 1))
    drawn = [threefry((two[0], two[1]), particle, coordinate) for two in words]
    halves = [[_normal(_from_32_bits(bits)) for bits in of_half] for of_half in zip(*drawn, strict=True)]
    first_half, second_half = jax.lax.optimization_barrier([_mean(of_half) for of_half in halves])
    found = []
    for first, shape in zip(_firsts(shapes), shapes, strict=True):
        last = first + math.prod(shape)
        parts = [first_half[:, first:last], second_half[:, max(first - half, 0) : max(last - half, 0)]]
        some = [part for part in parts if part.shape[1]] or parts[:1]
        found.append(jnp.concatenate(some, axis=1).reshape(n, *shape))
    return found


def _half_by_half(words: Words, n: int, shapes: Shapes) -> list[Float[Array, "n ..."]]:
    """All of θ, then cut into leaves."""
    half = _half(sum(map(math.prod, shapes)))
    particle, coordinate = (jax.lax.broadcasted_iota(jnp.uint32, (n, half), axis) for axis in (0, 1))
    # Both made once: a compiler would make them again in every leaf, and wherever a leaf is used.
    bits = jax.lax.optimization_barrier(jnp.concatenate(threefry(words, particle, coordinate), axis=1))
    normal = jax.lax.optimization_barrier(_normal(_from_32_bits(bits)))
    cuts = zip(_firsts(shapes), shapes, strict=True)
    return [normal[:, first : first + math.prod(shape)].reshape(n, *shape) for first, shape in cuts]


def _leaf_by_leaf(words: Words, n: int, shapes: Shapes) -> list[Float[Array, "n ..."]]:
    """The same numbers, each made where it is used."""
    half = _half(sum(map(math.prod, shapes)))
    found = []
    for first, shape in zip(_firsts(shapes), shapes, strict=True):
        particle, coordinate = _counters(n, first, shape)
        is_first = coordinate < half
        high, low = threefry(words, particle, jnp.where(is_first, coordinate, coordinate - np.uint32(half)))
        found.append(_normal(_from_32_bits(jnp.where(is_first, high, low))))
    return found


@functools.partial(jax.jit, static_argnums=(1, 2))
def _doubles(words: UInt32[Array, "k 2"], n: int, shapes: Shapes) -> list[Float[Array, "n ..."]]:
    """For leaves of these shapes, some of which have double precision."""
    return _mean_over_words(_digit_by_digit, words, n, shapes)


def _digit_by_digit(words: Words, n: int, shapes: Shapes) -> list[Float[Array, "n ..."]]:
    counters = [_counters(n, first, shape) for first, shape in zip(_firsts(shapes), shapes, strict=True)]
    return [_normal(_from_64_bits(*threefry(words, *of_leaf))) for of_leaf in counters]


def _normal(uniform: Float[Array, "..."]) -> Float[Array, "..."]:
    """From (−1, 1), by the inverse of the distribution function."""
    return math.sqrt(2) * jax.lax.erf_inv(uniform)


def _half(size: int) -> int:
    """How many coordinates have the first words."""
    return -(-size // 2)


def _firsts(shapes: Shapes) -> list[int]:
    """The coordinates that leaves begin with."""
    return list(itertools.accumulate((math.prod(shape) for shape in shapes[:-1]), initial=0))


def _counters(n: int, first: int, shape: tuple[int, ...]) -> Words:
    """Of every number of a leaf from coordinate `first` on: its particle, and its coordinate."""
    particle = jax.lax.broadcasted_iota(jnp.uint32, (n, *shape), 0)
    coordinate = np.uint32(first) + jnp.arange(math.prod(shape), dtype=jnp.uint32).reshape(1, *shape)
    return particle, jnp.broadcast_to(coordinate, (n, *shape))


def threefry(
    key: Words, high: UInt32[Array, "..."], low: UInt32[Array, "..."]
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
