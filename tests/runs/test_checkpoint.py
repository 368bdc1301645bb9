"""A run that is cut off goes on as if nothing had happened; what goes wrong is said, and loses little."""

import contextlib
import functools
import importlib.util
import itertools
import json
import logging
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import types
import warnings
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import measureflow as mf
from measureflow.runs import divergence, driver, program
from measureflow.runs.batches import STREAMED
from measureflow.runs.fingerprints import differences, fingerprint, not_compared

# Optax's schedules and optimisers are not written for strict promotion.
pytestmark = pytest.mark.standard_promotion
solving, checkpoints = (sys.modules[f"measureflow.runs.{name}"] for name in ("solve", "checkpoint"))
KEY = jax.random.key(0)
PRIOR = mf.Gaussian({"w": jnp.zeros(2), "b": jnp.zeros(())}, 1.0)
START = PRIOR.sample(jax.random.key(1), 12)
X = jax.random.normal(jax.random.key(2), (53, 2))
DATA = (X, X @ jnp.array([1.0, -2.0]) + 0.5)
STEPS, EVERY = 300, 50


@contextlib.contextmanager
def little_effort():
    """These programs are small and run briefly: most of their time would be the compiler's."""
    effort = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_call", "_finite", "_losses"):
            compiled = eqx.filter_jit(getattr(program, name).__wrapped__, compiler_options=effort)
            patch.setattr(program, name, compiled)
        yield


@pytest.fixture(autouse=True, scope="module")
def quickly_compiled():
    with little_effort():
        yield


@pytest.fixture(autouse=True)
def usual_handlers():
    """As in a script; what runs the tests has handlers of its own."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    after = {number: signal.signal(number, handler) for number, handler in before.items()}
    assert after == usual, "a run leaves no handler behind"


def regression_loss(theta, batch):
    x, y = batch
    return jnp.mean((x @ theta["w"] + theta["b"] - y) ** 2)


def drle(loss=regression_loss, prior=PRIOR, lengthscale=1.0, mmd=0.3, kl=0.1):
    kernel = mf.SquaredExponential(lengthscale)
    return mf.deep_repulsive_langevin_ensemble(loss, prior, kernel, mmd=mmd, kl=kl)


def full_flow(step_size=1e-2, adapt_steps=200, momentum=0.2):
    """All that a state can hold: particles, a preconditioner's memory, momentum."""
    schedule = optax.cosine_decay_schedule(step_size, 500)
    return mf.WassersteinFlow(schedule, mf.RMSPreconditioner(adapt_steps), momentum=momentum)


PROBLEM, FLOW = drle(), full_flow()


def solve(
    problem=PROBLEM, flow=FLOW, initial=START, steps=STEPS, key=KEY, folder=None, every=EVERY, **options
):
    options = {"data": DATA, "batch_size": 10, "record_every": 7} | options
    if folder is not None:
        options["checkpoint"] = mf.Checkpoint(folder, every)
    return mf.solve(problem, flow, initial, steps, key, **options)


@pytest.fixture(scope="module")
def straight():
    return solve()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a finished run; not to be written to."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    solve(folder=folder)
    return folder


@pytest.fixture
def copied(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


def file_of(step):
    return f"{step}-1-of-1.safetensors"


def names_in(folder):
    return {path.name for path in folder.iterdir()}


def bits(tree):
    leaves = [x if x.dtype != KEY.dtype else jax.random.key_data(x) for x in jax.tree.leaves(tree)]
    return [np.asarray(leaf).tobytes() for leaf in leaves]


def assert_identical(solution, expected):
    """To the bit: state, history, restarts."""
    assert [x.dtype for x in jax.tree.leaves(solution.state)] == [
        x.dtype for x in jax.tree.leaves(expected.state)
    ]
    assert bits(solution.state) == bits(expected.state)
    assert list(solution.history) == list(expected.history)
    assert bits(dict(solution.history)) == bits(dict(expected.history))
    assert solution.restarts == expected.restarts


class CutError(Exception):
    pass


@contextlib.contextmanager
def at_step(step, act):
    """Do something between two compiled calls, once, as soon as a run has come to `step`."""
    before, done = solving.SolveRun.advance, []

    def then(run, budget, end):
        before(run, budget, end)
        if run.step >= step and not done:
            done.append(run.step)
            act()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solving.SolveRun, "advance", then)
        yield done
    assert done, f"the run never came to step {step}"


def cut():
    raise CutError


def cut_off(act, step=170):
    with at_step(step, cut), pytest.raises(CutError):
        act()


# --- resuming


def key_in_memory():
    """A problem with a random key in the state: Optax's noise, at no temperature."""
    optimiser = optax.chain(optax.add_noise(0.01, 0.5, KEY), optax.adam(1e-2))
    return mf.deep_ensemble(regression_loss), mf.WassersteinFlow(optimiser=optimiser), START


def parametric():
    flow = mf.ParametricFlow(mf.MeanFieldGaussian(), optax.adam(1e-2), samples=2)
    return mf.deep_ensemble(regression_loss), flow, PRIOR


KINDS = {
    "particles": lambda: (PROBLEM, FLOW, START),
    "optimiser": key_in_memory,
    "parametric": parametric,
}


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_was_cut_off_resumes_by_itself_to_the_bit(kind, tmp_path, capsys):
    run = functools.partial(solve, *KINDS[kind]())
    cut_off(lambda: run(folder=tmp_path / "run"))
    assert capsys.readouterr().err == ""
    resumed = run(folder=tmp_path / "run")
    assert capsys.readouterr().err == f"measureflow: {tmp_path / 'run'}: resuming at step 150 of 300\n"
    assert_identical(resumed, run())


def test_a_finished_run_returns_at_once(finished, straight, capsys, monkeypatch):
    monkeypatch.setattr(solving.Program, "call", lambda *arguments: pytest.fail("something was computed"))
    before = sorted(finished.rglob("*"))
    assert_identical(solve(folder=finished), straight)
    assert capsys.readouterr().err == f"measureflow: {finished}: finished\n"
    assert sorted(finished.rglob("*")) == before


@pytest.mark.parametrize("steps", [100, 119, 140])
def test_steps_may_grow(steps, tmp_path, straight):
    """Where a part ended leaves no trace, on a checkpoint, on a record, or on neither."""
    part = solve(steps=steps, folder=tmp_path / "run")
    assert part.history.step[-1] == steps
    assert_identical(solve(folder=tmp_path / "run"), straight)
    with pytest.raises(ValueError, match=f"is at step 300, beyond steps={steps}; steps may only grow"):
        solve(steps=steps, folder=tmp_path / "run")


def test_records_go_on_as_they_began(tmp_path):
    """How often, if it was not said, is decided by the first call."""
    solve(steps=100, record_every=None, folder=tmp_path / "run")
    longer = solve(steps=2000, record_every=None, folder=tmp_path / "run", every=1000)
    assert set(np.diff(longer.history.step)) == {1}


def traced_loss(theta, batch):
    # A count of its own would be a part of what the run is made of.
    logging.getLogger("traces").info("traced")
    return regression_loss(theta, batch)


def test_resuming_compiles_nothing(tmp_path, caplog):
    problem, traced = mf.deep_ensemble(traced_loss), []
    for steps in (60, 130):
        with caplog.at_level("INFO", "traces"):
            solve(problem, mf.WassersteinFlow(1e-2), steps=steps, folder=tmp_path / "run")
        traced.append(sum(record.name == "traces" for record in caplog.records))
    assert traced[0] == traced[1] > 0


def test_a_run_may_end_where_an_unfinished_one_has_come_to(tmp_path):
    cut_off(lambda: solve(folder=tmp_path / "run"))
    assert_identical(solve(steps=150, folder=tmp_path / "run"), solve(steps=150))


def test_a_continued_run_counts_from_its_own_beginning(tmp_path, straight):
    part = solve(steps=33)

    def rest(**options):
        return solve(initial=part.state, steps=STEPS - 33, **options)

    cut_off(lambda: rest(folder=tmp_path / "run"), 120)
    resumed = rest(folder=tmp_path / "run")
    assert_identical(resumed, rest())
    assert bits(resumed.state) == bits(straight.state)


def test_the_latest_are_kept(finished, tmp_path):
    assert names_in(finished) == {file_of(250), file_of(300), "measureflow.json"}
    options = {"checkpoint": mf.Checkpoint(tmp_path / "run", every=20, keep=3)}
    solve(steps=90, **options)
    assert names_in(tmp_path / "run") == {file_of(60), file_of(80), file_of(90), "measureflow.json"}


def test_what_a_killed_process_leaves_behind_is_no_obstacle(copied, straight):
    """A checkpoint half written, one of which a process has written nothing, a marker half written."""
    half = (copied / file_of(300)).read_bytes()[:999]
    (copied / file_of(300)).unlink()
    (copied / f".{file_of(300)}.0123456789abcdef.tmp").write_bytes(half)
    (copied / ".measureflow.json.0123456789abcdef.tmp").write_text("{")
    (copied / "300-1-of-2.safetensors").write_bytes(half)
    assert_identical(solve(folder=copied), straight)
    whole = {file_of(250), file_of(300), "measureflow.json"}
    assert names_in(copied) - {"300-1-of-2.safetensors"} == whole
    fresh = copied.parent / "fresh"
    fresh.mkdir()
    (fresh / ".measureflow.json.0123456789abcdef.tmp").write_text("{")
    assert int(solve(steps=10, folder=fresh).state.step) == 10
    assert names_in(fresh) == {file_of(10), "measureflow.json"}


# --- what a run is made of

SCALE = 1.0


def offset_loss(offset):
    def loss(theta, batch):
        return regression_loss(theta, batch) + offset

    return loss


def default_loss(theta, batch, *, power=2.0):
    return jnp.mean(jnp.abs(batch[0] @ theta["w"] - batch[1]) ** power)


def helped_loss(theta, batch):
    return helper(theta, batch)


def helper(theta, batch):
    return SCALE * regression_loss(theta, batch)


class WeightedLoss(eqx.Module):
    weight: jax.Array

    def __call__(self, theta, batch):
        return self.weight * regression_loss(theta, batch)


OTHER = {
    "key": ({"key": jax.random.key(1)}, "key: was uint32[2] sha256"),
    "initial": (
        {"initial": jax.tree.map(lambda x: x + 1, START)},
        "initial.particles.b: was float32[12]",
    ),
    "particles": ({"initial": PRIOR.sample(KEY, 11)}, "is float32[11"),
    "step size": ({"flow": full_flow(2e-2)}, "flow.step_size.init_value: was 0.01, is 0.02"),
    "momentum": ({"flow": full_flow(momentum=0.8)}, "flow.momentum"),
    "no momentum": ({"flow": full_flow(momentum=None)}, "is None"),
    "adapt_steps": ({"flow": full_flow(adapt_steps=3)}, "flow.preconditioner.adapt_steps: was int32 200, is"),
    "weight": ({"problem": drle(kl=0.2)}, "problem.regulariser"),
    "lengthscale": ({"problem": drle(lengthscale=2.0)}, "lengthscale: was float32 1.0, is float32 2.0"),
    "prior": ({"problem": drle(prior=mf.Gaussian(PRIOR.mean, 2.0))}, "scale"),
    "loss": (
        {"problem": drle(helped_loss)},
        "problem.objective.loss: was test_checkpoint.regression_loss bytecode",
    ),
    "data": ({"data": (X + 1, DATA[1])}, "data.data.0: was float32[53, 2] sha256"),
    "batch_size": ({"batch_size": 11}, "data.batch_size: was 10, is 11"),
    "whole": (
        {"batch_size": None},
        "data: was measureflow.runs.batches.Shuffled, is measureflow.runs.batches.Whole",
    ),
    "iterator": ({"data": iter([DATA]), "batch_size": None}, "Could not be compared: data."),
    "record_every": ({"record_every": 8}, "record_every: was 7, is 8"),
    "on_divergence": ({"on_divergence": "restart"}, "on_divergence: was 'raise', is 'restart'"),
}


@pytest.mark.parametrize("name", OTHER)
def test_another_run_is_refused_and_the_difference_named(name, finished):
    options, piece = OTHER[name]
    with pytest.raises(ValueError, match="holds another run; to start over, name another folder") as caught:
        solve(folder=finished, **options)
    assert piece in str(caught.value), str(caught.value)


def changed_globals(function, **values):
    """The same function as a module with other contents would have it."""
    copy = type(function)(function.__code__, function.__globals__ | values, function.__name__)
    copy.__module__, copy.__qualname__ = function.__module__, function.__qualname__
    return copy


def other_helper(theta, batch):
    return 2 * regression_loss(theta, batch)


def other_call(self, theta, batch):
    return -self.weight


SIMILAR = {
    "closure": (offset_loss(1.0), offset_loss(2.0), "loss.offset: was 1, is 2"),
    "closed array": (offset_loss(X), offset_loss(-X), "loss.offset: was float32[53, 2]"),
    "default": (
        default_loss,
        functools.partial(default_loss, power=3.0),
        "loss: was test_checkpoint.default_loss bytecode",
    ),
    "global": (helper, changed_globals(helper, SCALE=2.0), "loss.SCALE: was 1, is 2"),
    "helper's global": (
        helped_loss,
        changed_globals(helped_loss, helper=changed_globals(helper, SCALE=2.0)),
        "loss.helper.SCALE: was 1, is 2",
    ),
    "helper": (helped_loss, changed_globals(helped_loss, helper=other_helper), "loss.helper: was "),
    "constant": (lambda t: t + 1.0, lambda t: t + 2.0, "bytecode"),
    "nested constant": (lambda t: [x + 1 for x in t], lambda t: [x + 2 for x in t], "bytecode"),
    "instruction": (lambda t: t + 1.0, lambda t: t - 1.0, "bytecode"),
    "called name": (lambda t: jnp.sin(t), lambda t: jnp.cos(t), "bytecode"),
    "module": (WeightedLoss(jnp.ones(())), WeightedLoss(jnp.zeros(())), "loss.weight: was float32 1.0"),
    "jitted": (jax.jit(offset_loss(1.0)), jax.jit(offset_loss(2.0)), "loss.wrapped.offset"),
    "partial": (functools.partial(max, 1), functools.partial(max, 2), "loss.arguments.0: was 1, is 2"),
    "distribution": (
        mf.FromDistribution(dist.Normal(0.0, 1.0)),
        mf.FromDistribution(dist.Normal(0.0, 2.0)),
        "loss.distribution.scale",
    ),
    "dtype": (jnp.zeros(2), jnp.zeros(2, jnp.int32), "loss: was float32[2] sha256"),
    "set": ({"a", "b"}, {"a", "c"}, "loss.members.1: was"),
}


@pytest.mark.parametrize("name", SIMILAR)
def test_what_is_alike_is_told_apart(name):
    first, second, piece = SIMILAR[name]
    lines = [*itertools.chain(*differences(fingerprint(loss=first), fingerprint(loss=second)))]
    assert len(lines) == 1, lines
    assert piece in lines[0], lines
    assert differences(fingerprint(loss=first), fingerprint(loss=first)) == ([], [])


def test_a_method_that_was_rewritten_is_told_apart(monkeypatch):
    before = fingerprint(loss=WeightedLoss(jnp.ones(())))
    monkeypatch.setattr(WeightedLoss, "__call__", other_call)
    changed, _ = differences(before, fingerprint(loss=WeightedLoss(jnp.ones(()))))
    assert any(line.startswith("loss.__call__: was") for line in changed)


def test_what_is_made_again_is_the_same_and_what_cannot_be_compared_is_said():
    def parts():
        loss, flow = offset_loss(jnp.ones(2)), full_flow()
        return {"loss": loss, "flow": flow, "problem": drle(), "data": iter(x for x in "ab")}

    found = fingerprint(**parts())
    assert found == fingerprint(**parts())
    assert not_compared(found) == ["data"]
    assert found["data"] == "builtins.generator (compared by type only)"
    cyclic = [1]
    cyclic.append(cyclic)
    assert fingerprint(loss=cyclic)["loss.1"] == "(part of itself)"


CONFIG = types.SimpleNamespace(scale=1.0)


def configured_loss(theta, batch):
    return CONFIG.scale * regression_loss(theta, batch)


class Weighted:
    weight = 1.0

    def __init__(self, power):
        self.power = power

    def __call__(self, theta, batch):
        return self.weight * regression_loss(theta, batch) ** self.power


def another_value(kind, monkeypatch):
    """A problem, and how to make another one of it behind its back."""
    if kind == "object":
        return configured_loss, lambda: monkeypatch.setattr(CONFIG, "scale", 2.0)
    loss = Weighted(1.0)
    change = (Weighted, "weight") if kind == "class" else (loss, "power")
    return loss, lambda: monkeypatch.setattr(*change, 2.0)


@pytest.mark.parametrize("kind", ["object", "class", "attribute"])
def test_a_run_is_not_spliced_of_two(kind, tmp_path, monkeypatch):
    """What a loss reads, wherever it finds it, is a part of the problem."""
    loss, change = another_value(kind, monkeypatch)
    problem = mf.deep_ensemble(loss)
    solve(problem, steps=20, folder=tmp_path / "run")
    solve(problem, steps=30, folder=tmp_path / "run")
    change()
    with pytest.raises(ValueError, match=r"holds another run(?s:.*)was 1, is 2"):
        solve(problem, steps=40, folder=tmp_path / "run")


def other_code(theta, batch):
    inputs, targets = batch
    return jnp.mean((inputs @ theta["w"] + theta["b"] - targets) ** 2)


def recoded(function, other):
    """The same function, of another version of Python or after an edit that leaves its meaning."""
    copy = types.FunctionType(other.__code__, function.__globals__, function.__name__)
    copy.__module__, copy.__qualname__ = function.__module__, function.__qualname__
    return copy


def test_a_run_whose_code_alone_differs_is_not_lost(copied, straight):
    problem = drle(recoded(regression_loss, other_code))
    with pytest.raises(ValueError, match="the code differs from that of the run in ") as caught:
        solve(problem, folder=copied)
    for piece in (
        "problem.objective.loss: was test_checkpoint.regression_loss bytecode",
        "on_code_change='warn'",
    ):
        assert piece in str(caught.value)
    options = {"checkpoint": mf.Checkpoint(copied, EVERY, on_code_change="warn")}
    with pytest.warns(UserWarning, match=r"goes on, though the code differs(?s:.*)regression_loss") as caught:
        assert_identical(solve(problem, **options), straight)
    assert len(caught) == 1
    # But one in which anything else differs is another one.
    for other in ({"key": jax.random.key(1)}, {"flow": full_flow(momentum=0.8)}, {"data": (X + 1, DATA[1])}):
        with pytest.raises(ValueError, match=r"holds another run(?s:.*)regression_loss"):
            solve(**{"problem": problem} | options | other)


def test_another_version_of_a_library_is_other_code(tmp_path):
    """Whose functions may close over other names, then."""
    options = {"problem": mf.deep_ensemble(regression_loss), "steps": 20}
    options |= {"flow": mf.WassersteinFlow(optimiser=optax.adam(1e-2))}
    solve(**options, folder=tmp_path / "run")
    marker = tmp_path / "run" / "measureflow.json"
    held = json.loads(marker.read_text())
    for path, description in held["made_of"].items():
        held["made_of"][path] = re.sub("library code .*", "library code 0123456789abcdef", description)
    function = next(path for path in held["made_of"] if path.endswith(".update"))
    held["made_of"][f"{function}.once_closed_over"] = "1"
    marker.write_text(json.dumps(held))
    with pytest.raises(ValueError, match=r"the code differs(?s:.*)optax.* library code"):
        solve(**options, folder=tmp_path / "run")
    checkpoint = mf.Checkpoint(tmp_path / "run", EVERY, on_code_change="warn")
    with pytest.warns(UserWarning, match="the code differs"):
        solve(**options, checkpoint=checkpoint)
    held["made_of"]["flow.momentum"] = "0.7"
    marker.write_text(json.dumps(held))
    with pytest.raises(ValueError, match="holds another run"):
        solve(**options, checkpoint=checkpoint)


def test_on_code_change_is_one_of_two(tmp_path):
    with pytest.raises(ValueError, match="on_code_change must be 'raise' or 'warn', got 'go on'"):
        mf.Checkpoint(tmp_path, on_code_change="go on")
    assert repr(mf.Checkpoint("/a", on_code_change="warn")).endswith("keep=2, on_code_change='warn')")


# --- data that comes from an iterator

BATCHES = [(np.asarray(X[i : i + 10]), np.asarray(DATA[1][i : i + 10])) for i in range(0, 40, 10)]


class Plain:
    """Batches without end, in an order that is worth remembering."""

    def __init__(self):
        self.state, self.asked = {"next": 0}, 0

    def __iter__(self):
        return self

    def __next__(self):
        position, self.asked = self.state["next"], self.asked + 1
        self.state["next"] += 1
        return BATCHES[position * position % 7 % 4]


class InDictionary(Plain):
    def get_state(self):
        return self.state  # and goes on to change it

    def set_state(self, state):
        self.state = dict(state)


class InBytes(Plain):
    def get_state(self):
        return json.dumps(self.state).encode()

    def set_state(self, state):
        self.state = json.loads(state)


class NotInJSON(InDictionary):
    def get_state(self):
        return {0: self.state["next"]}


class Short(Plain):
    def __init__(self, end):
        super().__init__()
        self.end = end

    def __next__(self):
        if self.asked == self.end:
            raise StopIteration
        return super().__next__()


class Loader:
    def __iter__(self):
        return iter(BATCHES)


@pytest.fixture(scope="module")
def streamed():
    return {kind: solve(data=kind(), batch_size=None) for kind in (Plain, Loader)}


UNCOMPARED = pytest.mark.filterwarnings("ignore:the run in .* is resumed as the same one")


@pytest.mark.few(2)
@UNCOMPARED
@pytest.mark.parametrize("kind", [Plain, InDictionary, InBytes, NotInJSON, Loader])
def test_an_iterator_is_taken_up_where_it_was(kind, tmp_path, streamed):
    cut_off(lambda: solve(data=kind(), batch_size=None, folder=tmp_path / "run"))
    data = kind()
    with pytest.warns(UserWarning, match="is resumed as the same one. Could not be compared: data") as caught:
        resumed = solve(data=data, batch_size=None, folder=tmp_path / "run")
    assert len(caught) == 1
    assert_identical(resumed, streamed[Loader if kind is Loader else Plain])
    if kind is not Loader:
        # One was asked for before the folder was looked into.
        expected = 150 + 1 if kind in (InDictionary, InBytes) else STEPS
        assert data.asked == expected
    # The last record sees the batch that it saw before.
    longer = solve(data=kind(), batch_size=None, folder=tmp_path / "run", steps=STEPS + STREAMED + 3)
    assert_identical(longer, solve(data=kind(), batch_size=None, steps=STEPS + STREAMED + 3))


@UNCOMPARED
def test_an_iterator_that_is_not_at_its_beginning_is_refused(tmp_path):
    cut_off(lambda: solve(data=Short(STEPS), batch_size=None, folder=tmp_path / "run"))
    with pytest.raises(ValueError, match=r"ended after 90 batches, but the run .* used 150 of them; pass it"):
        solve(data=Short(90), batch_size=None, folder=tmp_path / "run")


@UNCOMPARED
def test_a_finished_run_needs_no_more_batches(tmp_path, streamed):
    batches = [next(data) for data in [Plain()] for _ in range(STEPS)]
    for _ in range(2):
        solution = solve(data=iter(batches), batch_size=None, folder=tmp_path / "run")
        assert_identical(solution, streamed[Plain])


# --- nothing but the arguments decides


HOW = {
    "calls of one step": (driver.AbstractRun, "seconds", 0.0),
    "few records in a call": (solving, "RECORDS", 3),
    "long calls": (driver.AbstractRun, "seconds", 100.0),
}


@pytest.mark.parametrize("how", [*HOW, "progress", "a checkpoint at every step", "again"])
def test_the_same_call_gives_the_same_result(how, straight, tmp_path, monkeypatch, capsys):
    if how in HOW:
        monkeypatch.setattr(*HOW[how])
    options = {"progress": {"progress": True}}.get(how, {})
    expected = straight
    if how == "a checkpoint at every step":
        options, expected = {"folder": tmp_path / "run", "every": 1, "steps": 12}, solve(steps=12)
    assert_identical(solve(**options), expected)


def test_steps_are_taken_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    """The first one is not written before the run has come further; if that waited, it would for a minute."""
    came_further, waited = threading.Event(), []

    def late(*arguments, **options):
        waited.append(came_further.wait(60))
        mf.save(*arguments, **options)

    monkeypatch.setattr(driver.AbstractRun, "seconds", 0.0)
    monkeypatch.setattr(checkpoints, "save", late)
    with at_step(55, came_further.set):
        solve(folder=tmp_path / "run", steps=80)
    assert waited == [True, True]


# --- signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_stops_with_the_solution_in_hand(number, tmp_path, straight):
    with (
        at_step(170, lambda: signal.raise_signal(number)) as reached,
        pytest.raises(mf.Interrupted, match=f"^{number.name} at step .* of 300: .* It is saved in") as caught,
    ):
        solve(folder=tmp_path / "run")
    solution = caught.value.solution
    assert int(solution.state.step) == reached[0] < STEPS
    assert bits(solution.state) == bits(solve(steps=reached[0]).state)
    assert 0 < len(solution.history.step) < len(straight.history.step)
    assert bits(solution.measure.particles) == bits(solution.state.particles)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    # With what was in hand, and with what was saved.
    rest = solve(initial=solution.state, steps=STEPS - reached[0])
    assert bits(rest.state) == bits(straight.state)
    with at_step(reached[0] + 1, lambda: None) as first:
        assert_identical(solve(folder=tmp_path / "run"), straight)
    assert first[0] > reached[0]


def test_a_signal_from_outside_is_noticed():
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    with at_step(1, timer.start), pytest.raises(mf.Interrupted, match="SIGINT at step") as caught:
        solve(steps=10**9, record_every=10**6)
    assert "saved" not in str(caught.value)
    assert int(caught.value.solution.state.step) > 0
    assert isinstance(caught.value, KeyboardInterrupt)


def test_the_second_interrupt_stops_at_once(tmp_path, straight):
    def twice():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with at_step(170, twice), pytest.raises(KeyboardInterrupt) as caught:
        solve(folder=tmp_path / "run")
    assert type(caught.value) is KeyboardInterrupt
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert_identical(solve(folder=tmp_path / "run"), straight)


def test_a_second_sigterm_changes_nothing(tmp_path):
    def twice():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)

    with at_step(170, twice) as reached, pytest.raises(mf.Interrupted, match="SIGTERM"):
        solve(folder=tmp_path / "run")
    assert (tmp_path / "run" / file_of(reached[0])).exists()


@pytest.mark.parametrize("name", ["_record", "_save"])
def test_a_signal_at_the_end_is_not_lost(name, tmp_path, straight, monkeypatch):
    """The run is finished, and whoever sent the signal wants the program to stop."""
    before = getattr(solving.SolveRun, name)

    def signalled(run, *arguments):
        if run.step == STEPS:
            signal.raise_signal(signal.SIGTERM)
        before(run, *arguments)

    monkeypatch.setattr(solving.SolveRun, name, signalled)
    with pytest.raises(mf.Interrupted, match="SIGTERM at step 300 of 300") as caught:
        solve(folder=tmp_path / "run")
    assert_identical(caught.value.solution, straight)
    monkeypatch.undo()
    assert_identical(solve(folder=tmp_path / "run"), straight)


def test_handlers_of_others_are_left_alone(straight):
    heard = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def both():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)

    with at_step(170, both):
        assert_identical(solve(), straight)
    assert heard == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signal.signal(signal.SIGTERM, before)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_a_thread_touches_no_handler(straight, tmp_path):
    found = []

    def run():
        with at_step(170, lambda: found.append(signal.getsignal(signal.SIGINT))):
            found.append(solve(folder=tmp_path / "run"))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found[0] is signal.default_int_handler
    assert_identical(found[1], straight)


# --- divergence


def quartic(theta, batch=1.0):
    return jnp.sum(batch * theta**4) / 4


DIVERGING = np.array([[0.5], [1.6], [1.0], [2.5], [-3.0], [1.39]], np.float32)


def replay(batches, start=DIVERGING):
    """Gradient descent on b θ⁴/4 with η = 1 in NumPy, lost particles restarted: an independent account."""
    x, restarts, step = start, [], 0
    with np.errstate(over="ignore", invalid="ignore"):
        while step < len(batches):
            after = x - np.float32(batches[step]) * x**3
            lost = np.flatnonzero(~np.isfinite(after[:, 0]))
            if len(lost) == 0:
                x, step = after, step + 1
                continue
            losses = batches[step] * x[:, 0].astype(np.float64) ** 4
            best = [i for i in np.argsort(losses, kind="stable") if i not in lost]
            copied = [best[k % len(best)] for k in range(len(lost))]
            restarts.append((step + 1, tuple(lost.tolist()), tuple(map(int, copied))))
            x = x.copy()
            x[lost] = x[copied]
    return x, restarts


def restart(problem=None, steps=60, flow=None, initial=DIVERGING, **options):
    problem = mf.Problem(quartic) if problem is None else problem
    options = {"on_divergence": "restart", "data": None, "batch_size": None} | options
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        initial = jnp.asarray(initial) if isinstance(initial, np.ndarray) else initial
        solution = solve(problem, flow or mf.WassersteinFlow(1.0), initial, steps, **options)
    return solution, [str(warning.message) for warning in caught]


def test_lost_particles_go_on_as_copies_of_the_best():
    solution, warned = restart()
    x, restarts = replay(np.ones(60))
    assert len(restarts) > 1
    assert [tuple(made) for made in solution.restarts] == restarts
    np.testing.assert_allclose(solution.measure.particles, x, rtol=1e-3)
    first = restarts[0]
    assert warned[0].startswith(
        f"at step {first[0]} particles {list(first[1])} became NaN or infinite; they go on as copies of "
        f"{list(first[2])}."
    )
    assert len(warned) == len(restarts)


RESTARTED = {
    "calls of one step": {"seconds": 0.0},
    "long calls": {"seconds": 100.0},
    "long iterated calls": {"seconds": 100.0},
    "iterated calls of one step": {"seconds": 0.0},
}


@pytest.mark.parametrize("how", RESTARTED)
def test_restarts_do_not_depend_on_how_steps_are_grouped(how, tmp_path, monkeypatch):
    weights = 1 + 0.2 * np.sin(np.arange(200))
    iterated = "iterated" in how

    def options():
        batches = (np.full(1, weight, np.float32) for weight in weights)
        return {"data": batches} if iterated else {}

    expected, _ = restart(**options())
    x, restarts = replay(weights[:60] if iterated else np.ones(60))
    assert [tuple(made) for made in expected.restarts] == restarts
    np.testing.assert_allclose(expected.measure.particles, x, rtol=2e-3)
    monkeypatch.setattr(driver.AbstractRun, "seconds", RESTARTED[how]["seconds"])
    assert_identical(restart(**options())[0], expected)
    cut_off(lambda: restart(**options(), folder=tmp_path / "run", every=4), 12)
    assert_identical(restart(**options(), folder=tmp_path / "run", every=4)[0], expected)


def test_a_run_in_parts_restarts_the_same_particles():
    whole, _ = restart()
    for steps in (1, whole.restarts[0].step - 1, whole.restarts[0].step, 30):
        part, _ = restart(steps=steps)
        rest, _ = restart(initial=part.state, steps=60 - steps)
        assert bits(rest.state) == bits(whole.state)
        assert part.restarts + rest.restarts == whole.restarts


def test_momentum_and_memory_of_a_lost_particle_are_those_of_its_source():
    flow = mf.WassersteinFlow(optimiser=optax.sgd(1.0, momentum=0.5))
    solution, _ = restart(flow=flow)
    assert solution.restarts
    last = solution.restarts[-1]
    state = solution.state
    # No noise: a copy stays with its source.
    for lost, source in zip(last.lost, last.copied, strict=True):
        for leaf in jax.tree.leaves((state.particles, state.memory)):
            assert np.array_equal(leaf[lost], leaf[source])
    drifting, _ = restart(flow=mf.WassersteinFlow(1.0, momentum=0.5))
    last = drifting.restarts[-1]
    assert np.array_equal(drifting.state.drift[last.lost[0]], drifting.state.drift[last.copied[0]])


def test_a_run_that_cannot_be_saved_gives_up(monkeypatch):
    options = {"data": None, "batch_size": None, "on_divergence": "restart"}
    with pytest.raises(mf.DivergenceError, match="2 of 2 particles") as caught:
        restart(initial=DIVERGING[[3, 3]])
    np.testing.assert_array_equal(caught.value.lost, [0, 1])
    # Without a minimum, each restart leads to the next.
    endless, start = mf.Problem(lambda theta: -quartic(theta)), np.linspace(0.1, 1.0, 6, dtype=np.float32)
    for most in (4, 3):
        monkeypatch.setattr(divergence, "_MOST_RESTARTS", most)
        with (
            pytest.warns(UserWarning, match="go on as copies") as warned,
            pytest.raises(mf.DivergenceError) as caught,
        ):
            solve(endless, mf.WassersteinFlow(1.0), jnp.asarray(start)[:, None], **options)
        assert len(warned) == most
        assert np.all(np.isfinite(caught.value.state.particles))


def test_a_lost_particle_is_never_copied():
    """Nor is one whose loss is not a number, where there are others."""

    def loss(theta):
        fine = jnp.where(theta < -1, -quartic(theta), -theta)
        return jnp.sum(jnp.where(theta > 2, jnp.nan, fine))

    initial = np.array([[-0.5], [-3.0], [-3.0], [1.95], [-3.0]], np.float32)
    solution, _ = restart(mf.Problem(loss), initial=initial, steps=8, flow=mf.WassersteinFlow(0.1))
    assert solution.restarts[0].lost == (1, 2, 4)
    assert solution.restarts[0].copied == (0, 0, 0)


def test_a_preconditioner_that_overflows_is_noticed():
    """g = 0 from then on: particles that stand still are finite, but lost."""
    flow = mf.WassersteinFlow(1e-2, preconditioner=mf.RMSPreconditioner(10))
    with pytest.raises(mf.DivergenceError, match="diverged at step 1: 2 of 2"):
        solve(mf.Problem(quartic), flow, jnp.array([[1e7], [1.0]]), data=None, batch_size=None)


def test_divergence_is_found_within_the_call_and_the_checkpoint_stays(tmp_path):
    options = {"data": None, "batch_size": None, "folder": tmp_path / "run", "every": 2}
    for _ in range(2):
        with pytest.raises(mf.DivergenceError) as caught:
            solve(mf.Problem(quartic), mf.WassersteinFlow(1.0), jnp.asarray(DIVERGING), 10**6, **options)
        _, restarts = replay(np.ones(60))
        assert caught.value.step == restarts[0][0]
        np.testing.assert_array_equal(caught.value.lost, restarts[0][1])


def test_restart_is_for_particles():
    with pytest.raises(ValueError, match="needs particles, got ParametricFlow; use 'raise'"):
        solve(*parametric(), on_divergence="restart")
    with pytest.raises(ValueError, match="must be 'raise' or 'restart', got 'stop'"):
        solve(on_divergence="stop")


# --- what disks and people do


def large():
    """400 kB of particles."""
    prior = mf.Gaussian(jnp.zeros(20_000), 1.0)
    problem = mf.deep_langevin_ensemble(square, prior, kl=0.1)
    return problem, mf.WassersteinFlow(1e-2), prior.sample(KEY, 5)


def square(theta):
    return jnp.sum(theta**2)


def test_a_full_disk_is_reported_and_the_run_goes_on(tmp_path, monkeypatch):
    """Files may not grow beyond 100 kB for a while; a checkpoint needs more."""
    arguments, options = (*large(), 60), {"data": None, "batch_size": None}
    monkeypatch.setattr(driver.AbstractRun, "seconds", 0.0)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, unlimited[1]))

    def full():
        limit(100_000)

    def free():
        limit(unlimited[0])
        shutil.copytree(tmp_path / "run", tmp_path / "then")

    try:
        with (
            at_step(25, full),
            at_step(45, free),
            pytest.warns(UserWarning, match="could not be written to .* The run goes on") as caught,
        ):
            solution = solve(*arguments, **options, folder=tmp_path / "run", every=10)
    finally:
        limit(unlimited[0])
    assert sum("could not be written" in str(warning.message) for warning in caught) == 2
    expected = solve(*arguments, **options)
    assert_identical(solution, expected)
    names = names_in(tmp_path / "then")
    assert {file_of(10), file_of(20), "measureflow.json"} == names
    assert_identical(solve(*arguments, **options, folder=tmp_path / "then", every=10), expected)
    assert names_in(tmp_path / "run") == {file_of(50), file_of(60), "measureflow.json"}


def test_an_interrupt_does_not_claim_to_have_saved_what_it_could_not(tmp_path, monkeypatch):
    def fail(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints, "save", fail)
    with (
        at_step(20, lambda: signal.raise_signal(signal.SIGINT)),
        pytest.warns(UserWarning, match="No space left"),
        pytest.raises(mf.Interrupted) as caught,
    ):
        solve(folder=tmp_path / "run")
    assert "saved" not in str(caught.value)


def files_of(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


def resaved(**changes):
    """A file that is whole, but not that of this run."""

    def change(newest):
        mf.save(mf.load(newest) | changes, newest, force=True)

    return change


DAMAGE = {
    "truncated": lambda newest: newest.write_bytes(newest.read_bytes()[:999]),
    "emptied": lambda newest: newest.write_bytes(b""),
    "flipped": flip,
    "a folder": lambda newest: (newest.unlink(), newest.mkdir()),
    "no leaves": resaved(state=[]),
    "other leaves": resaved(state=[[((0,), np.zeros(3))]] * 4),
    "half of a leaf": lambda newest: resaved(state=[*mf.load(newest)["state"][:-1], []])(newest),
    "no dictionary": lambda newest: mf.save([1], newest, force=True),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_checkpoint_is_set_aside_for_the_one_before(name, copied, straight):
    DAMAGE[name](copied / file_of(300))
    with pytest.warns(UserWarning, match=r"step 300 .* cannot be read .* goes on from step 250") as caught:
        assert_identical(solve(folder=copied), straight)
    assert len(caught) == 1
    assert (copied / f"{file_of(300)}.unreadable").exists()
    # It is whole again.
    assert_identical(solve(folder=copied), straight)


def test_a_changed_number_is_noticed(tmp_path):
    """In a file that is complete."""
    options = {"data": None, "batch_size": None, "folder": tmp_path / "run", "every": 10}
    expected = solve(*large(), 20, **options)
    flip(tmp_path / "run" / file_of(20))
    with pytest.warns(UserWarning, match="its checksum differs"):
        assert_identical(solve(*large(), 20, **options), expected)


def test_no_readable_checkpoint_is_an_error_that_touches_nothing(copied):
    for step in (250, 300):
        flip(copied / file_of(step))
    before = files_of(copied)
    with pytest.raises(ValueError, match=r"of steps \[300, 250\], but none can be read; to start over"):
        solve(folder=copied)
    assert files_of(copied) == before


def occupied(tmp_path):
    (tmp_path / "thesis.tex").write_text("important")
    return {"folder": tmp_path}


def a_file(tmp_path):
    (tmp_path / "run").write_text("")
    return {"folder": tmp_path / "run"}


def below_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    return {"folder": tmp_path / "file" / "run"}


def marked(text):
    def make(tmp_path):
        (tmp_path / file_of(100)).touch()
        (tmp_path / "measureflow.json").write_text(text)
        return {"folder": tmp_path}

    return make


def earlier(tmp_path):
    (tmp_path / "100").mkdir()
    (tmp_path / "measureflow.json").write_text('{"format": 1, "made_of": {}}')
    return {"folder": tmp_path}


def no_marker(tmp_path):
    (tmp_path / "100").mkdir()
    return {"folder": tmp_path}


BAD = {
    "a file": (a_file, ValueError, "is a file; name a folder"),
    "below a file": (below_a_file, ValueError, "cannot be written to: .*; name another one"),
    "not writable": (lambda _: {"folder": "/proc/run"}, ValueError, "cannot be written to: .*; name another"),
    "occupied": (
        occupied,
        ValueError,
        "holds no run, but files such as thesis.tex; name an empty",
    ),
    "no marker": (
        no_marker,
        ValueError,
        "holds no run, but files such as 100; name an empty one",
    ),
    "garbage": (marked("{not json"), ValueError, "unreadable measureflow.json, .*; name another folder"),
    "no dictionary": (marked("[1]"), ValueError, "unreadable measureflow.json, .*; name another folder"),
    "no contents": (marked('{"format": 2}'), ValueError, "unreadable measureflow.json, .*; name another"),
    "format": (marked('{"format": 9, "made_of": {}}'), ValueError, "has format 9, .* reads 2; use the"),
    "earlier format": (earlier, ValueError, "has format 1, .* reads 2; use the version that wrote it"),
    "every 0": (lambda path: {"folder": path, "every": 0}, ValueError, "every must be at least 1, got 0; it"),
    "every 1.5": (
        lambda path: {"folder": path, "every": 1.5},
        TypeError,
        "every must be an integer, got",
    ),
    "folder 3": (lambda _: {"folder": 3}, TypeError, "folder must be a path, got 3; for example"),
    "a path": (
        lambda path: {"checkpoint": str(path)},
        TypeError,
        "must be of type Checkpoint, got .*; pass",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_message(name, tmp_path, jaxtyping_off):
    make, kind, message = BAD[name]
    options = make(tmp_path)
    before = files_of(tmp_path)
    with pytest.raises(kind, match=message):
        solve(**options)
    assert files_of(tmp_path) == before


@pytest.fixture
def jaxtyping_off():
    import jaxtyping

    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def test_keep_counts(tmp_path, jaxtyping_off):
    with pytest.raises(ValueError, match="keep must be at least 1, got 0; 2 leaves one"):
        mf.Checkpoint(tmp_path, keep=0)
    assert repr(mf.Checkpoint("/a", 5)) == "Checkpoint('/a', every=5, keep=2)"
    assert mf.Checkpoint("~/run").folder == Path.home() / "run"


# --- other processes


def sharded(devices=4):
    mesh = Mesh(np.array(jax.devices()[:devices]), ("particles",))
    return jax.device_put(START, NamedSharding(mesh, PartitionSpec("particles")))


@little_effort()
def processes():
    """In a process with four devices: finish a run of another one, and begin one for it."""
    work = Path(sys.argv[1])
    theirs = solve(folder=work / "one-to-four", initial=sharded())
    assert len(theirs.state.particles["w"].sharding.device_set) == 4
    np.savez(work / "theirs.npz", *jax.tree.leaves(theirs.state), **theirs.history)
    cut_off(lambda: solve(folder=work / "four-to-one", initial=sharded()))
    shutil.copytree(work / "four-to-one", work / "four-to-four")
    assert_identical(solve(folder=work / "four-to-four", initial=sharded()), solve(initial=sharded()))
    (work / "parts.json").write_text(json.dumps(fingerprint(**tricky())))


def tricky():
    """What is easily another thing in another process."""
    return {
        "words": lambda word: word in {"one", "two", "three", "four"},
        "set": {"one", "two", "three", "four"},
        "distribution": dist.Normal(jnp.zeros(2), 2.0).to_event(1),
        "bound": WeightedLoss(jnp.ones(())).__call__,
        "activation": jax.nn.softplus,
        "optimiser": optax.adam(1e-2),
    }


@pytest.mark.slow
def test_a_run_moves_between_numbers_of_devices(tmp_path, straight):
    cut_off(lambda: solve(folder=tmp_path / "one-to-four"))
    here = Path(__file__).parent
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "PYTHONPATH": os.pathsep.join([str(here), str(here.parents[1] / "src")]),
        "PYTHONHASHSEED": "7" if os.environ.get("PYTHONHASHSEED") != "7" else "8",
    }
    code = "import test_checkpoint; test_checkpoint.processes()"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "resuming at step 150 of 300" in done.stderr
    ours = solve(folder=tmp_path / "four-to-one")
    with np.load(tmp_path / "theirs.npz") as theirs:
        for i, leaf in enumerate(jax.tree.leaves(straight.state)):
            np.testing.assert_allclose(theirs[f"arr_{i}"], leaf, rtol=1e-4, atol=1e-5)
        assert list(theirs["step"]) == list(straight.history.step)
        np.testing.assert_allclose(theirs["loss"], straight.history.loss, rtol=1e-3)
    for a, b in zip(jax.tree.leaves(ours.state), jax.tree.leaves(straight.state), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(ours.history.loss, straight.history.loss, rtol=1e-3)
    assert len(ours.state.particles["w"].sharding.device_set) == 1
    assert json.loads((tmp_path / "parts.json").read_text()) == fingerprint(**tricky())


@pytest.mark.slow
def test_killed_runs_end_as_if_nobody_had_killed_them(monkeypatch):
    path = Path(__file__).parents[2] / "benchmarks" / "torture.py"
    spec = importlib.util.spec_from_file_location("torture", path)
    torture = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(torture)
    monkeypatch.setattr(torture, "LONGEST_PROGRESS", 0.5)
    runs = torture.torture(kills=2, minutes=2, seed=0, steps=10_000)
    assert sum(run["kills"] for run in runs) == 2
    for run in runs:
        assert run["unreadable"] == 0
        assert run["most lost"] <= 2
        assert run["identical"]
