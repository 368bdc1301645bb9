"""Values from JSON and arrays: how `load` builds what a file describes. Nodes are those of `encoding`.

Nothing is imported, and nothing called, because a file says so: kinds are looked up in a table, and code is
taken from the user, or from the modules that the user trusts.
"""

import importlib
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from measureflow.saving.container import FileFormatError, PathLike, brief
from measureflow.saving.encoding import ANY, DEEPEST, KEYS, KINDS, MOST_TEXT, attribute, below

_TROUBLES = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class _NoTemplateError(FileFormatError):
    """A structure is needed, and there is none."""


class Decoder:
    """Nodes as values; `arrays` is what these refer to."""

    def __init__(self, path: PathLike, arrays: Mapping[str, Any], trust: Sequence[str]):
        self._path, self._arrays, self._trust = path, arrays, tuple(trust)
        self._taken: set[str] = set()
        self._shared: dict[str, jax.Array] = {}
        self._depth = 0

    def error(self, what: str, *remedy: str) -> FileFormatError:
        """The error that says what is wrong with this file."""
        return FileFormatError(self._path, what, *remedy)

    def require_all_taken(self) -> None:
        """Every array of the file belongs somewhere."""
        left = sorted(set(self._arrays) - self._taken)
        if left:
            raise self.error(f"it holds arrays that its description does not mention: {brief(left)}")

    def built(
        self, kind: str, nodes: Any, where: str, template: Any, given: Mapping[str, Any] | None = None
    ) -> Any:
        """A thing of a known kind. Values that are `given` are taken instead of the file's."""
        recipe, values = KINDS[kind], dict(given or {})
        if not isinstance(nodes, dict) or set(nodes) != set(recipe.fields):
            names = ", ".join(recipe.fields) or "none"
            raise self.error(f"{where} has not the fields of a {kind}, which are {names}")
        alike = recipe.template is not attribute or any(hasattr(template, name) for name in recipe.fields)
        if template is not ANY and recipe.fields and not alike:
            raise self._unlike(where, f"a {kind}", _shown(template))
        for name in recipe.fields:
            if name in values:
                self._skip(nodes[name])
                continue
            try:
                wanted = recipe.template(name, template, values)
                values[name] = self.value(nodes[name], below(where, name), wanted)
            except _NoTemplateError as error:
                if name not in recipe.optional:
                    raise
                warnings.warn(
                    f"{self._path} is loaded without its {name}: {error.what}; {error.remedy}", stacklevel=3
                )
                self._skip(nodes[name])
                values[name] = None
        return self._made(where, recipe.build, values)

    def value(self, node: Any, where: str, template: Any = ANY) -> Any:
        """The value of a node, which must look like `template`."""
        self._depth += 1
        try:
            if self._depth > DEEPEST + 2:
                raise self.error(f"{where} is nested too deeply")
            if template is not ANY and (template is None) != (node is None):
                raise self._unlike(where, "None" if node is None else "something", _shown(template))
            if node is None or type(node) in (bool, int, float, str):
                return node
            read = _NODES.get(frozenset(node)) if isinstance(node, dict) else None
            if read is None:
                raise self.error(f"{where} is {brief(node)}, which is no value")
            return read(self, node, where, template)
        finally:
            self._depth -= 1

    def _made(self, where: str, build: Callable[..., Any], values: dict[str, Any]) -> Any:
        try:
            return build(**values)
        except FileFormatError:
            raise
        except Exception as error:
            # Whatever it is, it comes of values that are the file's.
            remedy = "check the file, and what was passed with it."
            raise self.error(f"{where} is not valid: {str(error)[:500].rstrip('.')}", remedy) from error

    def _unlike(self, where: str, found: str, wanted: str) -> FileFormatError:
        remedy = "pass like= (or network=) with the structure and the shapes of what was saved."
        return self.error(f"{where} is {found} in the file, and {wanted} in what was passed", remedy)

    def _skip(self, node: Any) -> None:
        """Arrays of this node belong somewhere, but are not wanted."""
        pending = [node]
        while pending:
            one = pending.pop()
            if isinstance(one, dict):
                names = [one.get(tag) for tag in ("jax", "numpy", "scalar", "key")]
                self._taken.update(name for name in names if isinstance(name, str))
                pending += one.values()
            elif isinstance(one, list):
                pending += one

    def _float(self, node: dict[str, Any], where: str, template: Any) -> float:
        text = node["float"]
        if not isinstance(text, str) or text not in _TROUBLES:
            raise self.error(f"{where} is {brief(node)}, which is no number")
        return _TROUBLES[text]

    def _sequence(self, node: dict[str, Any], where: str, template: Any) -> Any:
        ((kind, items),) = node.items()
        make = {"list": list, "tuple": tuple}[kind]
        if not isinstance(items, list):
            raise self.error(f"{where} is {brief(node)}, which is no {kind}")
        templates = [ANY] * len(items)
        if template is not ANY:
            if type(template) is not make or len(template) != len(items):
                raise self._unlike(where, f"a {kind} of {len(items)}", _shown(template))
            templates = list(template)
        pairs = zip(items, templates, strict=True)
        return make(self.value(item, below(where, i), wanted) for i, (item, wanted) in enumerate(pairs))

    def _dict(self, node: dict[str, Any], where: str, template: Any) -> dict[str, Any]:
        items = node["dict"]
        if not isinstance(items, dict):
            raise self.error(f"{where} is {brief(node)}, which is no dict")
        if template is not ANY and (type(template) is not dict or set(template) != set(items)):
            raise self._unlike(where, f"a dict with the keys {brief(list(items))}", _shown(template))
        wanted = dict.fromkeys(items, ANY) if template is ANY else template
        return {key: self.value(item, below(where, key), wanted[key]) for key, item in items.items()}

    def _array(self, name: Any, where: str, template: Any) -> Any:
        if not isinstance(name, str) or name not in self._arrays:
            raise self.error(f"{where} is the array {brief(name)}, which is not in the file")
        if name in self._taken:
            raise self.error(f"{where} is the array {brief(name)}, which is that of another place, too")
        self._taken.add(name)
        self._require_shape(self._arrays[name], where, template)
        return self._arrays[name]

    def _require_shape(self, array: Any, where: str, template: Any) -> None:
        if template is not ANY and tuple(getattr(template, "shape", ())) != array.shape:
            raise self._unlike(where, f"an array of shape {array.shape}", _shown(template))

    def _jax(self, node: dict[str, Any], where: str, template: Any) -> jax.Array:
        name = node["jax"]
        if not isinstance(name, str) or name not in self._shared:
            array = self._array(name, where, template)
            self._shared[name] = self._on_device(array, where)
        self._require_shape(self._shared[name], where, template)
        return self._shared[name]

    def _on_device(self, array: Any, where: str) -> jax.Array:
        converted = jnp.asarray(array)
        if converted.dtype != array.dtype:
            raise self.error(
                f"{where} holds {array.dtype}, which JAX is set to round to {converted.dtype}",
                'call jax.config.update("jax_enable_x64", True) at the start of the program.',
            )
        return converted

    def _numpy(self, node: dict[str, Any], where: str, template: Any) -> np.ndarray:
        return self._array(node["numpy"], where, template)

    def _scalar(self, node: dict[str, Any], where: str, template: Any) -> np.generic:
        array = self._array(node["scalar"], where, ANY)
        if array.shape != ():
            raise self.error(f"{where} is an array of shape {array.shape}, not one number")
        return array[()]

    def _key(self, node: dict[str, Any], where: str, template: Any) -> jax.Array:
        data, implementation = self._array(node["key"], where, ANY), node["implementation"]
        if implementation not in KEYS or data.dtype != np.uint32:
            raise self.error(f"{where} is no random key")
        values = {"key_bits_array": jnp.asarray(data), "impl": implementation}
        return self._made(where, jax.random.wrap_key_data, values)

    def _strings(self, node: dict[str, Any], where: str, template: Any) -> np.ndarray:
        texts, dtype = node["strings"], node["dtype"]
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise self.error(f"{where} is no list of texts")
        if dtype == "object":
            return np.array(texts, dtype=object)
        width = re.fullmatch(r"<U([1-9]\d{0,8})", dtype) if isinstance(dtype, str) else None
        longest = max(map(len, texts), default=0)
        if width is None or int(width[1]) < longest or 4 * int(width[1]) * len(texts) > MOST_TEXT:
            raise self.error(f"{where} has texts of the dtype {brief(dtype)}, which is not theirs")
        return np.array(texts, dtype=dtype)

    def _object(self, node: dict[str, Any], where: str, template: Any) -> Any:
        kind = node["object"]
        if not isinstance(kind, str) or kind not in KINDS:
            raise self.error(f"{where} is a {brief(kind)}, which is not known")
        return self.built(kind, node["fields"], where, template)

    def _leaves(self, node: dict[str, Any], where: str, template: Any) -> Any:
        nodes, once = node["leaves"], node["structure"]
        if not isinstance(nodes, dict) or not isinstance(once, str):
            raise self.error(f"{where} is {brief(node)}, which is no pytree")
        if template is ANY:
            raise _NoTemplateError(
                self._path,
                f"{where} is a pytree of which the file has the arrays, but not the structure, once "
                f"{once[:120]!r}",
                "pass like=, a thing of the same structure; for a Solution flow.init(problem, particles).",
            )
        leaves, structure = jax.tree_util.tree_flatten_with_path(template)
        named = {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
        if list(named) != list(nodes):
            raise self._unlike(where, f"a pytree of {brief(list(nodes))}", f"one of {brief(list(named))}")
        values = [self.value(nodes[path], below(where, path), leaf) for path, leaf in named.items()]
        return self._made(where, jax.tree.unflatten, {"treedef": structure, "leaves": values})

    def _code(self, node: dict[str, Any], where: str, template: Any) -> Any:
        name = node["import"]
        module, separator, path = name.partition(":") if isinstance(name, str) else ("", "", "")
        if not separator:
            raise self.error(f"{where} is {brief(node)}, which names no code")
        argument = "network=" if "network" in where.lower() else "likelihood="
        if module not in self._trust:
            raise self.error(
                f"{where} is code, named {brief(name)}, and a file's code is not run",
                f"pass {argument}, or trust=({brief(module)},) if you know that module.",
            )
        found: Any = self._made(where, importlib.import_module, {"name": module})
        for part in path.split("."):
            found = getattr(found, part, None)
        # A module has more names than those of its own: those that it imported are not what was trusted.
        own = getattr(found, "__module__", None) == module and getattr(found, "__qualname__", None) == path
        made = isinstance(found, type) and issubclass(found, eqx.Module)
        usable = callable(found) and made == isinstance(found, type) == ("fields" in node)
        if not own or not usable:
            raise self.error(
                f"{where} is {brief(name)}, which that module cannot give", f"use {argument} instead."
            )
        if not made:
            return found
        fields = self._dict({"dict": node["fields"]}, where, ANY)
        return self._made(where, found, fields)


_NODES: dict[frozenset[str], Callable[[Decoder, dict[str, Any], str, Any], Any]] = {
    frozenset({"float"}): Decoder._float,
    frozenset({"list"}): Decoder._sequence,
    frozenset({"tuple"}): Decoder._sequence,
    frozenset({"dict"}): Decoder._dict,
    frozenset({"jax"}): Decoder._jax,
    frozenset({"numpy"}): Decoder._numpy,
    frozenset({"scalar"}): Decoder._scalar,
    frozenset({"key", "implementation"}): Decoder._key,
    frozenset({"strings", "dtype"}): Decoder._strings,
    frozenset({"object", "fields"}): Decoder._object,
    frozenset({"leaves", "structure"}): Decoder._leaves,
    frozenset({"import"}): Decoder._code,
    frozenset({"import", "fields"}): Decoder._code,
}


def _shown(template: Any) -> str:
    if hasattr(template, "shape"):
        return f"an array of shape {tuple(template.shape)}"
    return f"a {type(template).__name__}" + (f" of {len(template)}" if hasattr(template, "__len__") else "")
