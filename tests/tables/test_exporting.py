"""Exports: files that predict what the estimator does, in a process that has no measureflow."""

import json
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import numpy as np
import pandas as pd
import pytest
from sklearn.exceptions import ConvergenceWarning, NotFittedError

import measureflow as mf
from measureflow.tables import predictor
from measureflow.tables.predictor import Predictor

pytest.importorskip("flatbuffers", reason="jax.export writes with flatbuffers, which is not installed")
pytestmark = [
    pytest.mark.standard_promotion,
    pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning"),
    # The hour that a clock is set back is no time of a zone.
    pytest.mark.filterwarnings("ignore:column 'zoned' of X has no value:UserWarning"),
]
TINY = {"steps": 20, "hidden": (4,), "particles": 3, "prior_weight": 1.0, "random_state": 0}
LEVELS = (0.05, 0.5, 0.999)


def rows(count, seed):
    """Every kind of column, with gaps."""
    rng = np.random.default_rng(seed)
    days = pd.to_datetime("2023-01-01") + pd.to_timedelta(rng.integers(0, 900 * 24, count), unit="h")
    frame = pd.DataFrame(
        {
            "area": rng.normal(70, 15, count).round(2),
            "seconds": 1.7e9 + rng.normal(0, 50, count),
            "district": rng.choice(["Mitte", "Nord", "Süd", "rare"], count, p=[0.4, 0.3, 0.28, 0.02]),
            "code": rng.choice(["1", "2", "3b"], count),
            "size": pd.Categorical(rng.choice(["S", "M", "L"], count), ["S", "M", "L"], ordered=True),
            "new": rng.random(count) < 0.3,
            "listed": days,
            "zoned": days.tz_localize("Europe/Berlin", ambiguous="NaT", nonexistent="NaT"),
            "same": "constant",
        }
    )
    for column in ("area", "district", "listed"):
        frame.loc[rng.random(count) < 0.15, column] = None
    return frame


def records(frame):
    """As JSON has them."""
    found = []
    for row in frame.to_dict("records"):
        plain = {name: None if pd.isna(value) else value for name, value in row.items()}
        found.append(
            {
                name: value.isoformat() if hasattr(value, "isoformat") else value
                for name, value in plain.items()
            }
        )
    return json.loads(json.dumps(found))


@pytest.fixture(scope="module")
def frame_model(tmp_path_factory):
    folder, frame = tmp_path_factory.mktemp("export") / "flats", rows(150, 0)
    target = np.exp(0.02 * frame["area"].fillna(70).to_numpy() + 0.3 * (frame["district"] == "Mitte")) * 300
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model = mf.EnsembleRegressor(**TINY, encoding=8, likelihood="log_mixture").fit(frame, target)
    model.export(folder, missing=("NA",))
    return model, folder, frame


def compared(found, model, table, exact=1e-6):
    """To 1e-6 of a standard deviation, or of the number itself."""
    mean, deviation = model.predict(table, return_std=True)
    law = model.predict_dist(table)
    law = law.marginals if law.event_shape else law
    levels = np.array(LEVELS).reshape(-1, *(1,) * len(law.batch_shape))
    quantiles = np.moveaxis(np.asarray(law.quantile(levels), np.float64), 0, -1)
    size = np.maximum(np.abs(mean), deviation)
    np.testing.assert_allclose(found["mean"], mean, atol=exact * size.max(), rtol=exact)
    np.testing.assert_allclose(found["standard_deviation"], deviation, rtol=5 * exact)
    np.testing.assert_allclose(found["quantiles"], quantiles, atol=5 * exact * size.max(), rtol=5 * exact)


def test_no_quantiles_are_none(frame_model):
    _, folder, _ = frame_model
    assert Predictor(folder).predict([GOOD, GOOD], ())["quantiles"].shape == (2, 0)


def test_records_become_the_numbers_of_the_frame(frame_model):
    model, folder, _ = frame_model
    new = rows(300, 1)
    np.testing.assert_array_equal(Predictor(folder).numbers(records(new)), model.columns_.numbers(new))


def test_a_frame_s_model_predicts_the_same(frame_model):
    model, folder, _ = frame_model
    new, exported = rows(300, 2), Predictor(folder)
    found = exported.predict(records(new), LEVELS)
    compared(found, model, new)
    # However many are asked for at a time.
    for count in (1, 5):
        some = exported.predict(records(new[:count]), LEVELS)
        np.testing.assert_allclose(some["mean"], found["mean"][:count], rtol=1e-6)
        np.testing.assert_allclose(some["quantiles"], found["quantiles"][:count], rtol=1e-5)


WORLD = np.random.default_rng(5).normal(size=(80, 3)) * [1, 10, 1] + [0, 1e6, 0]
LINE = np.exp(WORLD[:, 0] + 0.3 * np.random.default_rng(6).normal(size=80))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("law", "targets"),
    [
        ("heteroscedastic", 1e9 + LINE),
        ("homoscedastic", np.stack([LINE, 2 * LINE + 1], axis=1)),
        ("student_t", LINE),
        ("mixture", LINE),
        ("poisson", np.round(LINE)),
        ("zero_inflated", np.round(LINE)),
        ("hurdle", np.round(LINE)),
        ("beta", LINE / (1 + LINE)),
        ("negative_binomial", np.round(LINE)),
        ("gamma", LINE),
        ("log_normal", LINE),
        ("yeo_johnson_mixture", 1e9 - LINE),
    ],
)
def test_every_law_is_exported(law, targets, tmp_path):
    model = mf.EnsembleRegressor(**TINY, encoding=0, likelihood=law).fit(WORLD, targets)
    model.export(tmp_path / "model")
    found = Predictor(tmp_path / "model").predict(WORLD[:20], LEVELS)
    compared(found, model, WORLD[:20])
    assert found["epistemic_share"].shape == found["mean"].shape
    assert np.all((found["epistemic_share"] >= 0) & (found["epistemic_share"] <= 1))


@pytest.fixture(scope="module")
def classes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export") / "classes"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model = mf.EnsembleClassifier(**TINY, encoding=4).fit(
            WORLD, np.array(["a", "b", "c"])[np.arange(80) % 3]
        )
    model.export(folder)
    return model, folder


def test_classes_have_their_probabilities(classes):
    model, folder = classes
    found = Predictor(folder).predict(WORLD[:20])
    np.testing.assert_allclose(found["probabilities"], model.predict_proba(WORLD[:20]), atol=1e-6)
    assert found["classes"] == ["a", "b", "c"]
    assert found["class"] == model.predict(WORLD[:20]).tolist()


def test_it_runs_where_measureflow_cannot_be_imported(frame_model, tmp_path):
    """In a process of its own, from the folder alone, numpyro and equinox not being there either."""
    model, folder, _ = frame_model
    new = rows(300, 3)
    script = f"""
import sys
for name in ("measureflow", "numpyro", "equinox", "optax", "sklearn", "pandas"):
    sys.modules[name] = None
sys.path.insert(0, {str(folder)!r})
import json
from predictor import Predictor
found = Predictor({str(folder)!r}).predict(json.load(sys.stdin), {LEVELS})
json.dump({{name: part.tolist() for name, part in found.items()}}, sys.stdout)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        input=json.dumps(records(new)),
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    compared({name: np.array(part) for name, part in json.loads(done.stdout).items()}, model, new)


def test_predict_bin_alone_is_a_function_of_any_number_of_rows(classes):
    model, folder = classes
    program = jax.export.deserialize(bytearray((folder / "predict.bin").read_bytes()))
    about = json.loads((folder / "model.json").read_text())
    inputs = ((WORLD - about["input_mean"]) / about["input_scale"]).astype(np.float32)
    levels = np.full(1, 0.5, np.float32)
    for count in (1, 7):
        (table,) = program.call(inputs[:count], levels, levels)
        np.testing.assert_allclose(table, model.predict_proba(WORLD[:count]), atol=1e-6)


GOOD = {
    "area": 70.0, "seconds": 1.7e9, "district": "Mitte", "code": "1", "size": "M", "new": True,
    "listed": "2024-12-31T12:00:00", "zoned": "2024-12-31T12:00:00+01:00", "same": "constant",
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"area": "big"}, "row 1, 'area' must be a number, got 'big'"),
        ({"area": float("inf")}, "must be a finite number"),
        ({"area": 10**400}, "must be a finite number"),
        ({"area": [1]}, "must be a number"),
        ({"new": "perhaps"}, "must be true or false"),
        ({"new": []}, "must be true or false"),
        ({"size": "XL"}, "must be one of S, M, L"),
        ({"code": "4"}, "must be one of"),
        ({"code": {}}, "must be a text"),
        ({"listed": "yesterday"}, "must be a date such as"),
        ({"listed": "2024-02-30"}, "must be a date such as"),
        ({"listed": "2024-12-31T12:00:00+01:00"}, "without a time zone"),
        ({"zoned": "2024-12-31T12:00:00"}, "with a time zone"),
        ({"zoned": "0001-01-01T00:00:00+14:00"}, "must be a date such as"),
        ({"colour": "red"}, "'colour' is none of the columns area"),
    ],
)
def test_wrong_values_are_named(change, said, frame_model):
    _, folder, _ = frame_model
    with pytest.raises(ValueError, match="row 1") as error:
        Predictor(folder).predict([GOOD, GOOD | change])
    assert said in str(error.value)


def test_what_is_missing_is_named_or_stands_for_nothing(frame_model):
    model, folder, _ = frame_model
    short = {name: value for name, value in GOOD.items() if name != "area"}
    with pytest.raises(ValueError, match="'area' is missing; where there is no value, pass None"):
        Predictor(folder).predict([short])
    for nothing in (None, "", "  ", "NA", float("nan")):
        assert np.all(
            Predictor(folder).numbers([short | {"area": nothing}])[:, :2]
            == [[model.columns_.columns[0].median, 1]]
        )
    for rows in ([], [1, 2], {}, "text", np.zeros((2, 9))):
        with pytest.raises(ValueError, match="rows must be"):
            Predictor(folder).predict(rows)


def test_categories_that_are_new(frame_model):
    """Beside rare ones they count as such, and elsewhere only where that is asked for."""
    model, folder, _ = frame_model
    found = Predictor(folder).predict([GOOD | {"code": "4", "size": "XL"}], unseen=True)
    assert np.isfinite(found["mean"]).all()
    assert np.array_equal(
        Predictor(folder).numbers([GOOD | {"code": "1.0"}]), Predictor(folder).numbers([GOOD])
    )
    assert Predictor(folder).numbers([GOOD | {"district": "Ost"}]).shape == (1, model.columns_.width)


def test_no_digit_of_a_code_is_rounded():
    from measureflow.tables.predictor import _level

    levels = ["123456789012345678", "7", "1E3"]
    assert [_level(levels, text) for text in ("123456789012345679", "1000", "7.0")] == [
        "123456789012345679",
        "1000",
        "7",
    ]


def test_levels_and_shapes_are_checked(classes):
    _, folder = classes
    for levels in ((0.0,), (1.0,), (float("nan"),)):
        with pytest.raises(ValueError, match="quantiles must be between"):
            Predictor(folder).predict(WORLD[:1], levels)
    for rows in (WORLD[:2, :2], WORLD[0], np.full((1, 3), np.nan)):
        with pytest.raises(ValueError, match="rows must be"):
            Predictor(folder).predict(rows)


def test_nothing_is_overwritten_unasked(classes, tmp_path):
    model, folder = classes
    with pytest.raises(FileExistsError, match="not empty; pass force=True"):
        model.export(folder)
    model.export(folder, force=True)
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(FileExistsError, match=r"holds thesis\.tex"):
        model.export(tmp_path, force=True)
    with pytest.raises(FileExistsError, match="is a file"):
        model.export(tmp_path / "thesis.tex", force=True)
    with pytest.raises(NotFittedError):
        mf.EnsembleRegressor().export(tmp_path / "unfitted")
    assert not (tmp_path / "unfitted").exists()


def test_the_script_reads_rows_from_a_pipe(classes):
    model, folder = classes
    done = subprocess.run(
        [sys.executable, folder / "predictor.py"],
        input=json.dumps(WORLD[:2].tolist()),
        capture_output=True,
        text=True,
    )
    assert json.loads(done.stdout)["class"] == model.predict(WORLD[:2]).tolist(), done.stderr
    assert (folder / "predictor.py").read_bytes() == Path(predictor.__file__).read_bytes()
