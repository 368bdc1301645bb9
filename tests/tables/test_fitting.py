"""A fit as a user meets it: watched, stopped, killed and resumed, interrupted, diverged, not converged."""

import os
import pickle
import signal
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers import assert_close
from sklearn.exceptions import ConvergenceWarning, NotFittedError

import measureflow as mf
from measureflow.runs import duration
from measureflow.tables import training, trials
from measureflow.tables.convergence import not_converged
from measureflow.tables.crossvalidation import cross_validate
from measureflow.tables.methods import METHODS, Candidate, Method

pytestmark = pytest.mark.standard_promotion

STEPS = 2_000
# Linear models without noise compile fastest.
SETTINGS = {
    "method": "DE",
    "hidden": (),
    "encoding": 0,
    "particles": 3,
    "steps": STEPS,
    "step_size": 0.05,
    # Of three networks, none begins so far away that it is not there in time; of some seeds, one does.
    "random_state": 4,
}


def table(rows=40, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(rows, 3))
    return X, np.sin(2 * X[:, 0]) + X[:, -1] + 0.5 * rng.normal(size=rows)


X, Y = table()


def regressor(**settings):
    return mf.EnsembleRegressor(
        **(SETTINGS | {"likelihood": "heteroscedastic", "prior_weight": 1.0} | settings)
    )


def same(mine, others):
    return jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(a, b), mine.particles_, others.particles_))


@pytest.fixture(scope="module")
def fitted():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return regressor().fit(X, Y)


# History


def test_history_is_that_of_the_training_rows(fitted):
    history = fitted.history_
    assert isinstance(history, mf.History)
    assert 40 <= len(history.step) <= 100
    assert history.step[0] == 0
    assert history.step[-1] == STEPS
    assert all(np.isfinite(column).all() for column in history.values())
    assert history.loss[-1] < history.loss[0]
    rows = (X - fitted.input_mean_) / fitted.input_scale_
    targets = (Y - fitted.target_mean_) / fitted.target_scale_
    outputs = np.stack([rows @ w + b for w, b in zip(*_layers(fitted.particles_), strict=True)])
    scale = np.logaddexp(outputs[..., 1], 0) + 1e-3
    densities = -0.5 * np.log(2 * np.pi) - np.log(scale) - 0.5 * ((targets - outputs[..., 0]) / scale) ** 2
    assert_close(history.loss[-1], -densities.mean(), 1e-5)
    assert_close(history.mixture_loss[-1], -np.log(np.exp(densities).mean(axis=0)).mean(), 1e-5)


def _layers(particles):
    (layer,) = particles
    return layer["weight"].astype(np.float64), layer["bias"].astype(np.float64)


def test_the_gradient_norm_falls_to_that_of_the_end(fitted):
    """On all rows, the drift is the gradient of ℓ − w log p, which RMS averages over a hundred steps."""
    norms = regressor(batch_size=40).fit(X, Y).history_.gradient_norm
    assert norms[0] > 10 * norms[-1] > 0
    variational = regressor(method="FD-GVI", steps=300).fit(X, Y).history_.gradient_norm
    assert np.isfinite(variational).all()


def test_history_is_kept_in_pickles_and_files(fitted, tmp_path):
    fitted.save(tmp_path / "model")
    for back in (pickle.loads(pickle.dumps(fitted)), mf.load(tmp_path / "model")):
        assert isinstance(back.history_, mf.History)
        assert list(back.history_) == list(fitted.history_)
        assert all(np.array_equal(back.history_[name], fitted.history_[name]) for name in fitted.history_)


def test_history_looks_at_every_other_row_of_many():
    many, targets = table(3_000)
    some = regressor(steps=60)
    with pytest.warns(ConvergenceWarning):
        some.fit(many, targets)
    law = some.predict_dist(many[::2])
    densities = np.asarray(law.log_prob(targets[::2].astype(np.float32))) + np.log(some.target_scale_)
    assert_close(some.history_.mixture_loss[-1], -densities.mean(), 1e-4)


# Callbacks


def test_a_callback_sees_the_run_and_ends_it():
    seen = []

    def watch(step, record, state):
        seen.append((step, record, state))
        return step > 300

    estimator = regressor().fit(X, Y, callback=watch)
    steps = [step for step, _, _ in seen]
    assert steps == sorted(steps)
    assert [step > 300 for step in steps] == [False] * (len(steps) - 1) + [True]
    step, record, state = seen[-1]
    assert estimator.n_iter_ == step < STEPS
    assert {"step", "loss", "mixture_loss", "gradient_norm"} <= set(record)
    assert record["loss"] == pytest.approx(
        estimator.history_.loss[estimator.history_.step <= step][-2], rel=1
    )
    for mine, its in zip(
        jax.tree.leaves(estimator.particles_), jax.tree.leaves(state.particles), strict=True
    ):
        assert np.array_equal(mine, its), "the model is what it was at that step"
    assert estimator.history_.step[-1] == step


def test_a_callback_that_never_answers_changes_nothing(fitted):
    steps = []
    assert same(regressor().fit(X, Y, callback=lambda step, *_: steps.append(step)), fitted)
    assert steps[-1] == STEPS


def test_a_callback_must_be_a_function():
    with pytest.raises(TypeError, match="callback must be a function of \\(step, record, state\\), got 3"):
        regressor().fit(X, Y, callback=3)


# Checkpoints

SCRIPT = """
    import os, signal, sys
    import numpy as np
    import measureflow as mf

    def main(folder, rows, callback, **settings):
        rng = np.random.default_rng(0)
        X = rng.normal(size=(rows, 3))
        y = np.sin(2 * X[:, 0]) + X[:, -1] + 0.5 * rng.normal(size=rows)
        checkpoint = mf.Checkpoint(folder, every=500) if folder else None
        return mf.EnsembleRegressor(**settings).fit(X, y, callback=callback, checkpoint=checkpoint)
"""


def run_script(body, *arguments, **options):
    # It compiles as the tests do, or the last bits differ.
    tests = str(Path(__file__).parents[1])
    compiling = f"import sys; sys.path.insert(0, {tests!r}); import effort; effort.spare()\n"
    text = compiling + textwrap.dedent(SCRIPT) + textwrap.dedent(body)
    command = [sys.executable, "-c", text, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


@pytest.mark.filterwarnings("ignore:the run goes on, though the code differs")
def test_a_killed_fit_goes_on_where_it_was(tmp_path, capfd, monkeypatch):
    """60 rows, so that there is something to choose; what was chosen is not chosen again."""
    settings = SETTINGS | {"method": "DLE", "steps": 4_000, "likelihood": "heteroscedastic"}
    body = f"""
    def kill(step, record, state):
        if step > 3200:
            os.kill(os.getpid(), signal.SIGKILL)

    main(sys.argv[1], 60, kill, **{settings!r})
    """
    with run_script(body, tmp_path / "run") as killed:
        assert killed.wait() == -signal.SIGKILL, killed.communicate()
    whole, steps = mf.EnsembleRegressor(**settings).fit(*table(60)), []
    monkeypatch.setattr(training, "chosen_on_folds", None)
    resumed = mf.EnsembleRegressor(**settings)
    resumed.fit(
        *table(60),
        # Here, and not in the process that was killed, shapes are checked at run time.
        checkpoint=mf.Checkpoint(tmp_path / "run", every=500, on_code_change="warn"),
        callback=lambda step, *_: steps.append(step),
    )
    # Checkpoints are written beside the run: the newest may have been on their way when it was killed.
    assert steps[0] > 1000, "it did not begin anew"
    said = capfd.readouterr().err
    assert any(f"{tmp_path / 'run'}: resuming at step {step} of 4000" in said for step in (2000, 2500, 3000))
    assert same(resumed, whole)
    assert (resumed.spread_, resumed.prior_weight_) == (whole.spread_, whole.prior_weight_)
    scores = resumed.validation_scores_, whole.validation_scores_
    assert all(np.array_equal(scores[0][name], scores[1][name]) for name in scores[1])
    assert all(np.array_equal(resumed.history_[name], whole.history_[name]) for name in whole.history_)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints") / "run"
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        regressor().fit(X, Y, checkpoint=mf.Checkpoint(folder, every=500))
    return mf.Checkpoint(folder, every=500)


def test_a_finished_fit_is_read(kept, fitted, capfd):
    steps = []
    again = regressor().fit(X, Y, checkpoint=kept, callback=lambda step, *_: steps.append(step))
    assert steps == []
    assert "finished" in capfd.readouterr().err
    assert same(again, fitted)
    assert again.n_iter_ == STEPS


@pytest.mark.parametrize(
    ("changed", "y"),
    [
        ({}, Y + np.eye(1, 40, 7)[0]),
        ({"step_size": 0.04}, Y),
        ({"steps": STEPS + 1}, Y),
        ({"method": "DLE"}, Y),
        ({"likelihood": "homoscedastic"}, Y),
        ({"random_state": 1}, Y),
        ({"particles": 4}, Y),
    ],
)
def test_another_fit_is_refused(kept, changed, y):
    with pytest.raises(ValueError, match="holds another run; to start over, name another folder"):
        regressor(**changed).fit(X, y, checkpoint=kept)


def test_checkpoints_need_a_random_state(tmp_path):
    with pytest.raises(ValueError, match="checkpoint needs a random_state, got None"):
        regressor(random_state=None).fit(X, Y, checkpoint=mf.Checkpoint(tmp_path / "run"))
    with pytest.raises(TypeError, match=r"checkpoint must be an mf\.Checkpoint, got 'here'"):
        regressor().fit(X, Y, checkpoint="here")
    assert not (tmp_path / "run").exists()


def test_early_stopping_goes_on_with_the_best_that_it_had(tmp_path):
    """Noise cannot be learned: the best was early, before the fit was stopped."""
    noise = np.random.default_rng(5).normal(size=40)
    settings = {"early_stopping": True, "validation_fraction": 0.25, "steps": 8_000, "prior_weight": 1e-3}
    whole = regressor(**settings).fit(X, noise)
    assert whole.n_iter_ < 3_000
    checkpoint = mf.Checkpoint(tmp_path / "run", every=700)
    stopped = regressor(**settings).fit(
        X, noise, checkpoint=checkpoint, callback=lambda step, *_: step > 3_000
    )
    assert same(stopped, whole), "the best is kept, also where a callback ends the run"
    steps = []
    resumed = regressor(**settings)
    resumed.fit(X, noise, checkpoint=checkpoint, callback=lambda step, *_: steps.append(step))
    assert steps[0] > 3_000
    assert steps[-1] == whole.n_iter_ + 5_000
    assert same(resumed, whole)
    steps.clear()
    resumed.fit(X, noise, checkpoint=checkpoint, callback=lambda step, *_: steps.append(step))
    assert steps == [], "it is over"


# Ctrl-C


def interrupting(after, times=1, number=signal.SIGINT):
    def interrupt(step, record, state):
        if step > after:
            for _ in range(times):
                os.kill(os.getpid(), number)

    return interrupt


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_fit_is_the_model_so_far(number):
    estimator, handler = regressor(), signal.getsignal(number)
    with pytest.warns(ConvergenceWarning, match=rf"{number.name} at step \d+ of {STEPS}: the model is"):
        assert estimator.fit(X, Y, callback=interrupting(300, number=number)) is estimator
    assert 300 < estimator.n_iter_ < STEPS
    assert np.isfinite(estimator.predict(X)).all()
    assert estimator.history_.step[-1] == estimator.n_iter_
    assert signal.getsignal(number) is handler


def test_a_second_interrupt_stops_at_once(fitted):
    estimator = pickle.loads(pickle.dumps(fitted))
    with pytest.raises(KeyboardInterrupt):
        estimator.set_params(step_size=0.01).fit(X, Y + 1, callback=interrupting(300, times=2))
    assert same(estimator, fitted), "what it had learned before is as it was"
    assert estimator.target_mean_ == fitted.target_mean_


def test_an_interrupt_while_choosing_raises(monkeypatch):
    advance = trials.Trials.advance

    def interrupted(self, budget, end):
        os.kill(os.getpid(), signal.SIGINT)
        advance(self, budget, end)

    monkeypatch.setattr(trials.Trials, "advance", interrupted)
    estimator = regressor(prior_weight=None)
    with pytest.raises(KeyboardInterrupt, match="choosing how to train: nothing was trained yet"):
        estimator.fit(*table(60))
    with pytest.raises(NotFittedError):
        estimator.predict(X)


def test_an_interrupted_cross_validation_has_no_scores(monkeypatch):
    advance = trials.Trials.advance

    def interrupted(self, budget, end):
        os.kill(os.getpid(), signal.SIGINT)
        advance(self, budget, end)

    monkeypatch.setattr(trials.Trials, "advance", interrupted)
    with pytest.raises(KeyboardInterrupt, match="there are no scores"):
        cross_validate(regressor(), X, Y, cv=2)


def test_ctrl_c_from_outside():
    """A script that trains for hours, and gets the signal that the terminal sends."""
    body = f"""
    def ready(step, record, state):
        print("ready", flush=True)

    estimator = main(None, 40, ready, **{SETTINGS | {"steps": 10**9, "prior_weight": 1.0}!r})
    print("fitted at", estimator.n_iter_, flush=True)
    """
    script = run_script(body)
    assert script.stdout.readline() == "ready\n"
    script.send_signal(signal.SIGINT)
    out, err = script.communicate(timeout=60)
    assert script.returncode == 0, err
    assert "fitted at " in out
    assert "ConvergenceWarning: SIGINT at step" in err


# Divergence


def test_divergence_is_noticed_when_it_happens():
    estimator = regressor(method="DLE", step_size=1e30, steps=10**9)
    with pytest.raises(
        mf.DivergenceError, match=r"became NaN or infinite between steps \d+ and \d+"
    ) as caught:
        estimator.fit(X, Y)
    assert caught.value.step < 10_000
    assert "step_size=1e+30; try a smaller one, such as step_size=1e+29" in str(caught.value)
    assert len(caught.value.lost) > 0
    assert np.isfinite(jax.tree.leaves(caught.value.state.particles)[0]).all()
    with pytest.raises(NotFittedError):
        estimator.predict(X)


def test_candidates_may_diverge():
    """One of infinite temperature: it is never chosen, and does not stop the others."""
    problem = METHODS["DLE"].problem
    method = Method("hot or cold", problem, candidates=(Candidate(np.inf), Candidate(1.0)))
    estimator = regressor(method=method, prior_weight=None).fit(*table(60))
    assert estimator.prior_weight_ == 1.0
    assert estimator.validation_scores_["log_density"][0] == -np.inf


# Convergence


@pytest.mark.parametrize("steps", [1, 7, 8, 30, 300])
@pytest.mark.parametrize("method", ["DRLE", "DE"])
def test_fits_that_are_too_short_say_so(method, steps):
    with pytest.warns(ConvergenceWarning, match=f"not converged in {steps} steps.*increase steps"):
        regressor(method=method, steps=steps, step_size=0.01).fit(X, Y)


def test_one_step_says_so_for_classes_and_where_steps_are_chosen():
    with pytest.warns(ConvergenceWarning, match="not converged in 1 steps"):
        mf.EnsembleClassifier(steps=1, hidden=(), random_state=0).fit(X, Y > 0)
    with pytest.warns(ConvergenceWarning, match="not converged in 1 steps"):
        regressor(prior_weight=None, steps=1).fit(*table(60))


# Networks that begin far away stay there under the log score of their mixture, which does without them: then
# there is something to say.
@pytest.mark.parametrize("method", [method for method in METHODS if method != "PrO"])
def test_long_fits_say_nothing(method):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        regressor(method=method, steps=None, step_size=0.01).fit(X, Y)


def test_cross_validation_counts_those_that_are_too_short():
    with pytest.warns(ConvergenceWarning, match="^2 of 2 fits: not converged in 30 steps"):
        cross_validate(regressor(steps=30), X, Y, cv=2)


def record(loss, steps=1_000, first=2.0):
    """A history whose loss is a function of the share of steps taken."""
    share = np.linspace(0, 1, 51)
    return mf.History(
        {"step": (steps * share).round().astype(int), "loss": loss(share), "mixture_loss": np.full(51, first)}
    )


def test_what_was_learned_before_half_time_counts():
    """L(T/4) − L(T/2) against a quarter of M(0) − L(T), here of 2 − 0 or 2 − (−2)."""

    def fell(by, end):
        return lambda share: np.interp(share, [0, 0.1, 0.35, 0.4, 0.7, 1], [9, 1 + by, 1 + by, 1, 1, end])

    assert not_converged(record(fell(0.51, 0.0))) is not None
    assert not_converged(record(fell(0.49, 0.0))) is None
    assert not_converged(record(fell(0.51, -2.0))) is None
    assert not_converged(record(fell(1.01, -2.0))) is not None
    assert not_converged(record(fell(1.01, -2.0)), stopped_early=True) is None
    # Where nothing was learned, an eighth of a nat.
    assert not_converged(record(fell(0.13, 0.9), first=1.0)) is not None
    assert not_converged(record(fell(0.12, 0.9), first=1.0)) is None


def test_noise_of_single_records_is_averaged_out():
    rng = np.random.default_rng(0)
    assert not_converged(record(lambda share: 1 + 0.1 * rng.normal(size=share.shape))) is None


@pytest.mark.slow
@pytest.mark.skipif(
    "MEASUREFLOW_DATA" not in os.environ, reason="MEASUREFLOW_DATA names no folder of UCI sets"
)
@pytest.mark.parametrize("name", ["yacht", "energy", "boston", "concrete"])
def test_defaults_say_nothing_on_real_tables(name):
    data = mf.datasets.load_uci(name)
    train, _ = data.splits[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mf.EnsembleRegressor(random_state=0).fit(data.inputs[train], data.targets[train])
    with pytest.warns(ConvergenceWarning, match="not converged in 1000 steps"):
        mf.EnsembleRegressor(random_state=0, steps=1_000, prior_weight=1.0).fit(
            data.inputs[train], data.targets[train]
        )


# How long it takes


def test_the_time_is_said_at_the_start(capfd):
    seconds = []

    def stop(step, record, state):
        seconds.append(duration.time.perf_counter())
        return seconds[-1] - seconds[0] > 1

    regressor(verbose=1, steps=10**8).fit(X, Y, callback=stop)
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("training DE: about ") == 1
    regressor(steps=300).fit(X, Y, callback=lambda *_: True)
    assert capfd.readouterr() == ("", "")


def test_the_time_of_compilation_does_not_count(monkeypatch, capsys):
    clock = iter([100.0, 100.1, 100.5, 101.0])
    monkeypatch.setattr(duration.time, "perf_counter", lambda: next(clock))
    said = duration.Announcement("training", 0, 10_000)
    for step in (16, 30, 66, 500):
        said(step, {}, None)
    # 50 steps in half a second.
    assert capsys.readouterr().err == "training: about 2 min\n"


def test_times_in_words():
    words = [duration.in_words(seconds) for seconds in (0.2, 25.4, 99.0, 100.0, 3_000.0, 1e5)]
    assert words == ["1 s", "25 s", "99 s", "2 min", "50 min", "28 h"]


# A fit that fails


def test_a_fit_that_fails_leaves_the_estimator_as_it_was(fitted):
    estimator = pickle.loads(pickle.dumps(fitted))

    def fail(step, record, state):
        raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError, match="disk"):
        estimator.fit(X[:, :2], Y + 1, callback=fail)
    assert same(estimator, fitted)
    assert estimator.n_features_in_ == 3
    assert np.array_equal(estimator.predict(X), fitted.predict(X))
