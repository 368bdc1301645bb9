"""The Gaussian prior of a network, by the shapes of its parameters; and how many outputs it has."""

import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Key

from measureflow.core.pytrees import Parameters, strong_tree
from measureflow.core.validation import positive_number
from measureflow.networks.functions import CastApply, ConstantsApply, PerceptronApply, RowsOfOutputs
from measureflow.spaces.measures import Gaussian


def gaussian_prior(init: Callable, output_axis: int, weight: Any, bias: Any) -> Gaussian:
    """Weights N(0, weight²/fan-in), all else N(m, bias²): `Network.prior`."""
    weight = positive_number("weight", weight, "√2 is right for relu, 1 for tanh.")
    bias = positive_number("bias", bias, "it is a standard deviation.")
    mean = _centre(init, jax.random.key(0), jax.random.key(1))

    def scale(path: tuple, leaf: Array) -> Array:
        fan_in = leaf.size // leaf.shape[output_axis] if _is_weight(path, leaf) else None
        return bias if fan_in is None else weight / math.sqrt(fan_in)

    return Gaussian(mean, jax.tree_util.tree_map_with_path(scale, mean))


# Compiled, so that weights, which are not looked at, are never drawn.
@eqx.filter_jit
def _centre(init: Callable, key: Key[Array, ""], other_key: Key[Array, ""]) -> Parameters:
    """Where the initialiser always starts a leaf that is not a weight; else 0."""

    def centre(path: tuple, leaf: Array, other: Array) -> Array:
        zero = jnp.zeros_like(leaf)
        return zero if _is_weight(path, leaf) else jnp.where(jnp.all(leaf == other), leaf, zero)

    draws = strong_tree(init(key)), strong_tree(init(other_key))
    return jax.tree_util.tree_map_with_path(centre, *draws)


def _is_weight(path: tuple, leaf: Array) -> bool:
    return leaf.ndim >= 2 and jax.tree_util.keystr(path[-1:], simple=True) != "bias"


def perceptron(network: Any) -> PerceptronApply | None:
    """The multilayer perceptron that a network is, but for constants and precision."""
    apply = network.apply
    while isinstance(apply, RowsOfOutputs | ConstantsApply | CastApply):
        apply = apply.function if isinstance(apply, RowsOfOutputs) else apply.apply
    return apply if isinstance(apply, PerceptronApply) else None


def outputs_of(network: Any) -> int | None:
    """How many numbers it gives for a row, where that can be told."""
    inner = perceptron(network)
    if inner is None:
        return None
    theta = jax.eval_shape(network.init, jax.random.key(0))
    rows = jax.ShapeDtypeStruct((1, inner.sizes[0]), jax.tree.leaves(theta)[0].dtype)
    return jax.eval_shape(network.apply, theta, rows).shape[1]
