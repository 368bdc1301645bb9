"""The report: its numbers are those computed again by other means, its page opens anywhere and hides
nothing."""

import dataclasses
import re
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
import scoringrules
from numpyro.distributions import Normal
from scipy import stats
from tests.commands.browser import CHROMIUM, dom
from tests.commands.flats import invoke

import measureflow as mf
from measureflow.commands import baselines
from measureflow.commands.files import read_table
from measureflow.commands.model import load_model
from measureflow.commands.report import effects, figures
from measureflow.commands.report.drawing import number, ticks
from measureflow.commands.report.findings import Share, find, share
from measureflow.commands.report.judging import Judgement, Part, judged
from measureflow.commands.report.page import page
from measureflow.commands.report.words import distrust, how_judged
from measureflow.commands.reporting import judged_table
from measureflow.tables.frames import Columns

# Laws are NumPyro's.
pytestmark = [pytest.mark.standard_promotion, pytest.mark.xdist_group("commands")]


def table(model, path):
    return judged_table(model, read_table(str(path)), by_name=False, unseen=False, skip_missing=False)[0]


@pytest.fixture(scope="module", autouse=True)
def two_baselines():
    """Boosting takes longest, and has tests of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(baselines, "NAMES", ("constant", "linear"))
        yield


@pytest.fixture(scope="module")
def found(fitted, two_baselines):
    """What is found on new rows, of numbers and of classes."""
    models = {name: load_model(str(getattr(fitted, name))) for name in ("rent", "cheap")}
    return {name: find(model, table(model, fitted.new), 2) for name, model in models.items()}


@pytest.fixture(scope="module")
def normals(found):
    """Means and deviations of the particles, for the judged rows: rows × particles."""
    rent = found["rent"]
    law = rent.model.estimator.predict_dist(rent.inputs.iloc[rent.rows]).component_distribution
    return np.asarray(law.loc, np.float64), np.asarray(law.scale, np.float64)


def test_scores_are_those_of_scoringrules(found, normals):
    rent = found["rent"]
    assert rent.judgement.how == "new rows"
    assert len(rent.rows) == 60
    line = next(line for line in rent.board if line["model"].startswith("this model"))
    nll = scoringrules.logs_mixnorm(rent.targets, *normals)
    assert line["nll"] == pytest.approx(np.mean(nll), rel=1e-4)
    assert line["nll_error"] == pytest.approx(stats.sem(nll), rel=1e-3)
    assert line["crps"] == pytest.approx(np.mean(scoringrules.crps_mixnorm(rent.targets, *normals)), rel=1e-4)
    shown = f"{np.mean(nll):.3f} ± {stats.sem(nll):.3f}"
    assert page(rent).count(shown) == 2, "on the card and in the table"


def test_calibration_is_that_of_the_mixture(found, normals):
    rent = found["rent"]
    below = stats.norm.cdf(rent.targets[:, None], *normals).mean(axis=1)
    for one in rent.reliability:
        assert one.found == np.mean(below <= one.promised)
    for one in rent.coverage:
        assert one.found == np.mean(np.abs(2 * below - 1) <= one.promised)
        assert one.rows == 60
    by_district = next(group for group in rent.groups if group.column == "district")
    for one in by_district.shares:
        rows = rent.inputs["district"].to_numpy()[rent.rows] == one.name
        assert (one.rows, one.found) == (rows.sum(), np.mean(np.abs(2 * below[rows] - 1) <= 0.9))


def test_uncertainty_is_cut_in_two(found, normals):
    rent, (loc, scale) = found["rent"], normals
    np.testing.assert_allclose(rent.laws["epistemic"], loc.std(axis=1), rtol=1e-3)
    np.testing.assert_allclose(rent.laws["aleatoric"], np.sqrt(np.mean(scale**2, axis=1)), rtol=1e-3)
    assert rent.least_known[0] == np.argmax(loc.std(axis=1))


def test_rows_are_called_what_the_file_calls_them(fitted, tmp_path):
    """Also where rows without a target are left out."""
    model, frame = load_model(str(fitted.rent)), pd.read_csv(fitted.new)
    frame.loc[[0, 5], "rent"] = None
    frame.to_csv(tmp_path / "gaps.csv", index=False)
    source = read_table(str(tmp_path / "gaps.csv"))
    task, _ = judged_table(model, source, by_name=False, unseen=False, skip_missing=True)
    assert task.rows.numbers.tolist() == [n for n in range(1, 61) if n not in (1, 6)]
    assert task.rows.targets.tolist() == frame["rent"].dropna().tolist()


def test_the_law_of_a_point_is_its_density(found, normals):
    rent, (loc, scale) = found["rent"], normals
    place = int(rent.shown[7])
    grid, density = rent.curves[place]
    np.testing.assert_allclose(
        density, stats.norm.pdf(grid[:, None], loc[place], scale[place]).mean(axis=1), rtol=1e-3
    )
    ends = stats.norm.cdf(grid[[0, -1], None], loc[place], scale[place]).mean(axis=1)
    np.testing.assert_allclose(ends, (0.002, 0.998), atol=1e-4)


def test_classes_have_scores_and_figures_of_their_own(found):
    cheap = found["cheap"]
    line = next(line for line in cheap.board if line["model"].startswith("this model"))
    table = cheap.model.estimator.predict_proba(cheap.inputs.iloc[cheap.rows])
    labels = np.searchsorted(["no", "yes"], cheap.targets)
    assert line["nll"] == pytest.approx(mf.metrics.log_loss(table, labels), rel=1e-5)
    assert line["accuracy"] == mf.metrics.accuracy(table, labels)
    assert sum(one.rows for one in cheap.reliability) == 60
    text = page(cheap)
    assert "The class that came out had a probability of" in text
    assert f"{line['accuracy']:.1%}" in text


def test_the_training_table_is_judged_by_folds(fitted):
    model = load_model(str(fitted.rent))
    task = table(model, fitted.train)
    model.estimator.spread_ = 1.7
    judgement = judged(model, task, 2, 0)
    assert judgement.how == "folds"
    assert judgement.known == 120
    assert sorted(judgement.rows.tolist()) == list(range(120))
    first, second = judgement.parts
    for part in (first, second):
        # What a fold has learned of a column, it has not learned from the rows that it judges.
        others = np.setdiff1d(np.arange(120), part.rows)
        mean = task.rows.inputs["area"].iloc[others].median(skipna=True)
        area = next(column for column in part.estimator.columns_.columns if column.name == "area")
        assert area.median == pytest.approx(mean, abs=0.5)
        assert part.estimator.spread_ == 1.7
        assert part.estimator.shape_ == model.estimator.shape_
    law = first.estimator.predict_dist(task.rows.inputs.iloc[first.rows])
    ours = judgement.entries[0].rows["nll"][: len(first.rows)]
    y = task.rows.targets[first.rows]
    assert ours.mean() == pytest.approx(mf.metrics.negative_log_likelihood(law, y), rel=1e-5)
    # Baselines are scored on the same rows, in the same order.
    constant = judgement.entries[1].rows["nll"][: len(y)]
    trained = task.rows.targets[second.rows]
    normal = stats.norm(trained.mean(), trained.std())
    log = stats.lognorm(np.log(trained).std(), scale=np.exp(np.log(trained).mean()))
    best = max((normal, log), key=lambda law: law.logpdf(trained).mean())
    np.testing.assert_allclose(constant, -best.logpdf(y), rtol=1e-9)


def test_without_folds_the_page_says_that_rows_were_trained_on(fitted, found, tmp_path):
    pd.read_csv(fitted.train)[:60].to_csv(tmp_path / "part.csv", index=False)
    model = found["rent"].model
    judgement = judged(model, table(model, tmp_path / "part.csv"), 0, 0)
    assert judgement.how == "training rows"
    assert judgement.parts[0].estimator is model.estimator


# Effects, of a model that is known.


class Line:
    """y ~ Normal(2 x, 1 + z): what each input does can be written down."""

    def __init__(self, frame):
        self.columns_ = Columns.learn(frame)

    def predict_dist(self, frame):
        x, z = (jnp.asarray(frame[name].to_numpy(np.float32))[:, None] for name in ("x", "z"))
        return mf.Mixture(Normal(2 * x, 1 + z))


def line(rows):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {"x": rng.normal(size=rows), "z": rng.uniform(size=rows), "noise": rng.normal(size=rows)}
    )
    y = 2 * frame["x"] + (1 + frame["z"]) * rng.normal(size=rows)
    return frame, y.to_numpy(), Line(frame)


def test_importance_is_what_shuffling_costs():
    frame, y, model = line(900)
    parts = [Part(model, np.arange(900)[::2]), Part(model, np.arange(900)[1::2])]
    found = {
        one.column: one for one in effects.importances(Judgement(parts, [], "folds", 0, []), frame, y, 0)
    }
    # ½ E[(2x − 2x′)² (1 + z)⁻²] = 4 Var(x) · ∫ (1 + z)⁻² dz = 4 · ½, for x and x′ from the rows.
    exact = 4 * np.var(frame["x"]) * np.mean((1 + frame["z"]) ** -2.0)
    assert found["x"].loss == pytest.approx(exact, abs=4 * found["x"].error)
    assert 0 < found["x"].error < 0.2
    # log((1 + z′)/(1 + z)) has mean 0; ½ (1 + z)² (1 + z′)⁻² − ½ has this one.
    scale = 1 + frame["z"].to_numpy()
    exact = 0.5 * np.mean(scale**2) * np.mean(scale**-2.0) - 0.5
    assert found["z"].loss == pytest.approx(exact, abs=4 * found["z"].error)
    assert found["noise"].loss == 0


def test_partial_dependence_is_exact_for_a_line():
    frame, _, model = line(300)
    on_x, on_z = (effects.effect(model, frame, column, 0) for column in ("x", "z"))
    rows = np.random.default_rng(0).permutation(300)[: effects.MOST_AVERAGED]
    np.testing.assert_allclose(on_x.lines["mean"], 2 * np.array(on_x.places), rtol=1e-5)
    np.testing.assert_allclose(on_x.spread, np.mean(1 + frame["z"].to_numpy()[rows]), rtol=1e-5)
    np.testing.assert_allclose(on_z.spread, 1 + np.array(on_z.places), rtol=1e-5)
    np.testing.assert_allclose(on_z.lines["mean"], np.mean(2 * frame["x"].to_numpy()[rows]), rtol=1e-4)
    assert len(on_x.places) == effects.GRID


# Words.


def test_words_say_what_the_numbers_say(found):
    rent = found["rent"]
    said = " ".join(distrust(rent))
    assert "Not converged in 60 steps" in said
    assert "60 rows are few" in said
    assert "not trained on" in how_judged(rent)
    narrow = rent._replace(coverage=[share("90%", 0.9, np.arange(60) < 40)])
    assert "Intervals of 90% hold 66.7% of the targets: they are too narrow." in distrust(narrow)
    right = rent._replace(coverage=[share("90%", 0.9, np.arange(60) < 54)])
    assert not [line for line in distrust(right) if "Intervals of 90%" in line]
    far = rent._replace(distance=np.full(60, 2.0))
    assert any("100.0% of the rows are farther out" in line for line in distrust(far))
    trained = rent._replace(judgement=rent.judgement._replace(how="training rows"))
    assert "learned from" in distrust(trained)[0]
    ours, *rivals = rent.judgement.entries
    better = ours._replace(name="linear", rows=ours.rows | {"nll": ours.rows["nll"] - 0.5})
    beaten = rent._replace(judgement=rent.judgement._replace(entries=[ours, better, *rivals[1:]]))
    assert any("linear has the better log score, by 0.500" in line for line in distrust(beaten))


def test_shares_know_how_far_chance_goes():
    one = Share("90%", 0.9, 0.8, 0.04, 100)
    assert one.off == pytest.approx(-0.1 / np.sqrt(0.9 * 0.1 / 100))


# The page.


def test_the_page_is_complete_and_alone(found):
    for name, findings in found.items():
        text = page(findings)
        assert not re.search(r"https?:|src=|@import|url\(", text), f"{name} fetches something"
        assert "default-src 'none'" in text
        assert "prefers-color-scheme: dark" in text
        assert "@media print" in text
        for title in ("What to distrust", "Scores", "Calibration", "What the inputs do", "Training"):
            assert f"<h2>{title}</h2>" in text
        assert text.count("<figure>") == text.count('role="img"') >= 10
        for column in ("district", "area", "listed"):
            assert column in text


def test_names_from_a_file_run_no_code(found):
    hostile = "</script><script>alert(1)</script>"
    rent = found["rent"]
    about = rent.model.about | {"file": hostile, "notes": [hostile]}
    model = dataclasses.replace(rent.model, target=hostile, about=about)
    one = rent.effects[0]._replace(column=hostile)
    group = rent.groups[0]._replace(column=hostile)
    spoilt = rent._replace(model=model, name=hostile, effects=[one], groups=[group])
    text = page(spoilt)
    assert "alert(1)" in text
    assert hostile not in text
    assert text.count("<script") == 2


def test_the_command_writes_it_once(fitted, tmp_path):
    out = tmp_path / "report.html"
    out.write_text("mine")
    refused = invoke("report", fitted.rent, fitted.new, "--out", out)
    assert refused.exit_code == 2
    assert out.read_text() == "mine"
    done = invoke("report", fitted.rent, fitted.new, "--out", out, "--force", "--folds", "2")
    assert done.exit_code == 0, done.stderr
    assert out.read_text().startswith("<!doctype html>")
    assert "60 rows with 'rent'" in done.stderr


@pytest.mark.parametrize(
    ("low", "high", "expected"), [(0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]), (-3, 12, [0, 5, 10]), (2, 2, [2])]
)
def test_ticks_are_round_numbers(low, high, expected):
    assert ticks(low, high) == expected


def test_numbers_for_people():
    assert [number(value) for value in (0.12345, 123.4, 1234.5, 181_234.0, 2.5e6)] == [
        "0.123", "123", "1234", "181k", "2.5M",
    ]  # fmt: skip


@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine")
@pytest.mark.parametrize("name", ["rent", "cheap"])
def test_a_browser_draws_every_figure(name, found, tmp_path):
    """And nothing is written to its console."""
    path = tmp_path / "report.html"
    text = page(found[name])
    # A point is pointed at, as a reader does, once all is there.
    event = "new Event('click', {bubbles: true})"
    pointed = f"<script>document.querySelector('.dot[data-i]').dispatchEvent({event})</script>"
    path.write_text(text.replace("</body>", f"{pointed}</body>"), encoding="utf-8")
    drawn, console = dom(path)
    assert not console, console
    assert f'data-drawn="{text.count("<figure>")}"' in drawn
    panel = re.search(r'<aside id="law">(.*?)</aside>', drawn, re.S)
    assert panel, "the law of the point is shown"
    assert "<svg" in panel[1]
    assert "row " in panel[1]


def test_a_model_without_effects_has_a_page(found):
    """Where no input matters, there is nothing to draw of it, and nothing fails."""
    rent = found["rent"]
    assert page(rent._replace(effects=[], groups=[])).count("What the inputs do") == 1
    assert figures.effects(SimpleNamespace(model=rent.model, effects=[])) == []
