"""Values as JSON and arrays: how `save` describes a thing.

A value is a *node* of the JSON document:

    null, true, 3, 0.5, "text"                        itself
    {"float": "nan"}                                  a number that JSON has no word for
    {"list": [...]}, {"tuple": [...]}, {"dict": {}}   of nodes
    {"jax": name}, {"numpy": name}, {"scalar": name}  an array of the file
    {"key": name, "implementation": "threefry2x32"}   random keys, as the numbers that they are made of
    {"text": name}, {"texts": [...]}                  NumPy's texts, as their letters' numbers; or as objects
    {"object": kind, "fields": {}}                    of a registered class, and of nothing else
    {"leaves": {path: node}, "structure": text}       another pytree, of which `like` must give the structure
    {"import": "module:name"}                         code, which no file holds: it is named, and not run
"""

import dataclasses
import math
import re
from typing import Any

import equinox as eqx
import jax
import numpy as np

from measureflow.core.pytrees import is_key
from measureflow.saving.container import NAMES
from measureflow.saving.registry import KINDS, kind_of

DEEPEST = 100
KEYS = ("threefry2x32", "rbg", "unsafe_rbg")


def is_pytree(value: Any) -> bool:
    """An array, or something that JAX looks into."""
    return isinstance(value, jax.Array | np.ndarray) or not jax.tree_util.all_leaves([value])


def below(where: str, name: Any) -> str:
    """Where a part of a value is found; names from a file may be long."""
    return f"{where}.{str(name)[:80]}"[-300:]


class Encoder:
    """Values as nodes; `arrays` is what these refer to, and `with_code` names the fields that name code."""

    def __init__(self):
        self.arrays: dict[str, Any] = {}
        self.with_code: set[str] = set()
        self._names: dict[int, str] = {}

    def fields(self, kind: str, thing: Any, where: str = "", depth: int = 0) -> dict[str, Any]:
        """What a file has of a thing of this kind. Functions are welcome where its class says so."""
        nodes = {}
        for name, value in KINDS[kind].values(thing).items():
            place = below(where, name) if where else name
            is_code = name in KINDS[kind].code and value is not None and kind_of(value) is None
            make = self._code if is_code else self.node
            nodes[name] = make(value, place, depth + 1)
        return nodes

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
            return {type(value).__name__: nodes}
        if type(value) is dict:
            return {"dict": self._dict(value, where, depth)}
        if isinstance(value, np.str_):
            return str(value)
        if isinstance(value, np.generic):
            return {"scalar": self._stored(np.asarray(value), where)}
        if isinstance(value, jax.Array):
            return self._jax(value, where)
        if isinstance(value, np.ndarray):
            return self._numpy(value, where)
        kind = kind_of(value)
        if kind is not None:
            return {"object": kind, "fields": self.fields(kind, value, where, depth)}
        return self._leaves(value, where, depth)

    def _dict(self, value: dict[Any, Any], where: str, depth: int) -> dict[str, Any]:
        for key in value:
            if type(key) is not str:
                raise TypeError(f"{where} has the key {key!r}, and only texts can be saved; use str(key).")
        return {key: self.node(item, below(where, key), depth + 1) for key, item in value.items()}

    def _stored(self, array: Any, where: str) -> str:
        """The name of an array in the file."""
        if np.dtype(array.dtype).newbyteorder("=") not in NAMES:
            kinds = ", ".join(map(str, NAMES))
            raise TypeError(f"{where} holds {array.dtype}, and a file only {kinds}; convert it with astype.")
        name = stem = re.sub(r"[^\w.\-]+", "_", where)
        number = 1
        while name in self.arrays:
            number += 1
            name = f"{stem}_{number}"
        self.arrays[name] = array
        return name

    def _jax(self, value: jax.Array, where: str) -> Any:
        if is_key(value):
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
        if value.dtype.kind == "U":
            letters = np.ascontiguousarray(value.astype(value.dtype.newbyteorder("="))).view(np.uint32)
            return {"text": self._stored(letters.reshape(*value.shape, value.dtype.itemsize // 4), where)}
        if value.dtype.kind != "O":
            return {"numpy": self._stored(value, where)}
        texts = value.tolist()
        if value.ndim != 1 or not all(type(text) is str for text in texts):
            raise TypeError(
                f"{where} is an array of objects; save numbers, or texts, as array.astype(str) makes them."
            )
        return {"texts": texts}

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
        # For those who read the file: it is not parsed, only compared within the file.
        return {"leaves": nodes, "structure": str(structure)[:2000]}


def _makes_again(value: eqx.Module, fields: dict[str, Any]) -> bool:
    """Whether the class makes an equal object of these fields, and a file can hold them."""
    try:
        Encoder().node(fields, "fields")
        return bool(eqx.tree_equal(type(value)(**fields), value))
    except Exception:
        # It is somebody's class, which may do anything here: it is named, then, and the user passes it.
        return False
