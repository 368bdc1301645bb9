"""Means and deviations that a far tail makes are told."""

import warnings

import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from helpers import assert_close
from scipy.stats import norm

import measureflow as mf
from measureflow.prediction.mixture import Mixture
from measureflow.tables.tails import Moments, mean_of, moments_of, warn_of_tails

SIGMAS = jnp.array([0.5, 1.5, 3.0, 6.0])


def log_normal(sigmas=SIGMAS):
    """exp(σZ): E = exp(σ²/2), √Var = E √(exp(σ²) − 1)."""
    return mf.LogMixture(Mixture(dist.Normal(jnp.zeros((len(sigmas), 1)), sigmas[:, None])))


def told(law, *, with_deviation):
    moments = (moments_of if with_deviation else mean_of)(law)
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        warn_of_tails(moments, np.asarray(moments.mean))
    return [str(one.message) for one in raised]


def test_how_much_of_a_law_lies_where():
    found, square = moments_of(log_normal()), np.asarray(SIGMAS, np.float64) ** 2
    mean, deviation = np.exp(square / 2), np.exp(square / 2) * np.sqrt(np.expm1(square))
    assert_close(found.mean, mean, 1e-4)
    assert_close(found.deviation, deviation, 1e-4)
    assert_close(found.below, norm.cdf(SIGMAS / 2), 1e-4)
    low = np.where(mean > deviation, np.log(np.maximum(mean - deviation, 1e-30)), -np.inf)
    assert_close(found.within, norm.cdf(np.log(mean + deviation) / SIGMAS) - norm.cdf(low / SIGMAS), 1e-4)


def test_the_first_row_is_told_and_what_to_use():
    mean, deviation = told(log_normal(), with_deviation=True)
    assert "the deviation of 2 rows is made by a far tail, of row 2 first" in deviation
    assert (
        "the mean of 1 row is made by a far tail, of row 3 first: more than 99% of the law lies below" in mean
    )
    assert "use predict_interval(X), or predict_dist(X).median" in mean
    narrower = log_normal(SIGMAS[:3])
    (deviation,) = told(narrower, with_deviation=True)
    assert "the deviation of 1 row is made by a far tail, of row 2 first" in deviation
    assert told(narrower, with_deviation=False) == []
    assert told(log_normal(SIGMAS[:2]), with_deviation=True) == []


def test_a_component_of_little_weight_far_out_is_told():
    """Twenty networks of which one is e⁹ too high for a row: 5% of its law, which is told by the interval
    but not here; one of two hundred is told."""
    for networks, expected in ((20, 0), (200, 1)):
        places = jnp.zeros((1, networks)).at[0, -1].set(9.0)
        law = mf.LogMixture(Mixture(dist.Normal(places, 0.1)))
        assert len(told(law, with_deviation=False)) == expected


def test_rows_are_counted_and_not_their_targets():
    mean = np.zeros((4, 3))
    mean[2, 1:] = np.inf
    with pytest.warns(UserWarning, match="the mean of 1 row is infinite, of row 2 first"):
        warn_of_tails(Moments(mean), mean)


def test_a_law_without_a_variance_has_a_mean():
    """As Gompertz's has none in NumPyro."""
    law = Mixture(dist.Gompertz(jnp.ones((2, 1)), jnp.ones((2, 1))))
    with pytest.raises(NotImplementedError):
        moments_of(law)
    assert mean_of(law).mean.shape == (2,)


def test_laws_of_y_itself_are_not_looked_at():
    law = Mixture(dist.Normal(jnp.zeros((2, 1)), 1.0))
    assert moments_of(law).below is None
    assert told(law, with_deviation=True) == []


@pytest.mark.parametrize("return_std", [False, True])
def test_an_estimator_tells(return_std):
    x = np.random.default_rng(0).normal(size=(60, 2))
    y = np.exp(x[:, 0])
    estimator = mf.EnsembleRegressor(
        likelihood="log_normal",
        hidden=(4,),
        encoding=0,
        prior_weight=1.0,
        particles=4,
        steps=50,
        random_state=0,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        estimator.fit(x, y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        estimator.predict(x, return_std=return_std)
    estimator.spread_ *= 1e2
    with pytest.warns(UserWarning, match="is made by a far tail|is infinite"):
        estimator.predict(x, return_std=return_std)
