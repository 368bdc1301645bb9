"""`measureflow uci`: what it writes, what it refuses, and how its tables are computed."""

import json
import os

import numpy as np
import pytest
from matplotlib.figure import Figure
from quick import quickly_compiled  # noqa: F401
from typer.testing import CliRunner

import measureflow as mf
from measureflow import cli
from measureflow.study import datasets
from measureflow.study import uci_benchmark as uci
from measureflow.study.uci_benchmark import Result, comparison_rows, mean_and_error, run_uci, score_rows
from measureflow.tables import crossvalidation

# NumPyro and Optax promote integers and ranks.
pytestmark = pytest.mark.standard_promotion

SCORES = ("negative_log_likelihood", "root_mean_square_error", "crps", "coverage", "width")


def result(name, method, nll, weights=(1.0, 1.0)):
    others = {score: [0.25, 0.75] for score in SCORES[1:]}
    return Result(name, method, {SCORES[0]: list(nll)} | others, list(weights), 1.26)


# Tables


def test_mean_and_error():
    mean, error = mean_and_error([1.0, 2.0, 6.0])
    assert mean == 3
    # Squares 4 + 1 + 9 over n − 1 = 2, over n = 3.
    assert error == pytest.approx(np.sqrt(7 / 3))
    assert np.isnan(mean_and_error([1.0])[1])


def test_score_rows():
    row, other = score_rows(
        [result("yacht", "DRLE", [0.0, 0.2], [1.0, 0.3]), result("boston", "DE", [2.0, 3.0])]
    )
    assert row == {
        "set": "yacht",
        "method": "DRLE",
        "NLL": "0.100 ± 0.100",
        "RMSE": "0.500 ± 0.250",
        "CRPS": "0.500 ± 0.250",
        "coverage of 90%": "0.500 ± 0.250",
        "best published NLL": 0.73,
        "prototype NLL": 0.10,
        "prior weights chosen": "1: 1, 0.3: 1",
        "seconds": 1.3,
    }
    assert other["best published NLL"] == 2.40
    assert other["prior weights chosen"] == "1: 2"


def test_published_numbers_are_those_of_the_literature():
    """Rows of the tables cited, by hand, in the order of the sets."""
    assert uci.SETS == (
        "boston",
        "concrete",
        "energy",
        "kin8nm",
        "naval",
        "power",
        "protein",
        "wine",
        "yacht",
    )
    assert all(len(numbers) == 9 for numbers in [*uci.PUBLISHED.values(), uci.PROTOTYPE])
    deep_ensembles = uci.PUBLISHED["Deep ensembles (Lakshminarayanan et al., 2017)"]
    assert deep_ensembles == (2.41, 3.06, 1.38, -1.20, -5.63, 2.79, 2.83, 0.94, 1.18)


def test_comparisons_are_paired_and_lower_is_a_win():
    results = [
        # By one every time: ± 0, a win. The spread between splits does not count.
        result("yacht", "DE", [0.0, 10.0]),
        result("yacht", "DRLE", [-1.0, 9.0]),
        # −0.6 ± 0.5: another.
        result("naval", "DE", [1.0, 1.0]),
        result("naval", "DRLE", [-0.1, 0.9]),
        # −0.4 ± 0.5: neither.
        result("wine", "DE", [1.0, 1.0]),
        result("wine", "DRLE", [0.1, 1.1]),
        # 0.6 ± 0.5: a loss.
        result("power", "DE", [1.0, 1.0]),
        result("power", "DRLE", [1.1, 2.1]),
        # Only one of the two.
        result("boston", "DE", [1.0, 1.0]),
    ]
    (row,) = comparison_rows(results)
    assert row == {
        "difference": "DRLE − DE",
        "yacht": "-1.000 ± 0.000",
        "naval": "-0.600 ± 0.500",
        "wine": "-0.400 ± 0.500",
        "power": "+0.600 ± 0.500",
        "wins": 2,
        "losses": 1,
    }


def test_every_pair_of_methods_is_compared_once():
    results = [result("yacht", method, [i, i + 1.0]) for i, method in enumerate(uci.METHODS)]
    rows = comparison_rows(results)
    pairs = ["DRLE − DRE", "DRLE − DLE", "DRLE − DE", "DRE − DLE", "DRE − DE", "DLE − DE"]
    assert [row["difference"] for row in rows] == pairs
    assert [row["yacht"].split()[0] for row in rows] == [
        "+1.000",
        "+2.000",
        "+3.000",
        "+1.000",
        "+2.000",
        "+1.000",
    ]
    assert all((row["wins"], row["losses"]) == (0, 1) for row in rows)
    assert comparison_rows(results[:1]) == []


def test_the_figure_has_a_panel_for_each_set():
    figure = Figure()
    results = [result(name, "DRLE", [1.0, 2.0]) for name in ("yacht", "wine", "power", "boston")]
    uci.draw(figure, [*results, result("yacht", "DE", [3.0, 4.0])])
    shown = [axis for axis in figure.axes if axis.get_visible()]
    assert [axis.get_title() for axis in shown] == ["yacht", "wine", "power", "boston"]
    # Two methods, and four lines of published numbers.
    assert len(shown[0].containers) == 2
    heights = [line.get_ydata()[0] for line in shown[0].lines if len(line.get_xdata()) == 2]
    assert heights[-4:] == [1.63, 1.18, 1.25, 0.73]


# The command


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Runs it in a folder of its own, on results made by hand."""
    monkeypatch.chdir(tmp_path)
    asked = []

    def made_by_hand(sets, methods, splits, seed, progress):
        asked.append((sets, methods, splits, seed))
        for name in sets:
            for method in methods:
                yield result(name, method, [1.0, 2.0])

    monkeypatch.setattr(cli, "run_uci", made_by_hand)

    def run(*arguments):
        return CliRunner().invoke(cli.app, ["uci", *arguments])

    run.asked = asked
    return run


def test_everything_is_written(command, tmp_path):
    done = command(
        "--sets", "yacht, wine", "--methods", "DE,DRLE", "--splits", "2", "--seed", "3", "--out", "here"
    )
    assert done.exit_code == 0, done.output
    assert command.asked == [(["yacht", "wine"], ["DE", "DRLE"], 2, 3)]
    assert {path.name for path in (tmp_path / "here").iterdir()} == {
        "results.json",
        "figure.png",
        "figure.svg",
    }
    record = json.loads((tmp_path / "here" / "results.json").read_text())
    assert record["seed"] == 3
    assert record["measureflow"] == mf.__version__
    assert record["settings"] == {"sets": ["yacht", "wine"], "methods": ["DE", "DRLE"], "splits": 2}
    assert {"commit", "jax", "python", "device"} <= set(record)
    kept = [(one["set"], one["method"]) for one in record["results"]]
    assert kept == [("yacht", "DE"), ("yacht", "DRLE"), ("wine", "DE"), ("wine", "DRLE")]
    assert record["results"][0]["scores"]["negative_log_likelihood"] == [1.0, 2.0]
    assert record["results"][0]["prior_weights"] == [1.0, 1.0]
    assert "yacht DRLE: NLL 1.500 ± 0.500" in done.output
    assert "DRLE − DE" in done.output
    assert "Wrote here/results.json" in done.output


def test_all_sets_and_methods_are_the_default(command):
    assert command().exit_code == 0
    assert command.asked == [(list(uci.SETS), list(uci.METHODS), None, 0)]


def test_nothing_is_overwritten_unless_forced(command, tmp_path):
    arguments = ("--sets", "yacht", "--methods", "DE", "--out", "here")
    assert command(*arguments, "--seed", "1").exit_code == 0
    refused = command(*arguments, "--seed", "2")
    assert refused.exit_code == 2
    assert "--force" in refused.output
    read = lambda: json.loads((tmp_path / "here" / "results.json").read_text())["seed"]  # noqa: E731
    assert read() == 1
    assert len(command.asked) == 1, "nothing was computed in vain"
    assert command(*arguments, "--seed", "2", "--force").exit_code == 0
    assert read() == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--sets", "yacht,titanic"), ("titanic", "--sets", "boston")),
        (("--methods", "DE,SVGD"), ("SVGD", "--methods", "DRLE")),
        (("--splits", "1"), ("at least 2", "--splits")),
        (("--splits", "0"), ("at least 2", "--splits")),
    ],
)
def test_wrong_options_say_what_is_possible(command, tmp_path, arguments, words):
    refused = command(*arguments, "--out", "here")
    assert refused.exit_code == 2
    assert all(word in refused.output for word in words), refused.output
    assert not (tmp_path / "here").exists()
    assert command.asked == []


@pytest.mark.parametrize("error", [RuntimeError("power cut"), KeyboardInterrupt()])
def test_what_was_computed_before_an_interruption_is_kept(command, tmp_path, monkeypatch, error):
    def interrupted(*_, **__):
        yield result("yacht", "DE", [1.0, np.nan])
        raise error

    monkeypatch.setattr(cli, "run_uci", interrupted)
    assert command("--out", "here").exit_code != 0
    record = json.loads((tmp_path / "here" / "results.json").read_text())
    assert [one["method"] for one in record["results"]] == ["DE"]
    assert record["results"][0]["scores"]["negative_log_likelihood"] == [1.0, None], "JSON knows no NaN"


# Fits


SPLITS = [(list(range(5, 40)), list(range(5))), (list(range(34)), list(range(34, 40)))]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A small set in the place of yacht, named by MEASUREFLOW_DATA; its last column is the target."""
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(40, 2))
    place = tmp_path / "data" / datasets.NAMES["yacht"]
    place.mkdir(parents=True)
    np.savetxt(place / "data.txt", np.column_stack([inputs, 5 + inputs[:, 0] + 0.1 * rng.normal(size=40)]))
    (place / "index_features.txt").write_text("0\n1\n")
    (place / "index_target.txt").write_text("2\n")
    (place / "n_splits.txt").write_text("2\n")
    for i, (train, test) in enumerate(SPLITS):
        np.savetxt(place / f"index_train_{i}.txt", train)
        np.savetxt(place / f"index_test_{i}.txt", test)
    monkeypatch.setenv(datasets.FOLDER, str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def quick_fits(monkeypatch):
    """The default, but for a small network and few steps; and what was asked of cross-validation."""
    calls, right = [], crossvalidation.cross_validate

    def smaller(estimator, inputs, targets, **settings):
        calls.append((estimator.get_params(), settings))
        estimator.set_params(hidden=(), particles=3, steps=4_000, step_size=0.05)
        return right(estimator, inputs, targets, **settings)

    monkeypatch.setattr(crossvalidation, "cross_validate", smaller)
    return calls


def test_fits_are_those_of_the_default_on_the_canonical_splits(folder, quick_fits):
    (found,) = run_uci(["yacht"], ["DE"], None, 7, progress=False)
    ((settings, asked),) = quick_fits
    default = mf.EnsembleRegressor().get_params()
    assert {name for name in settings if settings[name] != default[name]} == {"method", "random_state"}
    assert settings["random_state"] == 7
    assert [(train.tolist(), test.tolist()) for train, test in asked["cv"]] == SPLITS
    assert asked["coverage"] == 0.9
    assert found[:2] == ("yacht", "DE")
    assert set(found.scores) == set(SCORES)
    assert all(len(values) == 2 and np.all(np.isfinite(values)) for values in found.scores.values())
    assert found.prior_weights == [1.0, 1.0], "too few rows to choose from"
    assert found.seconds > 0
    # In the units of the targets, whose mean is 5 and whose deviation is 1.
    assert max(found.scores["root_mean_square_error"]) < 0.5


def test_the_whole_command(folder, quick_fits, tmp_path):
    arguments = ["uci", "--sets", "yacht", "--methods", "DE", "--splits", "2", "--out", "here"]
    done = CliRunner().invoke(cli.app, arguments)
    assert done.exit_code == 0, done.output
    record = json.loads((tmp_path / "here" / "results.json").read_text())
    assert len(record["results"][0]["scores"]["negative_log_likelihood"]) == 2
    assert (tmp_path / "here" / "figure.png").read_bytes().startswith(b"\x89PNG")
    quick_fits.clear()
    CliRunner().invoke(cli.app, [*arguments, "--force", "--seed", "1"])
    assert quick_fits[0][0]["random_state"] == 1


def test_a_set_that_is_missing_says_where_it_was_looked_for(folder, tmp_path):
    missing = CliRunner().invoke(cli.app, ["uci", "--sets", "wine", "--methods", "DE", "--out", "here"])
    assert missing.exit_code == 2
    assert "wine-quality-red" in missing.output.replace("\n", "")


@pytest.mark.slow
@pytest.mark.skipif(
    datasets.FOLDER not in os.environ, reason=f"{datasets.FOLDER} names no folder of UCI sets"
)
def test_a_real_set(quick_fits):
    (found,) = run_uci(["yacht"], ["DE"], 2, 0, progress=False)
    assert len(found.scores["negative_log_likelihood"]) == 2
    # A Gaussian with the mean and the variance of all targets would have 4.14.
    assert max(found.scores["negative_log_likelihood"]) < 3.7
