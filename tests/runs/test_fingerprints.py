"""What a loss reads is a part of the run, wherever it finds it: another value of it is another run."""

import argparse
import collections
import dataclasses
import enum
import functools
import importlib
import itertools
import logging
import operator
import sys
import threading
import types

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxtyping import Float, jaxtyped

import measureflow as mf
from measureflow.runs.fingerprints import UNKNOWN, differences, fingerprint, not_compared

pytestmark = pytest.mark.standard_promotion


class Plain:
    def __init__(self, scale):
        self.scale = scale


class Slotted:
    __slots__ = ("__private", "scale")

    def __init__(self, scale):
        self.scale, self.__private = 1.0, scale


class Forgetful(Plain):
    def __getstate__(self):
        return {}


class Cached(Plain):
    @functools.cached_property
    def twice(self):
        return 2 * self.scale


class Number(float):
    pass


class Settings(dict):
    pass


class Schedule(functools.partial):
    pass


@dataclasses.dataclass
class Derived:
    name: str = "a"

    def __post_init__(self):
        self.scale = None


@jax.tree_util.register_pytree_node_class
class Node(Plain):
    def tree_flatten(self):
        return (), None

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(0.0)


def with_attribute(thing, scale):
    thing.scale = scale
    return thing


def reading(cfg):
    def loss(theta):
        return cfg.scale * theta

    return loss


def of_class(scale):
    """The same class as a module with other contents would have it."""
    kind = type("Config", (), {"scale": scale, "__module__": __name__, "__qualname__": "Config"})
    return lambda theta: kind.scale * theta


def of_enum(scale):
    kind = enum.Enum("Scale", {"ONE": scale}, module=__name__)
    return kind.ONE


class Member(enum.Enum):
    ONE = Plain(1.0)


def of_property(code):
    namespace = {"__module__": __name__, "__qualname__": "Config", "scale": property(code)}
    return type("Config", (), namespace)()


def custom(scale):
    function = jax.custom_vjp(lambda x: x)
    function.defvjp(lambda x: (x, None), functools.partial(operator.mul, scale))
    return function


CONFIG, SCHEDULE, EVALUATED = Plain(1.0), None, None


def global_loss(theta):
    return CONFIG.scale * theta


def schedule_loss(theta):
    return SCHEDULE(0) * theta + EVALUATED(theta)


def attribute_loss(theta):
    return attribute_loss.scale * theta


def with_globals(function, **values):
    copy = types.FunctionType(function.__code__, function.__globals__ | values, function.__name__)
    copy.__module__ = function.__module__
    return copy


def schedules(rate):
    return {"SCHEDULE": optax.cosine_decay_schedule(rate, 10), "EVALUATED": jnp.sin}


def evaluated(scale):
    likelihood = mf.likelihoods.Heteroscedastic(smallest_scale=scale)
    return {"SCHEDULE": optax.constant_schedule(1.0), "EVALUATED": likelihood}


def cached(scale, ask):
    thing = Cached(scale)
    assert not ask or thing.twice == 2 * scale
    return thing


def deep(scale):
    return functools.reduce(lambda inner, _: [inner], range(50), Plain({"a": (scale,)}))


def masked(hide):
    return np.ma.masked_array([1.0, 2.0], [False, hide])


FOUND = {
    "attribute": lambda scale: reading(Plain(scale)),
    "slot": lambda scale: reading(Slotted(scale)),
    "attribute that pickling drops": lambda scale: reading(Forgetful(scale)),
    "attribute of a node": lambda scale: reading(Node(scale)),
    "attribute beside fields": lambda scale: with_attribute(Derived(), scale),
    "namespace": lambda scale: reading(types.SimpleNamespace(scale=scale)),
    "argparse": lambda scale: reading(argparse.Namespace(scale=scale)),
    "class": of_class,
    "enum": of_enum,
    "number": lambda scale: Number(scale),
    "attribute of a number": lambda scale: with_attribute(Number(1.0), scale),
    "attribute of a dictionary": lambda scale: with_attribute(Settings(), scale),
    "attribute of a partial": lambda scale: with_attribute(functools.partial(max), scale),
    "subclass of partial": lambda scale: with_attribute(Schedule(max), scale),
    "keyword of a subclass of partial": lambda scale: Schedule(max, key=Plain(scale)),
    "attribute of a function": lambda scale: with_attribute(with_globals(attribute_loss), scale),
    "bound method": lambda scale: Cached(scale).__getattribute__,
    "bound method of a library": lambda scale: {"scale": scale}.get,
    "wrapped": lambda scale: functools.lru_cache(reading(Plain(scale))),
    "dispatched": lambda scale: functools.singledispatch(reading(Plain(scale))),
    "checked": lambda scale: jaxtyped(reading(Plain(scale)), typechecker=None),
    "gradient": custom,
    "global": lambda scale: with_globals(global_loss, CONFIG=Plain(scale)),
    "schedule of a library": lambda scale: with_globals(schedule_loss, **schedules(scale)),
    "object of a library": lambda scale: with_globals(schedule_loss, **evaluated(scale)),
    "nested": deep,
    "objects in an array": lambda scale: np.array([Plain(scale), None], object),
    "key": lambda scale: {1: scale, "1": 0},
    "mask": lambda scale: masked(scale > 1),
    "deque": lambda scale: collections.deque([scale]),
    "defaults": lambda scale: collections.defaultdict(list, a=scale),
    "iterator": lambda scale: iter([scale]),
    "getter": lambda scale: operator.itemgetter(scale),
    "generator": lambda scale: np.random.default_rng(int(scale)),
    "set of objects": lambda scale: {Plain(scale)},
    "module": lambda scale: mf.likelihoods.Heteroscedastic(smallest_scale=scale),
}


@pytest.mark.parametrize("name", FOUND)
def test_another_value_is_another_run(name):
    make = FOUND[name]
    first, second = (fingerprint(loss=make(scale)) for scale in (1.0, 2.0))
    changed, recoded = differences(first, second)
    assert changed, second
    assert not recoded
    assert differences(first, fingerprint(loss=make(1.0))) == ([], []), "made again, it is the same"
    assert not not_compared(first)


def test_what_was_only_remembered_is_no_part():
    """Properties that were computed once follow from what is compared."""
    one, other = (fingerprint(loss=cached(1.0, ask)) for ask in (False, True))
    assert one == other
    assert fingerprint(loss=cached(2.0, False)) != one


def test_a_property_is_code():
    first, second = (of_property(code) for code in (lambda self: 1.0, lambda self: 2.0))
    assert differences(fingerprint(loss=first), fingerprint(loss=second))[1]


@pytest.mark.parametrize("how", ["import", "import inside", "from inside", "package"])
def test_what_is_read_of_a_module(how, tmp_path, monkeypatch):
    code = {
        "import": "import settings\ndef loss(theta):\n    return settings.SCALE * theta\n",
        "import inside": "def loss(theta):\n    import settings\n    return settings.SCALE * theta\n",
        "from inside": "def loss(theta):\n    from settings import SCALE\n    return SCALE * theta\n",
        "package": "import package.settings\ndef loss(theta):\n    return package.settings.SCALE * theta\n",
    }[how]
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / "package" if how == "package" else tmp_path
    folder.mkdir(exist_ok=True)
    (tmp_path / "my_loss.py").write_text(code)
    found = []
    for scale in (1.0, 2.0, 1.0):
        (folder / "settings.py").write_text(f"SCALE = {scale}\nUNREAD = {len(found)}\n")
        for name in ("my_loss", "settings", "package", "package.settings"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        found.append(fingerprint(loss=importlib.import_module("my_loss").loss))
    for name in ("my_loss", "settings", "package", "package.settings"):
        sys.modules.pop(name, None)
    changed, recoded = differences(found[0], found[1])
    assert len(changed) == 1
    assert "SCALE: was 1, is 2" in changed[0]
    assert not recoded
    assert found[0] == found[2]


def test_one_thing_at_two_places_is_not_two():
    """What is followed once is told apart by where."""
    one, other = Plain(1.0), Plain(2.0)
    first, second = fingerprint(loss=[one, other, one]), fingerprint(loss=[one, other, other])
    assert differences(first, second)[0] == ["loss.2: was as loss.0, is as loss.1"]


def test_objects_that_refer_to_each_other():
    one, other = Plain(1.0), Plain(2.0)
    one.other, other.other = other, one
    assert len(fingerprint(loss=one)) < 20
    chain = functools.reduce(lambda inner, _: Plain(inner), range(3000), 1.0)
    assert not_compared(fingerprint(loss=chain)) == ["loss" + ".scale" * 100]


OPAQUE = {
    "generator": (x for x in "ab"),
    "lock": threading.Lock(),
    "file": sys.__stdout__,
}


@pytest.mark.parametrize("name", OPAQUE)
def test_what_cannot_be_compared_is_said(name):
    found = fingerprint(loss=reading(OPAQUE[name]))
    assert not_compared(found) == ["loss.cfg"]
    assert found["loss.cfg"].endswith(UNKNOWN)


LOGGER = logging.getLogger("measureflow.tests")


def logged_loss(theta):
    LOGGER.info("called")
    return jnp.sum(theta) + int(Member.ONE.value.scale)


PROBLEMS = {
    "logger": logged_loss,
    "jitted": jax.jit(logged_loss),
    "filtered": eqx.filter_jit(logged_loss),
    "schedule": mf.WassersteinFlow(optax.warmup_cosine_decay_schedule(0.1, 1.0, 10, 100)),
    "optimiser": mf.WassersteinFlow(optimiser=optax.chain(optax.clip(1.0), optax.adamw(0.1))),
    "kernel": mf.SquaredMMD(mf.Empirical(jnp.zeros((3, 2))), mf.Matern(1.5, 1.0)),
    "network": mf.Network.equinox(lambda key: eqx.nn.MLP(2, 1, 3, 1, key=key)),
    "shape": jax.ShapeDtypeStruct((2,), jnp.float32),
    "structure": jax.tree.structure({"a": [1, (2, None)]}),
    "type": Float[jax.Array, " n"],
    "ufuncs": (np.add, jnp.add, jnp.float32, max, itertools.count(3)),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_all_of_what_is_usual_can_be_compared(name):
    found = fingerprint(part=PROBLEMS[name])
    assert not not_compared(found)
    assert found == fingerprint(part=PROBLEMS[name])
    assert not [line for line in found.values() if " at 0x" in line]
