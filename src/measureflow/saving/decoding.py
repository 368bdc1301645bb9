"""Values from JSON and arrays: how `load` builds what a file describes. Nodes are those of `encoding`.

Nothing is imported, and nothing called, because a file says so: kinds are those that classes have registered,
and code is taken from the user, or from the modules that the user trusts. What a file may ask for is bounded
by its own size: its arrays are as large as they are in it, and the objects it may have built are few.
"""

import dataclasses
import importlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from measureflow.saving.container import FileFormatError, PathLike, brief
from measureflow.saving.encoding import DEEPEST, KEYS, below
from measureflow.saving.registry import KINDS, Kind, kind_named

# One may take milliseconds: networks are looked at layer by layer.
MOST_OBJECTS = 1000
_LARGEST_LETTER = 0x10FFFF


class _NoStructureError(FileFormatError):
    """A structure is needed, and there is none."""


class Decoder:
    """Nodes as values; `arrays` is what these refer to."""

    def __init__(self, path: PathLike, arrays: Mapping[str, Any], trust: Sequence[str], like: Any = None):
        self._path, self._arrays, self._trust = path, arrays, tuple(trust)
        self._taken: set[str] = set()
        self._shared: dict[str, jax.Array] = {}
        self._likes, self._has_like = list(_subtrees(like)), like is not None
        self._depth = self._objects = 0

    def error(self, what: str, *remedy: str) -> FileFormatError:
        """The error that says what is wrong with this file."""
        return FileFormatError(self._path, what, *remedy)

    def require_all_taken(self) -> None:
        """Every array of the file belongs somewhere."""
        left = sorted(set(self._arrays) - self._taken)
        if left:
            raise self.error(f"it holds arrays that its description does not mention: {brief(left)}")

    def built(self, name: str, nodes: Any, where: str, given: Mapping[str, Any] | None = None) -> Any:
        """A thing of a known kind. Values that are `given` are taken instead of the file's."""
        kind, values = KINDS[name], dict(given or {})
        self._objects += 1
        if self._objects > MOST_OBJECTS:
            raise self.error(f"it holds more than {MOST_OBJECTS} objects", "save their arrays as a pytree.")
        if not isinstance(nodes, dict) or set(nodes) != set(kind.fields):
            raise self.error(
                f"{where} must have the fields of a {name}, which are {', '.join(kind.fields) or 'none'}"
            )
        for field in kind.fields:
            if field in values:
                self._skip(nodes[field])
                continue
            self._likes += _subtrees(kind.like(values)) if kind.like else ()
            try:
                values[field] = self._value(nodes[field], below(where, field))
            except _NoStructureError as error:
                if field not in kind.optional or self._has_like:
                    raise
                what = f"{self._path} is loaded without its {field}: {error.what}; {error.remedy}"
                warnings.warn(what, stacklevel=3)
                self._skip(nodes[field])
                values[field] = None
        return self._made(where, _checked, kind=kind, values=values)

    def _value(self, node: Any, where: str) -> Any:
        self._depth += 1
        try:
            if self._depth > DEEPEST + 2:
                raise self.error(f"{where} is nested too deeply")
            if node is None or type(node) in (bool, int, float, str):
                return node
            read = _NODES.get(frozenset(node)) if isinstance(node, dict) else None
            if read is None:
                raise self.error(f"{where} is {brief(node)}, which is not a value")
            return read(self, node, where)
        finally:
            self._depth -= 1

    def _made(self, where: str, build: Callable[..., Any], /, **values: Any) -> Any:
        try:
            return build(**values)
        except FileFormatError:
            raise
        except Exception as error:
            # Whatever it is, it comes of values that are the file's.
            remedy = "check the file, and what was passed with it."
            raise self.error(f"{where} is not valid: {str(error)[:500].rstrip('.')}", remedy) from error

    def _skip(self, node: Any) -> None:
        """Arrays of this node belong somewhere, but are not wanted."""
        pending = [node]
        while pending:
            one = pending.pop()
            if isinstance(one, dict):
                self._taken.update(name for name in one.values() if isinstance(name, str))
            pending += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()

    def _float(self, node: dict[str, Any], where: str) -> float:
        if node["float"] not in ("nan", "inf", "-inf"):
            raise self.error(f"{where} is {brief(node)}, which is not a number")
        return float(node["float"])

    def _sequence(self, node: dict[str, Any], where: str) -> Any:
        ((kind, items),) = node.items()
        if not isinstance(items, list):
            raise self.error(f"{where} is {brief(node)}, which is not a {kind}")
        values = [self._value(item, below(where, i)) for i, item in enumerate(items)]
        return values if kind == "list" else tuple(values)

    def _dict(self, node: dict[str, Any], where: str) -> dict[str, Any]:
        items = node["dict"]
        if not isinstance(items, dict):
            raise self.error(f"{where} is {brief(node)}, which is not a dict")
        return {key: self._value(item, below(where, key)) for key, item in items.items()}

    def _array(self, name: Any, where: str) -> Any:
        if not isinstance(name, str) or name not in self._arrays:
            raise self.error(f"{where} is the array {brief(name)}, which is not in the file")
        if name in self._taken:
            raise self.error(f"{where} is the array {brief(name)}, which is used in another place, too")
        self._taken.add(name)
        return self._arrays[name]

    def _jax(self, node: dict[str, Any], where: str) -> jax.Array:
        name = node["jax"]
        if not isinstance(name, str) or name not in self._shared:
            array = self._array(name, where)
            converted = self._made(where, jnp.asarray, a=array)
            if converted.dtype != array.dtype:
                raise self.error(
                    f"{where} holds {array.dtype}, which JAX is set to round to {converted.dtype}",
                    'call jax.config.update("jax_enable_x64", True) at the start of the program.',
                )
            self._shared[name] = converted
        return self._shared[name]

    def _numpy(self, node: dict[str, Any], where: str) -> np.ndarray:
        return self._array(node["numpy"], where)

    def _scalar(self, node: dict[str, Any], where: str) -> np.generic:
        array = self._array(node["scalar"], where)
        if array.shape != ():
            raise self.error(f"{where} is an array of shape {array.shape}, not one number")
        return array[()]

    def _key(self, node: dict[str, Any], where: str) -> jax.Array:
        data, implementation = self._array(node["key"], where), node["implementation"]
        if implementation not in KEYS or data.dtype != np.uint32:
            raise self.error(f"{where} is not a random key")
        numbers = jnp.asarray(data)
        return self._made(where, jax.random.wrap_key_data, key_bits_array=numbers, impl=implementation)

    def _text(self, node: dict[str, Any], where: str) -> np.ndarray:
        letters = self._array(node["text"], where)
        texts = letters.dtype == np.uint32 and letters.ndim > 0 and letters.shape[-1] > 0
        if not texts or letters.max(initial=0) > _LARGEST_LETTER:
            raise self.error(f"{where} holds no texts")
        return letters.view(f"<U{letters.shape[-1]}").reshape(letters.shape[:-1])

    def _texts(self, node: dict[str, Any], where: str) -> np.ndarray:
        texts = node["texts"]
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise self.error(f"{where} is not a list of texts")
        return np.array(texts, dtype=object)

    def _object(self, node: dict[str, Any], where: str) -> Any:
        name = node["object"]
        if kind_named(name) is None:
            raise self.error(f"{where} is a {brief(name)}, which is not known")
        return self.built(name, node["fields"], where)

    def _leaves(self, node: dict[str, Any], where: str) -> Any:
        nodes, once = node["leaves"], node["structure"]
        if not isinstance(nodes, dict) or not isinstance(once, str):
            raise self.error(f"{where} is {brief(node)}, which is not a pytree")
        values = [self._value(item, below(where, path)) for path, item in nodes.items()]
        for like in self._likes:
            leaves, structure = jax.tree_util.tree_flatten_with_path(like)
            if [jax.tree_util.keystr(path) for path, _ in leaves] == list(nodes) and all(
                getattr(leaf, "shape", np.shape(value)) == np.shape(value)
                for (_, leaf), value in zip(leaves, values, strict=True)
            ):
                return self._made(where, jax.tree.unflatten, treedef=structure, leaves=values)
        raise _NoStructureError(
            self._path,
            f"{where} is a pytree of which the file has the arrays, but not the structure, once "
            f"{once[:120]!r} with {brief(dict(zip(nodes, map(np.shape, values), strict=True)))}",
            "pass like= (or network=), a thing of the same structure and shapes; for a Solution "
            "flow.init(problem, particles).",
        )

    def _code(self, node: dict[str, Any], where: str) -> Any:
        name = node["import"]
        module, separator, path = name.partition(":") if isinstance(name, str) else ("", "", "")
        if not separator:
            raise self.error(f"{where} is {brief(node)}, which does not name code")
        argument = "network=" if "network" in where.lower() else "likelihood="
        if module not in self._trust:
            raise self.error(
                f"{where} is code, named {brief(name)}, and a file's code is not run",
                f"pass {argument}, or trust=({brief(module)},) if you know that module.",
            )
        found: Any = self._made(where, importlib.import_module, name=module)
        for part in path.split("."):
            found = getattr(found, part, None)
        # A module has more names than those of its own: those that it imported are not what was trusted.
        own = getattr(found, "__module__", None) == module and getattr(found, "__qualname__", None) == path
        made = isinstance(found, type) and issubclass(found, eqx.Module)
        if not own or not callable(found) or not made == isinstance(found, type) == ("fields" in node):
            what = f"{where} is {brief(name)}, which that module does not define"
            raise self.error(what, f"use {argument} instead.")
        return self._made(where, found, **self._dict({"dict": node["fields"]}, where)) if made else found


_NODES: dict[frozenset[str], Callable[[Decoder, dict[str, Any], str], Any]] = {
    frozenset({"float"}): Decoder._float,
    frozenset({"list"}): Decoder._sequence,
    frozenset({"tuple"}): Decoder._sequence,
    frozenset({"dict"}): Decoder._dict,
    frozenset({"jax"}): Decoder._jax,
    frozenset({"numpy"}): Decoder._numpy,
    frozenset({"scalar"}): Decoder._scalar,
    frozenset({"key", "implementation"}): Decoder._key,
    frozenset({"text"}): Decoder._text,
    frozenset({"texts"}): Decoder._texts,
    frozenset({"object", "fields"}): Decoder._object,
    frozenset({"leaves", "structure"}): Decoder._leaves,
    frozenset({"import"}): Decoder._code,
    frozenset({"import", "fields"}): Decoder._code,
}


def _checked(kind: Kind, values: dict[str, Any]) -> Any:
    """What the values make, if it holds them as they are, and is sound."""
    thing = kind.build(**values)
    for name, value in kind.values(thing).items():
        found, used = _types(values[name]), _types(value)
        if found != used:
            raise ValueError(f"{name} is {found[1]}, and {used[1]} where it is used")
    if kind.check:
        kind.check(thing)
    return thing


def _types(tree: Any) -> tuple[Any, list[str]]:
    """Structure, shapes and types."""
    leaves, structure = jax.tree.flatten(tree)
    arrays = [(leaf, getattr(leaf, "dtype", None)) for leaf in leaves]
    return structure, [f"{dtype}{leaf.shape}" if dtype else type(leaf).__name__ for leaf, dtype in arrays]


def _subtrees(tree: Any) -> Iterator[Any]:
    """A pytree, a solution or the like, and all that is in it: structures that a file may need."""
    flattened = jax.tree_util.default_registry.flatten_one_level(tree)
    parts = vars(tree).values() if flattened is None and dataclasses.is_dataclass(tree) else ()
    # Files have plain values as they are; an empty one has the leaves of any other empty structure.
    is_plain_and_empty = tree is None or (type(tree) in (tuple, list, dict) and not tree)
    yield from () if flattened is None or is_plain_and_empty else (tree,)
    for part in parts if flattened is None else flattened[0]:
        yield from _subtrees(part)
