"""Tables whose numbers are far from 0, very large, very small, or not numbers at all."""

import importlib.util
import pickle

import jax
import numpy as np
import pandas as pd
import pytest
import scipy.stats
from helpers import assert_close
from quick import quickly_compiled  # noqa: F401
from sklearn.model_selection import KFold

from measureflow.prediction import metrics
from measureflow.tables import ensemble
from measureflow.tables.classifier import EnsembleClassifier
from measureflow.tables.crossvalidation import cross_validate
from measureflow.tables.regressor import EnsembleRegressor
from measureflow.tables.scaling import moments, standardised

# NumPyro and Optax promote integers and ranks.
pytestmark = [
    pytest.mark.standard_promotion,
    # Fits are short here; test_fitting.py looks at convergence.
    pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning"),
]

SHELL = {
    "method": "DE",
    "hidden": (),
    "encoding": 0,
    "particles": 3,
    "steps": 1_000,
    "step_size": 0.05,
    "prior_weight": 1.0,
    "random_state": 0,
}
RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 3))
Y = np.sin(2 * X[:, 0]) + X[:, 2] + 0.1 * RNG.normal(size=40)
LABELS = np.where(Y > 0, "up", "down")


def shell(**settings):
    return EnsembleRegressor(**({"likelihood": "heteroscedastic"} | SHELL | settings))


def classifier(**settings):
    return EnsembleClassifier(**(SHELL | settings))


@pytest.fixture(scope="module")
def plain():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return shell().fit(X, Y), cross_validate(shell(), X, Y, cv=KFold(2))


# Units of the targets

# As y ↦ location + scale·y; what float64 keeps of it, and so the tolerance.
UNITS = {
    "seconds since 1970": (1.7e9, 1.0, 1e-5),
    "their cubes": (1e12, 1.0, 5e-3),
    "far away": (-1e15, 100.0, 2e-2),
    "huge": (0.0, 1e200, 1e-5),
    "tiny": (0.0, 1e-200, 1e-5),
    "subnormal": (0.0, 1e-305, 1e-2),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", UNITS)
def test_scores_do_not_depend_on_units(name, plain):
    """Before, NLL 1.38 was 1.00 at 1.7e9, and an RMSE of 0.99 was 4096 at 1e12."""
    location, scale, tolerance = UNITS[name]
    _, expected = plain
    found = cross_validate(shell(), X, location + scale * Y, cv=KFold(2))
    jacobian = {"negative_log_likelihood": np.log(scale), "coverage": 0.0}
    for score, values in expected.items():
        if score in jacobian:
            assert_close(found[score] - jacobian[score], values, tolerance)
        else:
            assert_close(found[score] / scale, values, tolerance)


@pytest.mark.parametrize("name", UNITS)
def test_laws_do_not_depend_on_units(name, plain):
    location, scale, tolerance = UNITS[name]
    law, expected = shell().fit(X, location + scale * Y).predict_dist(X), plain[0].predict_dist(X)
    y = location + scale * Y
    assert_close((law.mean - location) / scale, expected.mean, tolerance)
    assert_close(law.std / scale, expected.std, tolerance)
    assert_close((law.median - location) / scale, expected.median, tolerance)
    assert_close(law.cdf(y), expected.cdf(Y), tolerance)
    assert_close(law.log_prob(y) + np.log(scale), expected.log_prob(Y), tolerance)
    assert_close((law.quantile([0.05, 0.95]) - location) / scale, expected.quantile([0.05, 0.95]), tolerance)


def test_targets_in_units_of_their_own(plain):
    two = np.column_stack([1.7e9 + Y, 1e-200 * X[:, 0]])
    law = shell().fit(X, two).predict_dist(X)
    both = shell().fit(X, np.column_stack([Y, X[:, 0]])).predict_dist(X)
    assert_close((law.mean - [1.7e9, 0]) / [1, 1e-200], both.mean, 1e-5)
    assert_close(law.log_prob(two), both.log_prob(np.column_stack([Y, X[:, 0]])) + 200 * np.log(10), 1e-5)


# Columns


def test_a_column_whose_variance_overflows_is_scaled():
    """Before, it was left as it was, and R² was −10¹⁰."""
    large, one = X.copy(), X.copy()
    large[3, 1], one[3, 1] = 1e200, 1e20
    fitted = shell().fit(large, Y)
    assert np.all(np.isfinite(fitted.input_scale_))
    # The rest of the column is nothing next to either.
    assert_close(fitted.predict(large), shell().fit(one, Y).predict(one), 1e-6)


@pytest.mark.parametrize("unit", [1e200, 1e-200, 1e300 / 5, 1e-305])
def test_moments_of_any_unit(unit):
    weights = RNG.uniform(0.5, 2, size=40)
    mean, deviation = moments("X", X, weights)
    large_mean, large_deviation = moments("X", unit * X, weights)
    assert_close(large_mean / unit, mean, 1e-3 if unit == 1e-305 else 1e-12)
    assert_close(large_deviation / unit, deviation, 1e-3 if unit == 1e-305 else 1e-12)
    expected = np.average(X, axis=0, weights=weights)
    assert_close(mean, expected, 1e-12)
    assert_close(deviation, np.sqrt(np.average((X - expected) ** 2, axis=0, weights=weights)), 1e-12)


def test_constants_and_nearly_constants():
    mean, scale = moments("X", np.full((40, 2), [0.1, -3e300 / 10]), np.ones(40))
    assert mean.tolist() == [0.1, -3e299]
    assert scale.tolist() == [1, 1]
    # Rounding is no variation; a part in 10¹³ is.
    almost = np.column_stack([np.where(Y > 0, 0.1, np.nextafter(0.1, 1)), 1e15 + 100 * Y])
    _, scale = moments("X", almost, np.ones(40))
    assert scale[0] == 1
    assert scale[1] == pytest.approx(100 * Y.std(), rel=0.01)


def test_numbers_whose_differences_overflow_are_refused_by_name():
    frame = pd.DataFrame(X, columns=["a", "b", "c"])
    frame.loc[3, "b"] = 1e305
    with pytest.raises(ValueError, match=r"X holds a number of size 1e\+305 in column 'b'.*; divide"):
        shell().fit(frame, Y)
    with pytest.raises(ValueError, match=r"in column 1, and"):
        shell().fit(frame.to_numpy(), Y)
    with pytest.raises(ValueError, match=r"y holds a number of size 1e\+305, and beyond"):
        shell().fit(X, np.where(Y[0] == Y, 1e305, Y))


def test_rows_to_predict_may_be_anywhere(plain):
    with np.errstate(all="raise"):
        found = plain[0].predict(np.full((2, 3), [[1.7e308], [-1.7e308]]))
    assert np.all(np.isfinite(found))
    assert np.all(
        np.isfinite(standardised(np.full((1, 1), 1.7e308), np.full(1, -1.7e308), np.full(1, 1e-300)))
    )


# Intervals


def test_intervals_of_nearly_everything_are_finite(plain):
    low, high = plain[0].predict_interval(X, 1 - 1e-8)
    outputs = plain[0].predict_dist(X).component_distribution
    below, above = (
        tail(end[:, None], np.asarray(outputs.loc), np.asarray(outputs.scale)).mean(axis=1)
        for tail, end in ((scipy.stats.norm.cdf, low), (scipy.stats.norm.sf, high))
    )
    np.testing.assert_allclose(below, 5e-9, rtol=1e-2)
    np.testing.assert_allclose(above, 5e-9, rtol=1e-2)


def test_intervals_of_counts_reach_as_far():
    counts = np.random.default_rng(0).poisson(3.0, size=40)
    low, high = shell(likelihood="poisson").fit(X, counts).predict_interval(X, 1 - 1e-8)
    assert np.all(low == 0)
    assert np.all(np.isfinite(high) & (high > 8))


# Counts


@pytest.mark.parametrize("likelihood", ["poisson", "negative_binomial"])
def test_counts_beyond_what_can_be_predicted_are_refused(likelihood):
    """Before, the prediction for 10¹⁰ was 4.9·10⁸."""
    counts = np.round(1e10 * np.exp(Y))
    with pytest.raises(ValueError, match=rf"'{likelihood}' has means up to 4\.9e\+08; count in .*thousands"):
        shell(likelihood=likelihood).fit(X, counts)
    millions = shell(likelihood=likelihood).fit(X, np.round(1e7 * np.exp(Y)))
    assert np.all((millions.predict(X) > 1e6) & (millions.predict(X) < 4e8))


def test_likelihoods_of_large_counts_are_right():
    """Of counts of 10⁷, log p was off by 25."""
    counts = np.random.default_rng(0).poisson(1e7, size=40)
    estimator = shell(likelihood="poisson").fit(X, counts)
    law = estimator.predict_dist(X)
    rates = np.asarray(law.component_distribution.rate, np.float64)
    expected = scipy.special.logsumexp(scipy.stats.poisson(rates).logpmf(counts[:, None]), axis=1) - np.log(3)
    assert metrics.negative_log_likelihood(law, counts) == pytest.approx(-expected.mean(), rel=1e-4)


# Weights


@pytest.mark.parametrize("factor", [1e-40, 1e40, 1e307])
def test_weights_that_are_no_numbers_of_rows_are_refused(factor):
    with pytest.raises(ValueError, match=r"sample_weight sums to .*; divide it by its mean"):
        shell().fit(X, Y, sample_weight=np.full(40, factor))


def test_a_class_without_weight_is_said_to_have_none():
    """Before: classes must be at least 2, got 1; it counts the classes, whose names are 0, 1, …"""
    with pytest.raises(ValueError, match=r"sample_weight is 0 for every row but .* 'up'.*weight > 0"):
        classifier().fit(X, LABELS, sample_weight=LABELS == "up")
    three = np.where(X[:, 0] > 1, "far", LABELS)
    assert classifier().fit(X, three, sample_weight=three != "far").classes_.tolist() == ["down", "up"]


def test_unknown_settings_are_blamed_on_the_class_that_was_written():
    with pytest.raises(TypeError, match=r"EnsembleClassifier\.__init__\(\) got .* 'likelihood'"):
        EnsembleClassifier(likelihood="mixture")
    with pytest.raises(TypeError, match=r"EnsembleRegressor\.__init__\(\)"):
        EnsembleRegressor(class_weight="balanced")


@pytest.mark.parametrize("labels", [np.array(["a", 1] * 20, object), np.where(Y > 0, None, LABELS)])
def test_labels_of_several_types_are_refused(labels):
    with pytest.raises(ValueError, match=r"y must hold labels of one type, got .*str.*; drop rows without"):
        classifier().fit(X, labels)


# Warm starts


def test_a_gaussian_does_not_go_on_from_one_particle():
    """Before, the step size was blamed."""
    estimator = shell(method="FD-GVI", particles=1, warm_start=True, steps=500).fit(X, Y)
    before = estimator.predict(X)
    with pytest.raises(ValueError, match=r"warm_start with method='FD-GVI'.*particles=1 .*warm_start=False"):
        estimator.fit(X, Y)
    assert np.all(estimator.predict(X) == before)


# Cross-validation asks before it works


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"coverage": 90}, "coverage must be between 0 and 1, got 90"),
        ({"sample_weight": np.ones(41)}, "inconsistent numbers of samples"),
        ({"y": np.append(Y, 1.0), "cv": [(np.arange(20), np.arange(20, 40))]}, "inconsistent numbers"),
    ],
)
def test_what_cannot_be_scored_is_not_fitted(arguments, message, monkeypatch):
    monkeypatch.setattr(ensemble, "Trainer", lambda *_: pytest.fail("worked in vain"))
    with pytest.raises(ValueError, match=message):
        cross_validate(shell(), X, **({"y": Y} | arguments))


def test_classes_that_cannot_be_scored_are_not_fitted(monkeypatch):
    monkeypatch.setattr(ensemble, "Trainer", lambda *_: pytest.fail("worked in vain"))
    labels = np.repeat([0, 1, 2], [14, 13, 13])
    with pytest.raises(ValueError, match="test rows have classes"):
        cross_validate(classifier(), X, labels, cv=[(np.arange(27), np.arange(27, 40))])


# Kinds of numbers


@pytest.mark.parametrize("kind", ["float16", "int8", "bool", "Decimal", "Float64", "Int64", "boolean"])
def test_kinds_of_columns_and_targets(kind):
    whole_x, whole_y = np.round(10 * X), np.round(10 * Y)
    if kind in ("bool", "boolean"):
        whole_x, whole_y = (X > 0).astype(float), (Y > 0).astype(float)
    if kind == "Decimal":
        from decimal import Decimal

        given = [np.vectorize(Decimal, otypes=[object])(v) for v in (whole_x, whole_y)]
    elif kind in ("Float64", "Int64", "boolean"):
        types = {"boolean": bool, "Int64": int, "Float64": float}
        frame = pd.DataFrame(whole_x.astype(types[kind]), columns=["a", "b", "c"])
        given = [frame.astype(kind), pd.Series(whole_y.astype(types[kind]), dtype=kind)]
    else:
        given = [whole_x.astype(kind), whole_y.astype(kind)]
    expected = shell().fit(whole_x, whole_y)
    assert np.all(shell().fit(*given).predict(given[0]) == expected.predict(whole_x))
    scores = cross_validate(shell(), *given, cv=2)
    for name, values in cross_validate(shell(), whole_x, whole_y, cv=2).items():
        assert_close(scores[name], values, 1e-6)


# Files of others


@pytest.mark.parametrize(
    "make",
    [
        lambda: shell(prior_weight=None).fit(np.tile(X, (2, 1)), np.tile(Y, 2)),
        lambda: classifier().fit(X, LABELS),
    ],
)
def test_files_of_skops(make):
    if importlib.util.find_spec("skops") is None:
        pytest.skip("skops is not installed")
    import skops.io

    estimator = make()
    written = skops.io.dumps(estimator)
    # Types of measureflow, and no others.
    types = skops.io.get_untrusted_types(data=written)
    assert all(name.startswith("measureflow.") for name in types), types
    loaded = skops.io.loads(written, trusted=types)
    assert np.all(loaded.predict(X) == estimator.predict(X))
    assert loaded.validation_scores_.keys() == estimator.validation_scores_.keys()
    for name, values in estimator.validation_scores_.items():
        assert np.all(loaded.validation_scores_[name] == values)


def test_pickles_hold_no_arrays_of_jax():
    estimator = shell(likelihood="poisson").fit(X, np.random.default_rng(0).poisson(3.0, size=40))
    assert b"jaxlib" not in pickle.dumps(estimator)
    loaded = pickle.loads(pickle.dumps(estimator))
    assert isinstance(loaded.likelihood_.shift, jax.Array)
    assert np.all(loaded.predict(X) == estimator.predict(X))
    assert isinstance(estimator.likelihood_.shift, jax.Array), "the estimator itself is as it was"
