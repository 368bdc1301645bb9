"""What a run is made of, in words that can be compared: arrays by hash, functions by name and code, objects
by what they hold.

A run is resumed only if all of it is as it was. Of libraries, names in modules say enough; what somebody
wrote is followed wherever code finds values: in closures, defaults and attributes, in the data of classes, in
globals, and in modules. Where a part can be told only by its type, that is said.
"""

import dataclasses
import dis
import enum
import functools
import hashlib
import importlib
import os
import re
import sys
import sysconfig
import types
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np
from numpyro.distributions import Distribution

from measureflow.core.pytrees import numbers_of

#: What marks a part that is known by its type alone.
UNKNOWN = "(compared by type only)"

_Parts: TypeAlias = Iterable[tuple[str, Any]]
_Number = bool | int | float | complex | str | bytes
_Plain = _Number | enum.Enum | np.dtype | range | slice | Path | jax.tree_util.PyTreeDef | None
_Array = np.ndarray | np.generic | jax.Array
_Container = Mapping | list | tuple | set | frozenset | functools.partial | _Array
_INSTALLED = {sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
_LIBRARIES = (*(path + os.sep for path in _INSTALLED), str(Path(__file__).parents[1]) + os.sep)
_CODE = re.compile(r"(.* )(bytecode|library code) [0-9a-f]{16}")
_DEEPEST = 100
# How one is made shows in what it holds, and how it is shown or compared does not matter.
_NO_MATTER = {
    f"__{name}__"
    for name in ["init", "new", "post_init", "check_init", "init_subclass", "repr", "str", "eq", "hash"]
}


@dataclasses.dataclass(frozen=True)
class OfType:
    """A thing that is to be told by its type alone, such as an iterator, which moves."""

    thing: Any


def fingerprint(**parts: Any) -> dict[str, str]:
    """Path ↦ description, for everything in `parts`."""
    found: dict[str, str] = {}
    seen: dict[int, Any] = {}
    for name, part in parts.items():
        _describe(part, name, (), found, seen)
    return found


def differences(saved: Mapping[str, str], now: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """What has changed, a line each; and what differs in its code only, or belongs to a library's
    function whose code does."""
    changed, recoded, others, libraries = [], [], [], []
    for path in {**saved, **now}:
        was, is_now = saved.get(path), now.get(path)
        # Of a part that is another one, its own parts say nothing more.
        if was == is_now or any(path.startswith(f"{above}.") for above in others):
            continue
        line = f"{path}: was {was or 'absent'}, is {is_now or 'absent'}"
        then, code = _CODE.fullmatch(was or ""), _CODE.fullmatch(is_now or "")
        if then and code and then.groups() == code.groups():
            recoded.append(line)
            libraries += [path] if code[2] == "library code" else []
        elif None in (was, is_now) and any(path.startswith(f"{above}.") for above in libraries):
            recoded.append(line)
        else:
            changed.append(line)
            others.append(path)
    return changed, recoded


def not_compared(found: Mapping[str, str]) -> list[str]:
    """The paths that are known by their type alone."""
    return [path for path, description in found.items() if description.endswith(UNKNOWN)]


def _describe(
    part: Any, path: str, above: tuple[int, ...], found: dict[str, str], seen: dict[int, Any]
) -> None:
    while path in found:
        path += "'"
    if isinstance(part, _Plain) and _is_library(type(part)):
        # 500 and 500.0 are one number: Optax's cosine schedule turns its own from one into the other.
        plain = int(part) if isinstance(part, float) and part.is_integer() else part
        found[path] = re.sub(" at 0x[0-9a-f]+", "", repr(plain))
    elif id(part) in above:
        found[path] = "(part of itself)"
    elif id(part) in seen:
        found[path] = f"as {seen[id(part)][0]}"
    else:
        if not isinstance(part, _Container):
            # They refer to each other every which way: each is followed once. Kept, so that ids stay theirs.
            seen[id(part)] = path, part
        parts = _parts(part) if len(above) < _DEEPEST else None
        is_unknown = parts is None or isinstance(part, OfType)
        found[path] = f"{_name(part)} {UNKNOWN}" if is_unknown else _name(part)
        for name, child in parts or ():
            _describe(child, f"{path}.{name}", (*above, id(part)), found, seen)


def _name(part: Any) -> str:
    if isinstance(part, _Array):
        return _array(part)
    if isinstance(part, type):
        return repr(part)
    if isinstance(part, types.FunctionType):
        code = "library code" if _is_library(part) else "bytecode"
        return f"{part.__module__}.{part.__qualname__} {code} {_bytecode(part.__code__)}"
    if isinstance(part, types.BuiltinFunctionType | np.ufunc) or _is_named(part):
        return f"{getattr(part, '__module__', None)}.{_qualname(part)}"
    kind = type(part.thing if isinstance(part, OfType) else part)
    return f"{kind.__module__}.{kind.__qualname__}"


def _qualname(part: Any) -> str:
    return str(getattr(part, "__qualname__", None) or getattr(part, "__name__", ""))


def _array(array: Any) -> str:
    values = np.asarray(numbers_of(array))
    if values.dtype.hasobject:
        return f"{values.dtype}{list(values.shape)}"
    if values.ndim == 0:
        return f"{values.dtype} {values}"
    return f"{values.dtype}{list(values.shape)} sha256 {hashlib.sha256(values.tobytes()).hexdigest()[:16]}"


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


def _parts(part: Any) -> _Parts | None:
    """What it is made of, or None where that cannot be known."""
    if isinstance(part, OfType | type):
        return _of_class(part if isinstance(part, type) else type(part.thing))
    if isinstance(part, types.FunctionType):
        return _of_function(part)
    if isinstance(part, types.MethodType):
        return [("function", part.__func__), ("self", part.__self__)]
    if isinstance(part, types.BuiltinFunctionType | types.MethodWrapperType):
        return [] if isinstance(part.__self__, types.ModuleType | None) else [("self", part.__self__)]
    items = _items(part)
    if not _is_library(type(part)):
        return [*items, *_of_class(type(part)), *_attributes(part)]
    if isinstance(part, functools.partial | np.ma.MaskedArray):
        return [*items, *vars(part).items()]
    if isinstance(part, _Container) or _is_named(part):
        return items
    if callable(wrapped := getattr(part, "__wrapped__", None)):
        return [("wrapped", wrapped), *((n, v) for n, v in vars(part).items() if not n.startswith("_"))]
    if dataclasses.is_dataclass(part):
        names = [field.name for field in dataclasses.fields(part)]
        return [(name, getattr(part, name)) for name in names if hasattr(part, name)]
    return _of_library(part)


def _items(part: Any) -> _Parts:
    """Those of containers, and the value of what is a number or a text and somebody's object as well."""
    if isinstance(part, Mapping):
        return [(name if isinstance(name, str) else repr(name), child) for name, child in part.items()]
    if isinstance(part, list | tuple):
        return list(zip(map(str, getattr(part, "_fields", range(len(part)))), part, strict=True))
    if isinstance(part, set | frozenset):
        return [("members", sorted(str(fingerprint(member=member)) for member in part))]
    if isinstance(part, functools.partial):
        return [("function", part.func), ("arguments", part.args), ("keywords", part.keywords)]
    if isinstance(part, np.ndarray | np.generic) and part.dtype.hasobject:
        return [("items", part.tolist())]
    if isinstance(part, enum.Enum):
        return [("value", part.value)]
    return [("value", base(part)) for base in _Number.__args__ if isinstance(part, base)][:1]


def _of_library(part: Any) -> _Parts | None:
    """As NumPyro or JAX takes it apart; else what it would leave of itself for a copy."""
    if isinstance(part, Distribution):
        # NumPyro flattens them in the order of a set, which is another one in every process.
        names = {*part.gather_pytree_data_fields(), *part.gather_pytree_aux_fields()}
        return [(name, vars(part).get(name)) for name in sorted(names)]
    flattened = jax.tree_util.default_registry.flatten_one_level(part)
    if flattened is not None:
        return [*((str(index), child) for index, child in enumerate(flattened[0])), ("static", flattened[1])]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reduced = part.__reduce_ex__(4)
    except Exception:
        return None
    names = ("made_by", "arguments", "state", "items", "pairs")
    found = {} if isinstance(reduced, str) else dict(zip(names, reduced, strict=False))
    return [(n, list(v) if n in ("items", "pairs") else v) for n, v in found.items() if v is not None]


def _attributes(part: Any) -> Iterator[tuple[str, Any]]:
    """What an object holds in its dictionary and its slots, but for what it has only remembered."""
    # As `object` has it: what somebody's own class says of its state may leave out what code reads.
    state: Any = object.__getstate__(part)
    for held in state if isinstance(state, tuple) else (state,):
        for name, value in (held or {}).items():
            remembered = isinstance(getattr(type(part), name, None), functools.cached_property)
            of_enum = isinstance(part, enum.Enum) and name.startswith("_") and name.endswith("_")
            if not remembered and not of_enum and not name.startswith("__"):
                yield name, value


def _of_class(kind: type) -> Iterator[tuple[str, Any]]:
    """What somebody's own classes do, and their data; those of libraries are told by their names."""
    slots = types.MemberDescriptorType | types.GetSetDescriptorType
    for owner in kind.__mro__:
        for name, value in vars(owner).items() if not _is_library(owner) else ():
            if isinstance(value, property | functools.cached_property):
                yield name, value.fget if isinstance(value, property) else value.func
            elif isinstance(value, staticmethod | classmethod):
                yield name, value.__func__
            elif isinstance(value, types.FunctionType):
                yield from () if name in _NO_MATTER else ((name, value),)
            elif not name.startswith(("__", "_abc_")) and not isinstance(value, slots):
                yield from () if issubclass(kind, enum.Enum) else ((name, value),)
    if issubclass(kind, enum.Enum) and not _is_library(kind):
        yield from ((member.name, member.value) for member in kind)


def _of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function closes over, its defaults and attributes, and the values of the global names that it
    reads. What a library has wrapped round somebody's function is the library's."""
    made_in = function.__code__.co_filename
    if hasattr(function, "__wrapped__") and made_in.startswith((*_LIBRARIES, "<@beartype")):
        yield "wrapped", vars(function)["__wrapped__"]
        yield "registry", getattr(function, "registry", None)
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not filled in yet
            yield name, None
    yield from ((f"default {index}", value) for index, value in enumerate(function.__defaults__ or ()))
    yield from (function.__kwdefaults__ or {}).items()
    if not _is_library(function):
        yield from ((name, value) for name, value in vars(function).items() if not name.startswith("__"))
        yield from _globals(function)


def _globals(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    codes = list(_codes(function.__code__))
    names = {name for code in codes for name in code.co_names}
    read: dict[str, Any] = {}
    for code in codes:
        level, before = None, None
        for step in dis.get_instructions(code):
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                read[step.argval] = function.__globals__.get(step.argval)
            elif step.opname == "IMPORT_NAME":
                try:
                    # The function would do the same.
                    package = function.__globals__.get("__package__")
                    read[step.argval] = importlib.import_module("." * (level or 0) + step.argval, package)
                except Exception:
                    read[step.argval] = None
            level, before = before, step.argval
    for name, value in read.items():
        yield from _read(name, value, names, ())


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _read(path: str, value: Any, names: set[str], above: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    """A value that code reads by its name; of somebody's module, what the code may read of it."""
    if isinstance(value, types.ModuleType):
        if value not in above and not _is_of_library(value.__name__):
            for name in sorted(names & set(vars(value))):
                yield from _read(f"{path}.{name}", vars(value)[name], names, (*above, value))
    elif value is not None and not _is_named(value):
        yield path, value


def _is_named(value: Any) -> bool:
    """Whether it is a library's, and its name in a module says all."""
    if not callable(value) or not _is_library(value):
        return False
    found: Any = sys.modules.get(value.__module__)
    for name in _qualname(value).split("."):
        found = getattr(found, name, None)
    return found is value


def _is_library(part: Any) -> bool:
    """Whether it was defined in an installed package (or here), and not by the user."""
    return _is_of_library(getattr(part, "__module__", None))


def _is_of_library(module: Any) -> bool:
    if not isinstance(module, str) or module.split(".")[0] in sys.stdlib_module_names:
        return isinstance(module, str)
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and file.startswith(_LIBRARIES)
