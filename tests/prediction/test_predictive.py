"""The mixture over particles against SciPy, its quantiles, its parts, and prediction in blocks."""

import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
import scipy.optimize
import scipy.stats as st
from helpers import assert_close, assert_within, equations, jit, key, monte_carlo

from measureflow.networks import rescaling
from measureflow.networks.censoring import Censored
from measureflow.networks.likelihoods import Bernoulli, Categorical, Heteroscedastic, Poisson, StudentT
from measureflow.networks.network import Network
from measureflow.prediction.cumulative import cumulative
from measureflow.prediction.predictive import BLOCK, Mixture, Predictive

# NumPyro's code promotes integers and ranks.
pytestmark = pytest.mark.standard_promotion

RNG = np.random.default_rng(0)
ROWS, N = 4, 3


def numbers(*shape, low=-2.0, high=2.0):
    return RNG.uniform(low, high, size=shape).astype(np.float32)


LOC, SCALE, RATE = numbers(ROWS, N), numbers(ROWS, N, low=0.3), numbers(ROWS, N, low=0.5, high=30)
FREEDOM, LOGITS, CONCENTRATION = (
    numbers(ROWS, N, low=2.1, high=9),
    numbers(ROWS, N),
    numbers(ROWS, N, low=0.4),
)


def quantile(component, q):
    return jit(lambda mixture, q: mixture.quantile(q))(Mixture(component), jnp.asarray(q, jnp.float32))


def exact(array):
    return np.asarray(array, np.float64)


def sigmoid(x):
    return 1 / (1 + np.exp(-exact(x)))


# name: (components, the same in SciPy, points to look at)
REAL, COUNTS = np.linspace(-6, 6, 9, dtype=np.float32), np.array([0, 1, 2, 5, 17, 40])
LAWS = {
    "normal": (dist.Normal(LOC, SCALE), st.norm(exact(LOC), exact(SCALE)), REAL),
    "student": (
        dist.StudentT(FREEDOM, LOC, SCALE),
        st.t(exact(FREEDOM), exact(LOC), exact(SCALE)),
        REAL,
    ),
    "poisson": (dist.Poisson(RATE), st.poisson(exact(RATE)), COUNTS),
    "negative binomial": (
        dist.NegativeBinomial2(RATE, CONCENTRATION),
        st.nbinom(exact(CONCENTRATION), exact(CONCENTRATION) / (exact(CONCENTRATION) + exact(RATE))),
        COUNTS,
    ),
    "bernoulli": (dist.Bernoulli(logits=LOGITS), st.bernoulli(sigmoid(LOGITS)), np.array([0, 1])),
    "bernoulli by probability": (
        dist.Bernoulli(probs=sigmoid(LOGITS).astype(np.float32)),
        st.bernoulli(sigmoid(LOGITS)),
        np.array([0, 1]),
    ),
}
CONTINUOUS, INTEGERS = ["normal", "student"], ["poisson", "negative binomial", "bernoulli"]


def log_density(law, y):
    return law.logpdf(y) if hasattr(law.dist, "logpdf") else law.logpmf(y)


@pytest.mark.few(3)
@pytest.mark.parametrize("name", LAWS)
def test_density_cdf_and_moments(name):
    component, law, points = LAWS[name]
    mixture = Mixture(component)
    assert mixture.batch_shape == (ROWS,)
    assert mixture.event_shape == ()
    y = exact(points)[:, None, None]
    log_prob, cdf = jit(lambda m, y: (m.log_prob(y), m.cdf(y)))(mixture, jnp.asarray(points)[:, None])
    assert_close(log_prob, np.log(np.mean(np.exp(log_density(law, y)), axis=-1)), 1e-5)
    np.testing.assert_allclose(cdf, np.mean(law.cdf(y), axis=-1), atol=2e-5)
    means, variances = np.broadcast_arrays(law.mean(), law.var())
    mean, variance, within, between = jit(
        lambda m: (m.mean, m.variance, m.aleatoric_variance, m.epistemic_variance)
    )(mixture)
    assert_close(mean, means.mean(axis=-1))
    assert_close(within, variances.mean(axis=-1))
    assert_close(between, means.var(axis=-1))
    # The law of total variance, from the second moment.
    second = np.mean(variances + means**2, axis=-1)
    assert_close(variance, second - means.mean(axis=-1) ** 2, 1e-4)


def test_cdf_between_and_beyond_the_values():
    """NumPyro's own F of counts is NaN below −1, and wrong between integers."""
    y = jnp.array([-np.inf, -1e30, -3.0, -1.0, -0.5, 0.0, 0.5, 0.999, 1.0, np.inf])
    cdf = jit(lambda mixture, y: mixture.cdf(y))
    for name in INTEGERS:
        component, law, _ = LAWS[name]
        found = cdf(Mixture(component), y[:, None])
        np.testing.assert_allclose(found, law.cdf(exact(y)[:, None, None]).mean(axis=-1), atol=1e-5)
    for name in CONTINUOUS:
        found = cdf(Mixture(LAWS[name][0]), jnp.array([-np.inf, -1e30, 1e30, np.inf])[:, None])
        np.testing.assert_allclose(found, np.tile([[0], [0], [1], [1]], (1, ROWS)), atol=1e-7)
    assert np.all(np.isnan(cdf(Mixture(LAWS["poisson"][0]), jnp.nan)))


# Where float32 is hard: (law, its mean and spread, SciPy's)
HARD = {
    "poisson": [
        (dist.Poisson(np.float32(r)), st.poisson(np.float64(np.float32(r)))) for r in (0.1, 28, 35, 1e3, 1e6)
    ],
    "negative binomial": [
        (
            dist.NegativeBinomial2(np.float32(m), np.float32(c)),
            st.nbinom(np.float64(np.float32(c)), 1 / (1 + np.float64(np.float32(m)) / np.float32(c))),
        )
        for m in (0.1, 5, 20, 100, 1e5)
        for c in (0.01, 1, 10, 29, 100, 1e6)
    ],
    "student": [
        (dist.StudentT(np.float32(v), 0.0, 1.0), st.t(np.float64(np.float32(v))))
        for v in (0.5, 2.001, 5, 30, 59, 61, 1e3, 1e6)
    ],
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", HARD)
def test_cdf_in_float32(name):
    """Within 10⁻⁴ for all parameters; NumPyro's own F is not (the last assertion)."""
    ours, numpyros = jit(cumulative), jit(lambda distribution, y: distribution.cdf(y))
    errors, theirs = [], []
    for distribution, law in HARD[name]:
        points = law.ppf(np.linspace(0.001, 0.999, 60))
        points = np.concatenate([points, points[-1:] * 3, np.sign(points) * 1e-4, [0.0]])
        points = np.maximum(np.floor(points), 0) if name != "student" else points
        points = points.astype(np.float32)
        truth = law.cdf(exact(points))
        errors.append(np.abs(exact(ours(distribution, jnp.asarray(points))) - truth).max())
        theirs.append(np.abs(np.nan_to_num(exact(numpyros(distribution, jnp.asarray(points)))) - truth).max())
    assert max(errors) < 1e-4, errors
    assert max(theirs) > 3e-4


def test_tails_of_student_in_float32():
    """Not only absolutely: P(Y ≤ −20) is 2·10⁻⁵ to a relative 10⁻⁴."""
    z, v = np.array([-3.0, -8.0, -20.0], np.float32), np.array([[3.0], [20.0]], np.float32)
    found = jit(cumulative)(dist.StudentT(v, 0.0, 1.0), jnp.asarray(z))
    np.testing.assert_allclose(found, st.t(exact(v)).cdf(z), rtol=1e-4)


# Quantiles

LEVELS = np.array([0.001, 0.05, 0.3, 0.5, 0.77, 0.95, 0.999], np.float32)


@pytest.mark.parametrize("name", CONTINUOUS)
def test_quantiles_of_continuous_laws(name):
    component, law, _ = LAWS[name]
    found = exact(quantile(component, LEVELS[:, None]))
    assert found.shape == (len(LEVELS), ROWS)

    def excess(y, row, q):
        return np.mean(law.cdf(np.full((ROWS, N), y)), axis=-1)[row] - q

    truth = [
        [scipy.optimize.brentq(excess, -300, 300, (row, np.float64(q)), 1e-12) for row in range(ROWS)]
        for q in LEVELS
    ]
    np.testing.assert_allclose(found, truth, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", INTEGERS)
def test_quantiles_of_integers(name):
    """The smallest y with F(y) ≥ q, exactly."""
    component, law, _ = LAWS[name]
    found = quantile(component, LEVELS[:, None])
    table = law.cdf(np.arange(2000)[:, None, None]).mean(axis=-1)
    truth = [[np.argmax(table[:, row] >= np.float64(q)) for row in range(ROWS)] for q in LEVELS]
    np.testing.assert_array_equal(found, truth)


def test_quantiles_where_they_are_hard():
    """Peaks a million widths apart; tails without a variance; counts in the millions; nothing but zeros."""
    apart = quantile(dist.Normal(jnp.array([-1000.0, 1000.0, 1000.0]), 1e-3), [0.1, 0.3, 0.4, 0.9])
    within = 1e-3 * st.norm.ppf([0.3, 0.9, 0.1, 0.85])
    np.testing.assert_allclose(apart, np.array([-1000, -1000, 1000, 1000]) + within, atol=1e-4)
    # F is flat between the peaks, and q just there; 0.05·3 of the first peak is its 0.15-quantile.
    near = quantile(dist.Normal(jnp.array([-1.0, 1.0, 1.0]), 1e-4), [0.05, 1 / 3])
    np.testing.assert_allclose(near[0], -1 + 1e-4 * st.norm.ppf(0.15), rtol=1e-6)
    assert -1 <= near[1] <= 1
    # Around 0, to the last digit of the spread and not of the quantile.
    heavy = quantile(dist.StudentT(jnp.array([1.5, 1.0]), 0.0, 1.0), [0.01, 0.5])
    truth = scipy.optimize.brentq(lambda y: (st.t(1.5).cdf(y) + st.t(1.0).cdf(y)) / 2 - 0.01, -1e4, 0)
    np.testing.assert_allclose(heavy, [truth, 0], rtol=1e-4, atol=1e-6)
    counts = quantile(dist.Poisson(jnp.array([[1e6], [1e-9], [0.0]])), 0.95)
    np.testing.assert_allclose(counts, [st.poisson(1e6).ppf(0.95), 0, 0], atol=0.5)
    assert np.isnan(quantile(dist.Normal(jnp.array([np.nan, 1.0]), 1.0, validate_args=False), 0.5))


def test_ends_and_shapes_of_quantiles():
    ends = np.array([0.0, 1.0])
    np.testing.assert_array_equal(quantile(dist.Normal(LOC[0], 1.0), ends), [-np.inf, np.inf])
    np.testing.assert_array_equal(quantile(dist.Poisson(RATE[0]), ends), [0, np.inf])
    classes = quantile(dist.Categorical(logits=jnp.zeros((2, 5))), [0.0, 0.1, 0.201, 0.399, 0.61, 1.0])
    np.testing.assert_array_equal(classes, [0, 0, 1, 1, 3, 4])
    # F(0) is ½: the smallest y that reaches it is 0.
    assert float(quantile(dist.Bernoulli(logits=jnp.zeros(2)), 0.5)) == 0
    assert float(quantile(dist.Poisson(jnp.array([1e-9])), 0.5)) == 0
    # One level for all rows, or several; by NumPyro's name, one for each, too.
    levels = np.linspace(0.1, 0.9, ROWS, dtype=np.float32)
    one, each, every = jit(
        lambda mixture: (mixture.quantile(0.1), mixture.icdf(levels), mixture.quantile(levels))
    )(Mixture(dist.Normal(LOC, SCALE)))
    assert every.shape == (ROWS, ROWS)
    np.testing.assert_allclose(each, np.diag(every), rtol=1e-6)
    np.testing.assert_allclose(one, every[0], rtol=1e-6)


def test_interval():
    mixture = Mixture(dist.Normal(LOC, SCALE))
    low, high = jit(lambda m: [m.cdf(end) for end in m.interval(0.8)])(mixture)
    np.testing.assert_allclose(low, 0.1, atol=1e-6)
    np.testing.assert_allclose(high, 0.9, atol=1e-6)


# One particle, and any order of them


@pytest.mark.few(3)
@pytest.mark.parametrize("name", LAWS)
def test_a_mixture_of_one_is_its_component(name):
    component, _, points = LAWS[name]
    one = jax.tree.map(lambda leaf: leaf[:, :1], component.get_args())
    alone, mixture = type(component)(**one), Mixture(type(component)(**one))
    y = jnp.asarray(points)[:, None]
    found, expected = jit(
        lambda m, d: (
            (m.log_prob(y), m.mean, m.variance, m.epistemic_variance),
            (d.log_prob(y[..., None])[..., 0], d.mean[:, 0], d.variance[:, 0], jnp.zeros(ROWS)),
        )
    )(mixture, alone)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    if name == "normal":
        np.testing.assert_array_equal(mixture.cdf(y), alone.cdf(y[..., None])[..., 0])
        np.testing.assert_allclose(mixture.quantile(0.3), alone.icdf(0.3)[:, 0], rtol=1e-7, atol=1e-7)


def test_the_order_of_particles_does_not_matter():
    n = 500
    loc, scale, order = numbers(2, n), numbers(2, n, low=0.1), np.random.default_rng(1).permutation(n)

    @jit
    def summary(loc, scale):
        mixture = Mixture(dist.Normal(loc, scale))
        return mixture.mean, mixture.variance, mixture.log_prob(0.3), mixture.cdf(0.3), mixture.quantile(0.9)

    for before, after in zip(summary(loc, scale), summary(loc[:, order], scale[:, order]), strict=True):
        np.testing.assert_allclose(before, after, rtol=2e-6, atol=2e-6)


def test_far_away_and_close_together():
    """A density of e⁻⁵⁰⁰⁰⁰⁰ is no zero; a spread of 10⁻² about 10⁴ is not lost to cancellation."""
    mixture = Mixture(dist.Normal(jnp.array([0.0, 1.0]), 1.0))
    far = jit(lambda m: m.log_prob(1000.0))(mixture)
    np.testing.assert_allclose(far, -0.5 * 999**2 - 0.5 * np.log(8 * np.pi), rtol=1e-6)
    loc = jnp.float32(1e4) + jnp.array([0.0, 2**-6, 2**-5])
    close = Mixture(dist.Normal(loc, 1e-3))
    mean, variance, between = jit(lambda m: (m.mean, m.variance, m.epistemic_variance))(close)
    np.testing.assert_allclose(between, np.var([0, 2**-6, 2**-5]), rtol=1e-5)
    np.testing.assert_allclose(variance, np.var([0, 2**-6, 2**-5]) + 1e-6, rtol=1e-5)
    np.testing.assert_allclose(mean, 1e4 + 2**-6, rtol=1e-7)


# Samples


def test_samples():
    n = 4000
    for name in ("normal", "negative binomial"):
        component, law, _ = LAWS[name]
        draws = exact(jit(lambda m: m.sample(key(), (n,)))(Mixture(component)))
        assert draws.shape == (n, ROWS)
        for row in range(ROWS):

            def cdf(y, row=row, law=law):
                return law.cdf(np.asarray(y)[..., None, None])[..., row, :].mean(axis=-1)

            if name in CONTINUOUS:
                assert st.kstest(draws[:, row], cdf).pvalue > 1e-4
                continue
            edges = np.unique(st.nbinom.ppf(np.linspace(0.1, 0.9, 6), 1.0, 1 / (1 + RATE[row].mean())))
            shares = np.diff(np.concatenate([[0], cdf(edges), [1]]))
            counts = np.bincount(np.searchsorted(edges, draws[:, row]), minlength=len(shares))
            assert st.chisquare(counts, n * shares).pvalue > 1e-4


def test_samples_of_several_targets_come_from_one_particle():
    """Targets are independent given the particle, so their covariance is that of the particles' means."""
    n, loc = 20_000, numbers(N, 2)
    loc[:, 1] += loc[:, 0]
    mixture = Mixture(dist.Normal(loc, 0.5).to_event(1))
    draws = exact(jit(lambda m: m.sample(key(), (n,)))(mixture))
    assert draws.shape == (n, 2)
    centred = draws - exact(loc).mean(axis=0)
    products = centred[:, :, None] * centred[:, None, :]
    covariance = np.cov(exact(loc).T, bias=True) + 0.25 * np.eye(2)
    assert abs(covariance[0, 1]) > 0.1
    assert_within(covariance, *monte_carlo(products))
    assert_close(mixture.variance, np.diag(covariance))


# Classes


def entropy(p):
    return -np.sum(p * np.log(p), axis=-1)


@pytest.mark.parametrize("binary", [True, False])
def test_entropies(binary):
    logits = numbers(ROWS, N) if binary else numbers(ROWS, N, 4)
    table = np.stack([sigmoid(-logits), sigmoid(logits)], axis=-1) if binary else np.exp(exact(logits))
    table = table / table.sum(axis=-1, keepdims=True)
    mixture = Mixture(dist.Bernoulli(logits=logits) if binary else dist.Categorical(logits=logits))
    mean, classes = table.mean(axis=1), np.arange(table.shape[-1])[:, None]
    probs, whole, expected, information, log_prob, cdf = jit(
        lambda m: (
            m.probs,
            m.entropy(),
            m.expected_entropy(),
            m.mutual_information(),
            m.log_prob(classes),
            m.cdf(classes + 0.5),
        )
    )(mixture)
    assert_close(probs, mean[:, 1] if binary else mean)
    assert_close(whole, entropy(mean))
    assert_close(expected, entropy(table).mean(axis=1))
    assert_close(information, entropy(mean) - entropy(table).mean(axis=1), 1e-4)
    assert_close(log_prob, np.log(mean.T))
    np.testing.assert_allclose(cdf, np.cumsum(mean.T, axis=0), atol=1e-6)


def test_entropies_at_their_ends():
    """Particles that are sure of different things disagree by log 2; equal ones not at all."""
    sure = jnp.array([[100.0, -100.0], [90.0, 90.0], [0.0, 0.0]])
    parts = jit(lambda m: (m.entropy(), m.expected_entropy(), m.mutual_information()))
    whole, expected, information = parts(Mixture(dist.Bernoulli(logits=sure)))
    np.testing.assert_allclose(whole, [np.log(2), 0, np.log(2)], atol=1e-6)
    np.testing.assert_allclose(expected, [0, 0, np.log(2)], atol=1e-6)
    np.testing.assert_allclose(information, [np.log(2), 0, 0], atol=1e-6)
    # Rounding never makes it negative.
    equal = np.repeat(numbers(200, 1, 5), 7, axis=1)
    *_, information = parts(Mixture(dist.Categorical(logits=equal)))
    assert np.all(np.asarray(information) >= 0)
    np.testing.assert_allclose(information, 0, atol=1e-6)
    # Small probabilities of 0 are not forgotten.
    assert_close(Mixture(dist.Bernoulli(logits=jnp.array([40.0, 50.0]))).log_prob(0), np.log(np.exp(-40) / 2))
    np.testing.assert_allclose(
        Mixture(dist.Bernoulli(logits=jnp.array([40.0]))).cdf(0.0), np.exp(-40), rtol=1e-5
    )


# Several targets


def test_marginals():
    loc, scale, logits = numbers(ROWS, N, 2), numbers(ROWS, N, 2, low=0.3), numbers(ROWS, N, 2, 3)
    y = numbers(ROWS, 2)

    @jit
    def both(mixture):
        """Of all targets together, and of each."""
        assert (mixture.batch_shape, mixture.event_shape) == ((ROWS,), (2,))
        assert (mixture.marginals.batch_shape, mixture.marginals.event_shape) == ((ROWS, 2), ())
        return [
            (m.log_prob(y), m.mean, m.epistemic_variance, m.variance) for m in (mixture, mixture.marginals)
        ]

    law = st.norm(exact(loc), exact(scale))
    densities, mixture = law.pdf(exact(y)[:, None]), Mixture(dist.Normal(loc, scale).to_event(1))
    together, apart = np.mean(np.prod(densities, axis=-1), axis=-1), np.mean(densities, axis=1)
    assert np.abs(np.log(together) - np.log(apart).sum(axis=-1)).max() > 0.01
    for found, density in zip(both(mixture), (together, apart), strict=True):
        assert_close(found[0], np.log(density))
        assert_close(found[1], exact(loc).mean(axis=1))
        assert_close(found[2], exact(loc).var(axis=1))
        assert_close(found[3], exact(loc).var(axis=1) + np.mean(exact(scale) ** 2, axis=1))
    below = jit(lambda m: m.marginals.cdf(y))(mixture)
    np.testing.assert_allclose(below, law.cdf(exact(y)[:, None]).mean(axis=1), atol=1e-6)
    # Parameters that are one number for all, or have an axis of their own.
    student = jit(lambda m: m.marginals.log_prob(y))(Mixture(dist.StudentT(3.0, loc, 1.0).to_event(1)))
    assert_close(student, np.log(st.t(3, exact(loc)).pdf(exact(y)[:, None]).mean(axis=1)))
    classes = jit(lambda m: m.marginals.probs)(Mixture(dist.Categorical(logits=logits).to_event(1)))
    table = np.exp(exact(logits)) / np.exp(exact(logits)).sum(axis=-1, keepdims=True)
    assert_close(classes, table.mean(axis=1))
    counts = Mixture(dist.NegativeBinomial2(np.exp(loc), 2.0).to_event(1))
    assert_close(jit(lambda m: m.marginals.mean)(counts), np.exp(loc).mean(axis=1))
    assert Mixture(dist.Normal(LOC, SCALE)).marginals.batch_shape == (ROWS,)


def middle(law):
    """About which laws are widened: the median, but for laws with a gap there."""
    return 0.5 * (exact(law.quantile(0.5 - np.pi / 100)) + exact(law.quantile(0.5 + np.pi / 100)))


def test_widened():
    """m + c(Y − m), m the middle: c² of each variance, and quantiles c times as far away."""
    mixture = Mixture(dist.Normal(LOC, SCALE))
    plain, wide = jit(
        lambda mixture: [
            (m.mean, m.aleatoric_variance, m.epistemic_variance, m.quantile(0.9))
            for m in (mixture, mixture.widened(1.7))
        ]
    )(mixture)
    mean, within, between, level = map(exact, plain)
    m = middle(mixture)
    assert np.max(np.abs(mean - m)) > 0.01
    assert np.max(np.abs(m - exact(mixture.median))) < 0.05
    assert_close(wide[0], m + 1.7 * (mean - m), 1e-5)
    assert_close(wide[1], 1.7**2 * within)
    assert_close(wide[2], 1.7**2 * between)
    np.testing.assert_allclose(wide[3], m + 1.7 * (level - m), rtol=1e-4)


def test_a_far_network_does_not_move_the_others():
    """One of a hundred, 60 deviations away: narrowed to a half, the others' law is where it was. About the
    mean, the mutant, it would move by 0.3 of its deviations."""
    law = Mixture(dist.Normal(jnp.zeros((1, 100)).at[0, 0].set(60.0), 1.0))
    narrow = law.widened(0.5)
    places = np.sort(np.asarray(narrow.component_distribution.loc)[0])[:99]
    assert np.all(np.abs(places) < 0.01)
    mutant = rescaled_about(law, law.mean, 0.5)
    assert np.all(np.sort(np.asarray(mutant.loc)[0])[:99] > 0.25)


def rescaled_about(law, centre, factor):
    return rescaling.widened(law.component_distribution, centre[:, None], jnp.full((1, 1), factor))


def test_where_half_of_the_networks_are_far_from_the_others_nothing_jumps():
    """Between two halves the median may be anywhere in the gap; the middle is in its middle, whatever the
    order of the networks, and of either sign."""
    halves = jnp.concatenate([jnp.full(10, -1.0), jnp.full(10, 1.0)]) + 0.01 * numbers(20)
    law, other = (Mixture(dist.Normal(places[None], 0.02)) for places in (halves, halves[::-1]))
    found = float(law.widened(0.5).mean[0])
    assert found == pytest.approx(float(other.widened(0.5).mean[0]), abs=1e-5)
    mirrored = Mixture(dist.Normal(-halves[None], 0.02))
    assert found == pytest.approx(-float(mirrored.widened(0.5).mean[0]), abs=1e-5)
    assert abs(found) < 0.1


def test_widened_laws_have_derivatives():
    """Those of the middle, too, which is found by bisection: against finite differences."""

    def law(shift):
        loc = LOC[:1] + shift * jnp.arange(N) / N
        return Mixture(dist.Normal(loc, SCALE[:1] * jnp.exp(shift))).widened(0.6)

    for of in (lambda s: law(s).mean[0], lambda s: law(s).log_prob(jnp.full((1,), 0.3))[0]):
        difference = (of(0.01) - of(-0.01)) / 0.02
        assert_close(jax.grad(of)(0.0), jax.jacfwd(of)(0.0), 1e-5)
        assert float(jax.grad(of)(0.0)) == pytest.approx(float(difference), rel=0.02)


def test_events_of_any_shape_have_a_middle_each():
    each = Mixture(dist.Normal(LOC, SCALE))
    both, scales = jnp.stack([LOC, -LOC], axis=-1), jnp.broadcast_to(SCALE[..., None], (ROWS, N, 2))
    joint = Mixture(dist.Normal(both, scales).to_event(1)).widened(1.7).marginals
    assert_close(joint.mean[:, 0], each.widened(1.7).mean, 1e-5)
    assert_close(joint.mean[:, 1], -exact(each.widened(1.7).mean), 1e-5)
    for component in (
        dist.Normal(both[..., None], scales[..., None]).to_event(2),
        dist.Normal(both[..., None], scales[..., None]).to_event(1).to_event(1),
    ):
        assert_close(Mixture(component).widened(1.7).mean[..., 0], joint.mean, 1e-5)
    shared = dist.MixtureSameFamily(
        dist.Categorical(logits=jnp.zeros(2)), dist.Normal(jnp.stack([both, both], axis=-1), 1.0)
    )
    assert_close(
        Mixture(shared.to_event(1)).widened(1.7).mean[:, 0],
        Mixture(dist.Normal(LOC, 1.0)).widened(1.7).mean,
        1e-5,
    )
    bounds = Mixture(Censored(dist.Normal(LOC, SCALE))).widened(1.7)
    y = jnp.asarray(each.median) + 0.3
    assert_close(bounds.log_prob(jnp.stack([y, y], axis=-1)), each.widened(1.7).log_prob(y), 1e-4)
    assert Mixture(dist.Normal(LOC[:0], SCALE[:0])).widened(1.7).mean.shape == (0,)


# As a NumPyro distribution and as a pytree


def test_mixture_is_a_pytree_and_pickles():
    for component in (
        *(LAWS[name][0] for name in ("student", "negative binomial")),
        dist.Categorical(logits=numbers(ROWS, N, 4)),
        dist.Normal(LOC[..., None], SCALE[..., None]).to_event(1),
    ):
        mixture = Mixture(component)
        leaves, structure = jax.tree.flatten(mixture)
        for copy in (jax.tree.unflatten(structure, leaves), pickle.loads(pickle.dumps(mixture))):
            assert type(copy) is Mixture
            assert copy.shape() == mixture.shape()
            one, other = (jax.tree.leaves(m.component_distribution.get_args()) for m in (copy, mixture))
            assert all(map(np.array_equal, one, other))
        assert jax.jit(lambda m: m)(mixture).batch_shape == (ROWS,)


def test_mixtures_under_transformations():
    def summary(loc, scale):
        mixture = Mixture(dist.Normal(loc, scale))
        return mixture.log_prob(0.3), mixture.quantile(0.9), mixture.variance

    together = jax.jit(jax.vmap(summary))(LOC, SCALE)
    for found, expected in zip(together, jit(summary)(LOC, SCALE), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    gradient = jit(jax.grad(lambda loc: jnp.sum(Mixture(dist.Normal(loc, SCALE)).log_prob(0.3))))(LOC)
    share = st.norm(exact(LOC), exact(SCALE)).pdf(0.3)
    expected = share / share.sum(axis=1, keepdims=True) * (0.3 - exact(LOC)) / exact(SCALE) ** 2
    assert_close(gradient, expected)


def test_quantiles_compile_once():
    traces = []

    class Counted(dist.Normal):
        def cdf(self, value):
            traces.append(None)
            return super().cdf(value)

    for seed in range(3):
        Mixture(Counted(LOC + seed, SCALE)).quantile(0.1 * (seed + 1))
    assert len(traces) == 1


WRONG = {
    "quantile of several": (
        lambda: Mixture(dist.Normal(LOC[..., None], 1.0).to_event(1)).quantile(0.5),
        NotImplementedError,
        ["quantile", "(1,)", "marginals"],
    ),
    "cdf of several": (
        lambda: Mixture(dist.Normal(LOC[..., None], 1.0).to_event(1)).cdf(0.5),
        NotImplementedError,
        ["cdf", "(1,)", "marginals"],
    ),
    "mean of classes": (
        lambda: Mixture(dist.Categorical(logits=jnp.zeros((2, 3)))).mean,
        NotImplementedError,
        ["CategoricalLogits", "mean", "probs"],
    ),
    "variance of classes": (
        lambda: Mixture(dist.Categorical(logits=jnp.zeros((2, 3)))).variance,
        NotImplementedError,
        ["variance", "entropy()"],
    ),
    "mean of several classes": (
        lambda: Mixture(dist.Categorical(logits=jnp.zeros((3, 2, 4))).to_event(1)).mean,
        NotImplementedError,
        ["mean", "(2,)", "probs"],
    ),
    "entropy of Normals": (
        lambda: Mixture(dist.Normal(LOC, 1.0)).entropy(),
        NotImplementedError,
        ["Normal", "entropy", "variance"],
    ),
    "probs of Normals": (
        lambda: Mixture(dist.Normal(LOC, 1.0)).probs,
        NotImplementedError,
        ["probs"],
    ),
    "marginals of a joint law": (
        lambda: Mixture(dist.MultivariateNormal(jnp.zeros((3, 2)), jnp.eye(2))).marginals,
        NotImplementedError,
        ["marginals", "independent"],
    ),
    "quantile of integers": (
        lambda: Mixture(dist.Binomial(5, jnp.array([0.1, 0.2]))).quantile(0.5),
        NotImplementedError,
        ["Binomial", "quantile", "sample"],
    ),
    "q": (lambda: Mixture(dist.Normal(LOC, 1.0)).quantile(1.5), ValueError, ["q must", "1.5"]),
    "q nan": (lambda: Mixture(dist.Normal(LOC, 1.0)).quantile(np.nan), ValueError, ["q must", "nan"]),
    "coverage": (lambda: Mixture(dist.Normal(LOC, 1.0)).interval(90), ValueError, ["coverage", "90"]),
    "no particles": (lambda: Mixture(dist.Normal(0.0, 1.0)), TypeError, ["last batch axis"]),
    "widened classes": (
        lambda: Mixture(dist.Bernoulli(logits=LOC)).widened(2.0),
        TypeError,
        ["BernoulliLogits"],
    ),
}


# Prediction

NETWORK = Network.mlp(3, (6,), 2, "tanh")
PARTICLES = NETWORK.sample(key(1), 5)
PREDICTIVE = Predictive(NETWORK, Heteroscedastic(), PARTICLES)
X = RNG.normal(size=(2 * BLOCK + 40, 3)).astype(np.float32)


def by_hand(x, location=0.0, scale=1.0):
    """Means and deviations of every particle, one at a time."""
    outputs = [
        exact(NETWORK.apply(jax.tree.map(lambda leaf, i=i: leaf[i], PARTICLES), jnp.asarray(x)))
        for i in range(5)
    ]
    o = np.stack(outputs, axis=1)
    return location + scale * o[..., 0], scale * (np.logaddexp(o[..., 1], 0) + 1e-4)


def moments(mixture):
    return {"mean": mixture.mean, "variance": mixture.variance}


def test_predictive():
    loc, scale = by_hand(X)
    mixture = PREDICTIVE(X)
    assert mixture.batch_shape == (len(X),)
    assert mixture.mixture_size == 5
    assert_close(mixture.component_distribution.loc, loc)
    assert_close(mixture.component_distribution.scale, scale)
    y = RNG.normal(size=len(X))
    density = np.mean(st.norm(loc, scale).pdf(y[:, None]), axis=1)
    assert_close(mixture.log_prob(y.astype(np.float32)), np.log(density), 1e-4)
    mapped = PREDICTIVE.map(moments, X)
    assert all(isinstance(array, np.ndarray) for array in mapped.values())
    assert_close(mapped["mean"], loc.mean(axis=1))
    assert_close(mapped["variance"], np.mean(scale**2, axis=1) + loc.var(axis=1))


def test_units():
    loc, scale = by_hand(X[:7], 50.0, 3.0)
    for predictive in (
        Predictive(NETWORK, Heteroscedastic(), PARTICLES, 50.0, 3.0),
        Predictive(NETWORK, Heteroscedastic(), PARTICLES, location=np.float64(50), scale=jnp.asarray(3)),
    ):
        component = predictive(X[:7]).component_distribution
        assert_close(component.loc, loc)
        assert_close(component.scale, scale)
    loc, scale = by_hand(X[:7], 0.0, 3.0)
    assert_close(Predictive(NETWORK, Heteroscedastic(), PARTICLES, scale=3.0)(X[:7]).mean, loc.mean(axis=1))
    loc, scale = by_hand(X[:7], 5.0)
    assert_close(Predictive(NETWORK, Heteroscedastic(), PARTICLES, 5.0)(X[:7]).mean, loc.mean(axis=1))


def test_units_of_several_targets():
    network = Network.mlp(3, (6,), 4)
    particles = network.sample(key(2), 5)
    plain = Predictive(network, Heteroscedastic(targets=2), particles)(X[:7])
    location, scale = np.array([10.0, -4.0]), np.array([0.1, 7.0])
    moved = Predictive(network, Heteroscedastic(targets=2), particles, location, scale)(X[:7])
    assert moved.batch_shape == (7,)
    assert moved.event_shape == (2,)
    assert_close(moved.mean, location + scale * exact(plain.mean))
    assert_close(moved.marginals.variance, scale**2 * exact(plain.variance))


def test_spread():
    wide = Predictive(NETWORK, Heteroscedastic(), PARTICLES, 50.0, 3.0, spread=1.5).map(moments, X[:7])
    plain = Predictive(NETWORK, Heteroscedastic(), PARTICLES, 50.0, 3.0).map(moments, X[:7])
    m = middle(Predictive(NETWORK, Heteroscedastic(), PARTICLES, 50.0, 3.0)(X[:7]))
    assert_close(wide["mean"], m + 1.5 * (exact(plain["mean"]) - m), 1e-5)
    assert_close(wide["variance"], 1.5**2 * exact(plain["variance"]))


def test_a_row_does_not_depend_on_how_many_are_asked_for():
    """To the bit. In one piece it does, which is why there are blocks."""
    whole, parameters = PREDICTIVE.map(moments, X), PREDICTIVE(X).component_distribution
    for rows in (1, 2, 17, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK):
        part = PREDICTIVE.map(moments, X[:rows])
        assert part["mean"].shape == (rows,)
        for name in whole:
            np.testing.assert_array_equal(part[name], whole[name][:rows])
    for rows in (1, BLOCK + 1):
        few = PREDICTIVE(X[:rows]).component_distribution
        np.testing.assert_array_equal(few.loc, parameters.loc[:rows])


def test_one_program_for_any_number_of_rows_and_any_numbers():
    traces = []

    def apply(theta, x):
        traces.append(None)
        return jnp.tanh(x @ theta)

    network = Network(lambda k: jax.random.normal(k, (3, 2)), apply)

    def interval(coverage, mixture):
        return mixture.interval(coverage)

    likelihood = Heteroscedastic()
    for seed, rows in enumerate((5, 300, 1, 600)):
        particles = network.sample(key(seed), 4)
        predictive = Predictive(network, likelihood, particles, float(seed), 1.0 + seed)
        predictive.map(eqx.Partial(interval, jnp.asarray(0.5 + 0.1 * seed)), X[:rows])
    assert len(traces) == 1
    for seed, rows in enumerate((5, 300, 1)):
        Predictive(network, likelihood, network.sample(key(seed), 4))(X[:rows])
    assert len(traces) == 2


def test_no_program_holds_more_than_a_block():
    sizes = []

    def apply(theta, x):
        sizes.append(x.shape)
        return x @ theta

    network = Network(lambda k: jax.random.normal(k, (3, 2)), apply)
    predictive = Predictive(network, Heteroscedastic(), network.sample(key(), 2))
    predictive(X)
    predictive.map(moments, X)
    assert sizes == [(BLOCK, 3), (BLOCK, 3)]


def test_results_may_have_any_shape():
    def several(mixture):
        return mixture.quantile(jnp.array([[0.1], [0.5]])).T, (mixture.mean[:, None, None],)

    quantiles, (means,) = PREDICTIVE.map(several, X[: BLOCK + 3])
    assert quantiles.shape == (BLOCK + 3, 2)
    assert means.shape == (BLOCK + 3, 1, 1)
    assert_close(means[:, 0, 0], PREDICTIVE(X[: BLOCK + 3]).mean)


def test_inputs_may_be_a_pytree():
    network = Network(
        lambda k: {"slope": jax.random.normal(k, (3, 1)), "offsets": jnp.arange(4.0)},
        lambda theta, x: x["numbers"] @ theta["slope"] + theta["offsets"][x["group"]][:, None],
    )
    particles = network.sample(key(), 2)
    inputs = {"numbers": X[:9], "group": np.arange(9) % 4}
    mixture = Predictive(network, lambda o: dist.Normal(o[..., 0], 1.0), particles)(inputs)
    slopes = exact(particles["slope"])[:, :, 0]
    expected = exact(X[:9]) @ slopes.T + (np.arange(9) % 4)[:, None]
    assert_close(mixture.component_distribution.loc, expected)


def log_prob_of_0(mixture):
    return mixture.log_prob(jnp.zeros(mixture.batch_shape, jnp.int32))


@pytest.mark.parametrize("likelihood", [StudentT(), Bernoulli(), Categorical(3), Poisson()])
def test_other_likelihoods(likelihood):
    network = Network.mlp(3, (4,), likelihood.width)
    particles = network.sample(key(), 3)

    def alone(theta):
        return likelihood(network.apply(theta, jnp.asarray(X[:5]))).log_prob(jnp.zeros(5, jnp.int32))

    expected = np.log(np.mean(np.exp(exact(jit(jax.vmap(alone))(particles))), axis=0))
    assert_close(Predictive(network, likelihood, particles).map(log_prob_of_0, X[:5]), expected)


def test_predictive_under_transformations():
    """All rows are one block then, and the results the same but for rounding."""
    expected = PREDICTIVE.map(moments, X[:20])

    def predict(particles, x):
        return Predictive(NETWORK, Heteroscedastic(), particles).map(moments, x)

    found = jax.jit(predict)(PARTICLES, X[:20])
    two = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), PARTICLES)
    folds = jax.jit(jax.vmap(predict, (0, None)))(two, X[:20])
    for name, values in expected.items():
        assert_close(found[name], values)
        assert_close(folds[name], np.stack([values, values]))
    program = jax.make_jaxpr(predict)(PARTICLES, X[:20])
    assert all(BLOCK not in v.aval.shape for equation in equations(program) for v in equation.outvars)


def test_predictive_pickles():
    copy = pickle.loads(pickle.dumps(Predictive(NETWORK, Heteroscedastic(), PARTICLES, 1.0, 2.0)))
    np.testing.assert_array_equal(
        copy(X[:3]).mean, Predictive(NETWORK, Heteroscedastic(), PARTICLES, 1.0, 2.0)(X[:3]).mean
    )


def first_output(outputs):
    """Right for (rows, k), wrong for (rows, particles, k)."""
    return dist.Normal(outputs[:, 0], 1.0)


def predictive(*arguments, **others):
    return Predictive(NETWORK, Heteroscedastic(), PARTICLES, *arguments, **others)


WRONG |= {
    "one axis": (lambda: PREDICTIVE(X[0]), ValueError, ["inputs", "(3,)", "x[:, None]", "x[None]"]),
    "no rows": (lambda: PREDICTIVE(X[:0]), ValueError, ["inputs", "(0, 3)"]),
    "no inputs": (lambda: PREDICTIVE({}), ValueError, ["inputs", "no arrays"]),
    "ragged": (lambda: PREDICTIVE({"a": X, "b": X[:3]}), ValueError, ["inputs", "disagree"]),
    # Five particles and five outputs: shapes alone would not tell.
    "another axis": (
        lambda: Predictive(WIDE, first_output, WIDE.sample(key(), 5))(X),
        ValueError,
        ["likelihood", "(6, 7, 5)", "(6, 5)", "outputs[..., 0]"],
    ),
    "rows not first": (
        lambda: PREDICTIVE.map(lambda mixture: mixture.quantile(jnp.array([[0.1], [0.9]])), X),
        ValueError,
        ["function", f"(2, {BLOCK})", ".T"],
    ),
    "a scalar": (lambda: PREDICTIVE.map(lambda m: jnp.mean(m.mean), X), ValueError, ["function", "()"]),
    "nothing": (lambda: PREDICTIVE.map(lambda mixture: None, X), ValueError, ["function"]),
    "units of classes": (
        lambda: Predictive(WIDE, Categorical(5), PARTICLES_OF_5, 0.0, 1.0)(X),
        TypeError,
        ["CategoricalLogits", "leave location and scale out"],
    ),
    "scale 0": (lambda: predictive(0.0, 0.0), ValueError, ["scale", "> 0", "0.0"]),
    "scale matrix": (lambda: predictive(scale=np.eye(2)), ValueError, ["scale", "(2, 2)"]),
    "location of too many targets": (
        lambda: predictive(np.zeros(2))(X),
        ValueError,
        ["location", "(2,)", "()"],
    ),
    "spread": (lambda: predictive(spread=-1.0), ValueError, ["spread", "-1.0"]),
    "no particles left": (
        lambda: Predictive(NETWORK, Heteroscedastic(), jax.tree.map(lambda leaf: leaf[:0], PARTICLES)),
        ValueError,
        ["particles"],
    ),
}
WIDE = Network.mlp(3, (4,), 5)
PARTICLES_OF_5 = WIDE.sample(key(), 5)


@pytest.mark.parametrize("name", WRONG)
def test_message(name):
    act, kind, pieces = WRONG[name]
    with pytest.raises(kind) as caught:
        act()
    message = str(caught.value)
    for piece in pieces:
        assert piece in message, f"{piece!r} not in: {message}"
    assert "; " in message, f"no remedy in: {message}"
