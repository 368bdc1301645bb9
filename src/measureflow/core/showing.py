"""What `print` shows: one line, numbers as numbers, arrays by their shapes."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax
from jaxtyping import PyTree

from measureflow.core.pytrees import is_concrete

# So many characters of a value are shown.
_LONGEST = 80


def one_line(module: Any) -> str:
    """Class(field=value, …), without fields that have their default value."""
    fields = [field for field in dataclasses.fields(module) if field.repr and hasattr(module, field.name)]
    given = [(f.name, getattr(module, f.name)) for f in fields if not _is_default(f, getattr(module, f.name))]
    return f"{type(module).__name__}({', '.join(f'{name}={shown(value)}' for name, value in given)})"


def shown(value: Any) -> str:
    """One value: numbers to four digits, other arrays as dtype and shape."""
    if isinstance(value, jax.Array | np.ndarray) and value.ndim == 0 and is_concrete(value):
        return f"{value.item():.4g}" if eqx.is_inexact_array_like(value) else f"{value}"
    if isinstance(value, optax.GradientTransformation):
        return "<Optax optimiser>"
    if isinstance(value, eqx.Module):
        text = repr(value)
        return type(value).__name__ if "\n" in text else text
    if callable(value) and not isinstance(value, type):
        return getattr(value, "__name__", type(value).__name__)
    text = " ".join(eqx.tree_pformat(value, width=10_000).split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def or_fields(words: Callable[[Any], str]) -> Callable[[Any], str]:
    """A `__repr__` that falls back on the fields: JAX fills modules with anything, and printing must not
    fail."""

    @functools.wraps(words)
    def described(module: Any) -> str:
        try:
            return words(module)
        except (AttributeError, TypeError, ValueError, IndexError):
            return one_line(module)

    return described


def counted(number: int, what: str) -> str:
    """1 particle, 2 particles."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def few_numbers(tree: PyTree, most: int = 3) -> str | None:
    """The numbers of a small pytree in a list; None where there are more, or they are being traced."""
    leaves = jax.tree.leaves(tree)
    if not is_concrete(tree) or sum(leaf.size for leaf in leaves) > most:
        return None
    return "[" + ", ".join(f"{x:.4g}" for leaf in leaves for x in np.asarray(leaf).ravel()) + "]"


def _is_default(field: dataclasses.Field, value: Any) -> bool:
    default = field.default
    if value is default:
        return True
    # Numbers became arrays when they were given, the default among them.
    if isinstance(default, int | float) and getattr(value, "shape", None) == () and is_concrete(value):
        return bool(np.asarray(default, value.dtype) == np.asarray(value))
    return isinstance(default, int | float | str) and isinstance(value, type(default)) and value == default
