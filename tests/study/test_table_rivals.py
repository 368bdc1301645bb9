"""What each competitor is given, and what is made of its answers. Packages that are not installed have
stand-ins here; those that are, are fitted."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from measureflow.study.tables.cases import Case, UnsuitedError, expanded
from measureflow.study.tables.fitting import Job, fit_rival
from measureflow.study.tables.laws import LEVELS, Gaussian, LogNormal
from measureflow.study.tables.rivals import RIVALS, boosting, classical, missing, networks
from measureflow.study.tables.tasks import Task

ROWS = 60


def task(kind="regression", mixed=False, rows=ROWS, tested=10):
    rng = np.random.default_rng(0)
    x, colour = rng.normal(size=rows), rng.choice(["red", "blue"], rows)
    columns = {"x": x}
    if mixed:
        columns |= {"colour": colour.astype(object), "size": np.where(x > 1, np.nan, x)}
    y = 5.0 + x + 0.1 * rng.normal(size=rows)
    # Classes overlap, so that nobody is right to be certain.
    targets = (x + 0.3 * rng.normal(size=rows) > 0).astype(np.int64) if kind == "classes" else y
    split = np.split(np.arange(rows), [rows - tested])
    return Task("toy", "mixed", kind, columns, targets, [(split[0], split[1])])


# What columns become


def test_one_hot_learns_from_training_rows_alone():
    columns = {
        "size": np.array([1.0, 3.0, np.nan, 100.0]),
        "colour": np.array(["red", None, "red", "green"], object),
        "flat": np.array([2.0, 2.0, 2.0, 7.0]),
    }
    case = Case(
        Task("toy", "mixed", "regression", columns, np.zeros(4), [(np.arange(3), np.arange(3, 4))]), 0
    )
    train, test = case.one_hot()
    # The median of 1 and 3; columns for missing and red; none for green, or for what is flat in training.
    np.testing.assert_array_equal(train, [[1, 0, 1], [3, 1, 0], [2, 0, 1]])
    np.testing.assert_array_equal(test, [[100, 0, 0]])
    columns, text = case.natively()
    assert text == (1,)
    assert columns[1].tolist() == ["red", "missing", "red", "green"]
    np.testing.assert_array_equal(boosting._codes(columns[1], case.train), [1, 0, 1, np.nan])


def test_dates_become_numbers():
    column = np.array(["1970-02-01T06:30:00", "NaT"], "datetime64[s]")
    found = expanded({"when": column})
    assert [values[0] for values in found.values()] == [31 * 86400 + 6.5 * 3600, 31, 6, 6.5]
    assert all(np.isnan(values[1]) for values in found.values())


def test_held_out_rows_are_a_fifth_of_the_training_rows():
    case = Case(task(), 0, seed=3)
    learn, held = case.held_out()
    assert (len(learn), len(held)) == (40, 10)
    assert sorted([*learn, *held]) == list(range(50))
    assert not np.array_equal(held, Case(task(), 0, seed=4).held_out()[1])


# Laws from point predictions


def test_the_deviation_is_that_of_held_out_rows():
    law = boosting.gaussian_of_held_out(np.array([1.0, 2.0]), np.array([0.0, 0.0]), np.array([3.0, 4.0]))
    np.testing.assert_allclose(law.scale, np.sqrt(12.5))
    np.testing.assert_array_equal(law.location, [1, 2])
    exact = boosting.gaussian_of_held_out(np.array([1.0]), np.array([3.0]), np.array([3.0]))
    assert np.isfinite(exact.nll(np.array([1.0]))).all()


# Stand-ins


class Booster:
    """Predicts 7 everywhere; remembers what it was given."""

    def __init__(self, **settings):
        self.settings = settings
        Booster.last = self

    def fit(self, *data, **more):
        self.data, self.more = data, more
        return self

    def predict(self, rows, **how):
        if "quantile_alpha" in self.settings:
            return np.tile(self.settings["quantile_alpha"], (len(rows), 1))
        return np.full(len(rows), self.settings.get("alpha", 7.0))

    def predict_proba(self, rows):
        return np.tile([0.25, 0.75], (len(rows), 1))


@pytest.fixture
def stand_in(monkeypatch):
    return lambda name, **parts: monkeypatch.setitem(sys.modules, name, SimpleNamespace(**parts))


def test_lightgbm(stand_in):
    stops = []
    stand_in(
        "lightgbm",
        LGBMRegressor=Booster,
        LGBMClassifier=Booster,
        early_stopping=lambda n, verbose: stops.append(n),
    )
    case = Case(task(mixed=True), 0, threads=3)
    law = boosting.lightgbm(case)()
    more = Booster.last.more
    assert more["categorical_feature"] == [1]
    assert stops == [50]
    assert len(Booster.last.data[0]) == 40
    assert len(more["eval_set"][0][0]) == 10
    held = case.task.targets[case.train][case.held_out()[1]]
    np.testing.assert_allclose(law.scale, np.sqrt(np.mean((held - 7.0) ** 2)))
    assert Booster.last.settings["n_jobs"] == 3
    quantiles = boosting.lightgbm_quantiles(case)()
    np.testing.assert_array_equal(quantiles.values[0], LEVELS)


def test_xgboost(stand_in):
    stand_in("xgboost", XGBRegressor=Booster, XGBClassifier=Booster)
    law = boosting.xgboost(Case(task(), 0))()
    assert isinstance(law, Gaussian)
    assert Booster.last.settings["early_stopping_rounds"] == 50
    np.testing.assert_array_equal(boosting.xgboost_quantiles(Case(task(), 0))().values[3], LEVELS)
    np.testing.assert_array_equal(boosting.xgboost(Case(task("classes"), 0))()[0], [0.25, 0.75])


def test_pytabkit(stand_in):
    names = ("RealMLP_TD_Regressor", "RealMLP_TD_Classifier", "TabM_D_Regressor", "TabM_D_Classifier")
    stand_in("pytabkit", **dict.fromkeys(names, Booster))
    law = networks.realmlp(Case(task(), 0))()
    assert isinstance(law, Gaussian)
    assert len(Booster.last.more["X_val"]) == 10
    np.testing.assert_array_equal(networks.tabm(Case(task("classes"), 0))()[0], [0.25, 0.75])


class NGB(Booster):
    best_val_loss_itr = 4

    def pred_dist(self, rows, max_iter):
        assert max_iter == 5, "the best iteration is counted from 0"
        one = np.ones(len(rows))
        return SimpleNamespace(params={"loc": one, "scale": 2 * one, "s": 3 * one})


def test_ngboost(stand_in):
    stand_in("ngboost", NGBRegressor=NGB, NGBClassifier=NGB)
    stand_in("ngboost.distns", Normal="normal", LogNormal="lognormal", k_categorical=lambda k: k)
    law = boosting.ngboost_normal(Case(task(), 0))()
    assert isinstance(law, Gaussian)
    assert (law.location[0], law.scale[0]) == (1, 2)
    assert len(Booster.last.more["X_val"]) == 10
    law = boosting.ngboost_lognormal(Case(task(), 0))()
    assert isinstance(law, LogNormal)
    assert (law.location[0], law.scale[0]) == (np.log(2.0), 3)
    negative = task()._replace(targets=task().targets - 5)
    with pytest.raises(UnsuitedError, match="above 0"):
        boosting.ngboost_lognormal(Case(negative, 0))


class Cat(Booster):
    def predict(self, rows, prediction_type):
        assert prediction_type == "RMSEWithUncertainty"
        return np.tile([1.0, 4.0], (len(rows[0]), 1))

    def virtual_ensembles_predict(self, rows, prediction_type, virtual_ensembles_count):
        assert (prediction_type, virtual_ensembles_count) == ("TotalUncertainty", 10)
        return np.tile([1.0, 9.0, 16.0], (len(rows[0]), 1))


def test_catboost(stand_in):
    stand_in(
        "catboost",
        CatBoostRegressor=Cat,
        CatBoostClassifier=Cat,
        Pool=lambda *data, cat_features: (*data, cat_features),
    )
    case = Case(task(mixed=True), 0)
    law = boosting.catboost(case)()
    assert (law.location[0], law.scale[0]) == (1, 2), "variances are given"
    assert Booster.last.data[0][2] == [1]
    assert len(Booster.last.more["eval_set"][0]) == 10
    law = boosting.catboost_virtual_ensembles(case)()
    assert law.scale[0] == 5
    assert Booster.last.settings["posterior_sampling"]


def test_bde(stand_in):
    class Regressor(Booster):
        def predict(self, rows, raw):
            return np.zeros((8, 100, len(rows), 2))

    stand_in("bde", BdeRegressor=Regressor, BdeClassifier=None)
    stand_in("bde.loss", GaussianNLL=object, CategoricalCrossEntropy=object)
    case = Case(task(), 0)
    law = networks.bde(case)()
    assert law.locations.shape == (200, 10)
    np.testing.assert_allclose(law.locations, case.y.mean())
    np.testing.assert_allclose(law.scales, case.y.std() * np.log(2.0), rtol=1e-5)


def test_large_tables_have_no_gaussian_process(monkeypatch):
    monkeypatch.setitem(classical.GAUSSIAN_PROCESS, "most_rows", 49)
    with pytest.raises(UnsuitedError, match="more than 49 training rows"):
        classical.gaussian_process(Case(task(), 0))


# Those that are installed


@pytest.fixture
def job(monkeypatch):
    def make(rival, kind="regression"):
        made = task(kind, mixed=True, rows=200, tested=80)
        monkeypatch.setattr("measureflow.study.tables.fitting.load_task", lambda _: made)
        return Job("toy", rival, 0, 0, 1)

    # Quickly.
    few = (0.05, 0.5, 0.95)
    monkeypatch.setattr(classical, "LEVELS", few)
    monkeypatch.setattr(boosting, "LEVELS", few)
    monkeypatch.setitem(networks.BDE, "warmup_steps", 100)
    monkeypatch.setitem(networks.BDE, "n_samples", 100)
    # On a busy machine, threads that wait for each other take most of the time.
    with threadpool_limits(1):
        yield make


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("rival", "kind"),
    [(name, kind) for name, rival in RIVALS.items() for kind in rival.kinds if name != "constant"],
)
def test_rivals_beat_a_constant(rival, kind, job):
    if reason := missing(rival):
        pytest.skip(reason)
    record, constant = fit_rival(job(rival, kind)), fit_rival(job("constant", kind))
    assert record["status"] == "scored", record["reason"]
    score = "crps" if kind == "regression" else "negative_log_likelihood"
    assert record["scores"][score] < 0.8 * constant["scores"][score]
    assert record["seconds"] > 0
    assert record["version"]


def test_errors_of_a_rival_are_recorded(job, monkeypatch):
    def fit(case):
        raise RuntimeError("no luck")

    monkeypatch.setitem(RIVALS, "linear", RIVALS["linear"]._replace(fit=fit))
    record = fit_rival(job("linear"))
    assert (record["status"], record["reason"]) == ("failed", "RuntimeError: no luck")


def test_missing_packages_are_a_reason(monkeypatch):
    monkeypatch.setitem(RIVALS, "bde", RIVALS["bde"]._replace(package="no_such_package.part"))
    assert missing("bde") == "the package no_such_package.part is not installed"
    assert missing("linear") is None
