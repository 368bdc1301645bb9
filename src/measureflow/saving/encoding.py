"""Values as JSON and arrays: how `save` describes a thing.

A value is a *node* of the JSON document:

    null, true, 3, 0.5, "text"                        itself
    {"float": "nan"}                                  a number that JSON has no word for
    {"list": [...]}, {"tuple": [...]}, {"dict": {}}   of nodes
    {"jax": name}, {"numpy": name}, {"scalar": name}  an array of the file
    {"key": name, "implementation": "threefry2x32"}   random keys
    {"strings": [...], "dtype": "<U5"}                NumPy's arrays of text
    {"object": kind, "fields": {}}                    one of `KINDS`, and nothing else
    {"leaves": {path: node}, "structure": text}       another pytree, of which `like` must give the structure
    {"import": "module:name"}                         code, which no file holds: it is named, and not run
"""

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from measureflow.saving.container import NAMES

DEEPEST = 100
# NumPy's arrays of text take 4 bytes a letter, for each text as many as for the longest: a file has fewer.
MOST_TEXT = 2**26
KEYS = ("threefry2x32", "rbg", "unsafe_rbg")


class _Any:
    """In the place of a template: anything goes."""


ANY = _Any()


def attribute(field: str, template: Any, values: dict[str, Any]) -> Any:
    """A part looks like the attribute of its name."""
    return getattr(template, field, ANY)


def anything(field: str, template: Any, values: dict[str, Any]) -> Any:
    """A part says itself what it is."""
    return ANY


@dataclasses.dataclass(frozen=True)
class Kind:
    """What a file may hold: the names of its fields, and how it is built from their values.

    `build` checks the values, which are the file's, and raises ValueError or TypeError. `template` says what
    a field must look like, given its name, what the whole must, and the values of the fields before it.
    Fields in `given` are arguments of `load` that take the place of what the file says. Fields in `optional`
    are None where the file alone cannot tell their structure.
    """

    fields: tuple[str, ...]
    build: Callable[..., Any]
    template: Callable[[str, Any, dict[str, Any]], Any] = attribute
    given: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


#: By the name in the file.
KINDS: dict[str, Kind] = {"Pytree": Kind(("tree",), lambda tree: tree, lambda field, like, values: like)}
#: By module and name of a class: thing ↦ kind and values of its fields. Classes are named, not imported, so
#: that to save or load one is not to import all.
DESCRIBERS: dict[str, Callable[[Any], tuple[str, dict[str, Any]]]] = {}


@dataclasses.dataclass(frozen=True)
class Code:
    """A function, or a callable object, in a description."""

    value: Any


def describer(thing: Any) -> Callable[[Any], tuple[str, dict[str, Any]]] | None:
    """How this thing is described, if it is of a known kind."""
    kind = type(thing)
    return DESCRIBERS.get(f"{kind.__module__}.{kind.__qualname__}")


def is_pytree(value: Any) -> bool:
    """An array, or something that JAX looks into."""
    return isinstance(value, jax.Array | np.ndarray) or not jax.tree_util.all_leaves([value])


class Encoder:
    """Values as nodes; `arrays` is what these refer to, and `with_code` names the fields that name code."""

    def __init__(self):
        self.arrays: dict[str, Any] = {}
        self.with_code: set[str] = set()
        self._names: dict[int, str] = {}

    def node(self, value: Any, where: str, depth: int = 0) -> Any:
        """`value` as JSON. `where` it is found names arrays and errors."""
        if depth > DEEPEST:
            raise ValueError(f"{where} is nested more than {DEEPEST} deep; save its leaves as a list.")
        if value is None or type(value) in (bool, int, str):
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        if type(value) in (list, tuple):
            nodes = [self.node(item, below(where, i), depth + 1) for i, item in enumerate(value)]
            return {"list" if type(value) is list else "tuple": nodes}
        if type(value) is dict:
            return {"dict": self._dict(value, where, depth)}
        if isinstance(value, np.generic):
            return self._scalar(value, where)
        if isinstance(value, jax.Array):
            return self._jax(value, where)
        if isinstance(value, np.ndarray):
            return self._numpy(value, where)
        if isinstance(value, Code):
            return self._code(value.value, where, depth)
        describe = describer(value)
        if describe is not None:
            kind, fields = describe(value)
            return {"object": kind, "fields": self._dict(fields, where, depth)}
        return self._leaves(value, where, depth)

    def _dict(self, value: dict[Any, Any], where: str, depth: int) -> dict[str, Any]:
        for key in value:
            if type(key) is not str:
                raise TypeError(f"{where} has the key {key!r}, and only texts can be saved; use str(key).")
        return {key: self.node(item, below(where, key), depth + 1) for key, item in value.items()}

    def _stored(self, array: Any, where: str) -> str:
        """The name of an array in the file."""
        if np.dtype(array.dtype).newbyteorder("=") not in NAMES:
            kinds = ", ".join(str(dtype) for dtype in NAMES)
            raise TypeError(f"{where} holds {array.dtype}, and a file only {kinds}; convert it with astype.")
        name = stem = re.sub(r"[^\w.\-]+", "_", where)
        number = 1
        while name in self.arrays:
            number += 1
            name = f"{stem}_{number}"
        self.arrays[name] = array
        return name

    def _scalar(self, value: np.generic, where: str) -> Any:
        return (
            str(value) if isinstance(value, np.str_) else {"scalar": self._stored(np.asarray(value), where)}
        )

    def _jax(self, value: jax.Array, where: str) -> Any:
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            implementation = str(jax.random.key_impl(value))
            if implementation not in KEYS:
                raise TypeError(f"{where} has keys of {implementation!r}; use one of {', '.join(KEYS)}.")
            name = self._stored(jax.random.key_data(value), where)
            return {"key": name, "implementation": implementation}
        # Particles, for example, are those of a solution's measure and of its state: one array, saved once.
        if id(value) not in self._names:
            self._names[id(value)] = self._stored(value, where)
        return {"jax": self._names[id(value)]}

    def _numpy(self, value: np.ndarray, where: str) -> Any:
        if type(value) not in (np.ndarray, np.memmap):
            raise TypeError(f"{where} is a {type(value).__name__}, not a plain array; use np.asarray.")
        if value.dtype.kind not in "OU":
            return {"numpy": self._stored(value, where)}
        texts = value.tolist()
        if value.ndim != 1 or not all(type(text) is str for text in texts):
            raise TypeError(
                f"{where} is an array of objects, or of texts with several axes; save numbers, or one row of "
                "texts, as array.astype(str) makes them."
            )
        if value.dtype.kind == "U" and value.nbytes > MOST_TEXT:
            raise ValueError(f"{where} has texts of {value.nbytes:,} bytes in all; use shorter ones.")
        dtype = "object" if value.dtype.kind == "O" else value.dtype.newbyteorder("<").str
        return {"strings": texts, "dtype": dtype}

    def _code(self, value: Any, where: str, depth: int) -> dict[str, Any]:
        self.with_code.add(where.split(".")[0])
        named = value if hasattr(value, "__qualname__") else type(value)
        node: dict[str, Any] = {"import": f"{named.__module__}:{named.__qualname__}"}
        if isinstance(value, eqx.Module) and named is type(value):
            names = [field.name for field in dataclasses.fields(value) if field.init]
            fields = {name: getattr(value, name) for name in names}
            if _makes_again(value, fields):
                node["fields"] = self._dict(fields, where, depth)
        return node

    def _leaves(self, value: Any, where: str, depth: int) -> dict[str, Any]:
        if jax.tree_util.all_leaves([value]):
            raise TypeError(
                f"{where} is a {type(value).__name__}, which cannot be saved; save arrays, numbers and "
                "texts, of an Equinox module eqx.filter(module, eqx.is_array)."
            )
        leaves, structure = jax.tree_util.tree_flatten_with_path(value)
        named = {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
        if len(named) < len(leaves):
            raise TypeError(
                f"{where} is a {type(value).__name__} with leaves of one name; save it as a list."
            )
        nodes = {path: self.node(leaf, below(where, path), depth + 1) for path, leaf in named.items()}
        # For those who read the file: it is not parsed.
        return {"leaves": nodes, "structure": str(structure)[:2000]}


def _makes_again(value: eqx.Module, fields: dict[str, Any]) -> bool:
    """Whether the class makes an equal object of these fields, and a file can hold them."""
    try:
        Encoder().node(fields, "fields")
        return bool(eqx.tree_equal(type(value)(**fields), value))
    except Exception:
        # It is somebody's class, which may do anything here: it is named, then, and the user passes it.
        return False


def below(where: str, name: Any) -> str:
    """Where a part of a value is found; names from a file may be long."""
    return f"{where}.{str(name)[:80]}"[-300:]
