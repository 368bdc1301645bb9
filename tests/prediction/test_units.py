"""Mixtures in the units of targets that float32 cannot hold, and the far tails of mixtures."""

import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
import scipy.optimize
import scipy.stats as st
from helpers import assert_close, assert_within, jit, key, monte_carlo

from measureflow.networks.likelihoods import Heteroscedastic
from measureflow.networks.network import Network
from measureflow.prediction import metrics
from measureflow.prediction.mixture import Mixture
from measureflow.prediction.predictive import Predictive

# NumPyro's code promotes integers and ranks.
pytestmark = pytest.mark.standard_promotion

RNG = np.random.default_rng(0)
ROWS, N = 4, 3
LOC = RNG.normal(size=(ROWS, N)).astype(np.float32)
SCALE = RNG.uniform(0.3, 1.0, size=(ROWS, N)).astype(np.float32)
Z = RNG.normal(size=ROWS)
NORMAL, STUDENT = dist.Normal(LOC, SCALE), dist.StudentT(4.0, LOC, SCALE)
LAWS = {
    "normal": (NORMAL, st.norm(np.float64(LOC), np.float64(SCALE))),
    "student": (STUDENT, st.t(4.0, np.float64(LOC), np.float64(SCALE))),
}
# Seconds since 1970; their cubes; the size and the charge of things.
UNITS = [(1.7e9, 60.0), (-1e12, 1.0), (0.0, 1e200), (3e-200, 1e-200), (5.0, 2.0)]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "location", "scale"),
    [
        pytest.param(name, *units, marks=[pytest.mark.slow] * (name == "student" and units[0] != 1.7e9))
        for name in LAWS
        for units in UNITS
    ],
)
def test_numbers_in_units_keep_their_digits(name, location, scale):
    component, law = LAWS[name]
    mixture, plain = Mixture(component, location=location, scale=scale), Mixture(component)
    y = location + scale * Z
    # What is left of z in float64.
    z = (y - location) / scale
    density = np.mean(law.pdf(z[:, None]), axis=1)
    np.testing.assert_allclose(mixture.log_prob(y), np.log(density) - np.log(scale), rtol=1e-5)
    np.testing.assert_allclose(mixture.cdf(y), np.mean(law.cdf(z[:, None]), axis=1), rtol=1e-4)
    for found, expected in (
        (mixture.mean, plain.mean),
        (mixture.median, plain.median),
        (mixture.quantile([0.05, 0.95]), plain.quantile([0.05, 0.95])),
        (mixture.interval(0.8)[0], plain.interval(0.8)[0]),
        (mixture.interval(0.8)[1], plain.interval(0.8)[1]),
        (mixture.sample(key(), (5,)), plain.sample(key(), (5,))),
    ):
        assert found.dtype == np.float64
        # 1e-4 is what float64 keeps of 1 about 10¹².
        np.testing.assert_allclose((found - location) / scale, np.asarray(expected, np.float64), atol=2e-4)
    np.testing.assert_allclose(mixture.std / scale, plain.std, rtol=1e-6)
    assert np.all(mixture.stddev == mixture.std)
    if 1e-100 < scale < 1e100:
        np.testing.assert_allclose(mixture.variance / scale**2, plain.variance, rtol=1e-6)
        np.testing.assert_allclose(mixture.epistemic_variance / scale**2, plain.epistemic_variance, rtol=1e-6)


def test_samples_in_units_are_draws_of_the_law():
    mixture = Mixture(NORMAL, location=1.7e9, scale=60.0)
    draws = mixture.sample(key(3), (4_000,))
    assert draws.shape == (4_000, ROWS)
    mean, error = monte_carlo(draws - 1.7e9)
    assert_within(mean, np.float64(LOC).mean(axis=1) * 60, error)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", LAWS)
def test_units_of_each_target(name):
    location, scale = np.array([1.7e9, -3.0, 0.0]), np.array([60.0, 1.0, 1e100])
    loc = RNG.normal(size=(5, 2, 3)).astype(np.float32)
    joint = (dist.Normal(loc, 0.5) if name == "normal" else dist.StudentT(4.0, loc, 0.5)).to_event(1)
    z = RNG.normal(size=(5, 3))
    y = location + scale * z
    mixture, plain = Mixture(joint, location=location, scale=scale), Mixture(joint)
    np.testing.assert_allclose(mixture.log_prob(y), plain.log_prob(z) - np.log(scale).sum(), rtol=1e-5)
    np.testing.assert_allclose((mixture.mean - location) / scale, plain.mean, atol=1e-6)
    each = mixture.marginals
    assert each.batch_shape == (5, 3)
    np.testing.assert_allclose(each.log_prob(y), plain.marginals.log_prob(z) - np.log(scale), rtol=1e-5)
    np.testing.assert_allclose(each.cdf(y), plain.marginals.cdf(z), atol=1e-6)
    found, expected = each.quantile([0.1, 0.9]), plain.marginals.quantile([0.1, 0.9])
    assert found.shape == (2, 5, 3)
    np.testing.assert_allclose((found - location) / scale, expected, atol=1e-6)
    wide = mixture.widened(2.0)
    np.testing.assert_allclose((wide.std / scale), 2 * np.asarray(plain.std), rtol=1e-5)
    np.testing.assert_allclose((wide.mean - location) / scale, plain.mean, atol=1e-5)


def test_values_may_be_numbers_lists_and_integers():
    mixture, plain = Mixture(NORMAL, location=2**40, scale=2), Mixture(NORMAL)
    expected = plain.cdf(1.0)
    for value in (
        2**40 + 2,
        float(2**40 + 2),
        [2**40 + 2] * ROWS,
        np.full(ROWS, 2**40 + 2),
        np.int64(2**40 + 2),
    ):
        np.testing.assert_allclose(mixture.cdf(value), expected, rtol=1e-6)
        np.testing.assert_allclose(mixture.log_prob(value), plain.log_prob(1.0) - np.log(2), rtol=1e-5)
    np.testing.assert_allclose(plain.cdf([1] * ROWS), expected)


# Within compiled functions


def test_units_that_float32_holds_may_be_compiled():
    mixture = Mixture(NORMAL, location=50.0, scale=3.0)
    y = jnp.asarray(50 + 3 * Z, jnp.float32)

    def summary(mixture, y):
        return mixture.log_prob(y), mixture.cdf(y), mixture.mean, mixture.std, mixture.quantile(0.9)

    for found, expected in zip(jit(summary)(mixture, y), summary(mixture, y), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    # With location and scale of their own, which nobody has seen.
    traced = jit(lambda location, y: Mixture(NORMAL, location=location, scale=3.0).log_prob(y))(50.0, y)
    np.testing.assert_allclose(traced, mixture.log_prob(y), rtol=1e-5)


COMPILED = {
    "value": lambda mixture: jax.jit(mixture.log_prob)(jnp.zeros(ROWS)),
    "gradient": lambda mixture: jax.grad(lambda y: jnp.sum(mixture.log_prob(y)))(jnp.zeros(ROWS)),
    "mixture": lambda mixture: jax.jit(lambda mixture: mixture.mean)(mixture),
    "quantile": lambda mixture: jax.jit(lambda mixture: mixture.quantile(0.5))(mixture),
    "sample": lambda mixture: jax.jit(lambda mixture: mixture.sample(key()))(mixture),
    "components": lambda mixture: mixture.component_distribution,
}


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize(("location", "scale"), UNITS[:4])
def test_units_that_float32_does_not_hold_raise_there(name, location, scale):
    with pytest.raises(
        ValueError, match=r"float32 cannot hold the units.*; call .* outside jax\.jit.*standardised"
    ):
        COMPILED[name](Mixture(NORMAL, location=location, scale=scale))


def test_in_double_precision_they_are_held():
    with jax.enable_x64(True):
        mixture = Mixture(dist.Normal(jnp.asarray(LOC), jnp.asarray(SCALE)), location=1.7e9, scale=60.0)
        found = jax.jit(lambda mixture, y: mixture.log_prob(y))(mixture, 1.7e9 + 60 * Z)
        np.testing.assert_allclose(found, Mixture(NORMAL).log_prob(Z) - np.log(60), rtol=1e-5)


def test_mixtures_in_units_are_pytrees_and_pickle():
    mixture = Mixture(NORMAL, location=1.7e9, scale=60.0)
    leaves, structure = jax.tree.flatten(mixture)
    for copy in (jax.tree.unflatten(structure, leaves), pickle.loads(pickle.dumps(mixture))):
        np.testing.assert_array_equal(copy.mean, mixture.mean)
        assert copy.location == 1.7e9
    assert Mixture(NORMAL).location is Mixture(NORMAL).scale is None
    assert Mixture(NORMAL, scale=2.0).location == 0


WRONG = {
    "scale 0": (lambda: Mixture(NORMAL, scale=0.0), ValueError, ["scale", "> 0", "0.0"]),
    "scale nan": (lambda: Mixture(NORMAL, scale=np.nan), ValueError, ["scale", "finite", "nan"]),
    "location inf": (lambda: Mixture(NORMAL, location=np.inf), ValueError, ["location", "finite", "inf"]),
    "complex": (lambda: Mixture(NORMAL, location=1j), TypeError, ["location", "real"]),
    "rows": (lambda: Mixture(NORMAL, location=np.zeros(ROWS)), ValueError, ["location", "(4,)", "()"]),
    "counts": (lambda: Mixture(dist.Poisson(SCALE), scale=2.0), TypeError, ["Poisson", "leave location"]),
    "tiny level": (lambda: Mixture(NORMAL).quantile(1e-40), ValueError, ["q must", "1e-40", "1e-37"]),
    "tail of a law of NumPyro's": (
        lambda: Mixture(dist.Laplace(LOC, 1.0)).interval(1 - 1e-8),
        ValueError,
        ["coverage", "Laplace", "1e-05"],
    ),
    "level of a law of NumPyro's": (
        lambda: Mixture(dist.Laplace(LOC, 1.0)).quantile([0.5, 1 - 1e-8]),
        ValueError,
        ["q must", "Laplace", "1e-05"],
    ),
    "levels": (lambda: Mixture(NORMAL).quantile([0.5, 1.5]), ValueError, ["q must", "1.5"]),
    "count too large": (
        lambda: Mixture(dist.Poisson(SCALE)).log_prob(np.int64(2**40)),
        ValueError,
        ["value", "1099511627776", "int32"],
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_message(name):
    act, kind, pieces = WRONG[name]
    with pytest.raises(kind) as caught:
        act()
    for piece in pieces:
        assert piece in str(caught.value)
    assert "; " in str(caught.value)


# Levels


def test_lists_of_levels_are_for_every_row():
    """For as many rows as levels, too."""
    mixture = Mixture(dist.Normal(LOC[:3], SCALE[:3]))
    levels = [0.05, 0.5, 0.95]
    found = mixture.quantile(levels)
    assert found.shape == (3, 3)
    for level, row in zip(levels, found, strict=True):
        np.testing.assert_allclose(row, mixture.quantile(level), rtol=1e-6)
    for same in (tuple(levels), np.array(levels), jnp.array(levels), np.array(levels)[:, None]):
        np.testing.assert_allclose(mixture.quantile(same), found, rtol=1e-6)
    low, high = mixture.interval([0.5, 0.9])
    assert low.shape == high.shape == (2, 3)
    np.testing.assert_allclose(high[1], found[2], rtol=1e-6)
    np.testing.assert_allclose(mixture.median, found[1], rtol=1e-6)


# Tails


def exact_quantile(law, row, tail):
    """Where P(Y > y) of a mixture is `tail`, in float64."""

    def excess(y):
        return np.mean(law.sf(np.full((ROWS, N), y)), axis=1)[row] / tail - 1

    return scipy.optimize.brentq(excess, 0, 1e6, xtol=1e-12, rtol=1e-14)


@pytest.mark.parametrize("tail", [5e-9, 1e-12, 1e-15])
@pytest.mark.parametrize("name", LAWS)
def test_intervals_of_nearly_everything_are_finite(name, tail):
    """As float32, 1 − 10⁻⁸ is 1, whose quantile is infinite."""
    component, law = LAWS[name]
    coverage = 1 - 2 * tail
    low, high = Mixture(component).interval(coverage)
    # What float64 leaves of it.
    tail = (1 - coverage) / 2
    expected = [exact_quantile(law, row, tail) for row in range(ROWS)]
    np.testing.assert_allclose(high, expected, rtol=2e-4)
    mirrored = LAWS[name][1].dist(*law.args[:-2], -law.args[-2], law.args[-1])
    expected = [-exact_quantile(mirrored, row, tail) for row in range(ROWS)]
    np.testing.assert_allclose(low, expected, rtol=2e-4)
    np.testing.assert_allclose(Mixture(component).quantile(tail), low, rtol=1e-6)


def test_intervals_of_counts_reach_into_their_tails():
    rates = np.array([[3.0, 40.0], [0.5, 7.0]], np.float32)
    low, high = Mixture(dist.Poisson(rates)).interval(1 - 2e-9)
    law = st.poisson(np.float64(rates))
    table = law.sf(np.arange(400)[:, None, None]).mean(axis=-1)
    np.testing.assert_array_equal(high, [np.argmax(table[:, row] <= 1e-9) for row in range(2)])
    np.testing.assert_array_equal(low, [0, 0])


def test_small_tails_under_jit_and_vmap():
    def ends(tail, loc):
        return Mixture(dist.Normal(loc, 1.0)).between_tails(tail)

    tails, zero = jnp.array([1e-3, 1e-9, 1e-30]), jnp.zeros((3, 2))
    low, high = jax.jit(jax.vmap(ends))(tails, zero)
    np.testing.assert_allclose(high, st.norm.isf(np.float64(tails)), rtol=1e-4)
    np.testing.assert_allclose(low, -high, rtol=1e-6)


def test_tails_that_are_not_known_are_no_numbers():
    """1 − F is 0 where F rounds to 1: the quantile would be where that happens, and not where it is."""
    low, high = jax.jit(lambda tail: Mixture(dist.Laplace(jnp.zeros(2), 1.0)).between_tails(tail))(1e-9)
    assert np.isnan(low)
    assert np.isnan(high)


BOUNDED = {
    "beta": (dist.Beta(jnp.full((1, 2), 2.0), 1.0), st.beta(2, 1)),
    "uniform": (dist.Uniform(jnp.zeros((1, 2)), 2.0), st.uniform(0, 2)),
    "exponential": (dist.Exponential(jnp.ones((1, 2))), st.expon()),
    "log-normal": (dist.LogNormal(jnp.zeros((1, 2)), 1.0), st.lognorm(1.0)),
    "cauchy": (dist.Cauchy(jnp.zeros((1, 2)), 1.0), st.cauchy()),
    "laplace": (dist.Laplace(jnp.zeros((1, 2)), 1.0), st.laplace()),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", BOUNDED)
def test_quantiles_stay_in_the_support(name):
    """The 0.95-quantile of Beta(2, 1) was 1.69: NumPyro's F is NaN beyond 1."""
    component, law = BOUNDED[name]
    levels = [0.001, 0.05, 0.5, 0.95, 0.999]
    found = Mixture(component).quantile(levels)[:, 0]
    np.testing.assert_allclose(found, law.ppf(levels), rtol=1e-3, atol=1e-6)
    outside = np.array([[-30.0], [30.0]])
    np.testing.assert_allclose(Mixture(component).cdf(outside)[:, 0], law.cdf(outside[:, 0]), atol=1e-6)


# Predictions

NETWORK = Network.mlp(2, (4,), 2, "tanh")
PARTICLES = NETWORK.sample(key(1), 5)
X = RNG.normal(size=(7, 2)).astype(np.float32)


def mean_of(mixture):
    return mixture.mean


def log_density_at(y, mixture):
    return mixture.log_prob(y)


def test_predictions_in_units_keep_their_digits():
    plain = Predictive(NETWORK, Heteroscedastic(), PARTICLES, spread=1.5)(X)
    seconds = Predictive(NETWORK, Heteroscedastic(), PARTICLES, 1.7e9, 60.0, spread=1.5)(X)
    np.testing.assert_allclose((seconds.mean - 1.7e9) / 60, plain.mean, atol=1e-6)
    np.testing.assert_allclose(seconds.std / 60, plain.std, rtol=1e-6)
    y = RNG.normal(size=7)
    found = seconds.log_prob(1.7e9 + 60 * y)
    np.testing.assert_allclose(found, plain.log_prob(y) - np.log(60), rtol=1e-5, atol=1e-5)


def test_predictions_in_units_that_a_program_cannot_hold_raise():
    predictive = Predictive(NETWORK, Heteroscedastic(), PARTICLES, 1.7e9, 60.0)
    with pytest.raises(ValueError, match="float32 cannot hold the units"):
        predictive.map(mean_of, X)
    with pytest.raises(ValueError, match="float32 cannot hold the units"):
        jax.jit(lambda x: predictive(x).mean)(X)
    # As an argument, too, when location and scale are float32 already.
    with pytest.raises(ValueError, match="float32 cannot hold the units"):
        eqx.filter_jit(lambda predictive, x: predictive(x).mean)(predictive, X)
    standardised = predictive.map(lambda mixture: mixture.standardised.mean, X)
    np.testing.assert_allclose(
        standardised, Predictive(NETWORK, Heteroscedastic(), PARTICLES)(X).mean, rtol=1e-5
    )


def test_inputs_that_do_not_fit_are_refused():
    predictive = Predictive(NETWORK, Heteroscedastic(), PARTICLES)
    with pytest.raises(ValueError, match=r"inputs holds 1e\+300 in float64"):
        predictive(np.full((3, 2), 1e300))


# Metrics


@pytest.mark.few(4)
@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize(("location", "scale"), UNITS)
def test_scores_are_those_of_standardised_targets_in_units(name, location, scale):
    component = LAWS[name][0]
    plain, moved = Mixture(component), Mixture(component, location=location, scale=scale)
    y = location + scale * Z
    rows = {"rel": 2e-4}
    assert metrics.negative_log_likelihood(moved, y) == pytest.approx(
        metrics.negative_log_likelihood(plain, Z) + np.log(scale), **rows
    )
    for metric in (metrics.root_mean_square_error, metrics.crps):
        assert metric(moved, y) / scale == pytest.approx(metric(plain, Z), **rows)
    np.testing.assert_allclose(
        metrics.probability_integral_transform(moved, y),
        metrics.probability_integral_transform(plain, Z),
        rtol=1e-3,
    )


def test_scores_of_plain_laws_far_away():
    """Of parameters in float64, and of errors whose squares are no numbers."""
    law = dist.Normal(np.full(3, 1.7e9), 60.0)
    y = 1.7e9 + 60 * np.array([-1.0, 0.0, 1.0])
    np.testing.assert_allclose(metrics.probability_integral_transform(law, y), st.norm.cdf([-1, 0, 1]))
    far = np.array([3e200, 0.0, 4e200, 0.0])
    plain = dist.Normal(jnp.zeros(4), 1.0)
    assert metrics.root_mean_square_error(plain, far) == pytest.approx(2.5e200)
    assert metrics.crps(plain, far) == pytest.approx(7e200 / 4)
    assert metrics.root_mean_square_error(plain, np.zeros(4)) == 0


def test_scores_of_several_targets_in_units():
    loc = RNG.normal(size=(5, 2, 3)).astype(np.float32)
    component, z = dist.Normal(loc, 0.5).to_event(1), RNG.normal(size=(5, 3))
    location, scale = np.array([1.7e9, 0.0, 1.0]), np.array([60.0, 1e-3, 2.0])
    plain, moved = Mixture(component), Mixture(component, location=location, scale=scale)
    y = location + scale * z
    assert metrics.negative_log_likelihood(moved, y) == pytest.approx(
        metrics.negative_log_likelihood(plain, z) + np.log(scale).sum(), rel=1e-6
    )
    squares = scale**2 * np.mean((z - loc.mean(axis=1)) ** 2, axis=0)
    assert metrics.root_mean_square_error(moved, y) == pytest.approx(np.sqrt(squares.mean()), rel=1e-6)
    each = [metrics.crps(Mixture(dist.Normal(loc[..., k], 0.5)), z[:, k]) for k in range(3)]
    assert metrics.crps(moved, y) == pytest.approx(np.mean(scale * np.array(each)), rel=1e-6)
    assert metrics.crps(moved.marginals, y) == pytest.approx(metrics.crps(moved, y))
    assert_close(metrics.probability_integral_transform(moved.marginals, y), plain.marginals.cdf(z), 1e-5)
