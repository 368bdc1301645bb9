"""Yeo and Johnson's transform, and laws of what it transforms, against SciPy's."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
import scipy.integrate
import scipy.stats
from helpers import assert_close, assert_within, key
from numpyro.distributions import CategoricalLogits, MixtureSameFamily

import measureflow as mf
from measureflow.prediction.mixture import Mixture
from measureflow.prediction.yeo_johnson import YeoJohnson, YeoJohnsonMixture

pytestmark = pytest.mark.standard_promotion

RNG = np.random.default_rng(0)
POWERS = (0.001, 0.4, 1.0, 1.7, 1.999)
POINTS = np.array([-30.0, -2.0, -1e-3, 0.0, 0.5, 4.0, 50.0])


@pytest.mark.parametrize("power", POWERS)
def test_the_transform_is_that_of_scipy(power):
    transform = YeoJohnson(power, 3.0, 2.0)
    y = 3 + 2 * POINTS
    assert_close(transform(y), scipy.stats.yeojohnson(POINTS, power), 1e-9)
    assert_close(transform.inverse(transform(y)), y, 1e-9)
    steps = (transform(y + 1e-4) - transform(y - 1e-4)) / 2e-4
    np.testing.assert_allclose(np.exp(transform.log_slope(y)), steps, rtol=1e-5)
    single = jax.jit(lambda t, v: (t(v), t.inverse(t(v))))(
        YeoJohnson(power), jnp.asarray(POINTS, jnp.float32)
    )
    np.testing.assert_allclose(single[0], scipy.stats.yeojohnson(POINTS, power), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(single[1], POINTS, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("shape", [lambda z: np.exp(0.4 * z), lambda z: -((z + 4) ** 2), np.sinh])
def test_the_power_is_that_of_highest_likelihood(shape):
    y = shape(RNG.normal(size=200))
    one = np.ones(200)
    found = YeoJohnson.learn(y, one, y.mean(), y.std())
    wanted = scipy.stats.yeojohnson_normmax((y - y.mean()) / y.std())
    assert float(found.power) == pytest.approx(np.clip(wanted, 0.001, 1.999), abs=1e-3)
    # A row of weight 2 is two rows.
    weights = RNG.integers(1, 3, size=200)
    heavy = YeoJohnson.learn(y, weights.astype(float), 0.0, 1.0)
    repeated = YeoJohnson.learn(np.repeat(y, weights), np.ones(weights.sum()), 0.0, 1.0)
    assert float(heavy.power) == pytest.approx(float(repeated.power), abs=1e-4)
    assert float(YeoJohnson.learn(np.ones(5), np.ones(5), 1.0, 1.0).power) == 1


# Laws: two rows, three particles, two Normals each, in units.

LOGITS, MEANS = RNG.normal(size=(2, 2, 3, 2))
SCALES = RNG.uniform(0.3, 0.9, size=(2, 3, 2))
SHARES = (np.exp(LOGITS) / np.exp(LOGITS).sum(axis=-1, keepdims=True) / 3).reshape(2, -1)
NORMALS = scipy.stats.norm(0.2 + 0.8 * MEANS.reshape(2, -1), 0.8 * SCALES.reshape(2, -1))
TRANSFORM = YeoJohnson(0.3, 100.0, 10.0)
Y = np.array([95.0, 130.0])


def law():
    logits, means, scales = (jnp.asarray(part, jnp.float32) for part in (LOGITS, MEANS, SCALES))
    parts = MixtureSameFamily(CategoricalLogits(logits), dist.Normal(means, scales))
    return YeoJohnsonMixture(Mixture(parts, location=0.2, scale=0.8), TRANSFORM)


def density(y, row):
    """By SciPy's transform, and a difference quotient of it."""
    u = (y - 100) / 10
    z, near = scipy.stats.yeojohnson(np.array([u, u + 1e-6]), 0.3)
    return np.sum(SHARES[row] * NORMALS.pdf(z)[row]) * (near - z) / 1e-6 / 10


def below(y, row):
    return np.sum(SHARES[row] * NORMALS.cdf(scipy.stats.yeojohnson(np.array([(y - 100) / 10]), 0.3))[row])


def test_the_density_has_its_jacobian():
    wanted = np.log([density(y, row) for row, y in enumerate(Y)])
    assert_close(law().log_prob(Y), wanted, 1e-5)
    # Mutants: without it, and without the unit of y.
    assert np.all(np.abs(np.asarray(law().inner.log_prob(TRANSFORM(Y))) - wanted) > 1)
    assert np.all(np.abs(np.asarray(law().standardised.log_prob((Y - 100) / 10)) - wanted) > 1)
    for row in range(2):
        whole, _ = scipy.integrate.quad(lambda y, r=row: density(y, r), 0.0, 1_000.0, limit=500)
        assert whole == pytest.approx(1, abs=1e-4)
    assert mf.metrics.negative_log_likelihood(law(), Y) == pytest.approx(-np.mean(wanted), rel=1e-5)


def test_chances_and_quantiles_are_exact():
    assert_close(law().cdf(Y), [below(y, row) for row, y in enumerate(Y)], 1e-5)
    low, high = law().interval(0.8)
    for ends, level in ((low, 0.1), (high, 0.9), (law().median, 0.5)):
        assert_close([below(end, row) for row, end in enumerate(ends)], [level] * 2, 1e-5)
    draws = np.asarray(law().sample(key(0), (4_000,)))
    for row in range(2):
        assert_within(0.5, np.asarray(law().cdf(draws))[:, row].mean(), np.sqrt(1 / 12 / 4_000))


def test_moments_are_integrals():
    def expected(function, row):
        ends = {"limit": 500, "points": [100.0]}
        return scipy.integrate.quad(lambda y: function(y) * density(y, row), 0.0, 1_500.0, **ends)[0]

    means = [expected(lambda y: y, row) for row in range(2)]
    variances = [expected(lambda y, m=means[row]: (y - m) ** 2, row) for row in range(2)]
    np.testing.assert_allclose(law().mean, means, rtol=1e-4)
    np.testing.assert_allclose(law().variance, variances, rtol=1e-3)
    np.testing.assert_allclose(law().aleatoric_variance + law().epistemic_variance, variances, rtol=1e-3)


def test_the_crps_is_the_integral():
    wanted = [
        scipy.integrate.quad(lambda x, r=row: below(x, r) ** 2, 0.0, y, limit=300)[0]
        + scipy.integrate.quad(lambda x, r=row: (1 - below(x, r)) ** 2, y, 1_500.0, limit=300)[0]
        for row, y in enumerate(Y)
    ]
    assert mf.metrics.crps(law(), Y) == pytest.approx(np.mean(wanted), rel=1e-3)


def test_wrong_powers_raise(as_a_user_runs_it):
    with pytest.raises(ValueError, match=r"power must be a number from 0.001 to 1.999, got 2.5"):
        YeoJohnson(2.5)
    with pytest.raises(ValueError, match=r"scale must be > 0, got 0"):
        YeoJohnson(1.0, 0.0, 0.0)
    with pytest.raises(TypeError, match="transformed must be a mixture of Normals, got StudentT"):
        YeoJohnsonMixture(Mixture(dist.StudentT(3.0, jnp.zeros((2, 3)), 1.0)), TRANSFORM)


# Fits: numbers of both signs with a long tail, far from 0.

X = RNG.normal(size=(100, 1))
SKEWED = 1e9 + 7 * scipy.special.inv_boxcox(X[:, 0] + 0.5 * RNG.normal(size=100) + 3, 0.2)


@pytest.fixture(scope="module")
def fitted():
    settings = {"hidden": (), "encoding": 0, "prior_weight": 1.0, "particles": 4, "random_state": 0}
    return mf.EnsembleRegressor(likelihood="yeo_johnson_normal", steps=4_000, **settings).fit(X, SKEWED)


def test_a_fit_has_the_laws_of_its_transform(fitted):
    ends = fitted.predict_interval(X, 0.9)
    assert abs(mf.metrics.coverage(*ends, SKEWED) - 0.9) < 4 * np.sqrt(0.09 / 100)
    found = fitted.predict_dist(X)
    np.testing.assert_allclose(fitted.predict(X) - 1e9, found.mean - 1e9, rtol=1e-4)
    np.testing.assert_allclose(ends[0] - 1e9, found.interval(0.9)[0] - 1e9, rtol=1e-4)
    assert 0.001 < float(fitted.target_transform_.power) < 1
    # More than a Normal law of the numbers as they are tells.
    plain = scipy.stats.norm(*scipy.stats.norm.fit(SKEWED)).logpdf(SKEWED).mean()
    assert -mf.metrics.negative_log_likelihood(found, SKEWED) > plain + 0.5
    wide = mf.Conformal(found, SKEWED).interval(found, 0.9)
    assert mf.metrics.coverage(*wide, SKEWED) >= 0.9


def test_a_fit_is_kept_in_files(fitted, tmp_path):
    fitted.save(tmp_path / "model")
    back = mf.load(tmp_path / "model")
    assert np.array_equal(back.predict(X), fitted.predict(X))
    units = fitted._predictive(*fitted._units(), fitted._transform())
    mf.save(units, tmp_path / "predictive")
    rows = fitted._rows(X)
    assert np.array_equal(mf.load(tmp_path / "predictive")(rows).mean, units(rows).mean)


def test_two_targets_are_refused(fitted):
    with pytest.raises(ValueError, match="likelihood='yeo_johnson_normal' is a law of one target"):
        mf.EnsembleRegressor(likelihood="yeo_johnson_normal").fit(X, np.stack([SKEWED, SKEWED], axis=1))
