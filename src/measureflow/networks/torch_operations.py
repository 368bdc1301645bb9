"""PyTorch's operations on tensors as functions of JAX: arithmetic, shapes, sums. Layers: `torch_layers.py`.

Each is called with the arguments of PyTorch's own schema by name, `self` as `x`, its defaults filled in. An
argument that a function here does not have must have its default, or the operation counts as not covered.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

#: By PyTorch's name and overload, such as "add.Tensor".
OPERATIONS: dict[str, Callable[..., Any]] = {}


def operation(*names: str) -> Callable[[Callable], Callable]:
    """Register a function for these operations."""

    def register(function: Callable) -> Callable:
        OPERATIONS.update(dict.fromkeys(names, function))
        return function

    return register


def kind(name: str | None, otherwise: Any) -> np.dtype:
    """A dtype of PyTorch as JAX has it: without x64, 64 bits are 32."""
    return np.dtype(jax.dtypes.canonicalize_dtype(otherwise if name is None else name))


def aligned(*values: Any) -> list[Array]:
    """Arrays of one dtype and of one rank, as PyTorch would make them: numbers do not widen arrays."""
    arrays = [value for value in values if hasattr(value, "dtype")]
    kinds = [x.dtype for x in arrays]
    common = functools.reduce(jnp.promote_types, kinds) if kinds else jnp.result_type(float)
    if any(isinstance(value, float) for value in values) and not jnp.issubdtype(common, jnp.floating):
        common = jnp.result_type(float)
    if common == np.dtype(bool) and any(type(value) is int for value in values):
        common = jnp.result_type(int)
    rank = max((jnp.ndim(value) for value in values), default=0)
    found = [jnp.asarray(value, common) for value in values]
    return [x.reshape((1,) * (rank - x.ndim) + x.shape) for x in found]


def axes(dim: Any, rank: int) -> tuple[int, ...]:
    """Axes that are reduced: none named are all."""
    if dim is None or (isinstance(dim, Sequence) and not dim):
        return tuple(range(rank))
    return tuple(i % max(rank, 1) for i in ((dim,) if isinstance(dim, int) else dim))


def _binary(function: Callable) -> Callable:
    return lambda x, other: function(*aligned(x, other))


def _unary(function: Callable) -> Callable:
    return lambda x: function(_as_float(x))


def _as_float(x: Array) -> Array:
    return x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.result_type(float))


for _name, _function in {
    "exp": jnp.exp, "log": jnp.log, "log1p": jnp.log1p, "expm1": jnp.expm1, "sqrt": jnp.sqrt, "sin": jnp.sin,
    "cos": jnp.cos, "tanh": jnp.tanh, "erf": jax.scipy.special.erf, "sigmoid": jax.nn.sigmoid,
    "rsqrt": jax.lax.rsqrt, "reciprocal": lambda x: 1 / x, "atan": jnp.arctan,
}.items():  # fmt: skip
    OPERATIONS[f"{_name}.default"] = _unary(_function)
for _name, _function in {
    "abs": jnp.abs, "neg": jnp.negative, "square": jnp.square, "sign": jnp.sign, "floor": jnp.floor,
    "ceil": jnp.ceil, "round": jnp.round, "logical_not": jnp.logical_not, "bitwise_not": jnp.bitwise_not,
    "clone": jnp.asarray, "alias": jnp.asarray, "contiguous": jnp.asarray, "lift_fresh_copy": jnp.asarray,
    "detach": jax.lax.stop_gradient, "relu": jax.nn.relu, "isnan": jnp.isnan, "t": jnp.transpose,
}.items():  # fmt: skip
    OPERATIONS[f"{_name}.default"] = lambda x, function=_function: function(x)
for _name, _function in {
    "mul": jnp.multiply, "maximum": jnp.maximum, "minimum": jnp.minimum, "eq": jnp.equal, "ne": jnp.not_equal,
    "lt": jnp.less, "le": jnp.less_equal, "gt": jnp.greater, "ge": jnp.greater_equal,
    "logical_and": jnp.logical_and, "logical_or": jnp.logical_or, "bitwise_and": jnp.bitwise_and,
    "bitwise_or": jnp.bitwise_or, "atan2": jnp.arctan2,
}.items():  # fmt: skip
    OPERATIONS.update(
        dict.fromkeys([f"{_name}.{o}" for o in ("Tensor", "Scalar", "default")], _binary(_function))
    )


@operation("add.Tensor", "add.Scalar")
def add(x: Any, other: Any, alpha: Any) -> Array:
    """x + alpha·other."""
    return jnp.add(*aligned(x, other if alpha == 1 else jnp.multiply(*aligned(other, alpha))))


@operation("sub.Tensor", "sub.Scalar")
def subtract(x: Any, other: Any, alpha: Any) -> Array:
    """x − alpha·other."""
    return jnp.subtract(*aligned(x, other if alpha == 1 else jnp.multiply(*aligned(other, alpha))))


@operation("rsub.Tensor", "rsub.Scalar")
def subtract_from(x: Any, other: Any, alpha: Any) -> Array:
    """other − alpha·x."""
    return subtract(other, x, alpha)


@operation("div.Tensor", "div.Scalar", "div.Tensor_mode", "div.Scalar_mode")
def divide(x: Any, other: Any, rounding_mode: str | None = None) -> Array:
    """x / other, which is floating-point unless it is rounded."""
    a, b = aligned(x, other)
    if rounding_mode is None:
        return jnp.divide(_as_float(a), _as_float(b))
    if rounding_mode == "floor":
        return jnp.floor_divide(a, b)
    return jnp.trunc(_as_float(a) / _as_float(b)).astype(a.dtype)


@operation("floor_divide.default", "floor_divide.Scalar")
def floor_divide(x: Any, other: Any) -> Array:
    """⌊x / other⌋."""
    return divide(x, other, "floor")


@operation("pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar")
def power(x: Any, exponent: Any) -> Array:
    """x to the power of the exponent; whole ones by products, so that negative numbers have powers."""
    if isinstance(exponent, int | float) and float(exponent).is_integer():
        return jax.lax.integer_pow(x, int(exponent)) if hasattr(x, "dtype") else jnp.asarray(x**exponent)
    return jnp.power(*aligned(x, exponent))


@operation("clamp.default", "clamp.Tensor", "hardtanh.default", "clamp_min.default", "clamp_max.default")
def clamp(x: Array, min: Any = None, max: Any = None, min_val: Any = None, max_val: Any = None) -> Array:
    """x within bounds."""
    for bound, function in (
        (min, jnp.maximum),
        (min_val, jnp.maximum),
        (max, jnp.minimum),
        (max_val, jnp.minimum),
    ):
        x = x if bound is None else function(*aligned(x, bound))
    return x


@operation("where.self", "where.ScalarOther", "where.ScalarSelf", "where.Scalar")
def where(condition: Array, x: Any, other: Any) -> Array:
    """x where the condition holds."""
    a, b = aligned(x, other)
    rank = max(a.ndim, condition.ndim)
    grown = [array.reshape((1,) * (rank - array.ndim) + array.shape) for array in (condition, a, b)]
    return jnp.where(*grown)


@operation("masked_fill.Scalar", "masked_fill.Tensor")
def masked_fill(x: Array, mask: Array, value: Any) -> Array:
    """The value where the mask holds."""
    return where(mask, jnp.asarray(value, x.dtype), x)


@operation("tril.default")
def lower(x: Array, diagonal: int) -> Array:
    """Without what lies above a diagonal."""
    return jnp.tril(x, diagonal)


@operation("triu.default")
def upper(x: Array, diagonal: int) -> Array:
    """Without what lies below a diagonal."""
    return jnp.triu(x, diagonal)


# --- products


@operation("matmul.default", "mm.default", "bmm.default")
def matmul(x: Array, other: Any = None, mat2: Any = None) -> Array:
    """Matrix products, over leading axes that broadcast."""
    return jnp.matmul(x, other if mat2 is None else mat2)


@operation("addmm.default", "baddbmm.default")
def matmul_and_add(
    x: Array,
    mat1: Any = None,
    mat2: Any = None,
    batch1: Any = None,
    batch2: Any = None,
    beta: Any = 1,
    alpha: Any = 1,
) -> Array:
    """beta·x + alpha·(mat1 @ mat2)."""
    product = jnp.matmul(*((mat1, mat2) if batch1 is None else (batch1, batch2)))
    return jnp.add(*aligned(jnp.multiply(*aligned(x, beta)), jnp.multiply(*aligned(product, alpha))))


@operation("einsum.default")
def einsum(equation: str, tensors: Sequence[Array]) -> Array:
    """Sums of products by name."""
    return jnp.einsum(equation, *tensors)


# --- shapes


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


# --- sums


@operation("mean.default", "mean.dim")
def mean(x: Array, dim: Any = None, keepdim: bool = False, dtype: str | None = None) -> Array:
    """The mean over axes."""
    return jnp.mean(x.astype(kind(dtype, x.dtype)), axes(dim, x.ndim), keepdims=keepdim)


@operation("sum.default", "sum.dim_IntList")
def total(x: Array, dim: Any = None, keepdim: bool = False, dtype: str | None = None) -> Array:
    """The sum over axes."""
    whole = jnp.result_type(int) if not jnp.issubdtype(x.dtype, jnp.floating) else x.dtype
    return jnp.sum(x.astype(kind(dtype, whole)), axes(dim, x.ndim), keepdims=keepdim)


@operation("amax.default", "max.default")
def largest(x: Array, dim: Any = None, keepdim: bool = False) -> Array:
    """The largest over axes."""
    return jnp.max(x, axes(dim, x.ndim), keepdims=keepdim)


@operation("amin.default", "min.default")
def smallest(x: Array, dim: Any = None, keepdim: bool = False) -> Array:
    """The smallest over axes."""
    return jnp.min(x, axes(dim, x.ndim), keepdims=keepdim)


@operation("max.dim")
def largest_and_where(x: Array, dim: int, keepdim: bool) -> tuple[Array, Array]:
    """The largest along an axis, and where it is."""
    return jnp.max(x, dim, keepdims=keepdim), jnp.argmax(x, dim, keepdims=keepdim)


@operation("argmax.default")
def where_largest(x: Array, dim: int | None, keepdim: bool) -> Array:
    """Where the largest is."""
    return jnp.argmax(x, dim, keepdims=keepdim)


@operation("var.correction", "var.dim")
def variance(
    x: Array, dim: Any = None, correction: Any = 1, keepdim: bool = False, unbiased: bool = True
) -> Array:
    """Σ(x − mean)²/(n − correction); the correction is 1 where nothing is said."""
    lost = 1 if correction is None else correction
    return jnp.var(x, axes(dim, x.ndim), ddof=lost if unbiased else 0, keepdims=keepdim)


@operation("std.correction", "std.dim")
def deviation(
    x: Array, dim: Any = None, correction: Any = 1, keepdim: bool = False, unbiased: bool = True
) -> Array:
    """√ of the variance."""
    return jnp.sqrt(variance(x, dim, correction, keepdim, unbiased))


@operation("linalg_vector_norm.default")
def norm(x: Array, ord: float, dim: Any, keepdim: bool) -> Array:
    """(Σ|x|ᵖ)^(1/p)."""
    over = axes(dim, x.ndim)
    if ord == math.inf:
        return jnp.max(jnp.abs(x), over, keepdims=keepdim)
    if ord == 2:
        return jnp.sqrt(jnp.sum(jnp.square(x), over, keepdims=keepdim))
    return jnp.power(jnp.sum(jnp.abs(x) ** ord, over, keepdims=keepdim), 1 / ord)


@operation("logsumexp.default")
def log_sum_exp(x: Array, dim: Any, keepdim: bool) -> Array:
    """log Σ exp."""
    return jax.nn.logsumexp(x, axes(dim, x.ndim), keepdims=keepdim)


@operation("cumsum.default")
def cumulative(x: Array, dim: int) -> Array:
    """Sums so far."""
    return jnp.cumsum(x, dim)


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
