"""Matrix products to the full precision of their arguments, by what each platform does best.

On GPUs plain products of float32 are made of TF32, which has three digits, and exact ones leave the tensor
cores idle; three products of TF32 are as precise, and take no longer than reading the arguments.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from measureflow.core import platforms

_EXACT = jax.lax.Precision.HIGHEST
_THREEFOLD = jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3
# How much of a long sum one part of a GPU takes on: few rows alone would leave most of it idle.
_PART = 256


def matmul(x: Float[Array, "n k"], y: Float[Array, "k m"]) -> Float[Array, "n m"]:
    """xy."""
    if not _on_tensor_cores(x, y):
        return _matmul(x, y, _EXACT)
    return jax.lax.platform_dependent(
        x,
        y,
        cuda=functools.partial(_matmul, precision=_THREEFOLD),
        default=functools.partial(_matmul, precision=_EXACT),
    )


def row_products(x: Float[Array, "n k"], y: Float[Array, "m k"]) -> Float[Array, "n m"]:
    """⟨xᵢ, yⱼ⟩."""
    if not _on_tensor_cores(x, y):
        return _matmul(x, y.T, _EXACT)
    return jax.lax.platform_dependent(
        x, y, cuda=_in_parts, default=lambda x, y: _matmul(x, y.T, precision=_EXACT)
    )


def _matmul(x: Array, y: Array, precision: jax.lax.PrecisionLike) -> Array:
    return jnp.matmul(x, y, precision=precision)


def _in_parts(x: Array, y: Array) -> Array:
    """Σₚ xₚ yₚᵀ over parts p of the long axis."""
    length = x.shape[1]
    parts = max((count for count in range(1, length // _PART + 1) if length % count == 0), default=1)
    cut_x, cut_y = (a.reshape(a.shape[0], parts, -1) for a in (x, y))
    contracted_and_batch = (((2,), (2,)), ((1,), (1,)))
    return jnp.sum(jax.lax.dot_general(cut_x, cut_y, contracted_and_batch, precision=_THREEFOLD), axis=0)


def _on_tensor_cores(x: Array, y: Array) -> bool:
    return x.dtype == y.dtype == jnp.float32 and platforms.compute_capability() >= platforms.AMPERE
