"""PyTorch's operations on the shapes of tensors as functions of JAX; and arrays made of nothing."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from measureflow.networks.torch_operations import axes, kind, operation


@operation("view.default", "reshape.default", "_unsafe_view.default")
def reshape(x: Array, size: Any = None, shape: Any = None) -> Array:
    """Other axes, the same numbers in order."""
    return x.reshape(tuple(size if shape is None else shape))


@operation("flatten.using_ints")
def flatten(x: Array, start_dim: int, end_dim: int) -> Array:
    """Several axes as one."""
    first, last = start_dim % x.ndim, end_dim % x.ndim
    return x.reshape((*x.shape[:first], -1, *x.shape[last + 1 :]))


@operation("unflatten.int")
def unflatten(x: Array, dim: int, sizes: Sequence[int]) -> Array:
    """One axis as several."""
    at = dim % x.ndim
    return x.reshape((*x.shape[:at], *sizes, *x.shape[at + 1 :]))


@operation("permute.default")
def permute(x: Array, dims: Sequence[int]) -> Array:
    """Axes in another order."""
    return jnp.transpose(x, [i % x.ndim for i in dims])


@operation("transpose.int")
def transpose(x: Array, dim0: int, dim1: int) -> Array:
    """Two axes changed for each other."""
    return jnp.swapaxes(x, dim0, dim1)


@operation("movedim.int", "movedim.intlist")
def move_axes(x: Array, source: Any, destination: Any) -> Array:
    """Axes moved elsewhere."""
    return jnp.moveaxis(x, source, destination)


@operation("squeeze.default", "squeeze.dim", "squeeze.dims")
def squeeze(x: Array, dim: Any = None) -> Array:
    """Without axes of length 1; named ones of another length stay."""
    return jnp.squeeze(x, tuple(i for i in axes(dim, x.ndim) if x.shape[i] == 1))


@operation("unsqueeze.default")
def unsqueeze(x: Array, dim: int) -> Array:
    """With an axis of length 1 more."""
    return jnp.expand_dims(x, dim)


@operation("expand.default")
def expand(x: Array, size: Sequence[int]) -> Array:
    """Repeated along axes of length 1; −1 is the length that there is."""
    shape = (1,) * (len(size) - x.ndim) + x.shape
    return jnp.broadcast_to(
        x.reshape(shape), [old if new == -1 else new for old, new in zip(shape, size, strict=True)]
    )


@operation("expand_as.default")
def expand_as(x: Array, other: Array) -> Array:
    """With the shape of another."""
    return expand(x, other.shape)


@operation("repeat.default")
def repeat(x: Array, repeats: Sequence[int]) -> Array:
    """One after the other, along every axis."""
    return jnp.tile(x.reshape((1,) * (len(repeats) - x.ndim) + x.shape), tuple(repeats))


@operation("cat.default", "concat.default")
def concatenate(tensors: Sequence[Array], dim: int) -> Array:
    """Joined along an axis."""
    common = functools.reduce(jnp.promote_types, [x.dtype for x in tensors])
    return jnp.concatenate([x.astype(common) for x in tensors], dim)


@operation("stack.default")
def stack(tensors: Sequence[Array], dim: int) -> Array:
    """Joined along an axis of their own."""
    return jnp.stack(list(tensors), dim)


@operation("split.Tensor", "split.sizes", "split_with_sizes.default")
def split(x: Array, split_size: Any = None, split_sizes: Any = None, dim: int = 0) -> list[Array]:
    """Parts of these lengths."""
    length = x.shape[dim]
    lengths = split_size if split_sizes is None else split_sizes
    if isinstance(lengths, int):
        return jnp.split(x, list(range(lengths, length, lengths)), dim)
    return jnp.split(x, np.cumsum(lengths)[:-1].tolist(), dim)


@operation("chunk.default")
def chunk(x: Array, chunks: int, dim: int) -> list[Array]:
    """So many parts, the last one shorter where it must be."""
    return split(x, -(-x.shape[dim] // chunks), dim=dim)


@operation("unbind.int")
def unbind(x: Array, dim: int) -> list[Array]:
    """All parts along an axis, without it."""
    return [jnp.take(x, i, dim) for i in range(x.shape[dim])]


@operation("select.int")
def select(x: Array, dim: int, index: int) -> Array:
    """One part along an axis, without it."""
    return jax.lax.index_in_dim(x, index, dim % x.ndim, keepdims=False)


@operation("slice.Tensor")
def part(x: Array, dim: int, start: int | None, end: int | None, step: int) -> Array:
    """Part of an axis."""
    return x[_along(x, dim, start, end, step)]


@operation("narrow.default")
def narrow(x: Array, dim: int, start: int, length: int) -> Array:
    """So many places of an axis."""
    return x[_along(x, dim, start, start + length, 1)]


def _along(x: Array, dim: int, start: int | None, end: int | None, step: int) -> tuple[slice, ...]:
    return (slice(None),) * (dim % x.ndim) + (slice(start, end, step),)


@operation("select_scatter.default")
def select_scatter(x: Array, src: Array, dim: int, index: int) -> Array:
    """Another array in the place of a part."""
    place = (slice(None),) * (dim % x.ndim) + (index,)
    return x.at[place].set(src.astype(x.dtype))


@operation("slice_scatter.default")
def slice_scatter(x: Array, src: Array, dim: int, start: Any, end: Any, step: int) -> Array:
    """Another array in the place of part of an axis."""
    return x.at[_along(x, dim, start, end, step)].set(src.astype(x.dtype))


@operation("copy.default")
def copy(x: Array, src: Array) -> Array:
    """Another array, with this one's shape and dtype."""
    return expand(src.astype(x.dtype), x.shape)


@operation("fill.Scalar", "fill.Tensor")
def fill(x: Array, value: Any) -> Array:
    """One number everywhere."""
    return jnp.full(x.shape, value, x.dtype)


@operation("index_select.default")
def index_select(x: Array, dim: int, index: Array) -> Array:
    """Chosen places of an axis; NaN where there is none."""
    return jnp.take(x, _from_the_start(index, x.shape[dim], False), dim, mode="fill")


@operation("index.Tensor")
def index_by(x: Array, indices: Sequence[Any]) -> Array:
    """Chosen places of several axes; NaN where there is none."""
    if any(i is not None and i.dtype == bool for i in indices):
        raise NotImplementedError("masks that choose, as in x[x > 0], have no shape that is known beforehand")
    places = [
        slice(None) if i is None else _from_the_start(i, x.shape[axis], True)
        for axis, i in enumerate(indices)
    ]
    return x.at[tuple(places)].get(mode="fill")


def _from_the_start(index: Array, length: int, from_the_end: bool) -> Array:
    """Indices from the start; those beyond either end are beyond the last, where "fill" finds them."""
    counted = jnp.where(index < 0, index + length, index) if from_the_end else index
    return jnp.where(counted < 0, length, counted)


@operation("roll.default")
def roll(x: Array, shifts: Sequence[int], dims: Sequence[int]) -> Array:
    """Moved round, along axes; of none named, along all in order."""
    return jnp.roll(x, tuple(shifts), tuple(dims)) if dims else jnp.roll(x, shifts[0])


@operation("flip.default")
def flip(x: Array, dims: Sequence[int]) -> Array:
    """From last to first."""
    return jnp.flip(x, tuple(dims))


_MODES = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}


@operation("pad.default", "constant_pad_nd.default")
def pad(x: Array, pad: Sequence[int], mode: str = "constant", value: Any = 0) -> Array:
    """More at both ends of the last axes: pairs, the last axis first; negative ones cut off."""
    pairs = [(pad[2 * i], pad[2 * i + 1]) for i in range(len(pad) // 2)][::-1]
    widths = [(0, 0)] * (x.ndim - len(pairs)) + pairs
    if mode == "constant":
        return jax.lax.pad(x, jnp.asarray(value or 0, x.dtype), [(*pair, 0) for pair in widths])
    return jnp.pad(x, widths, mode=_MODES[mode])


# --- arrays made of nothing


@operation("arange.default", "arange.start", "arange.start_step")
def arange(end: Any, start: Any = 0, step: Any = 1, dtype: str | None = None) -> Array:
    """start, start + step, …"""
    whole = all(isinstance(value, int) for value in (start, end, step))
    return jnp.arange(start, end, step, kind(dtype, jnp.result_type(int if whole else float)))


@operation("zeros.default", "empty.memory_format", "new_zeros.default", "new_empty.default")
def zeros(size: Sequence[int], x: Any = None, dtype: str | None = None) -> Array:
    """0 everywhere."""
    return jnp.zeros(tuple(size), kind(dtype, jnp.result_type(float) if x is None else x.dtype))


@operation("ones.default", "new_ones.default")
def ones(size: Sequence[int], x: Any = None, dtype: str | None = None) -> Array:
    """1 everywhere."""
    return jnp.ones(tuple(size), kind(dtype, jnp.result_type(float) if x is None else x.dtype))


@operation("full.default", "new_full.default")
def full(size: Sequence[int], fill_value: Any, x: Any = None, dtype: str | None = None) -> Array:
    """One number everywhere."""
    otherwise = jnp.result_type(type(fill_value)) if x is None else x.dtype
    return jnp.full(tuple(size), fill_value, kind(dtype, otherwise))


@operation("scalar_tensor.default")
def scalar(s: Any, dtype: str | None = None) -> Array:
    """One number."""
    return jnp.asarray(s, kind(dtype, jnp.result_type(float)))


@operation("zeros_like.default", "empty_like.default")
def zeros_like(x: Array, dtype: str | None = None) -> Array:
    """0 in this shape."""
    return jnp.zeros(x.shape, kind(dtype, x.dtype))


@operation("ones_like.default")
def ones_like(x: Array, dtype: str | None = None) -> Array:
    """1 in this shape."""
    return jnp.ones(x.shape, kind(dtype, x.dtype))


@operation("full_like.default")
def full_like(x: Array, fill_value: Any, dtype: str | None = None) -> Array:
    """One number in this shape."""
    return jnp.full(x.shape, fill_value, kind(dtype, x.dtype))


@operation("to.dtype", "to.dtype_layout", "_to_copy.default", "to.device")
def cast(x: Array, dtype: str | None = None) -> Array:
    """The same numbers in another dtype."""
    return x.astype(kind(dtype, x.dtype))


@operation("type_as.default", "to.other")
def cast_like(x: Array, other: Array) -> Array:
    """The same numbers in another's dtype."""
    return x.astype(other.dtype)
