"""What kernels are written with: 128 lanes, that share arrays of one axis evenly."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as mosaic
from jaxtyping import Array, Float

LANES = 128
#: Exponentials by the hardware's own instruction; and layouts as they are written here, since inferring them
#: takes time quadratic in the length of a program.
PARAMETERS = mosaic.CompilerParams(approx_math=True, lowering_semantics=mosaic.LoweringSemantics.Lane)
# JAX 0.10 wants an index beside the reference, later ones do not.
_INDEX = ((),) if inspect.signature(mosaic.load).parameters["idx"].default is inspect.Parameter.empty else ()


def load(reference: Any) -> Float[Array, " k"]:
    """From memory to registers, k/128 to every lane."""
    return mosaic.load(reference, *_INDEX, layout=_layout(reference.shape[-1]), optimized=False)


def zeros(length: int) -> Float[Array, " k"]:
    """0 in registers."""
    return mosaic.layout_cast(jnp.zeros(length, jnp.float32), _layout(length))


def added(x: list[Array], y: list[Array]) -> list[Array]:
    """The sums of two lists, entry by entry."""
    return [a + b for a, b in zip(x, y, strict=True)]


def filled_up(matrix: Float[Array, "n k"], multiple: int) -> Float[Array, "n l"]:
    """With columns of zeros, until their number is a multiple."""
    return jnp.pad(matrix, ((0, 0), (0, -matrix.shape[1] % multiple)))


def _layout(length: int) -> Any:
    return mosaic.Layout.WG_STRIDED((length,), length // LANES)


def on_mesh_as(x: Array, like: Array) -> Array:
    """x, what a kernel made of `like`: inside `shard_map` every device has its own, which kernels do not
    say."""
    return jax.lax.pcast(x, tuple(jax.typeof(like).manual_axis_type.varying), to="varying")
