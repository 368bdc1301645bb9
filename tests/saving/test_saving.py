"""What is saved comes back to the last bit; what is not whole, or not honest, is refused and does nothing."""

import contextlib
import dataclasses
import errno
import importlib
import json
import math
import os
import pathlib
import pickle
import subprocess
import sys
import threading
import time
import tracemalloc
from typing import NamedTuple

import equinox as eqx
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import optax
import pandas as pd
import pytest
from benchmarks import fuzz_files
from benchmarks.fuzz_files import fitted, particles_of, parts, sealed
from safetensors.numpy import load_file
from tests.helpers import key

import measureflow as mf
from measureflow.runs.solution import Restart
from measureflow.saving import documents, registry
from measureflow.saving.container import FileFormatError
from measureflow.saving.documents import load, save


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


def again(thing, path, **arguments):
    """Saved and loaded."""
    save(thing, path, force=True)
    return load(path, **arguments)


def assert_same(one, other, where="it"):
    """Of one type, and equal to the last bit, by a way that knows nothing of files."""
    assert type(one) is type(other) or (isinstance(one, jax.Array) and isinstance(other, jax.Array)), where
    if isinstance(one, jax.Array) and jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
        assert jax.random.key_impl(one) == jax.random.key_impl(other), where
        one, other = jax.random.key_data(one), jax.random.key_data(other)
    if isinstance(one, jax.Array | np.ndarray | np.generic):
        assert one.dtype == other.dtype, where
        assert one.shape == other.shape, where
        if one.dtype == object:
            assert list(one) == list(other), where
        else:
            assert np.asarray(one).tobytes() == np.asarray(other).tobytes(), where
    elif isinstance(one, dict):
        assert list(one) == list(other), where
        for name in one:
            assert_same(one[name], other[name], f"{where}[{name!r}]")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for i, (mine, theirs) in enumerate(zip(one, other, strict=True)):
            assert_same(mine, theirs, f"{where}[{i}]")
    elif dataclasses.is_dataclass(one):
        for field in dataclasses.fields(one):
            assert_same(getattr(one, field.name), getattr(other, field.name), f"{where}.{field.name}")
    elif isinstance(one, float):
        assert (math.isnan(one) and math.isnan(other)) or math.copysign(1, one) * one == math.copysign(
            1, other
        ) * other
        assert repr(one) == repr(other), where
    else:
        assert one == other, where


# Round trips.

NUMPY = (
    np.float64,
    np.float32,
    np.float16,
    np.int64,
    np.int32,
    np.int16,
    np.int8,
    np.uint64,
    np.uint8,
    np.bool_,
)
JAX = (jnp.float32, jnp.float16, jnp.bfloat16, jnp.int32, jnp.int16, jnp.uint32, jnp.uint8, jnp.bool_)
SPECIAL = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 5e-324, 1.7976931348623157e308])

TREES = {
    "numpy": {dtype.__name__: np.arange(6).reshape(2, 3).astype(dtype) for dtype in NUMPY},
    "jax": {np.dtype(dtype).name: jnp.arange(6).reshape(2, 3).astype(dtype) for dtype in JAX},
    "empty": [np.zeros((0, 3)), jnp.zeros((2, 0)), [], (), {}, None],
    "scalars": [
        np.float64(0.1),
        np.float32(0.1),
        np.int64(-3),
        np.bool_(True),
        np.uint8(255),
        jnp.float32(2.5),
    ],
    "python": [True, False, 0, -7, 10**30, 0.1, 1.0, -0.0, math.nan, math.inf, -math.inf, "", "naïve θ ☃ 𝕏"],
    "special": (SPECIAL, jnp.asarray(SPECIAL[:5], jnp.bfloat16), SPECIAL[:6].astype(np.float32)),
    "orders": {"Fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)), "strided": np.arange(10)[::3]},
    "0 axes": (np.array(3.0), jnp.array(3.0), np.array(True)),
    "names": {
        "a/b": np.arange(2),
        "a b": np.arange(4),
        "a": {"b": np.arange(3)},
        "../x": 1,
        "": [2],
        "__metadata__": np.ones(1),
        "\ud800": 3,
    },
    "keys": [jax.random.key(0), jax.random.split(jax.random.key(1, impl="rbg"), 3)],
    "texts": [
        np.array(["a", "bcd"]),
        np.array(["a", "é"], dtype="<U7"),
        np.array(["x", "y"], object),
        np.array([], str),
    ],
    "one array": np.arange(3),
    "deep": eval("[" * 90 + "1" + "]" * 90),
}


@pytest.mark.parametrize("name", TREES)
def test_pytrees(name, path):
    back = again(TREES[name], path)
    if name == "orders":
        assert back["strided"].flags.c_contiguous
    assert_same(TREES[name], back)


def test_byte_order_becomes_the_machine_s(path):
    back = again([np.arange(3, dtype=">i8"), np.array(["ab"], dtype=">U2")], path)
    assert_same([np.arange(3), np.array(["ab"])], back)


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.builds(
        lambda seed, shape, dtype, of_jax: (jnp.asarray if of_jax else np.asarray)(
            np.random.default_rng(seed).integers(0, 2, shape).astype(dtype)
        ),
        st.integers(0, 99),
        st.lists(st.integers(0, 3), max_size=3),
        st.sampled_from([np.float32, np.int32, np.bool_, np.uint8, jnp.bfloat16]),
        st.booleans(),
    ),
)
RANDOM = st.recursive(
    LEAVES,
    lambda children: (
        st.lists(children, max_size=3)
        | st.lists(children, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=5), children, max_size=3)
    ),
    max_leaves=12,
)


@hypothesis.settings(max_examples=40, deadline=None, derandomize=True, database=None)
@hypothesis.given(tree=RANDOM)
def test_random_pytrees(tree, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "random.safetensors"
    assert_same([tree], again([tree], path))


MEASURES = {
    "scalar scale": lambda: mf.Gaussian(jnp.zeros(3), 0.7),
    "scale of each": lambda: mf.Gaussian(jnp.arange(3.0), jnp.array([0.1, 1.0, 7.0])),
    "pytree": lambda: mf.Gaussian({"w": jnp.ones((2, 2)), "b": (jnp.zeros(()), [jnp.zeros(1)])}, 0.3),
    "full rank": lambda: mf.Gaussian(jnp.arange(3.0), jnp.linalg.cholesky(jnp.eye(3) + 0.5)),
    "full rank of one": lambda: mf.Gaussian(jnp.zeros(1), jnp.ones((1, 1))),
    "full rank of a pytree": lambda: mf.Gaussian({"a": jnp.zeros((1, 1))}, jnp.ones((1, 1))),
    "matrix, not full rank": lambda: mf.Gaussian(jnp.zeros((1, 1)), jnp.ones((1, 1))),
    "bfloat16": lambda: mf.Gaussian(jnp.ones(2, jnp.bfloat16), 0.3),
    "Uniform": lambda: mf.Uniform([jnp.zeros(2)], [jnp.array([0.1, 3.0])]),
    "mixture": lambda: mf.GaussianMixture(jnp.zeros((2, 3)), jnp.ones((2, 3)), jnp.array([0.3, 0.7])),
    "Flat": mf.Flat,
    "Empirical": lambda: mf.Empirical({"a": jnp.full((4, 2), jnp.nan), "b": jnp.arange(4.0)}),
}


@pytest.mark.parametrize("name", MEASURES)
def test_measures(name, path):
    measure = MEASURES[name]()
    assert_same(measure, again(measure, path))


def test_kinds_have_the_fields_of_their_classes():
    """A field that is added to a class must be added to the file."""
    classes = {
        "Solution": mf.Solution,
        "ParticleState": mf.ParticleState,
        "ParametricState": mf.ParametricState,
        "Predictive": mf.Predictive,
        "Empirical": mf.Empirical,
        "Uniform": mf.Uniform,
        **{
            kind.__name__: kind
            for kind in mf.likelihoods.AbstractLikelihood.__subclasses__()
            if kind.__module__.startswith("measureflow.")
        },
    }
    assert len(classes) == 19, sorted(classes)
    for name, kind in classes.items():
        fields = {field.name for field in dataclasses.fields(kind) if field.init}
        assert set(registry.KINDS[name].fields) == fields, name


def test_every_class_in_files_is_found_by_its_name():
    importlib.import_module("measureflow.commands.model")
    importlib.import_module("measureflow.tables.classifier")
    ours = {name for kind, name in registry._NAMES.items() if kind.__module__.startswith("measureflow.")}
    # A tree is saved by `save` itself.
    assert ours == {*registry._LATE, "Pytree"}
    for name, module in registry._LATE.items():
        assert name in vars(sys.modules[module]), f"{name} is not in {module}"


def test_a_fresh_process_imports_what_a_file_needs(tmp_path):
    save(mf.Gaussian(jnp.zeros(2), 1.0), tmp_path / "Gaussian")
    save(
        mf.Predictive(NETWORK, mf.likelihoods.NegativeBinomial(), particles_of(NETWORK, 3)),
        tmp_path / "Predictive",
    )
    program = (
        "import sys, measureflow\n"
        "print(type(measureflow.load('Gaussian')).__name__, 'measureflow.networks' in sys.modules)\n"
        "print(type(measureflow.load('Predictive')).__name__, 'sklearn' in sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": str(pathlib.Path(mf.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["Gaussian", "False", "Predictive", "False"], done.stderr


# Solutions.


def loss(theta, batch):
    return jnp.mean((batch @ theta["w"]) ** 2) + jnp.sum(theta["b"] ** 2)


PRIOR = mf.Gaussian({"w": jnp.zeros(2), "b": jnp.ones(())}, 1.0)
RNG = np.random.default_rng(0)
PARTICLES = {"w": jnp.asarray(RNG.normal(size=(6, 2))), "b": jnp.asarray(RNG.normal(size=6))}
DATA = jnp.asarray(RNG.normal(size=(12, 2)))


def run(problem, flow, initial, steps):
    return mf.solve(problem, flow, initial, steps, key(3), data=DATA, batch_size=4, record_every=1)


def test_a_plain_solution_goes_on_as_if_it_had_never_been_saved(path):
    problem = mf.Problem(loss, 0.1 * mf.KL(PRIOR))
    flow = mf.WassersteinFlow(0.05, mf.RMSPreconditioner(3), momentum=0.9)
    solution = run(problem, flow, PARTICLES, 4)
    back = again(solution, path)
    assert_same(solution, back)
    assert back.measure.particles["w"] is back.state.particles["w"], "saved once, and one array again"
    assert list(load_file(path)) == list(dict.fromkeys(load_file(path)))
    assert_same(run(problem, flow, back.state, 3).state, run(problem, flow, PARTICLES, 7).state)


def test_restarts_and_states_of_their_own(path):
    solution = fuzz_files.solution(mf.Problem(loss), mf.WassersteinFlow(0.05), PARTICLES)
    restarts = (Restart(3, (0, 2), (1, 4)), Restart(9, (5,), (1,)))
    back = again(dataclasses.replace(solution, restarts=restarts), path)
    assert back.restarts == restarts
    assert all(type(restart) is Restart and type(restart.lost[0]) is int for restart in back.restarts)
    assert_same(solution.state, again(solution.state, path))
    assert_same(
        dataclasses.replace(solution, state=None), again(dataclasses.replace(solution, state=None), path)
    )


@pytest.mark.standard_promotion
@pytest.mark.parametrize("kind", ["optimiser", "mean field", "full rank"])
def test_the_state_of_an_optimiser_needs_its_structure(kind, path):
    if kind == "optimiser":
        problem, flow, initial = mf.Problem(loss), mf.WassersteinFlow(optimiser=optax.adam(0.1)), PARTICLES
    else:
        family = mf.MeanFieldGaussian() if kind == "mean field" else mf.FullRankGaussian()
        problem, initial = mf.Problem(loss, 0.1 * mf.KL(PRIOR)), PRIOR
        flow = mf.ParametricFlow(family, optax.adam(0.1), samples=5)
    solution = fuzz_files.solution(problem, flow, initial)
    # As after some steps, when no two arrays are alike.
    leaves, structure = jax.tree.flatten(solution.state.memory)
    memory = jax.tree.unflatten(structure, [leaf + (1 + i) for i, leaf in enumerate(leaves)])
    state = eqx.tree_at(lambda state: state.memory, solution.state, memory)
    solution = dataclasses.replace(solution, state=state)
    save(solution, path)
    with pytest.warns(UserWarning, match=r"without its state.*memory.*ScaleByAdamState.*like=.*flow\.init"):
        back = load(path)
    assert back.state is None
    assert_same(solution.measure, back.measure)
    assert_same(solution.history, back.history)
    for like in (flow.init(problem, initial), solution):
        back = load(path, like=like)
        assert_same(solution, back)
        assert jax.tree.structure(solution.state) == jax.tree.structure(back.state)
    # Of another optimiser, another number of particles, or no state at all.
    others = [mf.WassersteinFlow(optimiser=optax.sgd(0.1, momentum=0.9)).init(mf.Problem(loss), PARTICLES)]
    if kind == "optimiser":
        others.append(flow.init(problem, jax.tree.map(lambda leaf: leaf[:2], PARTICLES)))
    for like in (*others, PARTICLES, 3.0):
        with pytest.raises(FileFormatError, match="like="):
            load(path, like=like)


class Pair(NamedTuple):
    first: jax.Array
    second: jax.Array


class Annealed(eqx.Module):
    """The state of somebody's flow, of which measureflow knows nothing."""

    particles: dict
    step: jax.Array
    level: Pair
    key: jax.Array


def test_the_state_of_a_flow_of_ones_own(path):
    """Its arrays are saved, and `like` has the structure."""

    def state(number):
        particles = jax.tree.map(lambda leaf: leaf + number, PARTICLES)
        return Annealed(particles, jnp.array(number), Pair(jnp.ones(2), jnp.zeros(3)), key(number))

    solution = mf.Solution(mf.Empirical(state(7).particles), HISTORY, state(7))
    save(solution, path)
    with pytest.warns(UserWarning, match=r"without its state.*Annealed.*like=.*flow\.init"):
        back = load(path)
    assert back.state is None
    assert_same(solution.measure, back.measure)
    for like in (state(0), dataclasses.replace(solution, state=state(1))):
        assert_same(solution, load(path, like=like))
    for like in (eqx.tree_at(lambda s: s.level, state(0), None), state(0).particles, STATE):
        with pytest.raises(FileFormatError, match=r"Annealed.*like="):
            load(path, like=like)


@registry.saved
class Grown(eqx.Module):
    """Another registration, as a class of this package would have it."""

    first: jax.Array
    second: int = 3


def test_a_field_more_in_a_class_is_one_more_in_its_files(path):
    assert_same([Grown(jnp.ones(2), 4)], again([Grown(jnp.ones(2), 4)], path))
    document, _, _ = parts(path.read_bytes())
    assert list(document["fields"]["tree"]["list"][0]["fields"]) == ["first", "second"]
    with pytest.raises(ValueError, match="Grown is the name of another class that is saved"):
        registry.saved(type("Grown", (), {}))


def test_other_pytrees_need_their_structure(path):
    module = eqx.filter(eqx.nn.MLP(2, 1, 3, 1, key=key()), eqx.is_inexact_array)
    particles = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf]), module)
    other = jax.tree.map(lambda leaf: jnp.zeros((2, *leaf.shape)), module)
    for thing, like in (
        (mf.Empirical(particles), mf.Empirical(other)),
        (mf.Gaussian(module, 0.5), mf.Gaussian(jax.tree.map(jnp.zeros_like, module), 1.0)),
        ({"a": Pair(jnp.ones(2), jnp.zeros(3))}, {"a": Pair(jnp.zeros(2), jnp.ones(3))}),
        (
            mf.FromDistribution(dist.Normal(1.0, jnp.ones(2))),
            mf.FromDistribution(dist.Normal(0.0, 2 * jnp.ones(2))),
        ),
    ):
        save(thing, path, force=True)
        with pytest.raises(FileFormatError, match=r"structure.*pass like="):
            load(path)
        back = load(path, like=like)
        assert jax.tree.structure(back) == jax.tree.structure(thing)
        assert_same(jax.tree.leaves(thing), jax.tree.leaves(back))
    save({"a": Pair(jnp.ones(2), jnp.zeros(3))}, path, force=True)
    for like in (
        {"a": Pair(jnp.ones(2), jnp.zeros(4))},
        {"b": 1},
        [1],
        {"a": (jnp.ones(2), jnp.zeros(3))},
        {"a": None},
    ):
        with pytest.raises(FileFormatError, match="like="):
            load(path, like=like)
    solution = mf.Solution(mf.Empirical(particles), mf.History(), mf.ParticleState(particles, jnp.array(4)))
    save(solution, path, force=True)
    back = load(path, like=mf.ParticleState(other, jnp.array(0)))
    assert_same(jax.tree.leaves(solution.measure), jax.tree.leaves(back.measure))
    assert_same(jax.tree.leaves(solution.state), jax.tree.leaves(back.state))


# Predictive laws.

NETWORK = mf.Network.mlp(2, (3,), 2, "relu+tanh")
LIKELIHOODS = {
    "heteroscedastic": (mf.likelihoods.Heteroscedastic(smallest_scale=0.02), 2, 0),
    "homoscedastic": (mf.likelihoods.Homoscedastic(targets=2), 2, 2),
    "student_t": (mf.likelihoods.StudentT(), 2, 1),
    "bernoulli": (mf.likelihoods.Bernoulli(targets=3), 3, 0),
    "categorical": (mf.likelihoods.Categorical(classes=4), 4, 0),
    "ordinal": (mf.likelihoods.Ordinal(classes=4, order=(2, 0, 1, 3)), 1, 3),
    "poisson": (mf.likelihoods.Poisson(), 1, 0),
    "negative_binomial": (mf.likelihoods.NegativeBinomial(), 2, 0),
    "hurdle": (mf.likelihoods.HurdleNegativeBinomial(), 3, 0),
}


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_predictive(name, path):
    likelihood, outputs, constants = LIKELIHOODS[name]
    network = mf.Network.mlp(2, (), outputs, "silu")
    network = network.with_constants(constants) if constants else network
    units = (jnp.float32(0.1), 3.0, 1.25) if name == "heteroscedastic" else (None, None, None)
    predictive = mf.Predictive(network, likelihood, particles_of(network, 3), *units)
    back = again(predictive, path)
    assert eqx.tree_equal(back, predictive)
    assert_same(jax.tree.leaves(predictive), jax.tree.leaves(back))
    assert back.network == predictive.network, "one program, not two"


def test_networks(path):
    network = mf.Network.mlp(3, (4, 5), 2, "gelu")
    for one in (network, network.with_constants(1), network.with_constants(1).with_constants(3)):
        assert again({"network": one}, path)["network"] == one


class Laplace(mf.likelihoods.AbstractLikelihood):
    """Somebody's own."""

    scale: jax.Array

    @property
    def outputs_per_target(self):
        return 1

    def law(self, outputs):
        return dist.Laplace(outputs[..., 0], self.scale)


def unit_normal(outputs):
    return dist.Normal(outputs[..., 0], 1.0)


def init_line(random_key):
    return {"slope": jax.random.normal(random_key, (2,))}


def apply_line(theta, inputs):
    return inputs @ theta["slope"]


def make_module(random_key):
    return eqx.nn.MLP(2, 1, 3, 1, key=random_key)


HERE = __name__
LINE, MODULE = mf.Network(init_line, apply_line), mf.Network.equinox(make_module)
CODE = {
    "function": (LINE, unit_normal),
    "object": (LINE, Laplace(jnp.float32(2.0))),
    "with constants": (LINE.with_constants(1), mf.likelihoods.Homoscedastic()),
    "Equinox": (MODULE, unit_normal),
}


@pytest.mark.parametrize("name", CODE)
def test_code_is_passed_or_trusted(name, path):
    network, likelihood = CODE[name]
    predictive = mf.Predictive(network, likelihood, particles_of(network, 3))
    save(predictive, path)
    known = {} if name == "with constants" else {"likelihood": likelihood}
    for back in (load(path, network=network, **known), load(path, trust=(HERE,))):
        assert jax.tree.structure(back.particles) == jax.tree.structure(predictive.particles)
        assert_same(jax.tree.leaves(predictive), jax.tree.leaves(back))
        assert type(back.likelihood) is type(likelihood)
    with pytest.raises(
        FileFormatError, match=rf"network.* code, named '{HERE}:.*pass network=, or trust=\('{HERE}'"
    ):
        load(path, **known)
    if known:
        with pytest.raises(FileFormatError, match=rf"likelihood.* code, named '{HERE}:.*pass likelihood="):
            load(path, network=network, trust=("tests.other",))


def test_code_without_a_name_is_passed(path):
    predictive = mf.Predictive(
        NETWORK, lambda outputs: dist.Normal(outputs[..., 0], 1.0), particles_of(NETWORK, 3)
    )
    save(predictive, path)
    with pytest.raises(FileFormatError, match=r"<lambda>.*pass likelihood="):
        load(path)
    with pytest.raises(FileFormatError, match="does not define; use likelihood= instead"):
        load(path, trust=(HERE,))
    assert_same(predictive.particles, load(path, likelihood=unit_normal).particles)
    for network in (LINE, mf.Network.mlp(3, (3,), 2)):
        with pytest.raises(FileFormatError, match=r"a list .* a dict .*network=|shapes .* the network's"):
            load(path, network=network, likelihood=unit_normal)


@pytest.mark.parametrize(
    "code",
    [
        {"import": "os:system"},
        {"import": "os:system", "fields": {"command": "touch STRANGER"}},
        {"import": "subprocess:Popen", "fields": {"args": {"list": ["touch", "STRANGER"]}}},
        {"import": "builtins:exec"},
        {"import": "stranger:function"},
        {"import": "stranger:Module", "fields": {}},
    ],
)
def test_a_file_cannot_name_what_is_run(code, path, tmp_path, monkeypatch):
    """Not without trust, and with trust in one module only what that module itself defines."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "stranger.py").write_text("import pathlib\npathlib.Path('STRANGER').touch()\n")
    (tmp_path / "friend.py").write_text(
        "import os\nfrom subprocess import Popen\nimport pathlib\npathlib.Path('FRIEND').touch()\n"
        "class Plain:\n    def __init__(self, **fields): pathlib.Path('STRANGER').touch()\n"
    )
    save(mf.Predictive(NETWORK, mf.likelihoods.NegativeBinomial(), particles_of(NETWORK, 3)), path)
    document, header, data = parts(path.read_bytes())
    document["fields"]["likelihood"] = code
    path.write_bytes(sealed(document, header, data))
    with pytest.raises(FileFormatError, match="not run; pass likelihood="):
        load(path)
    assert "stranger" not in sys.modules
    for name in ("os.system", "Popen", "pathlib.Path.touch", "Plain", "__builtins__.exec", "nothing"):
        document["fields"]["likelihood"] = {**code, "import": f"friend:{name}"}
        path.write_bytes(sealed(document, header, data))
        with pytest.raises(FileFormatError, match="does not define"):
            load(path, trust=("friend",))
    assert (tmp_path / "FRIEND").exists(), "a trusted module is imported"
    assert not (tmp_path / "STRANGER").exists()
    sys.modules.pop("friend")


# Estimators.

CLASSES = {
    "str": np.array(["b", "a", "long name"] * 3),
    "object": np.array(["b", "a", "ü"] * 3, object),
    "int": np.array([3, -1, 7] * 3),
    "uint8": np.array([3, 1, 7] * 3, np.uint8),
    "bool": np.array([True, False, True] * 3),
    "float": np.array([0.0, 1.0, 2.0] * 3),
}


@pytest.mark.parametrize("name", CLASSES)
def test_classes(name, path):
    estimator = fitted(mf.EnsembleClassifier(hidden=[3], particles=2), CLASSES[name])
    back = again(estimator, path)
    assert_same(vars(estimator), vars(back))
    assert back.get_params() == estimator.get_params()


@pytest.mark.parametrize(
    "name", ["heteroscedastic", "homoscedastic", "student_t", "poisson", "negative_binomial"]
)
@pytest.mark.parametrize("columns", [0, 1, 2])
def test_regressors(name, columns, path):
    y = np.arange(9 * max(columns, 1)).reshape(9, -1)
    estimator = mf.EnsembleRegressor(
        hidden=(), likelihood=name, random_state=np.int64(3), mmd=np.float64(0.1)
    )
    fitted(estimator, y if columns else y.ravel())
    back = again(estimator, path)
    assert_same(vars(estimator), vars(back))


@pytest.mark.standard_promotion
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_a_fitted_estimator(path):
    """By a true fit: what it learns and predicts."""
    rng = np.random.default_rng(0)
    rows = pd.DataFrame({"one": rng.normal(size=60), "two": rng.normal(size=60)})
    y = (rows["one"].to_numpy() + 0.1 * rng.normal(size=60)) * 1e5
    estimator = mf.EnsembleRegressor(hidden=(), particles=2, method="DE", steps=9, prior_weight=1)
    estimator.fit(rows, y)
    estimator.save(path)
    back = load(path)
    assert type(back) is mf.EnsembleRegressor
    assert back.get_params() == estimator.get_params()
    assert_same(vars(estimator), vars(back))
    assert_same(estimator.predict(rows), back.predict(rows))
    for leaf in jax.tree.leaves(back.particles_):
        assert leaf.flags.writeable


def test_a_generator_is_saved_as_none(path):
    estimator = fitted(mf.EnsembleRegressor(hidden=(), random_state=np.random.RandomState(0)), np.arange(9.0))
    with pytest.warns(
        UserWarning, match="random_state is a generator, which is not saved.*Predictions do not"
    ):
        save(estimator, path)
    assert load(path).random_state is None
    assert isinstance(estimator.random_state, np.random.RandomState)


# What cannot be saved.


class Own(mf.EnsembleRegressor):
    """Somebody's subclass."""


def regressor(**changes):
    estimator = fitted(mf.EnsembleRegressor(hidden=()), np.arange(9.0))
    vars(estimator).update(changes)
    return estimator


UNSAVED = {
    "number": (lambda: 3.0, TypeError, ["float", "pass a fitted estimator"]),
    "function": (lambda: print, TypeError, ["builtin_function", "pass a fitted estimator"]),
    "function inside": (lambda: {"a": [print]}, TypeError, ["tree.a.0", "eqx.filter"]),
    "module": (lambda: eqx.nn.MLP(1, 1, 1, 1, key=key()), TypeError, ["activation", "eqx.filter"]),
    "problem": (lambda: mf.Problem(loss), TypeError, ["function", "eqx.filter"]),
    "keys": (lambda: {"a": {3: 1}}, TypeError, ["tree.a", "3", "str(key)"]),
    "complex": (lambda: [jnp.ones(2, jnp.complex64)], TypeError, ["tree.0", "complex64", "astype"]),
    "dates": (
        lambda: [np.array(["2020-01-01"], "datetime64[D]")],
        TypeError,
        ["tree.0", "datetime64", "astype"],
    ),
    "objects": (lambda: [np.array([1, "a"], object)], TypeError, ["tree.0", "objects", "astype(str)"]),
    "masked": (lambda: [np.ma.masked_array([1.0])], TypeError, ["tree.0", "MaskedArray", "np.asarray"]),
    "deep": (lambda: eval("[" * 101 + "1" + "]" * 101), ValueError, ["nested", "list"]),
    "long": (lambda: ["x" * 17 * 2**20], ValueError, ["bytes to describe", "16,777,216", "fewer arrays"]),
    "many": (lambda: [mf.Flat()] * 1001, ValueError, ["more than 1000 objects", "pytree"]),
    "unfitted": (mf.EnsembleRegressor, ValueError, ["not fitted", "call fit"]),
    "attribute": (lambda: regressor(note="x"), ValueError, ["note", "delete"]),
    "subclass": (lambda: fitted(Own(hidden=()), np.arange(9.0)), TypeError, ["Own", "pass a fitted"]),
    "setting": (lambda: regressor(method="none"), ValueError, ["method", "none", "cannot be saved"]),
    "likelihood": (lambda: regressor(likelihood="poisson"), ValueError, ["likelihood_", "cannot be saved"]),
    "infinite": (lambda: regressor(spread_=math.inf), ValueError, ["spread_", "inf", "cannot be saved"]),
    "range": (lambda: regressor(hidden=range(3)), TypeError, ["settings.hidden", "range"]),
}


@pytest.mark.parametrize("name", UNSAVED)
def test_what_cannot_be_saved(name, path):
    make, kind, pieces = UNSAVED[name]
    thing = make()
    with pytest.raises(kind) as caught:
        save(thing, path)
    for piece in [*pieces, "; "]:
        assert piece in str(caught.value), f"{piece!r} not in: {caught.value}"
    assert not list(path.parent.iterdir()), "nothing is left"


# Writing.


def test_a_file_is_only_replaced_by_force(path):
    save([1], path)
    with pytest.raises(FileExistsError, match=r"model\.safetensors exists; pass force=True"):
        save([2], path)
    assert load(path) == [1]
    other = path.with_name("other")
    other.touch()
    assert path.stat().st_mode == other.stat().st_mode, "as any file of the user's"
    other.unlink()
    path.chmod(0o600)
    save([2], str(path), force=True)
    assert load(str(path)) == [2]
    assert path.stat().st_mode & 0o777 == 0o600
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_where_a_file_cannot_be(path, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no folder .*nowhere; make it"):
        save([1], tmp_path / "nowhere" / "x")
    for force in (True, False):
        with pytest.raises(FileExistsError, match="not a file; choose"):
            save([1], tmp_path, force=force)
    link = tmp_path / "link"
    link.symlink_to(path)
    save([1], link)
    save([2], link, force=True)
    assert link.is_symlink()
    assert load(path) == [2]


def no_space(*arguments, **keywords):
    raise OSError(errno.ENOSPC, "No space left on device")


def half_of_it(path, content):
    with path.open("wb") as file:
        file.write(content[: len(content) // 2])
    no_space()


@pytest.mark.parametrize("force", [True, False])
@pytest.mark.parametrize("when", ["writing", "os.fsync", "moving"])
def test_a_failure_leaves_the_old_file(when, force, path, monkeypatch):
    """A full disk, at any time: what was there stays, and nothing else."""
    if force:
        save([1], path)
        before = path.read_bytes()
    with monkeypatch.context() as patch:
        if when == "writing":
            patch.setattr(pathlib.Path, "write_bytes", half_of_it)
        elif when == "os.fsync":
            patch.setattr(os, "fsync", no_space)
        else:
            patch.setattr(os, "replace", no_space)
            patch.setattr(os, "link", no_space)
        with pytest.raises(
            OSError, match=r"model\.safetensors could not be written: No space.*; .*Make room"
        ) as caught:
            save([np.ones(1000)], path, force=force)
        assert caught.value.errno == errno.ENOSPC
    assert [file.name for file in path.parent.iterdir()] == ([path.name] if force else [])
    assert not force or path.read_bytes() == before


def test_without_links_a_file_is_moved(path, monkeypatch):
    monkeypatch.setattr(os, "link", no_space)
    save([1], path)
    assert load(path) == [1]
    with pytest.raises(FileExistsError, match="force=True"):
        save([2], path)
    assert len(list(path.parent.iterdir())) == 1


def test_a_process_that_dies_leaves_the_old_file(path):
    save([1], path)
    program = f"""
import os, numpy as np
from measureflow.saving import container
container.os.fsync = lambda descriptor: os._exit(9)
container.write({str(path)!r}, "text", {{"x": np.ones(10)}}, force=True)
"""
    done = subprocess.run([sys.executable, "-c", program], check=False)
    assert done.returncode == 9
    assert load(path) == [1]
    assert [file.suffix for file in path.parent.iterdir() if file != path] == [".tmp"]


def test_many_write_at_once(path):
    """Readers see a whole file, always; and without force, one of many has made it."""
    trees = [[i, np.full(2000, i)] for i in range(8)]
    save(trees[0], path)
    errors = []

    def write(tree):
        for _ in range(5):
            save(tree, path, force=True)

    def read():
        for _ in range(30):
            number, array = load(path)
            if not np.all(array == number):
                errors.append(number)

    threads = [threading.Thread(target=write, args=(tree,)) for tree in trees] + [
        threading.Thread(target=read)
    ]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not errors
    new, made = path.with_name("new"), []

    def first(tree):
        try:
            save(tree, new)
            made.append(tree[0])
        except FileExistsError:
            pass

    threads = [threading.Thread(target=first, args=(tree,)) for tree in trees]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert made == [load(new)[0]]
    assert {file.name for file in path.parent.iterdir()} == {"model.safetensors", "new"}


# Reading.


def test_others_can_read_the_arrays(path):
    """The reference implementation finds the same arrays under the same names."""
    tree = {"a": np.arange(3.0), "b": [jnp.ones((2, 2)), np.array(True)], "c": np.zeros((0, 2), np.int8)}
    save(tree, path)
    arrays = load_file(path)
    assert_same(tree["a"], arrays["tree.a"])
    assert_same(np.asarray(tree["b"][0]), arrays["tree.b.0"])
    assert_same(tree["b"][1], arrays["tree.b.1"])
    assert arrays["tree.c"].shape == (0, 2)


def test_the_same_thing_is_the_same_file(path):
    save(mf.Gaussian(jnp.zeros(2), 1.0), path)
    first = path.read_bytes()
    save(load(path), path, force=True)
    assert path.read_bytes() == first


def test_files_that_are_none(path, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no file .*model\.safetensors; check the path"):
        load(path)
    with pytest.raises(FileFormatError, match="it is not a file; pass the path"):
        load(tmp_path)
    path.write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(FileFormatError, match="not a safetensors file"):
        load(path)
    path.write_bytes(b"")
    with pytest.raises(FileFormatError, match="not a safetensors file"):
        load(path)
    from safetensors.numpy import save_file

    save_file({"x": np.ones(2)}, path)
    with pytest.raises(FileFormatError, match="measureflow did not write it"):
        load(path)
    error = pickle.loads(pickle.dumps(FileFormatError(path, "what", "remedy.")))
    assert str(error) == f"{path} cannot be loaded: what; remedy."


def test_pipes_are_not_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileFormatError, match="it is not a file"):
        load(tmp_path / "pipe")


def rewritten(path, thing, change):
    """The file of `thing` with its document changed."""
    save(thing, path, force=True)
    document, header, data = parts(path.read_bytes())
    path.write_bytes(sealed(change(document) or document, header, data))


def test_newer_files(path):
    rewritten(path, [1], lambda document: document.update(format_version=2, measureflow_version="9.1"))
    with pytest.raises(FileFormatError) as caught:
        load(path)
    for piece in (str(path), "measureflow 9.1", "version 2", f"measureflow {mf.__version__}", "upgrade"):
        assert piece in str(caught.value)


def version_0(document):
    """As it might have been: the tree was the content."""
    tree = document.pop("fields")["tree"]
    document.update(format_version=0, measureflow_version="0.0.1", content=tree)


def migrated(document):
    content = document.pop("content")
    return document | {"fields": {"tree": content}}


def test_older_files(path, monkeypatch):
    rewritten(path, [1, np.arange(2)], version_0)
    with pytest.raises(
        FileFormatError, match=r"0\.0\.1 wrote it in version 0 .* from 1 to 1; load and save it with"
    ):
        load(path)
    monkeypatch.setitem(documents.MIGRATIONS, 0, migrated)
    assert_same([1, np.arange(2)], load(path))
    # Over two versions, one after the other.
    monkeypatch.setattr(documents, "VERSION", 2)
    with pytest.raises(FileFormatError, match="from 0 to 2"):
        load(path)
    monkeypatch.setitem(documents.MIGRATIONS, 1, lambda document: document)
    assert_same([1, np.arange(2)], load(path))


def test_arguments(path):
    save(mf.Flat(), path)
    for name in ("network", "likelihood"):
        with pytest.raises(
            ValueError, match=rf"{name} was given, but .* holds a Flat, which takes none; leave"
        ):
            load(path, **{name: NETWORK})
    with pytest.raises(TypeError, match=r"trust must hold names.*; pass trust=\('package\.module',\)"):
        load(path, trust="package.module")


def test_double_precision_is_not_rounded_in_silence(path):
    with jax.enable_x64(True):
        measure = mf.Gaussian(jnp.ones(2, jnp.float64) / 3, 1.0)
        save(measure, path)
        assert_same(measure, load(path))
    with pytest.raises(
        FileFormatError, match=r"float64, which JAX is set to round to float32; .*jax_enable_x64"
    ):
        load(path)


NETWORK_ = ("fields", "fitted", "dict", "network_", "fields")
APPLY_ = ("apply", "fields", "function", "fields")
WRONG = {
    # What is wrong with a regressor's document: where, what, and a word of the error.
    "unknown kind": (["kind"], "Regressor", "not known"),
    "kind of another": (["kind"], "Gaussian", "fields of a Gaussian"),
    "setting": (["fields", "settings", "dict", "particles"], 0, "particles must be at least 1"),
    "setting of another type": (["fields", "settings", "dict", "warm_start"], 3, "warm_start"),
    "activation": (["fields", "settings", "dict", "activation"], "os.system", "activation is unknown"),
    "features": (["fields", "fitted", "dict", "n_features_in_"], 3, r"input_mean_ .*\(3,\)"),
    "sizes": ([*NETWORK_, "init", "fields", "sizes", "tuple", 1], 10**6, "(?s)not valid"),
    "layers": ([*NETWORK_, "init", "fields", "sizes", "tuple"], [2] * 10**4, "widths"),
    "activations": ([*NETWORK_, *APPLY_, "activation"], "relu+" * 10**5 + "relu", "activation is unknown"),
    "other sizes": ([*NETWORK_, *APPLY_, "sizes", "tuple", 0], 3, "(?s)not valid"),
    "targets": (["fields", "fitted", "dict", "likelihood_", "fields", "targets"], 2, "likelihood_ is not"),
    "shape": (["fields", "fitted", "dict", "target_shape_", "tuple"], [2], r"target_mean_ .*\(2,\)"),
    "scores": (["fields", "fitted", "dict", "validation_scores_", "dict", "log_density"], "x", "scores"),
    "spread": (["fields", "fitted", "dict", "spread_"], -1.0, "spread_ must be > 0"),
    "members": (["fields", "fitted", "dict", "members_"], None, "members_ are missing"),
    "some members": (["fields", "fitted", "dict", "members_", "dict", "binned"], 1.0, "members_ must hold"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_a_file_says_is_checked(name, path):
    (*where, last), value, word = WRONG[name]
    save(fitted(mf.EnsembleRegressor(hidden=(3,), particles=2), np.arange(9.0)), path)
    document, header, data = parts(path.read_bytes())
    node = document
    for step in where:
        node = node[step]
    assert node[last] != value
    node[last] = value
    path.write_bytes(sealed(document, header, data))
    with pytest.raises(FileFormatError, match=word):
        load(path)


ONE = jnp.asarray(np.arange(6.0).reshape(3, 2))
STATE = mf.ParticleState(ONE + 1, jnp.array(4), None, ONE + 2)
HISTORY = mf.History(step=np.arange(2), loss=np.arange(2.0))
SOUND = {
    "solution": lambda: mf.Solution(mf.Empirical(ONE), HISTORY, STATE),
    "predictive": lambda: mf.Predictive(
        NETWORK, mf.likelihoods.NegativeBinomial(), particles_of(NETWORK, 3), 1.0, 2.0
    ),
    "Gaussian": lambda: mf.Gaussian(jnp.arange(4.0), jnp.ones(4)),
    "classifier": lambda: fitted(mf.EnsembleClassifier(hidden=()), ["a", "b", "c"] * 3),
}
UNSOUND = {
    # An array's shape or dtype, or a field, that does not go with the others.
    "particles of integers": ("solution", "measure.particles", {"dtype": "I32"}, "int32.* and .*float32"),
    "moving integers": ("solution", "state.particles", {"dtype": "I32"}, "floating-point"),
    "particles of another shape": ("solution", "measure.particles", {"shape": [2, 3]}, "different shapes"),
    "drift": ("solution", "state.drift", {"shape": [2, 3]}, "drift and particles differ"),
    "step": ("solution", "state.step", {"shape": [1]}, "step is not a number"),
    "step of floats": ("solution", "state.step", {"dtype": "F32"}, "step is not a number"),
    "history": ("solution", "history.columns.loss", {"shape": [1, 2]}, "history is not a table"),
    "history of lengths": (
        "solution",
        "history.columns.loss",
        {"dtype": "I32", "shape": [4]},
        "history is not a table",
    ),
    "scale": ("Gaussian", "scale", {"shape": [2, 2]}, "scale has shapes"),
    "units": ("predictive", "location", {"shape": [1]}, "location or scale"),
    "weights": ("predictive", "particles.0.weight", {"shape": [3, 3, 2]}, "the network's parameters"),
    "likelihood": (
        "predictive",
        {"likelihood": {"object": "Poisson", "fields": {"targets": 1}}},
        None,
        "reads 1",
    ),
    "no likelihood": (
        "predictive",
        {"likelihood": {"object": "Flat", "fields": {}}},
        None,
        "(?s)not valid.*likelihood",
    ),
    "no network": (
        "predictive",
        {"network": {"object": "Flat", "fields": {}}},
        None,
        "(?s)not valid.*network",
    ),
    "no measure": ("solution", {"measure": None}, None, "its measure is none"),
    "no state": ("solution", {"state": 3}, None, "its state is none"),
    "no history": ("solution", {"history": {"list": []}}, None, "its history is none"),
    "no restarts": (
        "solution",
        {"restarts": {"tuple": [{"tuple": [1, 2, 3]}]}},
        None,
        "its restarts are none",
    ),
}


@pytest.fixture
def jaxtyping_off():
    """As for users: their types are not checked."""
    import jaxtyping

    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.parametrize("name", UNSOUND)
def test_what_does_not_go_together(name, path, jaxtyping_off):
    thing, what, change, word = UNSOUND[name]
    save(SOUND[thing](), path)
    document, header, data = parts(path.read_bytes())
    if isinstance(what, str):
        header[what].update(change)
    else:
        document["fields"].update(what)
    path.write_bytes(sealed(document, header, data))
    with pytest.raises(FileFormatError, match=word):
        load(path)


@pytest.mark.parametrize("texts", [["b", "a", "c"], ["a", "a", "b"], ["a", "b"], ["a", "b", "c", "d"]])
def test_classes_are_sorted_and_as_many_as_the_network_has(texts, path):
    save(SOUND["classifier"](), path)
    document, header, data = parts(path.read_bytes())
    document["fields"]["fitted"]["dict"]["classes_"] = {"texts": texts}
    path.write_bytes(sealed(document, header, data))
    with pytest.raises(FileFormatError, match=r"sorted classes|likelihood_ is not"):
        load(path)


def test_arrays_are_used_once_and_all(path):
    save({"a": np.arange(3), "b": jnp.arange(3), "c": jnp.arange(3)}, path)
    document, header, data = parts(path.read_bytes())
    tree = document["fields"]["tree"]["dict"]

    def refused(match, **changes):
        changed = json.loads(json.dumps(document))
        changed["fields"]["tree"]["dict"] = {**tree, **changes}
        path.write_bytes(sealed(changed, header, data))
        with pytest.raises(FileFormatError, match=match):
            load(path)

    refused("in another place", d={"numpy": "tree.a"})
    refused("in another place", d={"jax": "tree.a"})
    refused("in another place", d={"numpy": "tree.b"})
    refused("does not mention: .*tree.c", c=None)
    refused("not in the file", d={"jax": "tree.d"})


def of_document(change):
    """A file with another text for its document."""

    def changed(document, header, data):
        text = json.dumps(document)
        assert change(text) != text
        return sealed(change(text), header, data)

    return changed


def of_array(**changes):
    """A file with another description of its first array."""

    def changed(document, header, data):
        header["tree.a"].update(changes)
        return sealed(document, header, data)

    return changed


def of_header(change):
    """A file with another text for its header."""

    def changed(document, header, data):
        whole = sealed(document, header, data)
        text = whole[8 : len(whole) - len(data)].decode()
        assert change(text) != text
        return fuzz_files.with_header(change(text), data)

    return changed


TWICE = '"tree.a": {"dtype": "I64", "shape": [2], "data_offsets": [0, 16]}, "tree.b"'
CONTAINERS = {
    "overlap": (of_array(data_offsets=[16, 32]), "header or its arrays are wrong: .*invalid offset"),
    "gap": (of_array(data_offsets=[8, 24]), "header or its arrays are wrong: .*invalid offset"),
    "too small": (of_array(shape=[3]), "header or its arrays are wrong: .*invalid shape"),
    "too large": (of_array(shape=[1]), "header or its arrays are wrong: .*invalid shape"),
    "many axes": (of_array(shape=[2] + [1] * 70), "dimension"),
    "negative": (of_array(shape=[-2]), "header or its arrays are wrong: .*`-2`"),
    "truth": (of_array(shape=[True]), "header or its arrays are wrong: .*`true`"),
    "overflow": (of_array(shape=[2**40, 2**40]), "header or its arrays are wrong: .*overflow"),
    "dtype": (of_array(dtype="C64"), "C64, which is not one of"),
    "data": (
        lambda document, header, data: sealed(document, header, data + b"x"),
        "header or its arrays are wrong: .*invalid offset",
    ),
    "array twice": (of_header(lambda text: text.replace('"tree.b"', TWICE)), "the same name twice"),
    "field twice": (
        of_document(lambda text: text.replace('"kind":', '"kind": "Flat", "kind":')),
        "the same name twice",
    ),
    "NaN": (of_document(lambda text: text.replace("0.5", "NaN")), "JSON holds NaN"),
    "infinite": (of_document(lambda text: text.replace("0.5", "1e999")), "not a finite number"),
    "digits": (of_document(lambda text: text.replace("0.5", "9" * 5000)), "cannot be read"),
    "deep": (
        of_document(lambda text: text.replace("0.5", '{"list":[' * 150 + "1" + "]}" * 150)),
        "too deeply",
    ),
    "deeper": (of_document(lambda text: text.replace("0.5", "[" * 10**5 + "]" * 10**5)), "too deeply"),
    "text of numbers": (
        of_document(lambda text: text.replace('{"numpy": "tree.b"}', '{"text": "tree.b"}')),
        "holds no texts",
    ),
    "more": (of_document(lambda text: text.replace('"kind":', '"more": 1, "kind":')), "must have the parts"),
    "UTF-16": (of_header(lambda text: "\ufeff" + text), "header or its arrays are wrong"),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_what_makes_no_file(name, path):
    """Every check by itself, the check sums being right."""
    change, word = CONTAINERS[name]
    save({"a": np.arange(2), "b": np.arange(2), "c": 0.5}, path)
    path.write_bytes(change(*parts(path.read_bytes())))
    with pytest.raises(FileFormatError, match=word):
        load(path)


def test_truth_values_are_0_or_1(path):
    save([np.array([True, False])], path)
    document, header, _ = parts(path.read_bytes())
    path.write_bytes(sealed(document, header, b"\x02\x00"))
    with pytest.raises(FileFormatError, match="neither 0 nor 1"):
        load(path)


def test_large_headers_are_not_read(path, monkeypatch):
    with path.open("wb") as file:
        file.write((2**34).to_bytes(8, "little"))
        file.truncate(2**35)
    monkeypatch.setattr(json, "loads", no_space)
    with pytest.raises(FileFormatError, match=r"17,179,869,184 bytes, and 16,777,216 are the most"):
        load(path)


def lists(count, **node):
    return json.dumps({"list": [node] * count})


SIZES = {"tuple": [1] * 100}
BOMBS = {
    # What takes the place of one number, and how often.
    "wide texts": lists(24, strings=["a"], dtype="<U16777216"),
    "many texts": lists(60, strings=["a"] * 1000, dtype="<U16777"),
    "layers": lists(200, object="PerceptronInit", fields={"sizes": SIZES, "skip": False}),
    "networks": lists(
        500,
        object="Network",
        fields={
            "init": {"object": "PerceptronInit", "fields": {"sizes": SIZES, "skip": False}},
            "apply": {
                "object": "PerceptronApply",
                "fields": {"sizes": SIZES, "activation": "relu", "skip": False},
            },
            "output_axis": -1,
        },
    ),
    "references": lists(5000, jax="tree.a"),
    "measures": lists(
        2000, object="Gaussian", fields={"mean": {"jax": "tree.a"}, "scale": {"jax": "tree.a"}}
    ),
    "classes": lists(999, object="Categorical", fields={"targets": 2**30, "classes": 2**40}),
    "nesting": lists(20, **json.loads('{"list":[' * 90 + "1" + "]}" * 90)),
    "empty lists": lists(10_000, list=[]),
    "objects": json.dumps({"texts": ["a"] * 100_000}),
}


@pytest.mark.few(5)
@pytest.mark.parametrize("name", BOMBS)
def test_what_a_file_asks_for_is_in_proportion_to_its_size(name, path):
    """Memory is within 60 times the file, as JSON takes to be read, and a little; time within seconds."""
    save({"a": jnp.arange(2.0), "b": np.arange(2), "c": 0.5}, path)
    change = of_document(lambda text: text.replace("0.5", BOMBS[name]))
    path.write_bytes(change(*parts(path.read_bytes())))
    began = time.perf_counter()
    tracemalloc.start()
    try:
        with contextlib.suppress(FileFormatError):
            load(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 60 * path.stat().st_size + 2**23
    assert time.perf_counter() - began < 60


def test_the_texts_of_numpy_take_their_own_memory(path):
    """However wide: 72 MB are 72 MB in the file, and are never more."""
    save([np.array(["a", "bc"], "<U100000"), np.array([["a"], ["é"]])], path)
    assert path.stat().st_size > 8 * 100_000
    assert_same(np.array([["a"], ["é"]]), load(path)[1])
    save([np.array(["ab", "c"])], path, force=True)
    document, header, _ = parts(path.read_bytes())
    numbers = np.array([97, 98, 0x110000, 0], np.uint32).tobytes()
    path.write_bytes(sealed(document, header, numbers))
    with pytest.raises(FileFormatError, match="holds no texts"):
        load(path)


# Changed files: see benchmarks/fuzz_files.py.


@pytest.fixture(scope="module")
def contents(tmp_path_factory):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        folder = tmp_path_factory.mktemp("contents")
        contents = {name: fuzz_files.saved(thing, folder) for name, thing in fuzz_files.things().items()}
        return contents, fuzz_files.loaded_and_saved(contents, folder / "loaded", folder)


@pytest.mark.few(8)
@pytest.mark.standard_promotion
@pytest.mark.parametrize("change", range(len(fuzz_files.CHANGES)))
def test_changed_files_are_refused_or_sound(change, contents, path, tmp_path_factory):
    contents, originals = contents
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    for number in range(change, 7 * len(fuzz_files.CHANGES), len(fuzz_files.CHANGES)):
        kind, name, content = fuzz_files.mutant(contents, number, seed=1)
        path.write_bytes(content)
        outcome, thing = fuzz_files.outcome(path, originals[name], elsewhere)
        if fuzz_files.CHANGES[change] in fuzz_files.DAMAGE:
            assert outcome == "refused" or content == contents[name], (kind, name, number)
        fuzz_files.require_sound(thing)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_every_flipped_bit_of_a_header_is_noticed(path):
    save(mf.Gaussian(jnp.zeros(2), 1.0), path)
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    for place in rng.choice(len(whole), 100, replace=False):
        path.write_bytes(
            whole[:place] + bytes([whole[place] ^ (1 << int(rng.integers(8)))]) + whole[place + 1 :]
        )
        with pytest.raises(FileFormatError):
            load(path)
