"""Schedules as arrays, so that a new schedule is new data and not a new program."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

# Values are computed in blocks that always start at multiples of this, so that the value of a step
# is the same, to the bit, wherever a table starts.
_BLOCK = 1024


class Tabulated(eqx.Module):
    """The values of a schedule on steps first, …, first + used − 1, padded to a fixed length."""

    values: Float[Array, " length"]
    first: Int[Array, ""]

    def __init__(self, schedule: Callable[[Any], Any], first: int, used: int, length: int):
        blocks = range(first // _BLOCK, (first + max(used, 1) - 1) // _BLOCK + 1)
        values = np.concatenate([_block(schedule, block) for block in blocks])
        start = first - blocks[0] * _BLOCK
        values = values[start : start + max(used, 1)]
        bad = ~(np.isfinite(values) & (values >= 0))
        if np.any(bad):
            raise ValueError(
                f"step_size must be ≥ 0 and finite, got {values[bad][0]} from the schedule at step "
                f"{first + int(np.argmax(bad))}; check the schedule's length and end value."
            )
        self.values = jnp.asarray(np.pad(values, (0, length - len(values)), mode="edge"))
        self.first = jnp.asarray(first, jnp.int32)

    def __call__(self, step: Int[Array, ""]) -> Float[Array, ""]:
        return self.values[step - self.first]


def _block(schedule: Callable[[Any], Any], block: int) -> np.ndarray:
    steps = jnp.arange(block * _BLOCK, (block + 1) * _BLOCK)
    dtype = jnp.result_type(float)
    return np.asarray(jax.vmap(lambda step: jnp.asarray(schedule(step), dtype))(steps))


class CosineDecay(eqx.Module):
    """η ½(1 + cos(πt/T)) for t ≤ T, then 0 (Loshchilov and Hutter, 2017). η and T are data: other ones, and
    different ones side by side, are the same program. Without a step size nothing moves, so runs of
    different lengths can be one loop."""

    peak: Float[Array, ""]
    steps: Float[Array, ""]

    def __call__(self, step: Int[Array, ""]) -> Float[Array, ""]:
        share = jnp.minimum(step.astype(self.steps.dtype) / self.steps, 1)
        return self.peak * 0.5 * (1 + jnp.cos(jnp.pi * share))
