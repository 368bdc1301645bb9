"""Random projections of θ: features of few dimensions that keep distances, up to a known error."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key, UInt32

from measureflow.core.pytrees import Parameters, dimension
from measureflow.core.showing import one_line
from measureflow.core.validation import require_count, typed_key


def _count(value: Any) -> int:
    return require_count("RandomProjection count", value, 1, "1021 errs by about 4% in squared distances.")


class RandomProjection(eqx.Module):
    """The features f_b(θ) = Σ_c ±θ_c over the coordinates c with c mod M = b, with random signs: M numbers,
    however many coordinates there are (a count sketch; Charikar, Chen and Farach-Colton, 2002).

    ‖f(θ) − f(θ′)‖² is ‖θ − θ′‖² on average over the signs, with a relative standard deviation of about √(2/M)
    where many coordinates differ. `kernel.on(mf.RandomProjection(key))` is a kernel of its own, of which
    everything is exact: particles are read once for their features, and the forces are M numbers each, where
    exact interactions read and write all of the coordinates. A Gaussian with independent coordinates becomes
    one, so that MMD² has its closed form.

    Parameters
    ----------
    key
        A JAX random key, which makes the signs.
    count
        M. Best without common divisors with the widths of layers, as a prime has none: the weights of a unit
        would share few numbers.
    """

    word: UInt32[Array, ""]
    count: int = eqx.field(static=True)

    def __init__(self, key: Key[Array, ""], count: int = 1021):
        self.word, self.count = jax.random.bits(typed_key(key), (), jnp.uint32), _count(count)

    def __repr__(self) -> str:
        return one_line(self)

    def __call__(self, theta: Parameters) -> Float[Array, " {self.count}"]:
        return self.summed(theta, signed=True)

    def summed(self, theta: Parameters, *, signed: bool) -> Float[Array, " {self.count}"]:
        """Σ_c θ_c over the coordinates of each number, with or without the signs."""
        if dimension(theta) < self.count:
            raise ValueError(
                f"RandomProjection would make count={self.count} numbers of {dimension(theta)} coordinates; "
                "use a smaller count, or the kernel itself, without a projection."
            )
        leaves, first, found = jax.tree.leaves(theta), 0, []
        for leaf in leaves:
            values = leaf.reshape(-1)
            if signed:
                values = values * self._signs(first, leaf.size).astype(leaf.dtype)
            before = first % self.count
            padded = jnp.pad(values, (before, -(before + leaf.size) % self.count))
            found.append(jnp.sum(padded.reshape(-1, self.count), axis=0))
            first += leaf.size
        dtype = jnp.result_type(*leaves)
        return functools.reduce(jnp.add, [part.astype(dtype) for part in found])

    def _signs(self, first: int, number: int) -> Float[Array, " number"]:
        """±1 for the coordinates from `first` on: arithmetic, which is fused into what uses it."""
        x = jnp.arange(number, dtype=jnp.uint32) + jnp.uint32(first)
        # A mix of 32 bits with little bias (C. Wellons, 2018), of the coordinate and the word.
        x = x * jnp.uint32(0x9E3779B1) ^ self.word
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            x = (x ^ (x >> shift)) * jnp.uint32(factor)
        return 1 - 2 * (x >> 31).astype(np.float32)
