"""Bins of columns, the smallest scale of a law, and what models make of targets."""

import numpy as np
import pytest
import scipy.stats
from helpers import assert_close

import measureflow as mf
from measureflow.tables.encoding import PiecewiseLinear, can_be_cut
from measureflow.tables.models import Shape, default_shapes, given
from measureflow.tables.targets import TargetUnits, head_for, likelihoods_for, smallest_scale

RNG = np.random.default_rng(0)


def test_bins_are_piecewise_linear():
    column = np.linspace(-2, 2, 401, dtype=np.float32)[:, None]
    encoding = PiecewiseLinear.learn(column, 4)
    assert_close(encoding.edges, [[-2.0, -1.0, 0.0, 1.0, 2.0]], 1e-6)
    found = encoding(np.array([[-2.0], [-0.5], [2.0]], np.float32))
    assert_close(found[:, 0], [-2.0, -0.5, 2.0], 1e-7)  # the column itself
    assert_close(found[:, 1:], [[-1, -1, -1, -1], [1, 0, -1, -1], [1, 1, 1, 1]], 1e-6)


def test_numbers_beyond_the_bins_are_far_but_bounded():
    encoding = PiecewiseLinear.learn(np.linspace(0, 4, 401, dtype=np.float32)[:, None], 4)
    found = encoding(np.array([[-1.0], [5.0], [1e30], [-1e30]], np.float32))
    # The first and the last bin go on, for two widths: 2·(−2) − 1 and 2·3 − 1.
    assert_close(found[:, 1], [-3, 1, 1, -5], 1e-5)
    assert_close(found[:, 4], [-1, 3, 5, -1], 1e-5)


def test_repeated_values_and_two_values():
    inputs = np.stack(
        [RNG.integers(0, 2, 200), np.zeros(200), np.where(np.arange(200) < 190, 0, np.arange(200))], 1
    )
    encoding = PiecewiseLinear.learn(inputs.astype(np.float32), 8)
    assert encoding.binned.tolist() == [False, False, True]
    assert encoding.width == 3 + 8
    found = encoding(inputs.astype(np.float32))
    assert np.all(np.isfinite(found))
    assert_close(found[:, 0], inputs[:, 0], 1e-7)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_bins_are_kept_in_files(tmp_path):
    X = RNG.normal(size=(60, 2))
    settings = {"hidden": (3,), "encoding": 4, "likelihood": "mixture", "steps": 60, "particles": 2}
    fitted = mf.EnsembleRegressor(**settings, prior_weight=1.0, random_state=0)
    fitted.fit(X, np.sin(X[:, 0]))
    fitted.save(tmp_path / "model")
    loaded = mf.load(tmp_path / "model")
    assert loaded.shape_ == Shape((3,), 4, "mixture")
    np.testing.assert_array_equal(loaded.predict(X), fitted.predict(X))


# Targets


def test_rounded_targets_have_a_smallest_scale():
    """A Normal of weight w and this scale has no density above w/δ: atoms are not rewarded."""
    y = np.round(RNG.normal(10, 5, size=1_000))
    floor = smallest_scale(y, np.std(y)) * np.std(y)
    assert 0.5 < scipy.stats.norm.pdf(0, scale=floor) <= 1.0
    # Mutant: the floor of targets that are not rounded.
    assert scipy.stats.norm.pdf(0, scale=1e-3 * np.std(y)) > 50


@pytest.mark.parametrize(
    ("y", "floor"),
    [
        (RNG.normal(size=500), 1e-3),
        (np.arange(500.0), 1e-3),
        (np.concatenate([RNG.normal(size=480), np.zeros(20)]), 1e-3),
        (RNG.integers(0, 2, 500).astype(float), 0.5),
        # 0.1·3 and 0.3 are two numbers.
        (np.concatenate([0.1 * np.arange(100), np.round(0.1 * np.arange(100), 1)]), 2.0**-6),
    ],
)
def test_smallest_scales(y, floor):
    assert smallest_scale(y, np.std(y)) == pytest.approx(floor, rel=1e-2)


def test_units_of_logarithms_have_their_volume():
    y = np.exp(RNG.normal(3, 0.5, size=200))
    units = TargetUnits.of("log_normal", y, np.ones(200))
    z = units.standardised(y).astype(np.float64)
    assert abs(z.mean()) < 1e-5
    assert z.std() == pytest.approx(1, abs=1e-5)
    step = 1e-3 * y
    slope = (units.standardised(y + step).astype(float) - units.standardised(y - step)) / (2 * step)
    assert_close(units.log_volume(y), np.log(slope), 1e-2)


@pytest.mark.parametrize("likelihood", ["log_normal", "yeo_johnson_normal"])
def test_locations_of_bent_targets_are_near_them(likelihood):
    y = np.exp(RNG.normal(3, 0.5, size=200))
    units = TargetUnits.of(likelihood, y, np.ones(200))
    z = units.standardised(y)
    for end, beyond in zip(units.bounds, (z.min() - units.bounds[0], units.bounds[1] - z.max()), strict=True):
        assert 0.25 <= beyond < 0.5
        assert end % 0.25 == 0
    assert head_for(likelihood, 1, 0.0, bounds=units.bounds).likelihood.bounds.tolist() == list(units.bounds)
    assert TargetUnits.of("mixture", y, np.ones(200)).bounds is None


def test_laws_are_noticed():
    assert likelihoods_for(RNG.normal(size=300))[-1] == "mixture"
    assert likelihoods_for(np.exp(RNG.normal(size=300)))[-1] == "log_mixture"
    assert likelihoods_for(RNG.poisson(3.0, size=300).astype(float)) == (
        "heteroscedastic",
        "mixture",
        "negative_binomial",
    )
    # Years are whole numbers, but no counts, and classes 0 and 1 are none.
    assert len(likelihoods_for(RNG.integers(1990, 2020, 300).astype(float))) == 2
    assert len(likelihoods_for(RNG.integers(0, 2, 300).astype(float))) == 2
    # A row of weight k counts as k equal rows.
    skewed, few = np.exp(RNG.normal(size=200)), 3 + 0.1 * RNG.normal(size=5)
    y, weights = np.concatenate([skewed, few]), np.repeat([1.0, 1e4], [200, 5])
    assert likelihoods_for(y)[1] == likelihoods_for(y, np.ones(205))[1] == "log_mixture"
    assert (
        likelihoods_for(y, weights)[1] == likelihoods_for(np.repeat(y, weights.astype(int)))[1] == "mixture"
    )
    large, small = np.arange(100.0, 300.0), np.arange(4.0)
    counts, weights = np.concatenate([large, small]), np.repeat([1.0, 10.0], [200, 4])
    assert "negative_binomial" not in likelihoods_for(counts)
    assert "negative_binomial" in likelihoods_for(counts, weights)
    # A long way from 0 there is nothing to gain.
    assert likelihoods_for(100 + RNG.normal(size=300))[-1] == "mixture"


@pytest.mark.parametrize("y", [np.array([1.0, 0.0, 2.0] * 20), np.array([1.0, -3.0, 2.0] * 20)])
def test_targets_that_have_no_logarithm_raise(y):
    with pytest.raises(ValueError, match=r"y must hold numbers > 0 for likelihood='log_normal', got -?[03]"):
        mf.EnsembleRegressor(likelihood="log_normal").fit(np.arange(60.0)[:, None], y)


def test_what_is_given_is_not_chosen():
    shapes = default_shapes(1_000, 8, ("heteroscedastic", "mixture"))
    assert shapes == (Shape((32, 32, 32), 16, "mixture"),)
    (one,) = given(shapes, hidden=(7,), encoding=0, likelihood="student_t")
    assert one == Shape((7,), 0, "student_t")
    counts = default_shapes(1_000, 8, ("heteroscedastic", "mixture", "negative_binomial"))
    assert given(counts, hidden=(7,)) == (Shape((7,), 16, "mixture"), Shape((7,), 16, "negative_binomial"))


def test_networks_go_by_rows():
    laws = ("heteroscedastic", "mixture")
    found = {rows: default_shapes(rows, 8, laws)[0] for rows in (49, 50, 299, 300, 999, 1_000, 4_999, 5_000)}
    assert found[49] == Shape((50,), 0, "heteroscedastic"), "too few to choose by"
    assert found[50] == found[299] == Shape((16,) * 4, 8, "mixture")
    assert found[300] == found[999] == Shape((32,) * 3, 8, "mixture")
    assert found[1_000] == found[4_999] == Shape((32,) * 3, 16, "mixture")
    assert found[5_000] == Shape((64,) * 3, 16, "mixture")
    assert default_shapes(1_000, 8, (None,)) == (Shape((32,) * 3, 16),), "classes"
    wide = {columns: default_shapes(1_000, columns, laws)[0].encoding for columns in (18, 19, 37, 38, 500)}
    assert wide == {18: 16, 19: 8, 37: 8, 38: 4, 500: 4}, "many columns have fewer bins"
    assert default_shapes(10**6, 1_000, laws)[0].encoding == 0, "bins would not fit into memory"


@pytest.mark.parametrize("encoding", [1, -2, 2.5, "bins"])
def test_wrong_encodings_raise(encoding, as_a_user_runs_it):
    with pytest.raises((TypeError, ValueError), match="encoding"):
        mf.EnsembleRegressor(encoding=encoding).fit(np.arange(60.0)[:, None], np.arange(60.0))


def test_a_column_that_varies_late_has_bins():
    """A sorted table: whatever the order of its rows, a column of three values or more is cut."""
    late = np.concatenate([np.zeros(10_000), RNG.normal(size=5)])
    rows = np.column_stack([late, np.arange(10_005) % 2, np.ones(10_005)]).astype(np.float32)
    assert can_be_cut(rows).tolist() == can_be_cut(rows[::-1]).tolist() == [True, False, False]


def test_columns_of_two_values_are_not_counted_among_those_with_bins():
    flags, columns = RNG.integers(0, 2, (1_000, 60)), RNG.normal(size=(1_000, 5))
    rows = np.column_stack([flags, columns]).astype(float)
    prepared = mf.EnsembleRegressor(likelihood="student_t")._prepare(rows, columns[:, 0], None)
    assert prepared.models[0].shape.encoding == 16
