"""What networks are made of: functions of (θ, inputs), and draws of θ."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Key, PyTree

from measureflow.core.pytrees import Parameters, shown_shapes
from measureflow.core.validation import require_count, require_leading_axis, require_representable
from measureflow.saving.registry import require, saved

# By name: JAX's own functions do not pickle.
_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "elu": jax.nn.elu,
    "gelu": jax.nn.gelu,
    "identity": lambda units: units,
    "leaky_relu": jax.nn.leaky_relu,
    "relu": jax.nn.relu,
    "selu": jax.nn.selu,
    "sigmoid": jax.nn.sigmoid,
    "silu": jax.nn.silu,
    "sin": jnp.sin,
    "softplus": jax.nn.softplus,
    "tanh": jnp.tanh,
}
# Networks in files are looked at layer by layer.
_MOST_LAYERS, _LARGEST_LAYER = 100, 2**31


@saved(code=("function",))
class RowsOfOutputs(eqx.Module):
    """`function`(θ, inputs), as (rows, outputs)."""

    function: Callable

    def __call__(self, theta: Parameters, inputs: PyTree) -> Float[Array, "rows outputs"]:
        outputs = self.function(theta, require_representable("inputs", inputs))
        if not hasattr(outputs, "shape"):
            raise TypeError(
                f"apply must return one array (rows, outputs), got {type(outputs).__name__}; join several "
                "with jnp.concatenate(..., axis=-1)."
            )
        rows = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(inputs)}
        if len(outputs.shape) not in (1, 2) or not rows <= {outputs.shape[:1]}:
            raise ValueError(
                f"apply must map (rows, ...) to (rows, outputs), got outputs of shape {outputs.shape} for "
                f"inputs of shape {shown_shapes(inputs)}; give it a whole batch, and let the network end in "
                "one axis."
            )
        return outputs[:, None] if len(outputs.shape) == 1 else outputs


class OutputsAt(eqx.Module):
    """θ ↦ f_θ(inputs)."""

    apply: Callable
    inputs: PyTree

    def __call__(self, theta: Parameters) -> Float[Array, "rows outputs"]:
        return self.apply(theta, self.inputs)


@saved(check=lambda init: _require_perceptron(init))
class PerceptronInit(eqx.Module):
    """Weights N(0, 2/in), biases 0."""

    sizes: tuple[int, ...] = eqx.field(static=True)
    skip: bool = eqx.field(static=True, default=False)

    def __call__(self, key: Key[Array, ""]) -> list[dict[str, Array]]:
        keys = jax.random.split(key, len(self.sizes) - 1)
        theta = [
            {"weight": _kaiming(k, fan_in, out), "bias": jnp.zeros(out)}
            for k, (fan_in, out) in zip(keys, itertools.pairwise(self.sizes), strict=True)
        ]
        if self.skip:
            theta[-1]["skip"] = _kaiming(jax.random.fold_in(key, 0), self.sizes[0], self.sizes[-1])
        return theta


def _kaiming(key: Key[Array, ""], fan_in: int, out: int) -> Float[Array, "fan_in out"]:
    return math.sqrt(2 / fan_in) * jax.random.normal(key, (fan_in, out))


@saved(check=lambda apply: (_require_perceptron(apply), require_activation(apply.activation)))
class PerceptronApply(eqx.Module):
    """x ← σ(x W + b) for every hidden layer, then x W + b; with `skip` and inputs S more."""

    sizes: tuple[int, ...] = eqx.field(static=True)
    activation: str = eqx.field(static=True)
    skip: bool = eqx.field(static=True, default=False)

    def __call__(self, theta: list[dict[str, Array]], inputs: ArrayLike) -> Array:
        inputs = jnp.asarray(inputs)
        if inputs.ndim != 2 or inputs.shape[1] != self.sizes[0]:
            raise ValueError(
                f"inputs must have shape (rows, {self.sizes[0]}), got {inputs.shape}; the network was "
                f"built for features={self.sizes[0]}."
            )
        (*hidden, last), units = theta, inputs
        for layer in hidden:
            units = _activated(self.activation, _affine(layer, units))
        outputs = _affine(last, units)
        return outputs + inputs @ last["skip"] if self.skip else outputs


def require_activation(names: Any) -> None:
    """One activation, or several joined with +."""
    known = isinstance(names, str) and len(names) < 1000 and set(names.split("+")) <= set(_ACTIVATIONS)
    if not known:
        raise ValueError(
            f"activation is unknown, got {str(names)[:100]!r}; use {', '.join(_ACTIVATIONS)}, or several of "
            "them joined by +."
        )


def _require_perceptron(part: Any) -> None:
    sizes = part.sizes
    widths = isinstance(sizes, tuple) and 2 <= len(sizes) <= _MOST_LAYERS
    widths = widths and all(type(size) is int and 1 <= size <= _LARGEST_LAYER for size in sizes)
    require(widths, f"sizes are no widths of at most {_MOST_LAYERS} layers")
    require(isinstance(part.skip, bool), "skip is neither True nor False")


def _activated(names: str, units: Array) -> Array:
    """Each activation of its share of the units, in order."""
    shares = _shares(names, units.shape[1])
    return jnp.concatenate([_ACTIVATIONS[name](units[:, share]) for name, share in shares], axis=1)


def _shares(names: str, width: int) -> list[tuple[str, slice]]:
    """Which of so many units each activation has."""
    each = names.split("+")
    ends = [i * width // len(each) for i in range(len(each) + 1)]
    return [(name, slice(*share)) for name, share in zip(each, itertools.pairwise(ends), strict=True)]


def _affine(layer: dict[str, Array], inputs: Array) -> Array:
    return inputs @ layer["weight"] + layer["bias"][None, :]


@saved(code=("apply",), check=lambda apply: jnp.finfo(apply.dtype))
class CastApply(eqx.Module):
    """f_θ(x), computed in another precision than θ has."""

    apply: Callable
    dtype: str = eqx.field(static=True)

    def __call__(self, theta: PyTree, inputs: PyTree) -> Array:
        kept = jnp.result_type(*jax.tree.leaves(theta))
        outputs = self.apply(*jax.tree.map(self._cast, (theta, inputs)))
        return outputs.astype(kept)

    def _cast(self, leaf: ArrayLike) -> Array:
        leaf = jnp.asarray(leaf)
        return leaf.astype(self.dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf


@saved(code=("init",), check=lambda init: require_count("count", init.count, 1, ""))
class ConstantsInit(eqx.Module):
    """(θ, 0)."""

    init: Callable
    count: int = eqx.field(static=True)

    def __call__(self, key: Key[Array, ""]) -> dict[str, PyTree]:
        theta = self.init(key)
        dtype = jnp.result_type(jax.tree.leaves(theta)[0])
        return {"network": theta, "constants": jnp.zeros((self.count,), dtype)}


@saved(code=("apply",))
class ConstantsApply(eqx.Module):
    """(f_θ(x), c)."""

    apply: Callable

    def __call__(self, theta: dict[str, PyTree], inputs: PyTree) -> Array:
        outputs = self.apply(theta["network"], inputs)
        constants = theta["constants"].astype(outputs.dtype)[None, :]
        repeated = jnp.broadcast_to(constants, (outputs.shape[0], constants.shape[1]))
        return jnp.concatenate([outputs, repeated], axis=1)


def as_batch(inputs: PyTree) -> PyTree:
    """Arrays with one row for each case."""
    inputs = require_representable("inputs", require_leading_axis("inputs", inputs, "row"))
    return jax.tree.map(jnp.asarray, inputs)


def require_parameters(theta: PyTree) -> None:
    """Floating-point arrays, at least one."""
    leaves = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(theta)}
    if not leaves:
        raise ValueError("the network has no parameters: init returns no arrays; there is nothing to learn.")
    for path, leaf in leaves.items():
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise TypeError(
                f"parameters must be floating-point arrays, got {leaf.dtype} at θ{path}; keep constants "
                "inside apply."
            )
