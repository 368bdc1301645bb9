"""What a user may pass, and the words that say so: every message names the argument, its value and
the remedy. Values that are being traced cannot be looked at, and are let through."""

import operator
import warnings
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key, PyTree

from measureflow.core.pytrees import is_concrete, is_key, shapes_of, shown_shapes, strong, strong_tree
from measureflow.core.statistics import WithStatistics, parameters_of


def positive_number(name: str, value: Any, remedy: str) -> Float[Array, ""]:
    """`value` as a strongly typed scalar > 0."""
    if not isinstance(value, Real | np.ndarray | np.number | jax.Array) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, got {value!r}; {remedy}")
    shape, kind = getattr(value, "shape", ()), jnp.result_type(value)
    if shape != () or jnp.issubdtype(kind, jnp.complexfloating):
        raise ValueError(f"{name} must be one real number, got {kind} of shape {shape}; {remedy}")
    require_positive(name, value, remedy)
    return strong(value)


def require_positive(name: str, value: PyTree, remedy: str) -> None:
    """Every entry of `value` is finite and > 0, and stays so in JAX's precision."""
    if not is_concrete(value):
        return
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(require_real(name, value))]
    shown = leaves[0].item() if len(leaves) == 1 and leaves[0].size == 1 else value
    if not all(map(_all_positive, leaves)):
        raise ValueError(f"{name} must be > 0 and finite, got {shown}; {remedy}")
    if not all(_all_positive(_rounded(leaf)) for leaf in leaves):
        raise ValueError(
            f"{name} must be > 0 and finite in {jnp.result_type(float)}, got {shown}, which rounds to 0 or "
            f"infinity; {remedy}"
        )


def _all_positive(array: np.ndarray) -> bool:
    return bool(np.all(np.isfinite(array) & (array > 0)))


def _rounded(array: np.ndarray) -> np.ndarray:
    """Floats as JAX will have them."""
    with np.errstate(over="ignore", under="ignore"):
        return array.astype(np.float32) if jnp.result_type(float) == np.float32 else array


def require_real(name: str, tree: PyTree) -> PyTree:
    """No entry of `tree` is complex: its imaginary part would be dropped."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if np.iscomplexobj(leaf):
            raise TypeError(
                f"{name}{jax.tree_util.keystr(path)} must hold real numbers, got {jnp.result_type(leaf)}; "
                "pass real and imaginary parts as two numbers, jnp.stack([z.real, z.imag], axis=-1)."
            )
    return tree


def require_representable(name: str, tree: PyTree) -> PyTree:
    """Every number in the NumPy arrays of `tree` is one of JAX's. Unless `jax_enable_x64` is set, integers
    there have 32 bits, and larger ones would wrap around; floats end at 3·10³⁸, and would be infinite."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind in "iuf" and leaf.size:
            _require_representable(name + jax.tree_util.keystr(path), np.asarray(leaf))
    return tree


def _require_representable(name: str, array: np.ndarray) -> None:
    # Only what has 64 bits does JAX cut in half; what has more, it refuses.
    if array.dtype.itemsize != 8 or jnp.result_type(float) == np.float64:
        return
    kept = np.dtype(f"{array.dtype.kind}4")
    limits: Any = np.finfo(kept) if kept.kind == "f" else np.iinfo(kept)
    # Those that ignore NaN.
    least, most = (extreme.reduce(array, axis=None) for extreme in (np.fmin, np.fmax))
    if least < limits.min or most > limits.max:
        outside = np.isfinite(array) & ((array < limits.min) | (array > limits.max))
        if outside.any():
            became = "be infinite" if kept.kind == "f" else "wrap around"
            raise ValueError(
                f"{name} holds {array[outside][0]} in {array.dtype}, but JAX keeps {kept}, in which it would "
                f"{became}; scale it, as in (x - x.mean()) / x.std(), or call "
                "jax.config.update('jax_enable_x64', True) first."
            )


def require_not_lost(name: str, array: np.ndarray) -> np.ndarray:
    """Of an array that is not 0, something is left in JAX's precision; where a column loses most of its
    variation to rounding, a warning."""
    _warn_of_rounding(name, array)
    largest = np.max(np.abs(array), initial=0.0) if array.dtype.kind == "f" else 0.0
    if 0 < largest < np.finfo(jnp.result_type(float)).smallest_subnormal:
        raise ValueError(
            f"{name} holds numbers up to {largest}, all of which {jnp.result_type(float)} rounds to 0; scale "
            "it, as in x / x.std(), or call jax.config.update('jax_enable_x64', True) first."
        )
    return array


# How many numbers of an array are looked at, to see whether they vary.
_LOOKED_AT = 2**20


def _warn_of_rounding(name: str, array: np.ndarray) -> None:
    """Where rows of float64 are a constant and little more: (rows, ...), column by column."""
    kept = np.finfo(jnp.result_type(float))
    if array.dtype.kind != "f" or array.dtype.itemsize * 8 <= kept.bits or len(array) < 2:
        return
    rows = array[:: max(array.size // _LOOKED_AT, 1)].reshape(-1, max(array[0].size, 1))
    with np.errstate(invalid="ignore", over="ignore"):
        size, deviation = np.abs(rows.mean(axis=0)), rows.std(axis=0)
    lost = (float(kept.eps) * size > deviation / 100) & (deviation > 100 * np.finfo(rows.dtype).eps * size)
    if np.any(lost):
        column = int(np.argmax(lost))
        where = f", column {column}," if rows.shape[1] > 1 else ""
        warnings.warn(
            f"{name}{where} varies by {deviation[column]:.3g} about {rows[:, column].mean():.6g}, where "
            f"numbers of {kept.dtype} are {float(kept.eps) * size[column]:.1g} apart: most of it is lost; "
            "subtract the mean first.",
            stacklevel=2,
        )


def require_finite(name: str, tree: PyTree, remedy: str) -> PyTree:
    """`tree` as strongly typed arrays, at least one, with finite entries."""
    leaves = jax.tree.leaves(tree)
    if not leaves:
        raise ValueError(f"{name} holds no arrays, got {tree!r}; {remedy}")
    if any(not hasattr(leaf, "shape") and not isinstance(leaf, Real) for leaf in leaves):
        raise TypeError(f"{name} must hold numbers, got {tree!r}; {remedy}")
    tree = strong_tree(require_real(name, tree))
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


def require_particles(
    name: str, particles: PyTree, template: PyTree | None = None, *, with_statistics: bool = False
) -> PyTree:
    """`particles` as strongly typed arrays with one leading axis, each shaped like `template`. Those that
    carry statistics are welcome where the caller knows not to move these."""
    if isinstance(particles, WithStatistics) and not with_statistics:
        raise TypeError(
            f"{name} are particles with statistics (BatchNorm, Dropout), and only parameters are expected "
            "here: statistics are carried by mf.WassersteinFlow, without metropolis, and by nothing else; "
            "train with that, pass particles.parameters, or use a network without training-time state "
            "(GroupNorm for BatchNorm)."
        )
    if hasattr(particles, "log_density"):
        raise TypeError(
            f"{name} must be particles, got the measure {type(particles).__name__}; pass "
            "measure.sample(key, n), or measure.particles of an Empirical."
        )
    particles = strong_tree(require_real(name, require_leading_axis(name, particles, "particle")))
    if template is None:
        return particles
    one = jax.tree.map(lambda leaf: leaf[0], parameters_of(particles))
    if shapes_of(one) != shapes_of(template):
        raise ValueError(
            f"{name} holds particles of shape {shown_shapes(one)}, but the reference measure is on "
            f"{shown_shapes(template)}; "
            "give both the same pytree: the reference's mean has the shape of one particle."
        )
    return particles
