"""The benchmarks run, compare like with like, and their page shows what they found. Nothing here is timed."""

import ast
import copy
import importlib.util
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from benchmarks import bare, figures, growth, ours, overhead, page, pairs, tables, timing
from benchmarks.__main__ import measure
from benchmarks.peers import fit, kernel_sum, langevin, stein, tabular_fit
from benchmarks.peers.guests import Guests, needed
from benchmarks.targets import STEP_SIZE, TEMPERATURE, classification, disagreement, drift, regression
from benchmarks.timing import AbsentError, Contender, Ratio
from helpers import assert_close

import measureflow as mf
from measureflow.numerics.interactions import EXACT

pytestmark = [pytest.mark.standard_promotion, pytest.mark.slow]
FOLDER = Path(timing.__file__).parent


@pytest.fixture(autouse=True, scope="module")
def quickly_compiled():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def imported(name):
    tree = ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from ("targets" if name.startswith("benchmarks.targets") else name for name in whole)


def test_the_baseline_knows_nothing_of_measureflow():
    assert set(imported("targets")) <= {"collections.abc.Callable", "typing.Any", "typing.NamedTuple"} | {
        "jax",
        "numpy",
    }
    assert set(imported("bare")) <= {"collections.abc.Callable", "typing.Any", "jax", "targets"}
    assert "measureflow" in set(imported("ours")), "the test sees imports"


def flat(particles):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(particles)])


@pytest.fixture(scope="module")
def moved():
    """Where two steps lead: plain and by measureflow, without noise and with it."""
    target = regression(2)
    ended = {
        "bare": bare.gradient_steps(target, 2, draws=False)(),
        "bare with draws": bare.gradient_steps(target, 2, draws=True)(),
        "DE": ours.run(target, "DE", 2)().particles,
        "DLE": ours.run(target, "DLE", 2)().particles,
    }
    return {name: flat(particles) - flat(target.particles) for name, particles in ended.items()}


def test_the_bare_step_is_the_step_of_a_deep_ensemble(moved):
    assert_close(moved["bare"], moved["DE"], relative=1e-3)


@pytest.mark.parametrize("name", ["bare with draws", "DLE"])
def test_the_bare_draws_have_the_variance_of_the_flow(moved, name):
    """The gradient hardly changes, so the noises of two steps add up."""
    noise = (moved[name] - moved["bare"]) / np.sqrt(2 * 2 * STEP_SIZE * TEMPERATURE)
    assert abs(np.var(noise) - 1) < 5 * np.sqrt(2 / len(noise))
    assert abs(np.mean(noise)) < 5 / np.sqrt(len(noise))


def test_the_bare_repulsion_is_that_of_the_interactions():
    particles = jax.random.normal(jax.random.key(0), (40, 2))
    expected = EXACT.gradient(mf.SquaredExponential(0.7), particles)
    assert_close(-bare.repulsion(particles, 0.7), expected)


def test_the_target_is_that_of_a_deep_langevin_ensemble():
    target = regression(2)
    gradient = ours.problem_of(target, "DLE").wasserstein_gradient(target.particles, target.data)
    assert disagreement(jax.tree.map(jnp.negative, gradient), drift(target)) < 1e-5


def test_the_model_given_to_numpyro_has_the_same_target():
    target = regression(2)
    assert disagreement(stein.peer_drift(target), drift(target)) < 1e-5


@pytest.mark.parametrize("name", langevin.MODULES)
@pytest.mark.filterwarnings("ignore")
def test_other_peers_have_the_same_target(name):
    target = regression(2)
    try:
        peer = langevin.MODULES[name].Peer(target)
    except AbsentError as absent:
        pytest.skip(str(absent))
    assert disagreement(peer.drift(), drift(target)) < 1e-5


def test_disagreement_is_relative_to_the_largest_entry():
    assert disagreement([np.array([1.0, 3.5])], [np.array([1.0, 4.0])]) == 0.125


def test_contenders_take_turns():
    calls, ticks = [], []
    contenders = {
        "slow": Contender(lambda: calls.append("slow"), 2),
        "broken": Contender(lambda: 1 / 0, optional=True),
        "fast": Contender(lambda: calls.append("fast")),
    }
    times, left_out = timing.alternate(contenders, 3, lambda: ticks.append(len(calls)))
    assert calls == ["slow", "fast"] * 4
    assert ticks == [2, 4, 6, 8]
    assert left_out == {"broken": "ZeroDivisionError: division by zero"}
    assert {name: len(found["rounds"]) for name, found in times.items()} == {"slow": 3, "fast": 3}


def test_only_peers_may_fail():
    with pytest.raises(ZeroDivisionError):
        timing.alternate({"ours": Contender(lambda: 1 / 0)}, 1, lambda: None)


def test_seconds_are_of_one_step(monkeypatch):
    monkeypatch.setattr(timing, "seconds", lambda run: run())
    times, _ = timing.alternate({"a": Contender(lambda: 6.0, 3)}, 2, lambda: None)
    assert times == {"a": {"median": 2.0, "first_call": 6.0, "rounds": [2.0, 2.0]}}


def test_ratios_are_taken_within_rounds():
    times = {"a": {"rounds": [2.0, 30.0, 8.0]}, "b": {"rounds": [1.0, 10.0, 2.0]}}
    wanted = [Ratio("a", "b", at_most=2.9), Ratio("b", "a", at_least=0.3), Ratio("a", "absent")]
    slower, faster = timing.ratios(times, wanted)
    assert (slower["low"], slower["ratio"], slower["high"], slower["holds"]) == (2.5, 3.0, 3.5, False)
    assert faster["ratio"] == pytest.approx(1 / 3)
    assert faster["holds"]
    assert timing.ratios(times, [Ratio("a", "b")])[0]["holds"] is None


def test_the_exponent_is_that_of_the_larger_sizes():
    sizes = [1, 10, 100, 1000]
    assert timing.exponent(sizes, [7.0, 7.0, 3e4, 3e6]) == pytest.approx(2.0)
    assert timing.exponent([2, 4], [3.0, 24.0]) == pytest.approx(3.0)


def test_memory_is_read_from_the_compiled_program():
    """At least one copy of the particles, and never the N² numbers of all pairs."""
    assert 2 * 4 * 40_000 < growth.temporary_bytes(40_000) < 4 * 40_000**2 / 10


def test_the_plain_sum_over_pairs_is_ours():
    particles, kernel = jax.random.normal(jax.random.key(0), (1_234, 2)), mf.SquaredExponential(0.5)
    ours = jax.jit(lambda kernel, particles: EXACT.gradient(kernel, particles))(kernel, particles)
    # The plain sum subtracts what cancels, and errs by a few hundred units in the last place.
    assert disagreement(jax.jit(pairs.plain_sum)(kernel, particles), ours) < 2e-5


def test_large_networks_are_classifiers():
    target = classification(2, (4, 3, 3), 6)
    uniform = jax.tree.map(lambda leaf: np.zeros(leaf.shape[1:], np.float32), target.particles)
    assert jax.jit(target.loss)(uniform, target.data) == pytest.approx(np.log(3), rel=1e-6)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Tiny sizes of everything that needs no process of its own; peers where they are installed."""
    out = tmp_path_factory.mktemp("bench")
    with pytest.MonkeyPatch.context() as patch, jax.numpy_dtype_promotion("standard"):
        patch.setattr("benchmarks.__main__.tqdm", lambda **_: _Silent())
        found = measure(["imports", "overhead", "pairs", "peers", "growth"], quick=True, out=out)
    # What there was so far had been written, all along.
    assert len(json.loads((out / "results.json").read_text(encoding="utf-8"))["growth"]) == len(
        found["growth"]
    )
    found["peers"].append(tabular_fit.measured(_process, 2, lambda: None))
    return json.loads(json.dumps(found))


class _Silent:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def update(self):
        return None

    def set_description(self, _):
        return None


def _process(name):
    if name in (tabular_fit.DEFAULTS, tabular_fit.GRADIENTS):
        raise AbsentError("no time")
    factor = 6 if name == tabular_fit.BDE else 1
    return [{"seconds": 3.0 * factor, "nll": 5.0}, {"seconds": 1.0 * factor**2, "nll": 6.0}]


def test_everything_runs(results):
    assert len(results["overhead"]) == len(overhead.jobs(quick=True))
    for case in results["overhead"]:
        assert {"DRLE"} < set(case["times"])
        assert all(ratio["ratio"] > 0 for ratio in case["ratios"])
    assert [axis["title"] for axis in results["growth"]] == [
        "particles in 2-D",
        "networks 8-50-1, batch 100",
        "parameters of each of 20 particles",
        "memory of particles in 2-D",
        "memory of each device, 64 particles in 3-D",
        "bytes sent by each device, over the least possible, 64 particles in 3-D",
    ]
    assert all(min(axis["values"]) > 0 for axis in results["growth"])


def test_a_peer_is_timed_or_left_out_with_a_word(results):
    peers = [*langevin.MODULES, stein.POINTS, kernel_sum.NAME]
    timed = {name for case in results["peers"] for name in case["times"]}
    left_out = {name: why for case in results["peers"] for name, why in case["left_out"].items()}
    for peer in peers:
        assert (peer in timed) != (peer in left_out)
    assert stein.POINTS in timed, "NumPyro is always there"
    if importlib.util.find_spec("blackjax") is None:
        assert left_out["BlackJAX SGLD"].startswith("blackjax cannot be imported")


def test_whole_fits_are_compared_fit_by_fit(results):
    case = results["peers"][-1]
    assert [(ratio["of"], ratio["ratio"], ratio["holds"]) for ratio in case["ratios"]] == [
        ("bde, first fit", 6.0, True),
        ("bde, second fit", 36.0, True),
    ]
    assert case["left_out"] == dict.fromkeys((tabular_fit.DEFAULTS, tabular_fit.GRADIENTS), "no time")
    assert case["nll"] == {tabular_fit.BDE: 5.5, tabular_fit.STEPS: 5.5}


def test_a_missing_bde_is_left_out(monkeypatch, tmp_path):
    monkeypatch.setattr(tabular_fit, "BDE_PYTHON", tmp_path / "python")
    with pytest.raises(AbsentError, match="not installed"):
        tabular_fit.process(tabular_fit.BDE)


def test_our_settings_of_the_whole_fit_are_those_of_the_estimator():
    for who, settings in tabular_fit.CONTENDERS.values():
        if who == "measureflow":
            assert set(settings) <= set(mf.EnsembleRegressor().get_params())
    assert len(fit.split()[0]) == tabular_fit.TRAINING_ROWS


class _Regressor:
    def __init__(self, random_state, **settings):
        self.scale = settings["scale"] + random_state

    def fit(self, x, y):
        self.mean = y.mean()
        return self

    def predict_dist(self, x):
        import numpyro.distributions as dist

        return dist.Normal(jnp.full(len(x), self.mean), self.scale)


def test_fits_are_scored_on_test_rows(monkeypatch):
    monkeypatch.setattr(mf, "EnsembleRegressor", _Regressor)
    first, second = fit.fits(fit.measureflow, {"scale": 70.0})
    _, test_x, train_y, test_y = fit.split()
    for found, scale in ((first, 70.0), (second, 71.0)):
        expected = 0.5 * np.mean(((test_y - train_y.mean()) / scale) ** 2) + np.log(
            scale * np.sqrt(2 * np.pi)
        )
        assert found["nll"] == pytest.approx(expected, rel=1e-5)
        assert found["seconds"] > 0
    assert len(test_x) == len(test_y)


def test_the_page_shows_what_was_found(results, tmp_path):
    folder, docs = tmp_path / "bench", tmp_path / "docs"
    folder.mkdir()
    (folder / "results.json").write_text(json.dumps(results))
    assert {path.name for path in figures.draw_all(results, folder)} == {
        "overhead.png",
        "peers.png",
        "growth.png",
    }
    page.write(folder, docs)
    text = (docs / "benchmarks.md").read_text(encoding="utf-8")
    for picture in ("overhead", "peers", "growth"):
        assert f"(assets/benchmarks/{picture}.png)" in text
        assert (docs / "assets" / "benchmarks" / f"{picture}.png").stat().st_size > 10_000
    assert "| 40 particles in 2-D |" in text
    assert f"JAX {jax.__version__}" in text
    assert results["machine"]["processor"] in text
    assert "| bde | 18.0 s | 36.0 s | 5.500 |" in text
    assert f"bde, second fit / {tabular_fit.STEPS}, second fit | diabetes, 8 networks" in text
    assert "| 36 (36–36) | at least 5 | yes |" in text
    assert "Left out: EnsembleRegressor. no time" in text
    assert "Tiny sizes" in text, "nobody takes these for a measurement"


def test_no_number_of_the_page_is_typed_by_hand():
    texts = [
        page.INTRODUCTION,
        page.OVERHEAD,
        page.PAIRS,
        page.PEERS,
        page.APART,
        page.FITS,
        page.GROWTH,
        page.TARGETS,
    ]
    assert not any(character.isdigit() for text in texts for character in text.replace(".0e}", ""))


def test_a_missed_target_is_said_so(results):
    case = copy.deepcopy(results["overhead"][0])
    (held,) = (ratio for ratio in case["ratios"] if ratio["at_most"] == 1.25)
    for holds, word in ((True, "yes"), (False, "**no**")):
        held["holds"] = holds
        assert tables.targets({"overhead": [case]}).endswith(f"| at most 1.25 | {word} |")


@pytest.mark.parametrize(
    ("seconds", "shown"), [(1.234e-5, "12.3 µs"), (1.5e-3, "1.50 ms"), (0.25, "250 ms"), (31.4, "31.4 s")]
)
def test_durations(seconds, shown):
    assert tables.duration(seconds) == shown


def test_sizes_in_memory():
    assert [tables.size_in_memory(size) for size in (12, 2_336, 62_413_296)] == ["12 B", "2.34 kB", "62.4 MB"]


def test_a_peer_that_does_other_work_is_left_out():
    guests = Guests()
    guests.invite("good", lambda: (lambda: None, 1e-6), 3)
    guests.invite("other", lambda: (lambda: None, 0.5))
    guests.invite("broken", lambda: 1 / 0)
    guests.invite("absent", lambda: needed("no_such_library"))
    assert {name: contender.steps for name, contender in guests.contenders.items()} == {"good": 3}
    assert guests.left_out["other"] == "it does other work: 5.0e-01 from the target"
    assert guests.left_out["broken"].startswith("ZeroDivisionError")
    assert guests.left_out["absent"].startswith("no_such_library cannot be imported")
