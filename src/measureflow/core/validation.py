"""What a user may pass, and the words that say so: every message names the argument, its value and
the remedy. Values that are being traced cannot be looked at, and are let through."""

import operator
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key, PyTree

from measureflow.core.pytrees import is_concrete, is_key, shapes_of, shown_shapes, strong, strong_tree


def positive_number(name: str, value: Any, remedy: str) -> Float[Array, ""]:
    """`value` as a strongly typed scalar > 0."""
    if not isinstance(value, Real | np.ndarray | np.number | jax.Array) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, got {value!r}; {remedy}")
    array = jnp.asarray(value)
    if array.shape != () or jnp.iscomplexobj(array):
        raise ValueError(
            f"{name} must be one real number, got {array.dtype} of shape {array.shape}; {remedy}"
        )
    require_positive(name, value, remedy)
    return strong(value)


def require_positive(name: str, value: PyTree, remedy: str) -> None:
    """Every entry of `value` is finite and > 0."""
    if not is_concrete(value):
        return
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(value)]
    if not all(np.all(np.isfinite(leaf) & (leaf > 0)) for leaf in leaves):
        shown = leaves[0].item() if len(leaves) == 1 and leaves[0].size == 1 else value
        raise ValueError(f"{name} must be > 0 and finite, got {shown}; {remedy}")


def require_finite(name: str, tree: PyTree, remedy: str) -> PyTree:
    """`tree` as strongly typed arrays, at least one, with finite entries."""
    leaves = jax.tree.leaves(tree)
    if not leaves:
        raise ValueError(f"{name} holds no arrays, got {tree!r}; {remedy}")
    if any(not hasattr(leaf, "shape") and not isinstance(leaf, Real) for leaf in leaves):
        raise TypeError(f"{name} must hold numbers, got {tree!r}; {remedy}")
    tree = strong_tree(tree)
    if is_concrete(tree) and not all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(tree)):
        raise ValueError(f"{name} must be finite, got {tree}; {remedy}")
    return tree


def require_same_shape(name: str, tree: PyTree, template: PyTree) -> None:
    """`tree` has the structure and the shapes of `template`. Shapes are known while tracing, too."""
    if shapes_of(tree) != shapes_of(template):
        raise ValueError(
            f"{name} has shapes {shown_shapes(tree)}, but the measure is on {shown_shapes(template)}; "
            "give both the same pytree, and use jax.vmap for many points."
        )


def typed_key(key: Any) -> Key[Array, ""]:
    """`key` as a typed JAX random key; raw ones of the old style are wrapped."""
    if is_key(key) and key.shape == ():
        return key
    if getattr(key, "dtype", None) == jnp.uint32 and getattr(key, "shape", None) == (2,):
        return jax.random.wrap_key_data(key)
    raise TypeError(f"key must be a JAX random key, got {key!r}; pass jax.random.key(0).")


def require_count(name: str, value: Any, minimum: int, remedy: str) -> int:
    """`value` as an integer of at least `minimum`."""
    try:
        count = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}; {remedy}") from None
    if count < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {count}; {remedy}")
    return count


def require_leading_axis(name: str, tree: PyTree, what: str) -> PyTree:
    """`tree` as arrays that all share a leading axis of at least one `what`."""
    paths = jax.tree_util.tree_leaves_with_path(tree)
    if not paths:
        raise ValueError(f"{name} holds no arrays; pass a pytree whose leaves have one row per {what}.")
    shapes, lengths = shown_shapes(tree), {jnp.shape(leaf)[:1] for _, leaf in paths}
    if lengths & {(), (0,)}:
        raise ValueError(
            f"{name} needs a leading axis with at least one {what}, got shapes {shapes}; "
            "for a single one, add the axis with x[None]."
        )
    if len(lengths) > 1:
        raise ValueError(
            f"{name} has leaves that disagree in their leading axis, got shapes {shapes}; "
            f"every leaf needs the same number of rows, one per {what}."
        )
    return tree


def require_particles(name: str, particles: PyTree, template: PyTree | None = None) -> PyTree:
    """`particles` as strongly typed arrays with one leading axis, each shaped like `template`."""
    if hasattr(particles, "log_density"):
        raise TypeError(
            f"{name} must be particles, got the measure {type(particles).__name__}; pass "
            "measure.sample(key, n), or measure.particles of an Empirical."
        )
    particles = strong_tree(require_leading_axis(name, particles, "particle"))
    if template is None:
        return particles
    one = jax.tree.map(lambda leaf: leaf[0], particles)
    if shapes_of(one) != shapes_of(template):
        raise ValueError(
            f"{name} holds particles of shape {shown_shapes(one)}, but the reference measure is on "
            f"{shown_shapes(template)}; "
            "give both the same pytree: the reference's mean has the shape of one particle."
        )
    return particles
