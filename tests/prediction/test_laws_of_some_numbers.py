"""Laws of positive numbers, of shares, and of counts with many zeros, against SciPy's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.integrate
import scipy.special
import scipy.stats
from helpers import assert_close

import measureflow as mf
from measureflow.networks.likelihoods import (
    Beta,
    Gamma,
    HurdleNegativeBinomial,
    NormalMixture,
    ZeroInflatedNegativeBinomial,
)
from measureflow.prediction.cumulative import tails
from measureflow.prediction.mixture import Mixture

pytestmark = pytest.mark.standard_promotion

RNG = np.random.default_rng(0)
OUTPUTS = RNG.normal(size=(4, 3, 3))
MEANS = np.exp(OUTPUTS[..., 0])
OUTPUTS32 = jnp.asarray(OUTPUTS, jnp.float32)


def gamma():
    alpha = 1 / (np.exp(-OUTPUTS[..., 1]) + 1e-4) + 1e-3
    return scipy.stats.gamma(alpha, scale=MEANS / alpha)


def beta():
    share, many = scipy.special.expit(OUTPUTS[..., 0]), 1 / (np.exp(-OUTPUTS[..., 1]) + 4e-4)
    return scipy.stats.beta(share * many + 1e-3, (1 - share) * many + 1e-3)


CONTINUOUS = {
    "gamma": (Gamma(), gamma, np.array([0.1, 1.0, 3.0, 0.5])),
    "beta": (Beta(), beta, np.array([0.1, 0.5, 0.9, 0.99])),
}


@pytest.mark.parametrize("name", CONTINUOUS)
def test_continuous_laws_are_those_of_scipy(name):
    likelihood, exact, y = CONTINUOUS[name]
    law, exact = Mixture(likelihood(OUTPUTS32[..., :2])), exact()
    density, below = (f(y[:, None]).mean(axis=1) for f in (exact.pdf, exact.cdf))
    assert_close(law.log_prob(y), np.log(density), 1e-5)
    assert_close(law.cdf(y), below, 1e-5)
    # Mutant: the law of the mean outputs, in the place of the mean of laws.
    assert np.max(np.abs(np.log(density) - np.log(exact.pdf(y[:, None])).mean(axis=1))) > 0.1
    for level in (0.05, 0.5, 0.95):
        found = np.asarray(law.quantile(level))
        # Near 1 the numbers of float32 are 6e-8 apart, between which a law of shares may have much mass.
        ends = [exact.cdf((found * (1 + move))[:, None]).mean(axis=1) for move in (-1e-6, 1e-6)]
        assert np.all((ends[0] - 1e-5 < level) & (level < ends[1] + 1e-5))
    mean = exact.mean().mean(axis=1)
    assert_close(law.mean, mean, 1e-5)
    variance = (exact.var() + exact.mean() ** 2).mean(axis=1) - mean**2
    np.testing.assert_allclose(law.variance, variance, rtol=1e-4)


@pytest.mark.parametrize("name", CONTINUOUS)
def test_crps_is_the_integral(name):
    likelihood, exact, y = CONTINUOUS[name]
    exact, end = exact(), 1.0 if name == "beta" else 400.0

    def score(row):
        def square(x):
            below = exact.cdf(np.full((1, 1), x))[row].mean()
            return (below - (x >= y[row])) ** 2

        return sum(
            scipy.integrate.quad(square, *ends, limit=200)[0] for ends in ((0.0, y[row]), (y[row], end))
        )

    wanted = np.mean([score(row) for row in range(4)])
    law = Mixture(likelihood(OUTPUTS32[..., :2]))
    assert mf.metrics.crps(law, y) == pytest.approx(wanted, rel=1e-3)


@pytest.mark.parametrize("output", [3.0, 20.0])
def test_narrow_laws_of_positive_numbers_keep_their_digits(output):
    """With deviations of a hundredth of the mean, NumPyro's own is off by 0.01."""
    outputs = jnp.stack([OUTPUTS32[:, 0, 0], jnp.full(4, output)], axis=-1)
    means = np.exp(np.asarray(outputs[:, 0], np.float64))
    alpha = 1 / (np.exp(-output) + 1e-4) + 1e-3
    y = means * np.array([0.97, 1.0, 1.01, 1.05])
    wanted = scipy.stats.gamma(alpha, scale=means / alpha).logpdf(y)
    # A relative error of 6e-8 in y/mean counts α times over.
    assert_close(Gamma()(outputs).log_prob(jnp.asarray(y, jnp.float32)), wanted, 1e-5 + 2e-7 * alpha)


def test_counts_with_many_zeros_are_those_of_scipy():
    law = Mixture(ZeroInflatedNegativeBinomial()(OUTPUTS32))
    alpha, gate = np.log1p(np.exp(OUTPUTS[..., 1])) + 1e-3, scipy.special.expit(OUTPUTS[..., 2])
    exact, y = scipy.stats.nbinom(alpha, alpha / (alpha + MEANS)), np.array([0, 1, 3, 8])
    chance = (gate * (y[:, None] == 0) + (1 - gate) * exact.pmf(y[:, None])).mean(axis=1)
    below = (gate + (1 - gate) * exact.cdf(y[:, None])).mean(axis=1)
    assert_close(law.log_prob(y), np.log(chance), 1e-5)
    assert_close(law.cdf(y), below, 1e-5)
    # Mutant: zeros that are not inflated.
    assert np.max(np.abs(below - exact.cdf(y[:, None]).mean(axis=1))) > 0.1
    assert np.all(np.asarray(law.cdf(np.full(4, -1))) == 0)
    every = np.arange(400)[:, None, None]
    curves = (gate + (1 - gate) * exact.cdf(every)).mean(axis=-1)
    wanted = np.mean(np.sum((curves - (every[..., 0] >= y)) ** 2, axis=0))
    assert mf.metrics.crps(law, y) == pytest.approx(wanted, rel=1e-4)
    median = np.asarray(law.quantile(0.5))
    assert np.all(np.diagonal(curves[median.astype(int)]) >= 0.5 - 1e-6)


def hurdle(outputs):
    """Chances of the counts y along the first axis, by SciPy."""
    alpha, gate = np.log1p(np.exp(outputs[..., 1])) + 1e-3, scipy.special.expit(outputs[..., 2])
    count = scipy.stats.nbinom(alpha, alpha / (alpha + np.exp(outputs[..., 0])))
    return lambda y: np.where(y == 0, gate, (1 - gate) * count.pmf(y) / count.sf(0)), count, gate


def test_a_hurdle_of_counts_is_that_of_scipy():
    law, (chances, count, gate) = Mixture(HurdleNegativeBinomial()(OUTPUTS32)), hurdle(OUTPUTS)
    every, y = np.arange(400)[:, None, None], np.array([0, 1, 3, 8])
    table = chances(every).mean(axis=-1)
    wanted = np.log(table[y, np.arange(4)])
    assert_close(law.log_prob(y), wanted, 1e-5)
    # Mutants: counts that are not cut at 0, whose chances do not add up to 1; zeros that are counts as well.
    assert_close(table.sum(axis=0), np.ones(4), 1e-9)
    uncut = ((1 - gate) * count.pmf(y[:, None])).mean(axis=1)
    assert np.all(np.abs(np.log(uncut) - wanted)[1:] > 0.05)
    assert abs(np.log((gate + (1 - gate) * count.pmf(0))[0].mean()) - wanted[0]) > 0.05
    below = table.cumsum(axis=0)
    assert_close(law.cdf(y), below[y, np.arange(4)], 1e-5)
    assert np.all(np.asarray(law.cdf(np.full(4, -1))) == 0)
    mean = (table * every[..., 0]).sum(axis=0)
    assert_close(law.mean, mean, 1e-4)
    np.testing.assert_allclose(law.variance, (table * every[..., 0] ** 2).sum(axis=0) - mean**2, rtol=1e-3)
    score = np.mean(np.sum((below - (every[..., 0] >= y)) ** 2, axis=0))
    assert mf.metrics.crps(law, y) == pytest.approx(score, rel=1e-4)
    for level in (0.05, 0.5, 0.95):
        found = np.asarray(law.quantile(level)).astype(int)
        assert np.all(below[found, np.arange(4)] >= level - 1e-6)
        before = np.where(found > 0, below[np.maximum(found - 1, 0), np.arange(4)], 0.0)
        assert np.all(before < level + 1e-6)


def test_tails_and_moments_of_a_hurdle_keep_their_digits():
    """Counts above 0 of a tiny mean are all 1, and far tails have a size."""
    outputs = jnp.array([[-18.0, 1.0, 0.0], [3.0, 2.0, -30.0], [3.0, 2.0, 1.0]])
    law, (_, count, gate) = HurdleNegativeBinomial()(outputs), hurdle(np.asarray(outputs, np.float64))
    assert_close(law.log_prob(jnp.array([1, 0, 0])), [np.log(0.5), -30, np.log(gate[2])], 1e-4)
    assert float(law.mean[0]) == pytest.approx(0.5, rel=1e-5)
    assert float(law.variance[0]) == pytest.approx(0.25, rel=1e-4)
    far = jnp.array([1.0, 300.0, 300.0])
    above = (1 - gate) * count.sf(np.asarray(far)) / count.sf(0)
    np.testing.assert_allclose(tails(law, far)[1], above, rtol=2e-3)
    assert_close(
        law.cdf(jnp.array([-1.0, 5.0, 0.0])), [0, 1 - count.sf(5)[1] / count.sf(0)[1], gate[2]], 1e-5
    )


def test_draws_of_a_hurdle_have_its_law():
    outputs = jnp.array([[1.0, 0.5, -1.0], [-2.0, -3.0, 0.5], [4.0, 3.0, -2.0]])
    law, (chances, _, _) = HurdleNegativeBinomial()(outputs), hurdle(np.asarray(outputs, np.float64))
    draws, number = np.asarray(law.sample(jax.random.key(0), (20_000,))), 20_000
    for y in range(5):
        share, chance = (draws == y).mean(axis=0), chances(np.full(3, y))
        # Five standard errors: fifteen shares are looked at.
        assert np.all(np.abs(share - chance) < 5 * np.sqrt(chance * (1 - chance) / number)), y
    error = np.sqrt(np.asarray(law.variance) / number)
    assert np.all(np.abs(draws.mean(axis=0) - np.asarray(law.mean)) < 5 * error)


@pytest.mark.parametrize("law", [HurdleNegativeBinomial, ZeroInflatedNegativeBinomial, NormalMixture])
def test_several_targets_have_marginals(law):
    outputs = jnp.asarray(RNG.normal(size=(4, 3, law(targets=2).width)), jnp.float32)
    y = np.array([[0, 2], [1, 0], [3, 3], [0, 0]])
    joint, one = Mixture(law(targets=2)(outputs)), Mixture(law()(outputs[..., 1::2]))
    assert joint.log_prob(y).shape == (4,)
    assert_close(joint.marginals.log_prob(y)[:, 1], one.log_prob(y[:, 1]), 1e-5)
    assert_close(joint.marginals.mean[:, 1], one.mean, 1e-5)


@pytest.mark.parametrize(
    "likelihood", [Gamma(), Beta(), ZeroInflatedNegativeBinomial(), HurdleNegativeBinomial()]
)
def test_gradients_are_finite_where_outputs_are_extreme(likelihood):
    y = jnp.array([0, 7]) if likelihood.width == 3 else jnp.array([0.5, 0.99])
    for size in (-40.0, 40.0):
        outputs = jnp.full((2, likelihood.width), size)
        gradient = jax.grad(lambda o: jnp.sum(likelihood(o).log_prob(y)))(outputs)
        assert np.all(np.isfinite(gradient)), size


@pytest.mark.parametrize(("name", "low", "high"), [("gamma", 0.0, np.inf), ("beta", 0.0, 1.0)])
def test_estimators_predict_inside_the_support(name, low, high):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(80, 1))
    mean = X[:, 0] if name == "gamma" else scipy.special.expit(X[:, 0])
    y = rng.gamma(4.0, np.exp(mean) / 4) if name == "gamma" else rng.beta(8 * mean, 8 * (1 - mean))
    settings = {"hidden": (), "encoding": 0, "prior_weight": 1.0, "steps": 8_000, "particles": 4}
    model = mf.EnsembleRegressor(likelihood=name, random_state=0, **settings).fit(X, y)
    ends = model.predict_interval(X, 0.9)
    assert np.all((ends[0] > low) & (ends[1] < high))
    # As the right law says: four standard errors of 80 rows.
    assert abs(mf.metrics.coverage(*ends, y) - 0.9) < 4 * np.sqrt(0.09 / 80)


@pytest.mark.parametrize(
    ("name", "y", "said"),
    [
        ("gamma", [1.0, -2.0], "must hold numbers > 0 for likelihood='gamma', got -2"),
        ("beta", [0.5, 1.5], "must hold numbers from 0 to 1 for likelihood='beta', got 1.5"),
        ("beta", [0.5, 1.0], "between 0 and 1, without the two, for likelihood='beta', got 1"),
        ("hurdle", [0.0, -1.0], "must hold counts 0, 1, 2, … for likelihood='hurdle', got -1"),
        ("zero_inflated", [0.0, 0.5], "must hold counts 0, 1, 2, … for likelihood='zero_inflated', got 0.5"),
    ],
)
def test_targets_outside_the_support_raise(name, y, said, as_a_user_runs_it):
    with pytest.raises(ValueError, match=said):
        mf.EnsembleRegressor(likelihood=name).fit(np.arange(2.0)[:, None], y)
