"""What a run is made of, in words that can be compared: arrays by hash, functions by name and bytecode.

A run is resumed only if all of it is as it was. Where a part can be told only by its type, that is said.
"""

import dataclasses
import functools
import hashlib
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

#: What marks a part that is known by its type alone.
UNKNOWN = "(compared by type only)"


def fingerprint(**parts: Any) -> dict[str, str]:
    """Path ↦ description, for everything in `parts`."""
    found: dict[str, str] = {}
    for name, part in parts.items():
        found |= _described(part, name, ())
    return found


def differences(saved: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """What is not as it was, a line each."""
    lines, reported = [], set()
    for path in {**saved, **now}:
        was, is_now = saved.get(path), now.get(path)
        if was == is_now:
            continue
        # Of a part that is another one, its own parts say nothing more.
        if not any(path.startswith(f"{above}.") for above in reported):
            lines.append(f"{path}: was {was or 'absent'}, is {is_now or 'absent'}")
        reported.add(path)
    return lines


def not_compared(found: Mapping[str, str]) -> list[str]:
    """The paths that are known by their type alone."""
    return [path for path, description in found.items() if description.endswith(UNKNOWN)]


def _described(part: Any, path: str, above: tuple[int, ...]) -> dict[str, str]:
    if id(part) in above:
        return {path: "(part of itself)"}
    above = (*above, id(part))
    if part is None or isinstance(part, bool | int | float | complex | str | bytes | type):
        return {path: repr(part)}
    if isinstance(part, np.ndarray | np.generic | jax.Array):
        return {path: _array(part)}
    found = {path: _name(part)}
    for name, child in _children(part):
        found |= _described(child, f"{path}.{name}", above)
    return found


def _array(array: Any) -> str:
    if isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    values = np.asarray(array)
    if values.ndim == 0:
        return f"{values.dtype} {values}"
    return f"{values.dtype}{list(values.shape)} sha256 {hashlib.sha256(values.tobytes()).hexdigest()[:16]}"


def _name(part: Any) -> str:
    kind = f"{type(part).__module__}.{type(part).__qualname__}"
    code = getattr(part, "__code__", None)
    if isinstance(code, types.CodeType):
        return f"{part.__module__}.{part.__qualname__} bytecode {_bytecode(code)}"
    if hasattr(part, "__wrapped__") or isinstance(part, types.MethodType | functools.partial):
        return kind
    if dataclasses.is_dataclass(part) or isinstance(part, Mapping | list | tuple | set | frozenset):
        return kind
    name = getattr(part, "__qualname__", getattr(part, "__name__", None))
    if callable(part) and name is not None:
        return f"{part.__module__}.{name}"
    return f"{kind} {UNKNOWN}"


def _bytecode(code: types.CodeType) -> str:
    """Instructions and what they refer to; not where they stand in a file."""
    digest = hashlib.sha256(code.co_code)
    for constant in code.co_consts:
        nested = isinstance(constant, types.CodeType)
        digest.update((_bytecode(constant) if nested else repr(constant)).encode())
    digest.update(repr((code.co_names, code.co_varnames, code.co_freevars)).encode())
    return digest.hexdigest()[:16]


def _children(part: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(part, Mapping):
        yield from ((str(name), child) for name, child in part.items())
    elif isinstance(part, list | tuple):
        names = getattr(part, "_fields", range(len(part)))
        yield from ((str(name), child) for name, child in zip(names, part, strict=True))
    elif isinstance(part, set | frozenset):
        yield "members", sorted(map(repr, part))
    elif isinstance(part, types.MethodType):
        yield from (("function", part.__func__), ("self", part.__self__))
    elif isinstance(part, functools.partial):
        yield from (("function", part.func), ("arguments", part.args), ("keywords", part.keywords))
    elif isinstance(part, types.FunctionType):
        yield from _bound(part)
    elif hasattr(part, "__wrapped__"):
        yield "wrapped", part.__wrapped__
    elif dataclasses.is_dataclass(part) and not isinstance(part, type):
        fields = dataclasses.fields(part)
        yield from ((field.name, getattr(part, field.name)) for field in fields if hasattr(part, field.name))


def _bound(function: types.FunctionType) -> Iterable[tuple[str, Any]]:
    """What a function closes over, its defaults, and the values of the global names that it reads."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not filled in yet
            yield name, None
    yield from ((f"default {index}", value) for index, value in enumerate(function.__defaults__ or ()))
    yield from (function.__kwdefaults__ or {}).items()
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        # Modules and classes are code, not settings; functions of other modules are told by their names.
        if isinstance(value, bool | int | float | str | np.ndarray | jax.Array):
            yield name, value
