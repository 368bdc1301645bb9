"""Scores of the study's laws against SciPy's and scoringrules' values."""

import numpy as np
import pytest
import scipy.integrate
import scipy.stats
import scoringrules

from measureflow.study.tables.laws import (
    LEVELS,
    Gaussian,
    GaussianMixture,
    LogNormal,
    Quantiles,
    class_scores,
    regression_scores,
)

rng = np.random.default_rng(0)
LOCATION, SCALE = rng.normal(size=6), np.exp(0.5 * rng.normal(size=6))
Y = np.array([0.3, 2.0, 0.01, 5.0, 1.0, 0.7])


def numerical_crps(cdf, y):
    """∫ (F(x) − 1{x ≥ y})² dx."""
    below = scipy.integrate.quad(lambda x: cdf(x) ** 2, -60, y, limit=500, points=[min(0.0, y)])[0]
    return below + scipy.integrate.quad(lambda x: (1 - cdf(x)) ** 2, y, 500, limit=500)[0]


def test_gaussian():
    law = Gaussian(LOCATION, SCALE)
    np.testing.assert_allclose(law.crps(Y), scoringrules.crps_normal(Y, LOCATION, SCALE), rtol=1e-10)
    np.testing.assert_allclose(law.nll(Y), -scipy.stats.norm(LOCATION, SCALE).logpdf(Y))
    np.testing.assert_allclose(law.interval(0.9), scipy.stats.norm(LOCATION, SCALE).interval(0.9))


def test_lognormal():
    law, exact = LogNormal(LOCATION, SCALE), scipy.stats.lognorm(SCALE, scale=np.exp(LOCATION))
    np.testing.assert_allclose(law.crps(Y), scoringrules.crps_lognormal(Y, LOCATION, SCALE), rtol=1e-9)
    np.testing.assert_allclose(law.nll(Y), -exact.logpdf(Y))
    np.testing.assert_allclose(law.mean(), exact.mean())
    np.testing.assert_allclose(law.interval(0.9), exact.interval(0.9))


def test_lognormal_of_what_is_not_positive():
    law = LogNormal(np.zeros(2), np.full(2, 0.5))
    y = np.array([0.0, -2.0])
    exact = scipy.stats.lognorm(0.5)
    np.testing.assert_allclose(law.crps(y), [numerical_crps(exact.cdf, one) for one in y], rtol=1e-6)
    assert np.isposinf(law.nll(y)).all()


def test_mixture():
    locations, scales = rng.normal(size=(3, 6)), np.exp(rng.normal(size=(3, 6)))
    law = GaussianMixture(locations, scales)
    np.testing.assert_allclose(law.crps(Y), scoringrules.crps_mixnorm(Y, locations.T, scales.T), rtol=1e-8)
    densities = scipy.stats.norm.pdf(Y, locations, scales).mean(axis=0)
    np.testing.assert_allclose(law.nll(Y), -np.log(densities))
    for end, share in zip(law.interval(0.9), (0.05, 0.95), strict=True):
        below = scipy.stats.norm.cdf(end, locations, scales).mean(axis=0)
        np.testing.assert_allclose(below, share, atol=1e-9)


def test_quantiles_interpolate():
    law = Quantiles((0.1, 0.5, 0.9), np.array([[0.0, 1.0, 3.0]]))
    at = law.at(np.array([0.05, 0.1, 0.3, 0.5, 0.6, 0.9, 0.99]))
    np.testing.assert_allclose(at, [[0, 0, 0.5, 1, 1.5, 3, 3]])
    # A tenth of the mass at each end, and two pieces that are uniform: 0.1·0 + 0.4·0.5 + 0.4·2 + 0.1·3.
    np.testing.assert_allclose(law.mean(), [1.3], rtol=1e-3)

    def cdf(x):
        return 0.0 if x < 0 else 1.0 if x >= 3 else 0.1 + 0.4 * x if x < 1 else 0.5 + 0.2 * (x - 1)

    for y in (-1.0, 0.5, 2.0, 4.0):
        exact = scipy.integrate.quad(
            lambda x, y=y: (cdf(x) - (x >= y)) ** 2, -2, 5, points=[0, 1, 3, y], limit=500
        )[0]
        np.testing.assert_allclose(law.crps(np.array([y])), exact, rtol=1e-3)


def test_quantiles_of_a_normal_have_nearly_its_crps():
    """What the levels leave out costs less than one per cent; with levels that reach further, less."""
    y = scipy.stats.norm.ppf((np.arange(400) + 0.5) / 400)
    exact = np.mean(Gaussian(np.zeros(400), np.ones(400)).crps(y))
    found = [
        np.mean(Quantiles(levels, np.tile(scipy.stats.norm.ppf(levels), (400, 1))).crps(y))
        for levels in (LEVELS, tuple((np.arange(1000) + 0.5) / 1000))
    ]
    np.testing.assert_allclose(found, exact, rtol=1e-2)
    assert abs(found[1] - exact) < abs(found[0] - exact)


def test_crossing_quantiles_are_sorted_and_have_no_density():
    y = np.array([0.5])
    straight, crossed = (Quantiles((0.1, 0.9), np.array([values])) for values in ([0.0, 1.0], [1.0, 0.0]))
    np.testing.assert_array_equal(crossed.crps(y), straight.crps(y))
    assert np.isnan(straight.nll(y)).all()


def test_scores_are_means_over_rows():
    found = regression_scores(Gaussian(LOCATION, SCALE), Y)
    assert found["negative_log_likelihood"] == pytest.approx(
        -scipy.stats.norm(LOCATION, SCALE).logpdf(Y).mean()
    )
    assert found["root_mean_square_error"] == pytest.approx(np.sqrt(np.mean((Y - LOCATION) ** 2)))
    assert found["width"] == pytest.approx(2 * scipy.stats.norm.ppf(0.95) * SCALE.mean())
    assert found["coverage"] == np.mean(np.abs(Y - LOCATION) / SCALE <= scipy.stats.norm.ppf(0.95))
    classes = class_scores(np.array([[0.8, 0.2], [0.4, 0.6]]), np.array([0, 0]))
    assert classes["negative_log_likelihood"] == pytest.approx(-np.log([0.8, 0.4]).mean())
    assert classes["accuracy"] == 0.5
    assert classes["brier_score"] == pytest.approx((2 * 0.2**2 + 2 * 0.6**2) / 2)
