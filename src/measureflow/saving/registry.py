"""What a file may hold: classes that say so where they are defined.

    @saved
    class Gaussian: ...

A file has, of each, the values of what its constructor takes, read from the attributes of the same names: a
field more in a class is a field more in its files. What a class needs beyond that, it says there, too.
"""

import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, overload

Class = TypeVar("Class", bound=type)


@dataclasses.dataclass(frozen=True)
class Kind:
    """How things of one class are described, and built again.

    `build` makes one of the values in a file, by default the class itself, and its parameters name the
    fields; `describe` gives their values, by default the attributes. `check` of what was built raises where
    a file says what cannot be. `like`, of the fields so far, is something that has the structure of those to
    come, where a file has none. Fields in `code` may be functions, which no file holds: they are named. Those
    in `given` are arguments of `load` that take the place of what the file says. Those in `optional` are
    None where nothing says their structure.
    """

    build: Callable[..., Any]
    describe: Callable[[Any], dict[str, Any]] | None = None
    check: Callable[[Any], Any] | None = None
    like: Callable[[dict[str, Any]], Any] | None = None
    code: tuple[str, ...] = ()
    given: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()

    @functools.cached_property
    def fields(self) -> tuple[str, ...]:
        """Their names."""
        return tuple(inspect.signature(self.build).parameters)

    def values(self, thing: Any) -> dict[str, Any]:
        """Of its fields."""
        return self.describe(thing) if self.describe else {name: getattr(thing, name) for name in self.fields}


#: By the name in the file. Nothing else is ever built because a file says so.
KINDS: dict[str, Kind] = {}
_NAMES: dict[type, str] = {}
_LATE: dict[str, str] = {}


@overload
def saved(kind: Class, **options: Any) -> Class: ...


@overload
def saved(kind: None = None, **options: Any) -> Callable[[Class], Class]: ...


def saved(kind: Any = None, **options: Any) -> Any:
    """Let files hold things of a class: a decorator, with the options of `Kind`."""
    if kind is None:
        return functools.partial(saved, **options)
    if kind.__name__ in KINDS:
        raise ValueError(f"{kind.__name__} is the name of another class that is saved; rename it.")
    KINDS[kind.__name__] = Kind(**{"build": kind} | options)
    _NAMES[kind] = kind.__name__
    return kind


def saved_later(module: str, *names: str) -> None:
    """Classes that are registered when a module of this package is imported, which takes a while."""
    _LATE.update(dict.fromkeys(names, module))


def kind_of(thing: Any) -> str | None:
    """The name of a thing's kind, if it has one. A subclass is another class."""
    return _NAMES.get(type(thing))


def kind_named(name: Any) -> Kind | None:
    """The kind that a file names, if there is one."""
    if isinstance(name, str) and name in _LATE and name not in KINDS:
        importlib.import_module(_LATE[name])
    return KINDS.get(name) if isinstance(name, str) else None


def require(condition: Any, message: str) -> None:
    """Raises where what a file says cannot be."""
    if not condition:
        raise ValueError(message)
