"""PyTorch's pooling as functions of JAX."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from measureflow.networks.torch_layers import each
from measureflow.networks.torch_operations import operation


@operation("max_pool1d.default", "max_pool2d.default", "max_pool3d.default")
def max_pool(x: Array, kernel_size: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool) -> Array:
    """The largest number of every window."""
    spatial = x.ndim - 2
    if any(d != 1 for d in each(dilation, spatial)):
        raise NotImplementedError("pooling with dilation")
    sizes, strides, pairs = _windows(x, kernel_size, stride, padding, ceil_mode)
    lowest = jnp.asarray(-jnp.inf, x.dtype)
    return jax.lax.reduce_window(
        x, lowest, jax.lax.max, (1, 1, *sizes), (1, 1, *strides), ((0, 0), (0, 0), *pairs)
    )


@operation("avg_pool1d.default", "avg_pool2d.default", "avg_pool3d.default")
def average_pool(
    x: Any = None,
    kernel_size: Any = None,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Array:
    """The mean of every window; what lies beyond the padding never counts."""
    sizes, strides, pairs = _windows(x, kernel_size, stride, padding, ceil_mode)
    zero = jnp.zeros((), x.dtype)
    sums = jax.lax.reduce_window(
        x, zero, jax.lax.add, (1, 1, *sizes), (1, 1, *strides), ((0, 0), (0, 0), *pairs)
    )
    if divisor_override is not None:
        return sums / divisor_override
    counts = np.ones(())
    for axis, pad in enumerate(each(padding, len(sizes))):
        length, first = x.shape[axis + 2], np.arange(sums.shape[axis + 2]) * strides[axis] - pad
        low, high = (-pad, length + pad) if count_include_pad else (0, length)
        inside = np.minimum(first + sizes[axis], high) - np.maximum(first, low)
        counts = counts[..., None] * inside
    return sums / jnp.asarray(counts[None, None], x.dtype)


def _windows(x: Array, kernel_size: Any, stride: Any, padding: Any, ceil_mode: bool) -> tuple:
    """Sizes, strides, and what is added at both ends, so that there are as many windows as PyTorch has."""
    spatial = x.ndim - 2
    sizes, pads = each(kernel_size, spatial), each(padding, spatial)
    strides = each(stride, spatial) if stride else sizes
    pairs = []
    for length, size, step, pad in zip(x.shape[2:], sizes, strides, pads, strict=True):
        span = length + 2 * pad - size
        count = (-(-span // step) if ceil_mode else span // step) + 1
        # The last window has to begin within the input or the padding before it.
        if ceil_mode and (count - 1) * step >= length + pad:
            count -= 1
        pairs.append((pad, max((count - 1) * step + size - length - pad, 0)))
    return sizes, strides, pairs


@operation("adaptive_avg_pool1d.default", "adaptive_avg_pool2d.default", "adaptive_avg_pool3d.default")
def adaptive_average_pool(x: Array, output_size: Any) -> Array:
    """Means over so many parts of every axis, which may overlap."""
    return _adaptive(x, output_size, jnp.mean)


@operation("adaptive_max_pool1d.default", "adaptive_max_pool2d.default", "adaptive_max_pool3d.default")
def adaptive_max_pool(x: Array, output_size: Any) -> tuple[Array, None]:
    """The largest of so many parts of every axis."""
    return _adaptive(x, output_size, jnp.max), None


def _adaptive(x: Array, output_size: Any, reduced: Callable) -> Array:
    for axis, count in enumerate(each(output_size, x.ndim - 2), start=2):
        length = x.shape[axis]
        ends = [(i * length // count, -(-(i + 1) * length // count)) for i in range(count)]
        parts = [reduced(jax.lax.slice_in_dim(x, a, b, axis=axis), axis, keepdims=True) for a, b in ends]
        x = jnp.concatenate(parts, axis)
    return x


@operation("upsample_nearest1d.vec", "upsample_nearest2d.vec", "upsample_nearest3d.vec")
def upsample_nearest(input: Array, output_size: Any, scale_factors: Any) -> Array:
    """Every number several times."""
    for axis in range(2, input.ndim):
        length = input.shape[axis]
        count = output_size[axis - 2] if output_size else math.floor(length * scale_factors[axis - 2])
        ratio = length / count if output_size else 1 / scale_factors[axis - 2]
        chosen = np.minimum(np.floor(np.arange(count) * np.float32(ratio)).astype(int), length - 1)
        input = jnp.take(input, chosen, axis)
    return input
