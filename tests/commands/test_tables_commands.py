"""fit, predict, evaluate and describe: what is written is what the library computes, and nothing is lost."""

import io
import json
import time

import numpy as np
import pandas as pd
import pytest
import scoringrules
from scipy import stats
from tests.commands.flats import TINY, flats, invoke

import measureflow as mf
from measureflow.commands import evaluating, files, limits
from measureflow.commands.baselines import predicted
from measureflow.commands.model import inputs_of, load_model
from measureflow.commands.surroundings import Surroundings
from measureflow.prediction import rowwise

# Laws are NumPyro's; and one process fits the models that all of these tests use.
pytestmark = [pytest.mark.standard_promotion, pytest.mark.xdist_group("commands")]


def inputs(path, model):
    return inputs_of(model, files.read_table(str(path)), by_name=False, unseen=False)[0]


def normals(model, rows):
    """Means and deviations of every particle, computed from what the file holds: rows × particles."""
    law = model.estimator.predict_dist(rows)
    parts = law.component_distribution
    return np.asarray(parts.loc, np.float64), np.asarray(parts.scale, np.float64)


def test_fit_shows_the_types_that_it_found(fitted):
    said = " ".join(fitted.said.split())
    assert "120 rows; regression of 'rent', since the target holds numbers" in said
    assert "2 number area" in said
    assert "1 category district (3 levels)" in said
    assert "1 date listed" in said
    assert "1 dropped cheap (as told)" in said
    assert "note: not converged in 60 steps" in said
    said = " ".join(fitted.said_of_classes.split())
    assert "classification of 'cheap', since the target holds text" in said
    assert "2 category district (3 levels), floor (9 levels, as told)" in said


def test_a_model_file_is_never_overwritten_unasked(fitted, tmp_path):
    out = tmp_path / "model.mf"
    out.write_text("mine")
    refused = invoke("fit", fitted.train, "--target", "rent", "--out", out, *TINY)
    assert refused.exit_code == 2
    assert "exists; pass --force" in refused.stderr
    assert out.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [out]


def test_predictions_are_those_of_the_mixture(fitted, tmp_path):
    out = tmp_path / "predictions.csv"
    done = invoke(
        "predict", fitted.rent, fitted.new, "--out", out, "--quantiles", "0.1,0.9", "--above", "800",
        "--keep", "district", "--keep", "rent",
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    assert done.stdout == ""
    table, model, new = pd.read_csv(out), load_model(str(fitted.rent)), pd.read_csv(fitted.new)
    assert list(table.columns[:2]) == ["district", "rent"]
    assert table["rent"].tolist() == new["rent"].tolist()
    loc, scale = normals(model, inputs(fitted.new, model))
    variance = np.mean(scale**2, axis=1) + np.var(loc, axis=1)
    np.testing.assert_allclose(table["mean"], loc.mean(axis=1), rtol=1e-5)
    np.testing.assert_allclose(table["standard_deviation"], np.sqrt(variance), rtol=1e-4)
    np.testing.assert_allclose(table["epistemic_share"], np.var(loc, axis=1) / variance, rtol=1e-3)
    for column, level in {"quantile_0.1": 0.1, "median": 0.5, "quantile_0.9": 0.9}.items():
        below = stats.norm.cdf(table[column].to_numpy()[:, None], loc, scale).mean(axis=1)
        np.testing.assert_allclose(below, level, atol=2e-5)
    np.testing.assert_allclose(table["above_800"], stats.norm.sf(800, loc, scale).mean(axis=1), atol=1e-5)


def test_probabilities_of_classes(fitted):
    done = invoke("predict", fitted.cheap, fitted.new)
    table, model = pd.read_csv(io.StringIO(done.stdout)), load_model(str(fitted.cheap))
    rows = inputs(fitted.new, model)
    np.testing.assert_allclose(
        table[["probability_no", "probability_yes"]], model.estimator.predict_proba(rows), atol=1e-6
    )
    assert table["class"].tolist() == model.estimator.predict(rows).tolist()
    law = model.estimator.predict_dist(rows)
    np.testing.assert_allclose(
        table["epistemic_share"], law.mutual_information() / law.entropy(), rtol=1e-4, atol=1e-6
    )
    assert invoke("predict", fitted.cheap, fitted.new, "--above", "1").exit_code == 2


def test_pipes_give_what_files_give(fitted, tmp_path):
    piped = invoke("predict", fitted.rent, "-", stdin=fitted.new.read_text())
    out = tmp_path / "predictions.csv"
    assert invoke("predict", fitted.rent, fitted.new, "--out", out).exit_code == 0
    assert piped.stdout == out.read_text()
    assert piped.stdout.startswith("mean,standard_deviation,median,quantile_0.05")
    assert "60 rows" in piped.stderr


def test_one_row_is_predicted_as_it_is_among_many(fitted):
    """Types are those of training: a file of one row, whose codes look like numbers, is no other table."""
    text = fitted.new.read_text().splitlines()
    alone = invoke("predict", fitted.cheap, "-", stdin="\n".join(text[:2]))
    together = invoke("predict", fitted.cheap, "-", stdin="\n".join(text))
    assert alone.exit_code == 0
    assert alone.stdout.splitlines()[1] == together.stdout.splitlines()[1]


def test_the_model_file_is_one_that_python_reads(fitted):
    model = mf.load(fitted.rent)
    assert isinstance(model.estimator, mf.EnsembleRegressor)
    assert model.target == "rent"
    assert model.kinds == {"cheap": "drop"}
    assert model.about["file"] == "train.csv"
    assert model.about["settings"]["steps"] == 60


def test_describe_says_what_was_fitted(fitted):
    said = " ".join(invoke("describe", fitted.rent).stdout.split())
    for part in ("DRLE, 4 networks", "rent (regression", "train.csv: 120 rows, 4 columns", "cheap=drop"):
        assert part in said
    said = " ".join(invoke("describe", fitted.cheap).stdout.split())
    assert "classes no, yes" in said
    assert "floor=category" in said


def test_training_rows_are_known_again_and_others_are_not(fitted):
    model = load_model(str(fitted.rent))
    for path, share in ((fitted.train, 1.0), (fitted.new, 0.0)):
        rent = pd.read_csv(path)["rent"].to_numpy(np.float64)
        assert model.knows(inputs(path, model), rent).mean() == share


# Distances.


def test_the_distance_is_that_of_mahalanobis():
    rng = np.random.default_rng(0)
    root = 2 * np.eye(5) + 0.5 * rng.normal(size=(5, 5))
    z = rng.normal(size=(4000, 5)) @ root
    around, covariance = Surroundings.learn(z), root.T @ root
    new = 3 * rng.normal(size=(200, 5))
    exact = np.sqrt(np.einsum("ni,ij,nj->n", new, np.linalg.inv(covariance), new))
    # Of five Gaussian numbers, 99% are nearer than this.
    np.testing.assert_allclose(around.distance(new), exact / np.sqrt(stats.chi2.ppf(0.99, 5)), rtol=0.1)
    assert 0.005 < np.mean(around.distance(z) > 1) < 0.016


def test_a_rare_level_is_not_far_away_for_being_rare():
    """One row in 500, which networks see at 5 deviations of 0.2: no farther than 5 deviations of a number."""
    rng = np.random.default_rng(0)
    z = np.column_stack([rng.normal(size=(2000, 3)), 5.0 * (np.arange(2000) % 500 == 0)])
    around = Surroundings.learn(z)
    rare, far = around.distance(np.array([[0.0, 0.0, 0.0, 5.0], [5.0, 0.0, 0.0, 0.0]]))
    assert rare == pytest.approx(far, rel=0.1)


def test_more_columns_than_rows_have_a_distance():
    z = np.random.default_rng(0).normal(size=(30, 60))
    around = Surroundings.learn(z)
    assert np.all(around.distance(z) < 1.5)
    assert np.all(around.distance(10 * z) > 3)


# Scores.


def test_scores_of_rows_are_those_of_scoringrules_and_metrics(fitted):
    model = load_model(str(fitted.rent))
    rows, y = inputs(fitted.new, model), pd.read_csv(fitted.new)["rent"].to_numpy(np.float64)
    law, (loc, scale) = model.estimator.predict_dist(rows), normals(model, rows)
    found = evaluating.row_scores(model.estimator, rows, y)
    np.testing.assert_allclose(found["nll"], scoringrules.logs_mixnorm(y, loc, scale), rtol=1e-4)
    np.testing.assert_allclose(found["crps"], scoringrules.crps_mixnorm(y, loc, scale), rtol=1e-4)
    assert np.mean(found["crps"]) == pytest.approx(mf.metrics.crps(law, y), rel=1e-6)
    assert np.mean(found["nll"]) == pytest.approx(mf.metrics.negative_log_likelihood(law, y), rel=1e-6)
    low, high = model.estimator.predict_interval(rows, 0.9)
    assert np.mean(found["inside"]) == mf.metrics.coverage(low, high, y)
    np.testing.assert_allclose(
        rowwise.below(law, y), stats.norm.cdf(y[:, None], loc, scale).mean(axis=1), atol=1e-5
    )


def test_a_leaderboard_has_the_scores_of_its_folds(fitted, tmp_path):
    out = tmp_path / "board.json"
    done = invoke(
        "evaluate", fitted.train, "--target", "rent", "--drop", "cheap", "--folds", "2", "--methods", "DE",
        "--likelihood", "heteroscedastic", "--out", out, *TINY,
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    board = {line["model"]: line for line in json.loads(out.read_text())["leaderboard"]}
    assert set(board) == {"constant", "linear", "gradient boosting", "DE"}
    # Rents are linear in what is known of them.
    assert min(board, key=lambda name: board[name]["nll"]) == "linear"
    assert done.stdout.splitlines()[1].startswith("linear")
    # The constant, again from the table.
    y = pd.read_csv(fitted.train)["rent"].to_numpy(np.float64)
    from sklearn.model_selection import KFold

    scores, errors = np.empty(len(y)), np.empty(len(y))
    for train, test in KFold(2, shuffle=True, random_state=0).split(y):
        normal = stats.norm(y[train].mean(), y[train].std())
        log = stats.lognorm(np.log(y[train]).std(), scale=np.exp(np.log(y[train]).mean()))
        law = max((normal, log), key=lambda law: law.logpdf(y[train]).mean())
        scores[test], errors[test] = -law.logpdf(y[test]), np.square(y[test] - law.mean())
    assert board["constant"]["nll"] == pytest.approx(scores.mean(), rel=1e-9)
    assert board["constant"]["nll_error"] == pytest.approx(stats.sem(scores), rel=1e-9)
    assert board["constant"]["rmse"] == pytest.approx(np.sqrt(errors.mean()), rel=1e-9)


def test_differences_are_paired_by_row():
    rng = np.random.default_rng(0)
    hard = rng.normal(0, 10, 400)
    rows = {"brier": np.ones(400), "right": np.ones(400)}
    better = evaluating.Entry("better", {"nll": hard, **rows}, 1.0, [])
    worse = evaluating.Entry("worse", {"nll": hard + rng.normal(0.1, 0.01, 400), **rows}, 1.0, [])
    first, second = evaluating.leaderboard([worse, better])
    assert (first["model"], first["behind"]) == ("better", 0.0)
    assert second["behind"] == pytest.approx(0.1, abs=0.005)
    assert second["behind_error"] < 0.001 < second["nll_error"]


def test_boosting_admits_how_wrong_it_is_on_rows_it_has_not_seen():
    """Noise that nothing explains: an interval by training errors would be far too narrow."""
    rng = np.random.default_rng(0)
    frame, y = pd.DataFrame({"x": rng.normal(size=400)}), rng.normal(size=400)
    law = predicted("gradient boosting", frame[:200], y[:200], frame[200:], None, 0)
    low, high = law.interval(0.9)
    assert 0.84 < np.mean((low <= y[200:]) & (y[200:] <= high)) < 0.97


def test_scores_of_classes_are_those_of_metrics(fitted):
    model = load_model(str(fitted.cheap))
    rows, y = inputs(fitted.new, model), pd.read_csv(fitted.new)["cheap"].to_numpy(np.str_)
    table, labels = model.estimator.predict_proba(rows), np.searchsorted(["no", "yes"], y)
    found = evaluating.row_scores(model.estimator, rows, y)
    assert np.mean(found["nll"]) == pytest.approx(mf.metrics.log_loss(table, labels), rel=1e-5)
    assert np.mean(found["brier"]) == pytest.approx(2 * np.mean((table[:, 1] - labels) ** 2), rel=1e-5)
    assert np.mean(found["right"]) == mf.metrics.accuracy(table, labels)


@pytest.mark.parametrize("name", ["constant", "linear", "gradient boosting"])
def test_baselines_of_classes_have_probabilities(name):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"x": rng.normal(size=120)})
    y = np.where(frame["x"] + rng.normal(size=120) > 0, "yes", "no")
    table = predicted(name, frame[:80], y[:80], frame[80:], np.array(["no", "yes"]), 0)
    np.testing.assert_allclose(table.sum(axis=1), 1)
    right = np.mean(np.array(["no", "yes"])[table.argmax(axis=1)] == y[80:])
    assert right > 0.6 if name != "constant" else np.all(table == table[0])


# Limits of time.


class Slow:
    """An estimator whose steps take a while; `choosing` seconds go by before the first."""

    likelihood, steps, n_iter_ = None, 1000, 0
    hidden = encoding = prior_weight = None
    method = "drle"

    def __init__(self, per_step, choosing=0.0):
        self.per_step, self.choosing, self.fits = per_step, choosing, []
        self.shape_ = mf.EnsembleRegressor  # replaced below

    def set_params(self, **given):
        vars(self).update(given)
        return self

    def fit(self, frame, targets, callback):
        end = time.monotonic() + (self.choosing if self.prior_weight is None else 0.0)
        while time.monotonic() < end:
            time.sleep(0.01)
        self.shape_ = type("Shape", (), {"hidden": (8,), "encoding": 0, "likelihood": "mixture"})
        self.members_, self.validation_scores_ = {"share_of_steps": np.ones(1)}, {"log_density": np.zeros(0)}
        self.spread_, self.spread_power_, self.typical_deviation_ = 2.0 if not self.fits else 1.0, 1.0, 1.0
        self.n_iter_ = 0
        while self.n_iter_ < self.steps:
            time.sleep(20 * self.per_step)
            self.n_iter_ += 20
            if callback(self.n_iter_, {}, None):
                break
        self.fits.append(self.n_iter_)
        return self


def test_a_fit_that_has_time_is_left_alone():
    model = Slow(1e-5)
    assert limits.fit_within(model, None, np.zeros(100), 20.0) == []
    assert model.fits == [1000]


def test_a_fit_without_time_begins_again_with_the_steps_there_is_time_for(monkeypatch):
    monkeypatch.setattr(limits, "_TIMED", 0.2)
    model = Slow(0.004)
    began = time.monotonic()
    notes = limits.fit_within(model, None, np.zeros(100), 2.0)
    assert time.monotonic() - began < 2.4
    assert len(model.fits) > 1
    assert model.fits[-1] == pytest.approx(model.steps, abs=20), "to the end, where the step size is 0"
    assert model.steps < 500
    # What held-out rows chose is kept.
    assert (model.hidden, model.members, model.spread_) == ((8,), model.members_, 2.0)
    assert "fewer steps than the usual 1000" in notes[0]


def test_choosing_gets_half_of_the_time():
    model = Slow(1e-5, choosing=60.0)
    began = time.monotonic()
    notes = limits.fit_within(model, None, np.zeros(100), 1.0)
    assert time.monotonic() - began < 2.0
    assert model.fits == [1000]
    assert (model.hidden, model.encoding, model.prior_weight) == (None, 0, 1.0)
    assert "before candidates had been compared" in notes[0]


def test_the_last_attempt_is_cut_off_and_says_so(monkeypatch):
    monkeypatch.setattr(limits, "_ATTEMPTS", 1)
    model = Slow(0.004)
    (note,) = limits.fit_within(model, None, np.zeros(100), 0.5)
    assert model.fits[0] < 200
    assert "intervals may be far too wide" in note


def test_a_fit_that_is_over_is_not_cut_off():
    """Also where its last step ended after the limit."""
    pace = limits.Pace(time.monotonic() - 1.0, 10, cut=True)
    assert pace(9, {}, None)
    pace = limits.Pace(time.monotonic() - 1.0, 10, cut=True)
    assert not pace(10, {}, None)
    assert pace.stopped_at is None


# Formats.


def test_parquet_without_pyarrow_says_what_to_install(fitted, tmp_path, monkeypatch):
    path = tmp_path / "table.parquet"
    path.write_bytes(b"PAR1")
    monkeypatch.setattr(files.importlib.util, "find_spec", lambda name: None)
    for arguments in (
        ("predict", fitted.rent, path),
        ("predict", fitted.rent, fitted.new, "--out", path, "--force"),
    ):
        refused = invoke(*arguments)
        assert refused.exit_code == 2
        assert "pip install pyarrow" in refused.stderr
    assert path.read_bytes() == b"PAR1"


@pytest.mark.parametrize("ending", ["parquet", "feather"])
def test_parquet_and_feather_give_what_csv_gives(fitted, tmp_path, ending):
    pytest.importorskip("pyarrow", reason="Parquet and Feather need pyarrow")
    path, out = tmp_path / f"new.{ending}", tmp_path / f"predictions.{ending}"
    frame = flats(60, 1)
    frame["area"] = frame["area"].astype(float)
    getattr(frame, f"to_{ending}")(path)
    assert invoke("predict", fitted.rent, path, "--out", out).exit_code == 0
    found = getattr(pd, f"read_{ending}")(out)
    expected = pd.read_csv(io.StringIO(invoke("predict", fitted.rent, fitted.new).stdout))
    pd.testing.assert_frame_equal(found, expected, rtol=1e-6)


def test_separators_are_found_and_codes_stay_codes(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("code;size;note\n007;1,5;a\n012;2,5;NA\n", encoding="utf-8-sig")
    frame = files.read_table(str(path)).frame
    assert frame["code"].tolist() == ["007", "012"]
    assert frame["size"].tolist() == ["1,5", "2,5"]
    assert frame["note"].tolist()[1] is None
