"""`save` and `load`: one file for one thing, whose document says what it is, and which version wrote it."""

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from measureflow.saving.container import FileFormatError, PathLike, brief, read, strict_json, write
from measureflow.saving.decoding import Decoder
from measureflow.saving.encoding import Encoder, is_pytree
from measureflow.saving.registry import KINDS, kind_named, kind_of, saved

FORMAT, VERSION = "measureflow", 1
#: From the document of each version of the format to that of the next. A change of the format, be it one
#: field more, is a new version, and an entry here.
MIGRATIONS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}


@saved
class Pytree(NamedTuple):
    """What a file holds that is of no other kind."""

    tree: Any


def save(thing: Any, path: PathLike, *, force: bool = False) -> None:
    """Write `thing` to one file, which `load` reads without running code.

    A `random_state` that is a generator is saved as None. Networks other than `Network.mlp`, and likelihoods
    other than measureflow's, are saved by name only: pass them to `load`.

    Parameters
    ----------
    thing
        A fitted estimator, a `Solution`, a state, a measure, a `Predictive`, or a pytree of arrays.
    path
        Where: one file (safetensors, by any name), which appears whole or not at all.
    force
        Whether it may take the place of a file that is there.
    """
    kind = kind_of(thing)
    if kind is None and not is_pytree(thing):
        raise TypeError(
            f"a {type(thing).__name__} cannot be saved; pass a fitted estimator, a Solution, a measure, a "
            "Predictive, or a pytree of arrays."
        )
    if kind is None:
        kind, thing = "Pytree", Pytree(thing)
    encoder = Encoder()
    fields = encoder.fields(kind, thing)
    document = {
        "format": FORMAT,
        "format_version": VERSION,
        "measureflow_version": _measureflow_version(),
        "kind": kind,
        "fields": fields,
    }
    text = json.dumps(document, allow_nan=False, separators=(",", ":"))
    _require_loads(thing, kind, text, encoder)
    write(path, text, encoder.arrays, force=force)


def load(
    path: PathLike,
    *,
    network: Any = None,
    likelihood: Any = None,
    like: Any = None,
    trust: Sequence[str] = (),
) -> Any:
    """What `save` wrote to `path`, equal to the last bit. No code is run that the file brings or names.

    A `Predictive` of a network other than `Network.mlp`, or of a likelihood of your own, needs it again as
    `network=` or `likelihood=`. Where they are functions or Equinox modules of a module that can be imported,
    `trust=("package.module",)` imports it instead.

    Pytrees of dictionaries, lists and tuples come back as they were. Of others (Equinox modules as θ, states
    of Optax) a file has the arrays only, and `like` the structure: a thing of the same kind or, for a
    `Solution`, its state, as `flow.init(problem, particles)` makes it. Without it a `Solution` whose state
    only has such parts is loaded with state None, and a warning.

    Arrays are put on the default device. What is wrong with a file is a `FileFormatError`.

    Parameters
    ----------
    path
        A file that `save` wrote.
    network, likelihood
        Of a `Predictive`: networks other than `Network.mlp`, and likelihoods of your own, are not in the
        file.
    like
        Something with the structure of what was saved, where that is not of dictionaries, lists and
        tuples.
    trust
        Names of modules from which functions and Equinox modules may be imported: trust a module as if
        you ran it yourself.
    """
    if isinstance(trust, str) or not all(isinstance(name, str) for name in trust):
        raise TypeError(f"trust must hold names of modules, got {trust!r}; pass trust=('package.module',).")
    given = {"network": network, "likelihood": likelihood}
    given = {name: value for name, value in given.items() if value is not None}
    text, arrays = read(path)
    document = _current(path, text)
    name = document["kind"]
    kind = kind_named(name)
    if kind is None:
        raise FileFormatError(path, f"it holds a {brief(name)}, which is not known")
    for argument in given:
        if argument not in kind.given:
            raise ValueError(
                f"{argument} was given, but {path} holds a {name}, which takes none; leave it out."
            )
    decoder = Decoder(path, arrays, trust, like)
    thing = decoder.built(name, document["fields"], name, given)
    decoder.require_all_taken()
    return thing.tree if isinstance(thing, Pytree) else thing


def _measureflow_version() -> str:
    # The package itself cannot be imported from its modules, and is there when they are used.
    return sys.modules["measureflow"].__version__


def _require_loads(thing: Any, kind: str, text: str, encoder: Encoder) -> None:
    """What is written can be read: found out while there is something else to do about it."""
    # Code is for the user to pass again.
    given = {name: getattr(thing, name) for name in KINDS[kind].given if name in encoder.with_code}
    try:
        Decoder("it", encoder.arrays, (), thing).built(kind, strict_json(text)["fields"], kind, given)
    except FileFormatError as error:
        raise ValueError(
            f"this {kind} cannot be saved, since it could not be loaded: {error.what}; {error.remedy}"
        ) from error


def _current(path: PathLike, text: str) -> dict[str, Any]:
    """The document of a file, in the present version of the format."""
    try:
        document = strict_json(text)
    except ValueError as error:
        raise FileFormatError(path, f"its description cannot be read: {error}") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise FileFormatError(path, "measureflow did not write its description")
    version, writer = document.get("format_version"), document.get("measureflow_version")
    if type(version) is not int or not isinstance(writer, str):
        raise FileFormatError(path, "it does not say which version wrote it")
    oldest = min(MIGRATIONS, default=VERSION)
    if not oldest <= version <= VERSION or any(step not in MIGRATIONS for step in range(version, VERSION)):
        raise FileFormatError(
            path,
            f"measureflow {writer[:40]} wrote it in version {version} of the format, and this is measureflow "
            f"{_measureflow_version()}, which reads versions from {oldest} to {VERSION}",
            "upgrade with `pip install --upgrade measureflow`."
            if version > VERSION
            else f"load and save it with a measureflow between {writer[:40]} and {_measureflow_version()}.",
        )
    for step in range(version, VERSION):
        document = MIGRATIONS[step](document) | {"format_version": step + 1}
    if set(document) != (expected := {"format", "format_version", "measureflow_version", "kind", "fields"}):
        raise FileFormatError(path, f"its description must have the parts {', '.join(sorted(expected))}")
    return document
