"""PyTorch's operations on tensors as functions of JAX: arithmetic and sums.

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
    x = _as_float(x) if isinstance(exponent, float) and hasattr(x, "dtype") else x
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
