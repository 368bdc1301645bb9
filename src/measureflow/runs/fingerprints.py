"""What a run is made of, in words that can be compared: arrays by hash, functions by name and bytecode.

A run is resumed only if all of it is as it was. Where a part can be told only by its type, that is said.
"""

import dataclasses
import dis
import enum
import functools
import hashlib
import os
import sys
import sysconfig
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.distributions import Distribution

#: What marks a part that is known by its type alone.
UNKNOWN = "(compared by type only)"

_Plain = bool | int | float | complex | str | bytes | enum.Enum | np.dtype | range | slice | Path | None
_INSTALLED = {sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
_LIBRARIES = (*(path + os.sep for path in _INSTALLED), str(Path(__file__).parents[1]) + os.sep)


def fingerprint(**parts: Any) -> dict[str, str]:
    """Path ↦ description, for everything in `parts`."""
    found: dict[str, str] = {}
    code: dict[int, Any] = {}
    for name, part in parts.items():
        found |= _described(part, name, (), code)
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


def _described(part: Any, path: str, above: tuple[int, ...], code: dict[int, Any]) -> dict[str, str]:
    if isinstance(part, _Plain):
        # 500 and 500.0 are one number: Optax's cosine schedule turns its own from one into the other.
        return {path: repr(int(part) if isinstance(part, float) and part.is_integer() else part)}
    if isinstance(part, np.ndarray | np.generic | jax.Array):
        return {path: _array(part)}
    if id(part) in above:
        return {path: "(part of itself)"}
    found = {path: _name(part)}
    if isinstance(part, types.FunctionType | type):
        # They refer to each other every which way: each is followed once. Kept, so that ids stay theirs.
        if id(part) in code:
            return found
        code[id(part)] = part
    for name, child in _children(part):
        found |= _described(child, f"{path}.{name}", (*above, id(part)), code)
    return found


def _array(array: Any) -> str:
    if isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    values = np.asarray(array)
    if values.dtype.hasobject:
        return f"{values.dtype}{list(values.shape)} {UNKNOWN}"
    if values.ndim == 0:
        return f"{values.dtype} {values}"
    return f"{values.dtype}{list(values.shape)} sha256 {hashlib.sha256(values.tobytes()).hexdigest()[:16]}"


def _name(part: Any) -> str:
    if isinstance(part, type):
        return repr(part)
    code = getattr(part, "__code__", None)
    if isinstance(code, types.CodeType):
        return f"{part.__module__}.{part.__qualname__} bytecode {_bytecode(code)}"
    if hasattr(part, "__wrapped__") or isinstance(part, types.MethodType | functools.partial):
        return str(type(part).__qualname__)
    if isinstance(part, types.BuiltinFunctionType | np.ufunc) or (
        callable(part) and hasattr(part, "__qualname__") and hasattr(part, "__module__")
    ):
        name: Any = getattr(part, "__qualname__", None) or part.__name__
        return f"{part.__module__}.{name}"
    kind = f"{type(part).__module__}.{type(part).__qualname__}"
    is_known = dataclasses.is_dataclass(part) or isinstance(part, Mapping | list | tuple | set | frozenset)
    return kind if is_known or _flattened(part) is not None else f"{kind} {UNKNOWN}"


def _flattened(part: Any) -> dict[str, Any] | None:
    """The parts of what JAX knows as a pytree, one level deep."""
    if isinstance(part, Distribution):
        # NumPyro flattens them in the order of a set, which is another one in every process.
        names = {*part.gather_pytree_data_fields(), *part.gather_pytree_aux_fields()}
        return {name: vars(part).get(name) for name in sorted(names)}
    flattened = jax.tree_util.default_registry.flatten_one_level(part)
    if flattened is None:
        return None
    return {str(index): child for index, child in enumerate(flattened[0])} | {"static": flattened[1]}


def _bytecode(code: types.CodeType) -> str:
    """Instructions and what they refer to; not where they stand in a file."""
    digest = hashlib.sha256(code.co_code)
    digest.update("".join(map(_constant, code.co_consts)).encode())
    digest.update(repr((code.co_names, code.co_varnames, code.co_freevars)).encode())
    return digest.hexdigest()[:16]


def _constant(constant: Any) -> str:
    if isinstance(constant, types.CodeType):
        return _bytecode(constant)
    if isinstance(constant, tuple):
        return f"({','.join(map(_constant, constant))})"
    # The order of a set of words is another one in every process.
    return repr(sorted(map(repr, constant))) if isinstance(constant, frozenset) else repr(constant)


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
    elif isinstance(part, type):
        yield from _methods(part)
    else:
        yield from _methods(type(part))
        if dataclasses.is_dataclass(part):
            names = [field.name for field in dataclasses.fields(part)]
            yield from ((name, getattr(part, name)) for name in names if hasattr(part, name))
        else:
            yield from (_flattened(part) or {}).items()


def _methods(kind: type) -> Iterator[tuple[str, Any]]:
    """What the user's own classes do; those of libraries are told by their names."""
    for owner in kind.__mro__:
        # How one is made shows in its fields.
        names = [name for name in vars(owner) if name == "__call__" or not name.startswith("__")]
        functions = [] if _is_library(owner) else [(name, getattr(kind, name, None)) for name in names]
        yield from ((name, f) for name, f in functions if isinstance(f, types.FunctionType))


def _bound(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function closes over, its defaults, and the values of the global names that it reads."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not filled in yet
            yield name, None
    yield from ((f"default {index}", value) for index, value in enumerate(function.__defaults__ or ()))
    yield from (function.__kwdefaults__ or {}).items()
    if not _is_library(function):
        for name in dict.fromkeys(_globals_read(function.__code__)):
            value = function.__globals__.get(name)
            # Modules are not followed, and the bytecode has the names of what libraries define.
            from_library = callable(value) and _is_library(value)
            if value is not None and not from_library and not isinstance(value, types.ModuleType):
                yield name, value


def _globals_read(code: types.CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _globals_read(constant)


def _is_library(part: Any) -> bool:
    """Whether it was defined in an installed package (or here), and not by the user."""
    name = getattr(part, "__module__", None)
    if name == "__main__":
        return False
    file = getattr(sys.modules.get(name or ""), "__file__", None)
    return file is None or file.startswith(_LIBRARIES)
