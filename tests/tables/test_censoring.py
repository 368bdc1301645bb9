"""Targets that are known by bounds only: their law against SciPy's, and fits that are not biased by them."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
import scipy.special
import scipy.stats
from helpers import assert_close

import measureflow as mf
from measureflow.networks.censoring import Censored, log_mass
from measureflow.networks.likelihoods import NormalMixture
from measureflow.networks.network import Network
from measureflow.networks.rescaling import widened
from measureflow.prediction.censoring import bounds_of
from measureflow.tables.censoring import Bounds

pytestmark = pytest.mark.standard_promotion

INF = np.inf
# Known, larger than, smaller than, between.
BOUNDS = np.array([[0.3, 0.3], [0.3, INF], [-INF, 0.3], [-0.4, 0.9], [2.0, 2.1]])
OUTPUTS = np.random.default_rng(0).normal(size=(5, 9))


def masses(density, below, above, bounds=BOUNDS):
    """log p(y), or the logarithm of what is between the bounds, by functions of SciPy."""
    low, high = bounds.T
    known = low == high
    log_density = density(np.where(known, low, 0.0))
    with np.errstate(divide="ignore"):
        inside = np.where(np.isinf(low), below(high), np.where(np.isinf(high), above(low), 0.0))
        inside = np.where(np.isfinite(low + high), np.abs(below(high) - below(low)), inside)
        return np.where(known, log_density, np.log(np.where(known, 1.0, inside)))


def test_bounds_of_a_normal_law_are_those_of_scipy():
    exact = scipy.stats.norm(0.5, 1.2)
    found = Censored(dist.Normal(jnp.full(5, 0.5), 1.2)).log_prob(jnp.asarray(BOUNDS, jnp.float32))
    assert_close(found, masses(exact.logpdf, exact.cdf, exact.sf), 2e-5)
    # Mutants: survival in the place of F, and a density in the place of a mass.
    for mutant in ((exact.logpdf, exact.sf, exact.cdf), (exact.logpdf, exact.pdf, exact.pdf)):
        assert np.all(np.abs(np.asarray(found) - masses(*mutant))[1:3] > 0.2)


def test_bounds_of_a_mixture_are_those_of_scipy():
    law = NormalMixture(components=3, smallest_scale=0.05)(jnp.asarray(OUTPUTS, jnp.float32))
    logits, means, scales = np.split(OUTPUTS, 3, axis=1)
    shares = scipy.special.softmax(logits, axis=1)
    parts = scipy.stats.norm(means, np.logaddexp(scales, 0) + 0.05)

    def mixed(function):
        return lambda y: np.sum(shares * function(y[:, None]), axis=1)

    wanted = masses(lambda y: np.log(mixed(parts.pdf)(y)), mixed(parts.cdf), mixed(parts.sf))
    bounds = jnp.asarray(BOUNDS, jnp.float32)
    assert_close(Censored(law).log_prob(bounds), wanted, 5e-5)
    # Mutant: shares that do not add up to 1.
    assert np.all(np.abs(np.log(np.exp(logits).sum(axis=1))) > 0.1)
    wider = widened(Censored(law), jnp.zeros((5, 2)), jnp.full((5, 2), 2.0))
    narrow = Censored(law).log_prob(bounds / 2)
    assert_close(wider.log_prob(bounds)[1:], narrow[1:], 5e-5)
    assert_close(wider.log_prob(bounds)[:1], narrow[:1] - np.log(2), 5e-5)


def test_far_tails_and_their_gradients_are_numbers():
    bounds = jnp.array([[30.0, INF], [-INF, -30.0], [30.0, 31.0], [0.1, 0.1001], [-50.0, 50.0], [40.0, 40.0]])

    def total(parameters):
        return jnp.sum(Censored(dist.Normal(*parameters)).log_prob(bounds))

    parameters = jnp.stack([jnp.zeros(6), jnp.ones(6)])
    found = Censored(dist.Normal(*parameters)).log_prob(bounds)
    tail = scipy.stats.norm.logsf(30)
    narrow = np.log(scipy.stats.norm.cdf(0.1001) - scipy.stats.norm.cdf(0.1))
    wanted = [tail, tail, tail, narrow, 0.0, scipy.stats.norm.logpdf(40)]
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=5e-3)
    assert np.all(np.isfinite(jax.grad(total)(parameters)))


# Fits.

RNG = np.random.default_rng(1)
ROWS = 400
X = RNG.normal(size=(ROWS, 1))
TRUE = 1.0 + X[:, 0]
Y = TRUE + 0.7 * RNG.normal(size=ROWS)
# What goes on for longer than this was still going on when it was last looked at.
END = 1.0
SETTINGS = {"hidden": (), "encoding": 0, "particles": 4, "prior_weight": 1.0, "random_state": 0}


@pytest.fixture(scope="module")
def fits():
    """Without regard to censoring, and with it; from the right, from the left, and between bounds."""
    late, cells = Y > END, np.stack([np.floor(Y), np.floor(Y) + 1], axis=1)
    right, left = np.minimum(Y, END), np.maximum(-Y, -END)
    model = mf.EnsembleRegressor("DE", likelihood="homoscedastic", steps=4_000, **SETTINGS)
    return {
        "naive": model.fit(X, right).predict(X),
        "right": model.fit(X, right, censoring=late.astype(int)).predict(X),
        "left": -model.fit(X, left, censoring=-late.astype(int)).predict(X),
        "interval": model.fit(X, cells, censoring="interval").predict(X),
    }


def test_censored_fits_are_not_biased(fits):
    # Of a mean over rows; a bound tells less than a number does, here by less than half.
    error = 0.7 * np.sqrt(2 / ROWS)
    assert abs(np.mean(fits["naive"] - TRUE)) > 6 * error
    for name in ("right", "left", "interval"):
        assert abs(np.mean(fits[name] - TRUE)) < 3 * error, name
        assert abs(np.polyfit(X[:, 0], fits[name], 1)[0] - 1) < 4 * error, name


def small(**settings):
    return mf.EnsembleRegressor("DE", **(SETTINGS | {"steps": 50} | settings))


@pytest.mark.filterwarnings("ignore:not converged")
def test_rows_that_are_all_known_are_targets_like_others():
    plain, known = small().fit(X, Y), small().fit(X, Y, censoring=np.zeros(ROWS))
    bounds = small().fit(X, np.stack([Y, Y], axis=1), censoring="interval")
    assert np.array_equal(plain.predict(X), known.predict(X))
    assert np.array_equal(plain.predict(X), bounds.predict(X))
    assert not known.censored_


@pytest.mark.filterwarnings("ignore:not converged")
def test_held_out_rows_are_compared_in_units_that_laws_share():
    """Densities have units, and probabilities have none."""
    y, codes = np.exp(Y[:60]), np.where(Y[:60] > END, 1, 0)
    targets = Bounds(bounds_of(y, codes))
    prepared = small(likelihood="log_normal")._prepare(X[:60], targets, None)
    volume = prepared.models[0].log_volume(prepared.table.targets)
    wanted = np.log(np.std(y)) - np.log(np.std(np.log(y))) - np.log(y)
    assert_close(volume, np.where(codes, 0.0, wanted), 1e-9)
    chosen = small(likelihood="log_normal", prior_weight=None).fit(X[:60], y, censoring=codes)
    assert np.all(np.isfinite(chosen.validation_scores_["log_density"]))
    assert chosen.censored_


@pytest.mark.filterwarnings("ignore:not converged")
def test_a_censored_fit_goes_where_others_go(tmp_path):
    y, late = np.exp(np.minimum(Y, END)), (Y > END).astype(int)
    model = small(likelihood="log_mixture").fit(X, y, censoring=late)
    model.save(tmp_path / "model")
    back = mf.load(tmp_path / "model")
    assert back.censored_
    assert np.array_equal(back.predict(X), model.predict(X))
    model.warm_start = True
    assert np.all(np.isfinite(model.fit(X, y, censoring=late).predict(X)))


@pytest.mark.parametrize("log", [False, True])
def test_the_score_of_bounds_is_that_of_scipy(log):
    outputs = np.random.default_rng(2).normal(size=(5, 3, 2))
    parts = scipy.stats.norm(3 + 2 * outputs[..., 0], 2 * np.logaddexp(outputs[..., 1], 0))
    normal = dist.Normal(*(jnp.asarray(part, jnp.float32) for part in (outputs[..., 0], parts.std() / 2)))
    law = mf.Mixture(normal, location=3.0, scale=2.0)
    functions = [lambda y, f=f: np.mean(f(y[:, None]), axis=1) for f in (parts.pdf, parts.cdf, parts.sf)]
    wanted = masses(lambda y: np.log(functions[0](y)), *functions[1:])
    bounds = np.exp(BOUNDS) if log else BOUNDS
    if log:
        law, wanted = mf.LogMixture(law), wanted - np.where(BOUNDS[:, 0] == BOUNDS[:, 1], BOUNDS[:, 0], 0.0)
    found = mf.metrics.negative_log_likelihood(law, bounds, censoring="interval")
    assert found == pytest.approx(-np.mean(wanted), rel=1e-4)
    y, codes = bounds[[0, 1, 2], [0, 0, 1]], np.array([0, 1, -1])
    head = mf.Mixture(dist.Normal(normal.loc[:3], normal.scale[:3]), location=3.0, scale=2.0)
    head = mf.LogMixture(head) if log else head
    assert mf.metrics.negative_log_likelihood(head, y, censoring=codes) == pytest.approx(
        -np.mean(wanted[:3]), rel=1e-4
    )


@pytest.mark.parametrize(
    ("y", "censoring", "said"),
    [
        (Y[:3], [0, 1], r"censoring has shape \(2,\) and y \(3,\)"),
        (Y[:3], [0, 1, 2], "censoring must be -1, 0 or 1, got .*2"),
        (Y[:3], "right", "or 'interval', got 'right'"),
        (Y[:3], "interval", r"y must have two columns for censoring='interval', got shape \(3,\)"),
        ([[0, 1], [2, 1], [0, 0]], "interval", "low ≤ high, .*got 2 and 1 in row 1"),
        ([[0, 1], [-INF, INF], [0, 0]], "interval", "got -inf and inf in row 1"),
    ],
)
def test_bounds_that_are_none_raise(y, censoring, said):
    with pytest.raises(ValueError, match=said):
        small().fit(X[:3], y, censoring=censoring)


@pytest.mark.parametrize("law", ["student_t", "gamma", "negative_binomial"])
def test_laws_without_masses_are_told_those_with(law):
    y = np.round(np.exp(Y)) + 1
    with pytest.raises(ValueError, match=f"likelihood='{law}'; use one of heteroscedastic"):
        small(likelihood=law).fit(X, y, censoring=np.arange(ROWS) % 2)


@pytest.mark.parametrize("width", [1e-7, 1.2e-6, 1e-4, 9e-4, 1.1e-3, 0.1])
def test_near_bounds_keep_their_digits(width):
    """Φ(b) − Φ(a) has none where a and b are near: neither the mass nor its derivative may be lost."""
    low = jnp.float32(1.0)
    high = low + jnp.float32(width)

    def mass(loc):
        return log_mass(dist.Normal(loc, jnp.float32(1.0)), low, high)

    middle, width = (float(low) + float(high)) / 2, float(high) - float(low)
    expected = scipy.stats.norm.logpdf(middle - 1) + np.log(width) - width**2 / 24
    assert float(mass(low)) == pytest.approx(expected, abs=1e-4)
    assert float(jax.grad(mass)(low)) == pytest.approx(middle - 1, abs=1e-4)


@pytest.mark.parametrize(
    ("y", "censoring", "expected"),
    [
        ([14.0], [1], -scipy.stats.norm.logsf(14)),
        ([-20.0], [-1], -scipy.stats.norm.logsf(20)),
        ([[1.0, 1 + 1e-7]], "interval", -scipy.stats.norm.logpdf(1) - np.log(1e-7)),
        ([[12.0, 14.0]], "interval", -scipy.stats.norm.logsf(12)),
    ],
)
def test_scores_of_bounds_far_out_are_finite(y, censoring, expected):
    laws = [dist.Normal(jnp.zeros(1), jnp.ones(1))]
    network, likelihood = Network.mlp(1, (), 2), mf.likelihoods.Heteroscedastic()
    twice = [{"weight": jnp.zeros((2, 1, 2)), "bias": jnp.asarray([[0.0, np.log(np.expm1(1.0))]] * 2)}]
    laws.append(mf.Predictive(network, likelihood, twice)(jnp.zeros((1, 1))))
    for law in laws:
        found = mf.metrics.negative_log_likelihood(law, y, censoring=censoring)
        # The deviation of the second law is softplus of its inverse in float32, and z² is as exact as that.
        assert found == pytest.approx(expected, rel=1e-3)


def test_slopes_have_their_digits_however_far_a_bound_is():
    """d log Φ(z)/dz = √(2/π)/erfcx(−z/√2). That of JAX's log_ndtr is wrong by a factor of 3 at −9,000."""
    z = -np.logspace(-1, 6, 200)
    exact = np.sqrt(2 / np.pi) / scipy.special.erfcx(-z / np.sqrt(2))

    def mass(bound):
        return log_mass(dist.Normal(0.0, 1.0), jnp.asarray(-jnp.inf), bound)

    slopes = jax.vmap(jax.grad(mass))(jnp.asarray(z, jnp.float32))
    # Before the series begins, at −20, two logarithms near 200 lose their last digits: some 2e-5 each.
    assert np.max(np.abs(np.asarray(slopes) / exact - 1)) < 2e-4
    right = jax.vmap(jax.grad(mass))(jnp.asarray([0.0, 3.0, 30.0]))
    assert np.allclose(right, scipy.stats.norm.pdf([0, 3, 30]) / scipy.stats.norm.cdf([0, 3, 30]), rtol=1e-5)
    mutant = jax.grad(lambda bound: jax.scipy.special.log_ndtr(bound))(jnp.float32(-9_000.0))
    assert abs(mutant / 9_000 - 1) > 0.5
