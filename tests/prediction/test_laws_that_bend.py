"""Mixtures of Normals, laws of log y, and spreads that differ between rows: against SciPy's values."""

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
from measureflow.networks.likelihoods import Heteroscedastic, NormalMixture
from measureflow.prediction.logarithmic import LogMixture
from measureflow.prediction.mixture import Mixture
from measureflow.prediction.spread import Spread

pytestmark = pytest.mark.standard_promotion

ROWS, PARTICLES, COMPONENTS = 3, 4, 2
RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(ROWS, PARTICLES, COMPONENTS))
MEANS = RNG.normal(size=(ROWS, PARTICLES, COMPONENTS))
SCALES = RNG.uniform(0.2, 0.8, size=(ROWS, PARTICLES, COMPONENTS))
# All Normals of a row, with their weights.
WEIGHTS = (np.exp(LOGITS) / np.exp(LOGITS).sum(axis=-1, keepdims=True) / PARTICLES).reshape(ROWS, -1)
FLAT = MEANS.reshape(ROWS, -1), SCALES.reshape(ROWS, -1)
Y = np.array([0.3, -0.5, 1.1])
UNITS = {"location": 2.0, "scale": 0.7}


def mixture(**units):
    numbers = (jnp.asarray(part, jnp.float32) for part in (LOGITS, MEANS, SCALES))
    logits, means, scales = numbers
    return Mixture(MixtureSameFamily(CategoricalLogits(logits), dist.Normal(means, scales)), **units)


def density(y):
    return np.sum(WEIGHTS * scipy.stats.norm.pdf(y[:, None], *FLAT), axis=1)


def cdf(y):
    return np.sum(WEIGHTS * scipy.stats.norm.cdf(y[:, None], *FLAT), axis=1)


def test_a_mixture_of_mixtures_is_one_mixture():
    law = mixture()
    assert_close(law.log_prob(Y), np.log(density(Y)), 1e-5)
    assert_close(law.cdf(Y), cdf(Y), 1e-5)
    mean = np.sum(WEIGHTS * FLAT[0], axis=1)
    assert_close(law.mean, mean, 1e-5)
    second = np.sum(WEIGHTS * (FLAT[0] ** 2 + FLAT[1] ** 2), axis=1)
    assert_close(law.variance, second - mean**2, 1e-5)
    for level in (0.01, 0.5, 0.97):
        assert_close(cdf(np.asarray(law.quantile(level), np.float64)), np.full(ROWS, level), 1e-5)


def test_what_particles_disagree_on_is_epistemic():
    within = np.exp(LOGITS) / np.exp(LOGITS).sum(axis=-1, keepdims=True)
    means = np.sum(within * MEANS, axis=-1)
    assert_close(mixture().epistemic_variance, means.var(axis=1), 1e-5)
    aleatoric = np.sum(within * (MEANS**2 + SCALES**2), axis=-1) - means**2
    assert_close(mixture().aleatoric_variance, aleatoric.mean(axis=1), 1e-5)


def integrated_crps(distribution_function, y, low, high):
    """∫ (F(x) − 1{x ≥ y})² dx, by quadrature."""
    below, _ = scipy.integrate.quad(lambda x: distribution_function(x) ** 2, low, y, limit=200)
    above, _ = scipy.integrate.quad(lambda x: (1 - distribution_function(x)) ** 2, y, high, limit=200)
    return below + above


def test_crps_of_a_mixture_of_mixtures_is_the_integral():
    wanted = [
        integrated_crps(lambda x, r=row: cdf(np.full(ROWS, x))[r], Y[row], -8.0, 8.0) for row in range(ROWS)
    ]
    assert mf.metrics.crps(mixture(), Y) == pytest.approx(np.mean(wanted), rel=1e-5)


def test_units_move_all_components():
    law, y = mixture(**UNITS), 2.0 + 0.7 * Y
    assert_close(law.log_prob(y), np.log(density(Y) / 0.7), 1e-5)
    assert_close(law.mean, 2.0 + 0.7 * np.asarray(mixture().mean), 1e-5)
    assert mf.metrics.crps(law, y) == pytest.approx(0.7 * mf.metrics.crps(mixture(), Y), rel=1e-5)


def test_the_likelihood_reads_logits_means_and_scales():
    outputs = jnp.asarray(RNG.normal(size=(5, 6)), jnp.float32)
    law = NormalMixture(components=2, smallest_scale=0.1)(outputs)
    logits, means, scales = np.split(np.asarray(outputs, np.float64), 3, axis=1)
    shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    y = RNG.normal(size=5)
    wanted = np.sum(shares * scipy.stats.norm.pdf(y[:, None], means, np.log1p(np.exp(scales)) + 0.1), axis=1)
    assert_close(law.log_prob(jnp.asarray(y, jnp.float32)), np.log(wanted), 1e-5)
    # Mutant: weights that are not normalised.
    assert np.max(np.abs(np.log(wanted) - np.log(np.sum(np.exp(logits) / shares.size, axis=1)))) > 0.1


def test_one_component_is_heteroscedastic():
    outputs = jnp.asarray(RNG.normal(size=(5, 2)), jnp.float32)
    one = NormalMixture(components=1)(jnp.concatenate([jnp.ones((5, 1)), outputs], axis=1))
    y = jnp.asarray(RNG.normal(size=5), jnp.float32)
    assert_close(one.log_prob(y), Heteroscedastic()(outputs).log_prob(y), 1e-6)


@pytest.mark.parametrize("law", [Heteroscedastic, NormalMixture])
def test_scales_are_bounded(law):
    likelihood = law(smallest_scale=0.1, largest_scale=1.0)
    for output in (-50.0, 0.0, 50.0):
        found = likelihood(jnp.full((1, likelihood.width), output))
        normal = found.component_distribution if isinstance(found, MixtureSameFamily) else found
        assert_close(normal.scale, np.full_like(normal.scale, 0.1 + np.tanh(np.log1p(np.exp(output)))), 1e-5)


@pytest.mark.parametrize("law", [Heteroscedastic, NormalMixture])
def test_locations_are_bounded(law):
    likelihood, free = law(bounds=(-2.0, 4.0)), law()
    for output in (-1e30, -50.0, -0.5, 0.2, 1.0, 2.5, 50.0, 1e30):
        outputs = jnp.full((1, likelihood.width), output)
        x = np.float64((output - 1) / 3)
        wanted = 1 + 3 * np.sign(x) / (1 + np.abs(x) ** -4.0) ** 0.25 if x else 1.0
        assert_close(locations(likelihood(outputs)), np.full_like(locations(free(outputs)), wanted), 1e-5)
        slope = jax.grad(lambda o, k=likelihood: jnp.sum(locations(k(o))))(outputs)
        assert np.all(np.isfinite(slope))


def locations(law):
    return (law.component_distribution if isinstance(law, MixtureSameFamily) else law).loc


@pytest.mark.parametrize("wrong", [(1.0, 1.0), (2.0, 1.0), (1.0,)])
def test_wrong_bounds_raise(wrong, as_a_user_runs_it):
    with pytest.raises(ValueError, match="bounds must be two numbers, low < high, got"):
        Heteroscedastic(bounds=wrong)


# Laws of log y


def log_law():
    return LogMixture(mixture(**UNITS))


def of_logarithms():
    """SciPy's log-normal components, and their weights."""
    means, scales = 2.0 + 0.7 * FLAT[0], 0.7 * FLAT[1]
    return scipy.stats.lognorm(s=scales, scale=np.exp(means))


def test_the_density_has_its_jacobian():
    y = np.exp(2.0 + 0.7 * Y)
    wanted = np.log(np.sum(WEIGHTS * of_logarithms().pdf(y[:, None]), axis=1))
    assert_close(log_law().log_prob(y), wanted, 1e-5)
    # Mutant: without it.
    assert np.max(np.abs(wanted - np.asarray(mixture(**UNITS).log_prob(np.log(y))))) > 1
    assert np.all(np.asarray(log_law().log_prob(np.array([-1.0, 0.0, -1e-9]))) == -np.inf)


def test_moments_are_those_of_log_normal_laws():
    law, exact = log_law(), of_logarithms()
    mean = np.sum(WEIGHTS * exact.mean(), axis=1)
    assert_close(law.mean, mean, 1e-4)
    variance = np.sum(WEIGHTS * (exact.var() + exact.mean() ** 2), axis=1) - mean**2
    np.testing.assert_allclose(law.variance, variance, rtol=1e-4)
    np.testing.assert_allclose(law.aleatoric_variance + law.epistemic_variance, variance, rtol=1e-4)
    np.testing.assert_allclose(law.std, np.sqrt(variance), rtol=1e-4)


def test_quantiles_and_chances_are_those_of_the_logarithm():
    law, y = log_law(), np.exp(2.0 + 0.7 * Y)
    assert_close(law.cdf(y), cdf(Y), 1e-5)
    low, high = law.interval(0.8)
    assert np.all(low > 0)
    assert_close(law.cdf(low), np.full(ROWS, 0.1), 1e-4)
    assert_close(law.cdf(high), np.full(ROWS, 0.9), 1e-4)
    assert_close(law.median, law.quantile(0.5), 1e-6)


def test_draws_have_the_law():
    draws = np.asarray(log_law().sample(key(0), (4_000,)))
    for row in range(ROWS):
        chances = np.asarray(log_law().cdf(draws))[:, row]
        assert_within(0.5, chances.mean(), np.sqrt(1 / 12 / 4_000))


def test_crps_of_log_normal_laws_is_the_integral():
    y, exact = np.exp(2.0 + 0.7 * Y), of_logarithms()
    wanted = [
        integrated_crps(
            lambda x, r=row: np.sum(WEIGHTS[r] * exact.cdf(np.full((1, 1), x))[r]), y[row], 0.0, 400.0
        )
        for row in range(ROWS)
    ]
    assert mf.metrics.crps(log_law(), y) == pytest.approx(np.mean(wanted), rel=1e-4)


def test_other_laws_of_logarithms_are_refused():
    with pytest.raises(TypeError, match="logarithm must be a mixture of Normals, got StudentT"):
        LogMixture(Mixture(dist.StudentT(3.0, jnp.zeros((2, 3)), 1.0)))


# Counts


@pytest.mark.parametrize("scale", [1.0, 400.0])
def test_crps_of_counts_is_the_sum(scale):
    """Of a mixture of Poisson laws; beyond 4,096 counts, on a grid."""
    rates = scale * np.exp(RNG.normal(size=(3, 2)))
    y = np.round(scale * np.array([0.0, 2.0, 7.0]))
    every = np.arange(0, 40 * scale)[:, None, None]
    below = scipy.stats.poisson.cdf(every, rates).mean(axis=-1)
    wanted = np.sum((below - (every[..., 0] >= y)) ** 2, axis=0)
    law = Mixture(dist.Poisson(jnp.asarray(rates, jnp.float32)))
    assert mf.metrics.crps(law, y.astype(int)) == pytest.approx(np.mean(wanted), rel=1e-3)


# Spreads


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_a_spread_depends_on_how_wide_a_law_is(power):
    law = mixture(**UNITS)
    wide = law.widened(Spread(1.5, power, 0.6))
    levels = [0.5 - np.pi / 100, 0.5 + np.pi / 100]
    assert_close(wide.quantile(levels).mean(axis=0), law.quantile(levels).mean(axis=0), 1e-5)
    before = np.asarray(law.standardised.std, np.float64)
    wanted = 1.5 * 0.6 * (before / 0.6) ** power
    assert_close(wide.standardised.std, wanted, 1e-5)


def test_every_row_may_have_its_factor():
    factors = np.array([0.5, 1.0, 2.0])
    wide = mixture().widened(factors)
    assert_close(wide.std, factors * np.asarray(mixture().std), 1e-5)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [({"factor": -1.0}, "factor must be > 0"), ({"factor": 1.0, "power": 2.0}, "power must be")],
)
def test_wrong_spreads_raise(wrong, said, as_a_user_runs_it):
    with pytest.raises(ValueError, match=said):
        Spread(**wrong)


def test_gradients_go_through():
    """Of a loss, at outputs where scales are at their floor."""

    def loss(outputs):
        return -jnp.sum(NormalMixture(components=3, smallest_scale=1e-3)(outputs).log_prob(jnp.zeros(2)))

    gradient = jax.grad(loss)(jnp.full((2, 9), -30.0))
    assert np.all(np.isfinite(gradient))
