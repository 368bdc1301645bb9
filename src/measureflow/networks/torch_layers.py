"""PyTorch's layers as functions of JAX: what they are made of is in `torch_operations.py`."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key

from measureflow.networks.torch_operations import OPERATIONS, kind, operation

#: Those that mix the rows of a batch: what is predicted for a row would depend on the others.
OF_THE_BATCH = {"_native_batch_norm_legit_functional.default", "_native_batch_norm_legit.no_stats"}


def is_random(name: str, arguments: dict[str, Any]) -> bool:
    """Whether an operation draws random numbers with these arguments."""
    return name in ("native_dropout.default", "bernoulli.p") or bool(arguments.get("dropout_p"))


# --- activations

for _name, _function in {
    "silu": jax.nn.silu, "selu": jax.nn.selu, "mish": jax.nn.mish, "log_sigmoid": jax.nn.log_sigmoid,
    "hardswish": jax.nn.hard_swish, "hardsigmoid": jax.nn.hard_sigmoid, "relu6": jax.nn.relu6,
}.items():  # fmt: skip
    OPERATIONS[f"{_name}.default"] = lambda x, function=_function: function(x)


@operation("gelu.default")
def gelu(x: Array, approximate: str) -> Array:
    """x Φ(x), or its approximation by tanh."""
    return jax.nn.gelu(x, approximate=approximate == "tanh")


@operation("elu.default")
def elu(x: Array, alpha: float, scale: float, input_scale: float) -> Array:
    """scale·x for x > 0, else scale·alpha·(exp(input_scale·x) − 1)."""
    below = jnp.where(x > 0, 0.0, x)
    return scale * jnp.where(x > 0, x, alpha * jnp.expm1(input_scale * below))


@operation("celu.default")
def celu(x: Array, alpha: float) -> Array:
    """x for x > 0, else alpha·(exp(x/alpha) − 1)."""
    return jax.nn.celu(x, alpha)


@operation("leaky_relu.default")
def leaky_relu(x: Array, negative_slope: float) -> Array:
    """x for x > 0, else slope·x."""
    return jax.nn.leaky_relu(x, negative_slope)


@operation("prelu.default", "_prelu_kernel.default")
def prelu(x: Array, weight: Array) -> Array:
    """x for x > 0, else w·x with one w, or one for each channel."""
    return jnp.where(x > 0, x, x * _by_channel(weight.reshape(-1), x))


@operation("softplus.default")
def softplus(x: Array, beta: float, threshold: float) -> Array:
    """log(1 + exp(beta·x))/beta; x itself beyond the threshold."""
    return jnp.where(beta * x > threshold, x, jax.nn.softplus(beta * x) / beta)


@operation("threshold.default")
def threshold(x: Array, threshold: float, value: float) -> Array:
    """x above the threshold, else the value."""
    return jnp.where(x > threshold, x, jnp.asarray(value, x.dtype))


@operation("glu.default")
def glu(x: Array, dim: int) -> Array:
    """a·σ(b), of two halves."""
    first, second = jnp.split(x, 2, dim)
    return first * jax.nn.sigmoid(second)


@operation("softmax.int", "_softmax.default")
def softmax(x: Array, dim: int, dtype: str | None = None) -> Array:
    """exp(x)/Σ exp(x)."""
    return jax.nn.softmax(x.astype(kind(dtype, x.dtype)), dim)


@operation("log_softmax.int", "_log_softmax.default")
def log_softmax(x: Array, dim: int, dtype: str | None = None) -> Array:
    """x − log Σ exp(x)."""
    return jax.nn.log_softmax(x.astype(kind(dtype, x.dtype)), dim)


# --- linear maps and convolutions


@operation("linear.default")
def linear(input: Array, weight: Array, bias: Array | None) -> Array:
    """x Wᵀ + b."""
    found = jnp.matmul(input, weight.T)
    return found if bias is None else found + bias.reshape((1,) * (found.ndim - 1) + bias.shape)


@operation("bilinear.default")
def bilinear(input1: Array, input2: Array, weight: Array, bias: Array | None) -> Array:
    """x W y + b."""
    found = jnp.einsum("...i,oij,...j->...o", input1, weight, input2)
    return found if bias is None else found + bias.reshape((1,) * (found.ndim - 1) + bias.shape)


@operation("embedding.default")
def embedding(weight: Array, indices: Array, padding_idx: int, sparse: bool) -> Array:
    """The rows of a table; NaN for an index that it does not have. The row of padding has no gradient."""
    rows = weight.shape[0]
    if padding_idx >= 0:
        still = (jnp.arange(rows) == padding_idx)[:, None]
        weight = jnp.where(still, jax.lax.stop_gradient(weight), weight)
    known = jnp.where((indices < 0) | (indices >= rows), rows, indices)
    return jnp.take(weight, known, axis=0, mode="fill", fill_value=jnp.nan)


_CONVOLUTIONS = [f"conv{n}d.{overload}" for n in (1, 2, 3) for overload in ("default", "padding")]


@operation(*_CONVOLUTIONS)
def convolution(
    input: Array, weight: Array, bias: Array | None, stride: Any, padding: Any, dilation: Any, groups: int
) -> Array:
    """Convolutions as (rows, channels, …); "same" has what is odd at the end."""
    spatial = weight.ndim - 2
    stride, dilation = each(stride, spatial), each(dilation, spatial)
    if padding == "same":
        wide = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
        pairs = [(w // 2, w - w // 2) for w in wide]
    else:
        pairs = [(p, p) for p in each(0 if padding == "valid" else padding, spatial)]
    found = jax.lax.conv_general_dilated(
        input, weight, stride, pairs, rhs_dilation=dilation, feature_group_count=groups
    )
    return found if bias is None else found + _by_channel(bias, found)


@operation("conv_transpose1d.default", "conv_transpose2d.input", "conv_transpose3d.input")
def transposed_convolution(
    input: Array,
    weight: Array,
    bias: Array | None,
    stride: Any,
    padding: Any,
    output_padding: Any,
    groups: int,
    dilation: Any,
) -> Array:
    """The transpose of a convolution: the input with zeros between, and the kernel turned round."""
    spatial = weight.ndim - 2
    stride, padding, more, dilation = (each(x, spatial) for x in (stride, padding, output_padding, dilation))
    channels, out, *sizes = weight.shape
    turned = jnp.flip(weight, tuple(range(2, weight.ndim)))
    turned = turned.reshape(groups, channels // groups, out, *sizes)
    kernel = jnp.swapaxes(turned, 1, 2).reshape(groups * out, channels // groups, *sizes)
    wide = [d * (k - 1) for d, k in zip(dilation, sizes, strict=True)]
    pairs = [(w - p, w - p + m) for w, p, m in zip(wide, padding, more, strict=True)]
    found = jax.lax.conv_general_dilated(
        input,
        kernel,
        (1,) * spatial,
        pairs,
        lhs_dilation=stride,
        rhs_dilation=dilation,
        feature_group_count=groups,
    )
    return found if bias is None else found + _by_channel(bias, found)


# --- normalisation


@operation("_native_batch_norm_legit_no_training.default")
def batch_norm(
    input: Array, weight: Any, bias: Any, running_mean: Array, running_var: Array, eps: float, momentum: float
) -> tuple[Array, None, None]:
    """(x − m)/√(v + ε)·w + b with the running statistics."""
    return _normalised(input, running_mean, running_var, weight, bias, eps), None, None


@operation("_native_batch_norm_legit_functional.default")
def batch_norm_in_training(
    input: Array,
    weight: Any,
    bias: Any,
    running_mean: Array,
    running_var: Array,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Array, Array, Array, Array, Array]:
    """The same with the statistics of the batch; the running ones go on, of the variance the unbiased one:
    m ← (1 − momentum)·m + momentum·batch."""
    if not training:
        found = _normalised(input, running_mean, running_var, weight, bias, eps)
        return found, running_mean, running_var, running_mean, running_var
    found, mean, variance = batch_norm_of_the_batch(input, weight, bias, training, eps)
    count = input.size // input.shape[1]
    if count < 2:
        raise ValueError(
            f"BatchNorm in training needs more than one number per channel, got inputs of shape "
            f"{input.shape}; use larger batches."
        )
    unbiased = variance * (count / (count - 1))
    means, variances = (
        (1 - momentum) * old + momentum * new for old, new in ((running_mean, mean), (running_var, unbiased))
    )
    return found, mean, variance, means, variances


@operation("_native_batch_norm_legit.no_stats")
def batch_norm_of_the_batch(
    input: Array, weight: Any, bias: Any, training: bool, eps: float, momentum: float = 0.0
) -> tuple[Array, Array, Array]:
    """(x − m)/√(v + ε)·w + b with the statistics of the batch, and these."""
    over = tuple(i for i in range(input.ndim) if i != 1)
    mean, variance = jnp.mean(input, over), jnp.var(input, over)
    return _normalised(input, mean, variance, weight, bias, eps), mean, variance


def _normalised(x: Array, mean: Array, variance: Array, weight: Any, bias: Any, eps: float) -> Array:
    """By channel."""
    found = (x - _by_channel(mean, x)) * jax.lax.rsqrt(_by_channel(variance, x) + eps)
    found = found if weight is None else found * _by_channel(weight, x)
    return found if bias is None else found + _by_channel(bias, x)


@operation("layer_norm.default")
def layer_norm(input: Array, normalized_shape: Sequence[int], weight: Any, bias: Any, eps: float) -> Array:
    """(x − m)/√(v + ε)·w + b over the last axes."""
    over = tuple(range(input.ndim - len(normalized_shape), input.ndim))
    found = _standardised(input, over, eps)
    shape = (1,) * (input.ndim - len(normalized_shape)) + tuple(normalized_shape)
    found = found if weight is None else found * weight.reshape(shape)
    return found if bias is None else found + bias.reshape(shape)


@operation("rms_norm.default")
def rms_norm(input: Array, normalized_shape: Sequence[int], weight: Any, eps: float | None) -> Array:
    """x/√(mean x² + ε)·w over the last axes."""
    over = tuple(range(input.ndim - len(normalized_shape), input.ndim))
    eps = float(jnp.finfo(input.dtype).eps) if eps is None else eps
    found = input * jax.lax.rsqrt(jnp.mean(jnp.square(input), over, keepdims=True) + eps)
    return (
        found
        if weight is None
        else found * weight.reshape((1,) * (input.ndim - len(normalized_shape)) + weight.shape)
    )


@operation("group_norm.default")
def group_norm(input: Array, num_groups: int, weight: Any, bias: Any, eps: float) -> Array:
    """(x − m)/√(v + ε)·w + b over groups of channels."""
    grouped = input.reshape(input.shape[0], num_groups, -1)
    found = _standardised(grouped, (2,), eps).reshape(input.shape)
    found = found if weight is None else found * _by_channel(weight, input)
    return found if bias is None else found + _by_channel(bias, input)


@operation("instance_norm.default")
def instance_norm(
    input: Array, weight: Any, bias: Any, use_input_stats: bool, eps: float, momentum: float
) -> Array:
    """The same for every channel alone."""
    if not use_input_stats:
        raise NotImplementedError("InstanceNorm with running statistics")
    return group_norm(input, input.shape[1], weight, bias, eps)


def _standardised(x: Array, over: tuple[int, ...], eps: float) -> Array:
    centred = x - jnp.mean(x, over, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.mean(jnp.square(centred), over, keepdims=True) + eps)


def _by_channel(values: Array, like: Array) -> Array:
    """(channels,) against (rows, channels, …)."""
    if values.shape == (1,):
        return values.reshape((1,) * like.ndim)
    return values.reshape((1, -1) + (1,) * (like.ndim - 2))


def each(value: Any, count: int) -> tuple[int, ...]:
    """One number for all axes, or one for each."""
    numbers = (value,) if isinstance(value, int) else tuple(value)
    return numbers * count if len(numbers) == 1 else numbers


# --- attention


@operation("scaled_dot_product_attention.default")
def attention(
    query: Array,
    key: Array,
    value: Array,
    attn_mask: Any,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    random_key: Any,
) -> Array:
    """softmax(q kᵀ·scale + mask) v, with Dropout of the weights; 0 where everything is masked."""
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = jnp.matmul(query, jnp.swapaxes(key, -1, -2)) * factor
    if is_causal:
        attn_mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    if attn_mask is not None:
        mask = attn_mask.reshape((1,) * (scores.ndim - attn_mask.ndim) + attn_mask.shape)
        scores = jnp.where(mask, scores, -jnp.inf) if mask.dtype == bool else scores + mask
    nothing = jnp.all(scores == -jnp.inf, axis=-1, keepdims=True)
    weights = jnp.where(nothing, 0.0, jax.nn.softmax(jnp.where(nothing, 0.0, scores), axis=-1))
    if dropout_p:
        weights, _ = dropout(weights, dropout_p, True, random_key)
    return jnp.matmul(weights, value)


# --- random numbers, in training


@operation("native_dropout.default")
def dropout(input: Array, p: float, train: bool | None, random_key: Key[Array, ""]) -> tuple[Array, Array]:
    """x/(1 − p) with probability 1 − p, else 0; and which."""
    kept = jax.random.bernoulli(random_key, 1 - p, input.shape) if train else jnp.ones(input.shape, bool)
    factor = 0.0 if p == 1 else 1 / (1 - p)
    return jnp.where(kept, input * (factor if train else 1.0), 0.0), kept


@operation("bernoulli.p")
def bernoulli(x: Array, p: float, random_key: Key[Array, ""]) -> Array:
    """1 with probability p, else 0."""
    return jax.random.bernoulli(random_key, p, x.shape).astype(x.dtype)
