"""Metrics against other people's code, numbers by hand, and the laws that proper scores obey."""

import tracemalloc

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import numpyro.distributions as dist
import pandas as pd
import pytest
import scipy.stats
import scoringrules
import sklearn.metrics
from helpers import monte_carlo

from measureflow.prediction import metrics, ranked_probability
from measureflow.prediction.conformal import Conformal
from measureflow.prediction.predictive import Mixture

pytestmark = pytest.mark.standard_promotion  # NumPyro is not written for the strict one

ROWS, PARTICLES, TARGETS = 40, 7, 3
RNG = np.random.default_rng(0)
WEIGHTS = RNG.dirichlet(np.ones(PARTICLES)).astype(np.float32)
LOC = RNG.normal(2.0, 1.5, size=(ROWS, PARTICLES)).astype(np.float32)
SCALE = RNG.uniform(0.1, 1.5, size=(ROWS, PARTICLES)).astype(np.float32)
Y = RNG.normal(2.0, 2.0, size=ROWS)
# The same with several targets: (rows, particles, targets).
LOCS = RNG.normal(2.0, 1.5, size=(ROWS, PARTICLES, TARGETS)).astype(np.float32)
SCALES = RNG.uniform(0.1, 1.5, size=(ROWS, PARTICLES, TARGETS)).astype(np.float32)
YS = RNG.normal(2.0, 2.0, size=(ROWS, TARGETS))


def mixture(components, weights=WEIGHTS):
    return dist.MixtureSameFamily(dist.Categorical(probs=jnp.asarray(weights)), components)


MIXTURE = mixture(dist.Normal(LOC, SCALE))
EVENTS = mixture(dist.Normal(LOCS, SCALES).to_event(1))


def per_target(t):
    """The marginal of one target, as a mixture of its own."""
    return mixture(dist.Normal(LOCS[..., t], SCALES[..., t]))


def softmax(logits):
    return np.asarray(jax.nn.softmax(jnp.asarray(logits, jnp.float32), axis=-1))


PROBABILITIES = softmax(2 * RNG.normal(size=(ROWS, 4)))
LABELS = RNG.integers(0, 4, size=ROWS)
BINARY = softmax(2 * RNG.normal(size=(ROWS, 2)))


# The negative log-likelihood and the error of the mean


def test_likelihood_of_a_mixture():
    densities = scipy.stats.norm.pdf(Y[:, None], LOC.astype(float), SCALE.astype(float)) @ WEIGHTS
    value = metrics.negative_log_likelihood(MIXTURE, Y)
    assert type(value) is float
    assert value == pytest.approx(-np.mean(np.log(densities)), rel=1e-5)


def test_likelihood_of_several_targets_is_that_of_the_row():
    densities = np.prod(scipy.stats.norm.pdf(YS[:, None, :], LOCS, SCALES), axis=2) @ WEIGHTS
    value = metrics.negative_log_likelihood(EVENTS, YS)
    assert value == pytest.approx(-np.mean(np.log(densities)), rel=1e-5)


def test_likelihood_of_classes():
    value = metrics.negative_log_likelihood(dist.Categorical(probs=PROBABILITIES), LABELS)
    assert value == pytest.approx(metrics.log_loss(PROBABILITIES, LABELS), rel=1e-6)


def test_means_over_many_rows_keep_their_digits():
    """A sum of 10⁵ scores of about 10⁴ in float32 would be off by far more."""
    n = 100_000
    targets = np.full(n, 150.0)
    law = dist.Normal(jnp.zeros(n), jnp.ones(n))
    one = float(-dist.Normal(0.0, 1.0).log_prob(150.0))
    assert metrics.negative_log_likelihood(law, targets) == pytest.approx(one, rel=1e-12)


def test_error_of_the_mean():
    mean = LOC @ WEIGHTS
    expected = sklearn.metrics.root_mean_squared_error(Y, mean)
    assert metrics.root_mean_square_error(MIXTURE, Y) == pytest.approx(expected, rel=1e-6)
    means = np.einsum("npt,p->nt", LOCS, WEIGHTS)
    expected = np.sqrt(sklearn.metrics.mean_squared_error(YS, means))
    assert metrics.root_mean_square_error(EVENTS, YS) == pytest.approx(expected, rel=1e-6)


# The continuous ranked probability score


def test_crps_of_a_normal():
    loc, scale = LOC[:, 0], SCALE[:, 0]
    expected = scoringrules.crps_normal(Y, loc.astype(float), scale.astype(float)).mean()
    assert metrics.crps(dist.Normal(loc, scale), Y) == pytest.approx(expected, rel=1e-12)
    # 2φ(0) − 1/√π for the standard normal at its mean.
    at_the_mean = metrics.crps(dist.Normal(jnp.zeros(1), jnp.ones(1)), [0.0])
    assert at_the_mean == pytest.approx((np.sqrt(2) - 1) / np.sqrt(np.pi), rel=1e-12)


@pytest.mark.parametrize(
    "weights", [WEIGHTS, RNG.dirichlet(np.ones(PARTICLES), size=ROWS).astype(np.float32)]
)
def test_crps_of_a_mixture_of_normals(weights):
    law = mixture(dist.Normal(LOC, SCALE), weights)
    share = weights.astype(float) / weights.astype(float).sum(axis=-1, keepdims=True)
    every = np.broadcast_to(share, LOC.shape)
    expected = scoringrules.crps_mixnorm(Y, LOC.astype(float), SCALE.astype(float), every).mean()
    assert metrics.crps(law, Y) == pytest.approx(expected, rel=1e-7)


def test_crps_of_equal_particles_is_that_of_one():
    same = mixture(dist.Normal(np.repeat(LOC[:, :1], 7, axis=1), np.repeat(SCALE[:, :1], 7, axis=1)))
    assert metrics.crps(same, Y) == pytest.approx(
        metrics.crps(dist.Normal(LOC[:, 0], SCALE[:, 0]), Y), rel=1e-12
    )


def test_crps_of_narrow_particles_is_that_of_their_points():
    """Mean |xᵢ − y| − ½ mean |xᵢ − xⱼ|, as σ → 0."""
    points = LOC.astype(float)
    expected = np.mean(np.abs(points - Y[:, None])) - 0.5 * np.mean(
        np.abs(points[:, :, None] - points[:, None, :])
    )
    narrow = mixture(
        dist.Normal(LOC, jnp.full(LOC.shape, 1e-7)), np.full(PARTICLES, 1 / PARTICLES, np.float32)
    )
    assert metrics.crps(narrow, Y) == pytest.approx(expected, rel=1e-6)


def test_crps_of_several_targets_is_the_mean_over_their_marginals():
    expected = np.mean([metrics.crps(per_target(t), YS[:, t]) for t in range(TARGETS)])
    assert metrics.crps(EVENTS, YS) == pytest.approx(expected, rel=1e-12)
    independent = dist.Normal(LOCS[:, 0], SCALES[:, 0])
    expected = metrics.crps(independent, YS)
    assert metrics.crps(independent.to_event(1), YS) == pytest.approx(expected, rel=1e-12)


def test_crps_of_one_law_for_all_rows():
    expected = scoringrules.crps_normal(Y, 1.0, 2.0).mean()
    assert metrics.crps(dist.Normal(1.0, 2.0).expand((ROWS,)), Y) == pytest.approx(expected, rel=1e-12)


def test_crps_takes_memory_for_rows_times_particles_only():
    """All pairs of 20 particles at once would take 64 MB for one array of these rows."""
    law = mixture(dist.Normal(jnp.zeros((20_000, 20)), 1.0), np.full(20, 0.05, np.float32))
    targets = np.zeros(20_000)
    tracemalloc.start()
    metrics.crps(law, targets)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 3e6 < peak < 32e6


FAR = np.array([-30.0, -5.0, -1.0, -0.2, 0.0, 0.1, 0.7, 2.0, 8.0, 100.0, 1e4])
ONES = jnp.ones(len(FAR))
POSITIVE = np.abs(FAR) + 0.1
# name: (distribution, targets, the exact scores, the error allowed)
LAWS = {
    "Student 2.1": (
        dist.StudentT(2.1 * ONES, 0.5 * ONES, 2 * ONES),
        FAR,
        scoringrules.crps_t(FAR, 2.1, 0.5, 2),
        1e-7,
    ),
    "Student 4": (
        dist.StudentT(4 * ONES, 0.5 * ONES, 2 * ONES),
        FAR,
        scoringrules.crps_t(FAR, 4, 0.5, 2),
        1e-7,
    ),
    "Student 10⁶": (
        dist.StudentT(1e6 * ONES, 0 * ONES, ONES),
        FAR,
        scoringrules.crps_normal(FAR, 0, 1),
        2e-5,
    ),
    "Laplace": (dist.Laplace(0.5 * ONES, 2 * ONES), FAR, scoringrules.crps_laplace(FAR, 0.5, 2), 1e-6),
    "logistic": (dist.Logistic(0.5 * ONES, 2 * ONES), FAR, scoringrules.crps_logistic(FAR, 0.5, 2), 1e-6),
    "log-normal": (
        dist.LogNormal(0.2 * ONES, 0.5 * ONES),
        POSITIVE,
        scoringrules.crps_lognormal(POSITIVE, 0.2, 0.5),
        1e-6,
    ),
    "Gamma": (dist.Gamma(2 * ONES, ONES), POSITIVE, scoringrules.crps_gamma(POSITIVE, 2, rate=1), 1e-6),
    "exponential": (dist.Exponential(ONES), POSITIVE, scoringrules.crps_exponential(POSITIVE, 1), 1e-4),
    "uniform": (dist.Uniform(0 * ONES, ONES), FAR, scoringrules.crps_uniform(FAR, 0, 1), 1e-4),
}


@pytest.mark.parametrize("name", LAWS)
def test_crps_by_quadrature(name):
    law, targets, expected, tolerance = LAWS[name]
    np.testing.assert_allclose(ranked_probability.quadrature_crps(law, targets), expected, rtol=tolerance)
    assert metrics.crps(law, targets) == pytest.approx(expected.mean(), rel=tolerance)


def test_quadrature_on_mixtures_of_normals_and_targets_far_off():
    wide = mixture(dist.Normal(LOC, SCALE + 0.5))
    for targets in (Y, Y + 1e3, Y - 1e3):
        quadrature = ranked_probability.quadrature_crps(wide, targets).mean()
        assert quadrature == pytest.approx(metrics.crps(wide, targets), rel=1e-5)
    apart = mixture(dist.Normal(LOC, 0.01 * SCALE))
    assert ranked_probability.quadrature_crps(apart, Y).mean() == pytest.approx(
        metrics.crps(apart, Y), rel=5e-3
    )


def test_crps_of_a_mixture_of_students_with_several_targets():
    """E|X − y| − ½ E|X − X′| by Monte Carlo, target by target."""
    law = mixture(dist.StudentT(5.0, LOCS, SCALES).to_event(1))
    rng, row, target = np.random.default_rng(4), np.arange(ROWS)[:, None], np.arange(TARGETS)
    chosen = rng.choice(PARTICLES, p=WEIGHTS / WEIGHTS.sum(), size=(2, 4000, ROWS, 1))
    draws = LOCS[row, chosen, target] + SCALES[row, chosen, target] * rng.standard_t(
        5, (2, 4000, ROWS, TARGETS)
    )
    scores = np.abs(draws[0] - YS) - 0.5 * np.abs(draws[0] - draws[1])
    mean, error = monte_carlo(scores.mean(axis=(1, 2)))
    assert abs(metrics.crps(law, YS) - mean) < 4 * error
    assert error < 0.01 * mean


def test_predictive_mixtures_score_as_those_of_numpyro():
    """`predictive.Mixture` has quantiles, and mixes classes: other ways to the same numbers."""
    equal = np.full(PARTICLES, 1 / PARTICLES, np.float32)
    for components, targets in (
        (dist.Normal(LOC, SCALE), Y),
        (dist.StudentT(4.0, LOC, SCALE), Y),
        (dist.StudentT(4.0, LOCS, SCALES).to_event(1), YS),
    ):
        ours, theirs = Mixture(components), mixture(components, equal)
        for metric in (metrics.crps, metrics.negative_log_likelihood, metrics.quantile_calibration_error):
            assert metric(ours, targets) == pytest.approx(metric(theirs, targets), rel=1e-4)
    tables = softmax(RNG.normal(size=(ROWS, PARTICLES, 4)))
    classes = Mixture(dist.Categorical(probs=tables))
    expected = metrics.log_loss(tables.mean(axis=1), LABELS)
    assert metrics.negative_log_likelihood(classes, LABELS) == pytest.approx(expected, rel=1e-5)


# Intervals


def test_coverage_and_width_by_hand():
    low, high = [0.0, 0.0, 1.0, -1.0], [1.0, 2.0, 3.0, 0.0]
    assert metrics.coverage(low, high, [0.0, 2.5, 2.0, 0.0]) == 0.75, "ends belong to the interval"
    assert metrics.coverage(low, high, [-0.1, 2.1, 0.9, 0.1]) == 0.0
    assert metrics.width(low, high) == 1.5
    assert metrics.coverage([-np.inf], [np.inf], [3.0]) == 1.0


# Calibration of quantiles


def calibration_errors(scale, replications=400, n=200):
    """Of targets from N(μ, 1) that are predicted as N(μ, scale²)."""
    rng = np.random.default_rng(5)
    mean = jnp.asarray(rng.normal(size=n), jnp.float32)
    law = dist.Normal(mean, scale * jnp.ones(n))
    return [
        metrics.quantile_calibration_error(law, np.asarray(mean) + rng.normal(size=n))
        for _ in range(replications)
    ]


def test_calibration_by_hand():
    """Quantiles of U(0, 1) are the levels themselves."""
    law = dist.Uniform(jnp.zeros(4), jnp.ones(4))
    np.testing.assert_allclose(
        metrics.probability_integral_transform(law, [0.1, 0.3, 0.4, 0.8]), [0.1, 0.3, 0.4, 0.8]
    )
    assert metrics.quantile_calibration_error(law, [0.1, 0.3, 0.4, 0.8], levels=[0.35]) == pytest.approx(0.15)
    # Shares ¼, ¾ and 1 at levels 0.2, 0.5, 0.9.
    error = metrics.quantile_calibration_error(law, [0.1, 0.3, 0.4, 0.8], levels=[0.2, 0.5, 0.9])
    assert error == pytest.approx((0.05 + 0.25 + 0.1) / 3)


def test_transform_of_mixtures():
    expected = scipy.stats.norm.cdf(Y[:, None], LOC, SCALE) @ WEIGHTS
    np.testing.assert_allclose(metrics.probability_integral_transform(MIXTURE, Y), expected, atol=1e-6)
    expected = np.einsum("npt,p->nt", scipy.stats.norm.cdf(YS[:, None], LOCS, SCALES), WEIGHTS)
    np.testing.assert_allclose(metrics.probability_integral_transform(EVENTS, YS), expected, atol=1e-6)


def test_calibrated_predictions_err_as_chance_has_it():
    """Against the same statistic of uniform draws, which knows nothing of distributions; and the 0.32/√n that
    the documentation promises."""
    mean, error = monte_carlo(calibration_errors(1.0))
    levels = np.array(metrics.LEVELS)
    draws = np.random.default_rng(6).uniform(size=(2000, 200, 1))
    null = [np.mean(np.abs((u <= levels).mean(axis=0) - levels)) for u in draws]
    chance, chance_error = monte_carlo(null)
    assert abs(mean - chance) < 4 * np.hypot(error, chance_error)
    assert mean == pytest.approx(0.32 / np.sqrt(200), rel=0.05)
    for scale in (1.5, 1 / 1.5):
        caught = np.array(calibration_errors(scale, replications=50)) > np.quantile(null, 0.95)
        assert caught.mean() > 0.9


def test_shifted_predictions_are_caught():
    n, rng = 2000, np.random.default_rng(7)
    law = dist.Normal(jnp.zeros(n), jnp.ones(n))
    targets = rng.normal(size=n)
    assert metrics.quantile_calibration_error(law, targets) < 0.02
    # E|Φ(z_q − ½) − q| over the levels is 0.14.
    assert metrics.quantile_calibration_error(law, targets + 0.5) == pytest.approx(0.143, abs=0.02)


# Proper scores


@pytest.mark.parametrize("score", ["negative_log_likelihood", "crps"])
def test_proper_scores_prefer_the_true_law(score):
    """Differences of scores on the same targets, in standard errors over blocks of rows."""
    rng, blocks, n = np.random.default_rng(8), 20, 500
    loc = rng.choice([-1.0, 1.0], p=[0.3, 0.7], size=(blocks, n))
    targets = loc + 0.5 * rng.normal(size=(blocks, n))

    def law(shift=0.0, stretch=1.0, left=0.3):
        centres = np.broadcast_to(np.array([-1.0, 1.0], np.float32) + np.float32(shift), (n, 2))
        return mixture(
            dist.Normal(centres, np.float32(0.5 * stretch)), np.array([left, 1 - left], np.float32)
        )

    def scores(law):
        return np.array([getattr(metrics, score)(law, block) for block in targets])

    true = scores(law())
    for wrong in (law(shift=0.2), law(shift=-0.2), law(stretch=1.5), law(stretch=0.7), law(left=0.45)):
        mean, error = monte_carlo(scores(wrong) - true)
        assert mean > 5 * error


@pytest.mark.parametrize("score", ["log_loss", "brier_score"])
def test_proper_scores_of_classes_prefer_the_true_law(score):
    rng, blocks, n = np.random.default_rng(9), 20, 500
    logits = rng.normal(size=(n, 3))
    truth = softmax(logits)
    labels = [(rng.uniform(size=(n, 1)) > truth.cumsum(axis=1)).sum(axis=1) for _ in range(blocks)]

    def scores(probabilities):
        return np.array([getattr(metrics, score)(probabilities, each) for each in labels])

    true = scores(truth)
    for wrong in (softmax(1.7 * logits), softmax(0.5 * logits), softmax(logits + np.array([0.5, 0.0, 0.0]))):
        mean, error = monte_carlo(scores(wrong) - true)
        assert mean > 5 * error


# Classes


def test_scores_of_classes_against_scikit_learn():
    every = np.arange(4)
    expected = sklearn.metrics.log_loss(LABELS, PROBABILITIES, labels=every)
    assert metrics.log_loss(PROBABILITIES, LABELS) == pytest.approx(expected, rel=1e-6)
    expected = sklearn.metrics.accuracy_score(LABELS, PROBABILITIES.argmax(axis=1))
    assert metrics.accuracy(PROBABILITIES, LABELS) == expected
    assert 0 < expected < 1
    expected = sklearn.metrics.brier_score_loss(LABELS, PROBABILITIES, labels=every, scale_by_half=False)
    assert metrics.brier_score(PROBABILITIES, LABELS) == pytest.approx(expected, rel=1e-6)


CLASS_METRICS = [
    metrics.accuracy,
    metrics.log_loss,
    metrics.brier_score,
    metrics.expected_calibration_error,
]


@pytest.mark.parametrize("metric", CLASS_METRICS)
def test_labels_may_be_names(metric):
    """In the order of `classes_`, which is sorted; or in another, that `classes` says."""
    rng = np.random.default_rng(0)
    probabilities, numbers = rng.dirichlet(np.ones(3), 40), np.arange(40) % 3
    expected, names = metric(probabilities, numbers), np.array(["ant", "bee", "cat"])
    words = names[numbers]
    for labels in (words, words.tolist(), words.astype(object), pd.Series(words), pd.Categorical(words)):
        assert metric(probabilities, labels) == expected
        assert metric(probabilities, labels, classes=names) == expected
    mixed = metric(probabilities[:, ::-1], words, classes=names[::-1])
    assert mixed == pytest.approx(expected)
    # Some rows do not show every class.
    some = words != "bee"
    found = metric(probabilities[some], words[some], classes=names)
    assert found == metric(probabilities[some], numbers[some])
    # Numbers are names, too, if `classes` says so.
    assert metric(probabilities, numbers + 7, classes=[7, 8, 9]) == expected
    assert metric(probabilities, (numbers + 7).astype(float), classes=np.array([7, 8, 9])) == expected
    assert metric(probabilities, pd.Series(numbers, dtype="Int64")) == expected


@pytest.mark.parametrize("metric", CLASS_METRICS)
def test_names_1_to_k_that_are_taken_for_numbers_are_told(metric):
    """Where no row has the last class, names 1 to K are numbers of columns, of other classes."""
    names = np.array([1, 2] * 20)
    table = np.full((40, 3), 0.1)
    table[np.arange(40), names - 1] = 0.8
    with pytest.warns(UserWarning, match=r"none of them is 0; less 1, they would be more .* by 2\.1 nats"):
        metric(table, names)
    # Named they are right, and so are numbers; and a few rows without a 0, or of one class, are nothing odd.
    for labels, classes in ((names, [1, 2, 3]), (names - 1, None)):
        metric(table, labels, classes=classes)
    metric(table[:3], names[:3])
    metric(table[names == 2], names[names == 2] - 1)


def test_names_1_to_k_of_a_law_are_told():
    names = np.array([1, 2] * 20)
    table = np.full((40, 3), 0.1)
    table[np.arange(40), names - 1] = 0.8
    law = dist.CategoricalProbs(jnp.asarray(table))
    mixture = Mixture(dist.CategoricalProbs(jnp.asarray(table)[:, None]))
    for found in (law, mixture):
        with pytest.warns(UserWarning, match="labels are taken for numbers of columns, 0 to 2"):
            metrics.negative_log_likelihood(found, names)
        metrics.negative_log_likelihood(found, names - 1)
    with pytest.warns(UserWarning, match="labels are taken for numbers of columns, 0 to 2"):
        Conformal(mixture, names)


def test_scores_of_names_are_those_of_scikit_learn():
    rng = np.random.default_rng(1)
    probabilities, words = rng.dirichlet(np.ones(3), 30), np.array(["z", "a", "m"])[np.arange(30) % 3]
    expected = sklearn.metrics.log_loss(words, probabilities, labels=["a", "m", "z"])
    assert metrics.log_loss(probabilities, words) == pytest.approx(expected)


def test_binary_brier_score_is_twice_that_of_one_class():
    labels = LABELS % 2
    value = metrics.brier_score(BINARY, labels)
    assert value == pytest.approx(2 * sklearn.metrics.brier_score_loss(labels, BINARY[:, 1]), rel=1e-6)
    assert value == pytest.approx(2 * scoringrules.brier_score(labels, BINARY[:, 1]).mean(), rel=1e-6)
    assert metrics.brier_score([[0.0, 1.0]], [0]) == 2.0


def test_impossible_labels_cost_what_the_type_can_tell():
    single, double = np.array([[1, 0]], np.float32), np.array([[1, 0]], np.float64)
    assert metrics.log_loss(single, [1]) == pytest.approx(15.94, abs=0.01)
    assert metrics.log_loss(double, [1]) == pytest.approx(36.04, abs=0.01)
    expected = sklearn.metrics.log_loss([1], single, labels=[0, 1])
    assert metrics.log_loss(single, [1]) == pytest.approx(expected, rel=1e-5)
    assert metrics.log_loss(jnp.asarray(single, jnp.bfloat16), [1]) < 10


def test_expected_calibration_error_by_hand():
    """Two bins: (0, ½] holds 0.4 (right) and 0.5 (wrong), (½, 1] holds 0.7 (right) and 1 (wrong)."""
    probabilities = np.array([[0.4, 0.3, 0.3], [0.25, 0.5, 0.25], [0.1, 0.2, 0.7], [1.0, 0.0, 0.0]])
    labels = [0, 0, 2, 1]
    table = metrics.confidence_bins(probabilities, labels, bins=2)
    np.testing.assert_array_equal(table.counts, [2, 2])
    np.testing.assert_allclose(table.confidence, [0.45, 0.85])
    np.testing.assert_allclose(table.accuracy, [0.5, 0.5])
    assert metrics.expected_calibration_error(probabilities, labels, bins=2) == pytest.approx(
        (0.05 + 0.35) / 2
    )
    # Three bins: (⅓, ⅔] holds the first two, (⅔, 1] the others, the first none.
    table = metrics.confidence_bins(probabilities, labels, bins=3)
    np.testing.assert_array_equal(table.counts, [0, 2, 2])
    assert np.isnan(table.accuracy[0])
    assert metrics.expected_calibration_error(probabilities, labels, bins=3) == pytest.approx(
        (0.05 + 0.35) / 2
    )
    # One bin: |½ − 0.65|.
    assert metrics.expected_calibration_error(probabilities, labels, bins=1) == pytest.approx(0.15)


def test_expected_calibration_error_catches_overconfidence():
    rng, n = np.random.default_rng(10), 4000
    logits = 1.5 * rng.normal(size=(n, 3))
    truth = softmax(logits)
    labels = (rng.uniform(size=(n, 1)) > truth.cumsum(axis=1)).sum(axis=1)
    # What chance gives: the mean over bins of about √(2/π · a(1 − a)/n_b) is at most this.
    assert metrics.expected_calibration_error(truth, labels) < 0.4 * np.sqrt(15 / n)
    overconfident = softmax(3 * logits)
    gap = np.mean(overconfident.max(axis=1)) - metrics.accuracy(overconfident, labels)
    assert gap > 0.1
    assert metrics.expected_calibration_error(overconfident, labels) == pytest.approx(gap, rel=0.05)


# Outside the training distribution


def test_auroc_against_scikit_learn():
    rng = np.random.default_rng(11)
    # Rounded, so that there are ties.
    inside, outside = np.round(rng.normal(size=80), 1), np.round(0.7 + rng.normal(size=50), 1)
    expected = sklearn.metrics.roc_auc_score(np.repeat([0, 1], [80, 50]), np.concatenate([inside, outside]))
    assert metrics.auroc(inside, outside) == pytest.approx(expected, rel=1e-12)
    assert metrics.auroc(outside, inside) == pytest.approx(1 - expected, rel=1e-12)
    assert metrics.auroc([0.0, 1.0], [2.0]) == 1.0
    assert metrics.auroc([1.0, 1.0], [1.0]) == 0.5


# What a user may get wrong

NORMAL = dist.Normal(jnp.zeros(3), jnp.ones(3))
THREE = np.zeros(3)
ROW = [[0.5, 0.5]]
NAN = (jnp.zeros(2), jnp.array([1.0, jnp.nan]))
BROKEN = dist.Normal(*NAN, validate_args=False)
# name: (what is done, the type of the error, the pieces of its message)
MISTAKES = {
    "column of targets": (
        lambda: metrics.negative_log_likelihood(NORMAL, THREE[:, None]),
        ValueError,
        ["targets", "(3, 1)", "(3,)", "targets[..., 0]"],
    ),
    "too few targets": (
        lambda: metrics.crps(NORMAL, THREE[:2]),
        ValueError,
        ["targets", "(2,)", "(3,)", "one target"],
    ),
    "no rows": (lambda: metrics.crps(NORMAL, []), ValueError, ["targets", "(0,)"]),
    "one law": (
        lambda: metrics.crps(dist.Normal(0.0, 1.0), THREE),
        ValueError,
        ["targets", "()", "distribution.expand((3,))"],
    ),
    "nan target": (
        lambda: metrics.root_mean_square_error(NORMAL, [0.0, np.nan, 1.0]),
        ValueError,
        ["targets", "nan", "row 1", "drop"],
    ),
    "inf target": (lambda: metrics.crps(NORMAL, [0.0, 1.0, np.inf]), ValueError, ["targets", "inf", "row 2"]),
    "text targets": (lambda: metrics.crps(NORMAL, ["a", "b", "c"]), TypeError, ["targets", "numbers"]),
    "ragged targets": (lambda: metrics.crps(NORMAL, [[1.0], [1.0, 2.0]]), ValueError, ["targets", "lengths"]),
    "not a distribution": (
        lambda: metrics.crps(THREE, THREE),
        TypeError,
        ["distribution", "ndarray", "predict_dist"],
    ),
    "nan parameters": (
        lambda: metrics.negative_log_likelihood(BROKEN, THREE[:2]),
        ValueError,
        ["log_prob", "NaN", "row 1", "scales"],
    ),
    "nan parameters of crps": (
        lambda: metrics.crps(BROKEN, THREE[:2]),
        ValueError,
        ["NaN", "row 1"],
    ),
    "nan parameters of quadrature": (
        lambda: metrics.crps(dist.Laplace(*NAN, validate_args=False), THREE[:2]),
        ValueError,
        ["Laplace", "NaN"],
    ),
    "label of no class": (
        lambda: metrics.negative_log_likelihood(dist.Categorical(probs=jnp.ones((2, 3)) / 3), [0, 3]),
        ValueError,
        ["targets", "got 3", "row 1", "support", "labels"],
    ),
    "negative waiting time": (
        lambda: metrics.negative_log_likelihood(dist.Exponential(jnp.ones(2)), [1.0, -1.0]),
        ValueError,
        ["targets", "-1.0", "row 1", "likelihood"],
    ),
    "negative log-normal": (
        lambda: metrics.quantile_calibration_error(dist.LogNormal(jnp.zeros(2), jnp.ones(2)), [1.0, -1.0]),
        ValueError,
        ["cdf", "row 1", "support"],
    ),
    "label of no class of a mixture": (
        lambda: metrics.negative_log_likelihood(
            Mixture(dist.Categorical(probs=jnp.ones((2, 5, 3)) / 3)), [3, 0]
        ),
        ValueError,
        ["targets", "got 3", "row 0", "labels"],
    ),
    "mean of classes": (
        lambda: metrics.root_mean_square_error(
            Mixture(dist.Categorical(probs=jnp.ones((2, 5, 3)) / 3)), [1, 0]
        ),
        TypeError,
        ["Mixture", "mean", "accuracy for classes"],
    ),
    "crps of classes": (
        lambda: metrics.crps(dist.Categorical(probs=jnp.ones((2, 3)) / 3), [0, 1]),
        TypeError,
        ["continuous", "Categorical", "brier_score"],
    ),
    "infinite variance": (
        lambda: metrics.crps(dist.StudentT(1.5 * jnp.ones(3)), THREE),
        ValueError,
        ["StudentT", "finite", "2 degrees of freedom"],
    ),
    "no cdf": (
        lambda: metrics.quantile_calibration_error(dist.VonMises(jnp.zeros(3), jnp.ones(3)), THREE),
        TypeError,
        ["cdf", "VonMises", "negative_log_likelihood"],
    ),
    "no mean": (
        lambda: metrics.root_mean_square_error(
            dist.TransformedDistribution(NORMAL, dist.transforms.AffineTransform(0.0, 2.0)), THREE
        ),
        TypeError,
        ["TransformedDistribution", "mean", "negative_log_likelihood"],
    ),
    "neither quantiles nor mean": (
        lambda: metrics.crps(
            dist.TransformedDistribution(dist.Gamma(jnp.ones(3)), dist.transforms.ExpTransform()), [2, 3, 4]
        ),
        TypeError,
        ["crps", "TransformedDistribution", "mean and variance", "Normal, StudentT"],
    ),
    "level 1": (
        lambda: metrics.quantile_calibration_error(NORMAL, THREE, levels=[0.5, 1.0]),
        ValueError,
        ["levels", "1.", "between 0 and 1"],
    ),
    "level 0": (
        lambda: metrics.quantile_calibration_error(NORMAL, THREE, levels=[0.0]),
        ValueError,
        ["levels", "0."],
    ),
    "one level": (
        lambda: metrics.quantile_calibration_error(NORMAL, THREE, levels=0.5),
        ValueError,
        ["levels"],
    ),
    "swapped interval": (
        lambda: metrics.coverage(THREE + 1, THREE, THREE),
        ValueError,
        ["low", "1.0", "0.0", "row 0", "swap"],
    ),
    "nan interval": (lambda: metrics.width([0.0], [np.nan]), ValueError, ["high", "nan", "row 0"]),
    "short interval": (lambda: metrics.width(THREE, THREE[:2]), ValueError, ["high", "(2,)", "(3,)"]),
    "column in interval": (
        lambda: metrics.coverage(THREE, THREE, THREE[:, None]),
        ValueError,
        ["targets", "(3, 1)", "[..., 0]"],
    ),
    "binary probabilities": (
        lambda: metrics.accuracy([0.2, 0.8], [0, 1]),
        ValueError,
        ["probabilities", "(2,)", "np.stack([1 - p, p], axis=1)"],
    ),
    "logits": (
        lambda: metrics.log_loss([[0.5, 0.5], [2.0, -1.0]], [0, 1]),
        ValueError,
        ["probabilities", "-1", "row 1", "softmax"],
    ),
    "sum 1.1": (
        lambda: metrics.brier_score([[0.5, 0.6]], [0]),
        ValueError,
        ["probabilities", "0.6", "sum to 1"],
    ),
    "nan probability": (
        lambda: metrics.accuracy([[np.nan, 1.0]], [0]),
        ValueError,
        ["probabilities", "nan", "row 0"],
    ),
    "label 2 of 2": (
        lambda: metrics.expected_calibration_error(ROW, [2]),
        ValueError,
        ["labels", "got 2", "row 0", "0 to 1"],
    ),
    "names of some classes": (
        lambda: metrics.accuracy(np.full((2, 3), 1 / 3), ["a", "b"]),
        ValueError,
        ["labels name 2 classes", "'a' 'b'", "3 columns", "classes=model.classes_"],
    ),
    "a name that there is not": (
        lambda: metrics.log_loss(ROW, ["c"], classes=["a", "b"]),
        ValueError,
        ["labels", "['a', 'b']", "'c' in row 0"],
    ),
    "too many names": (
        lambda: metrics.brier_score(ROW, ["a"], classes=["a", "b", "c"]),
        ValueError,
        ["classes", "2 columns", "['a', 'b', 'c']"],
    ),
    "a name twice": (
        lambda: metrics.brier_score(ROW, ["a"], classes=["a", "a"]),
        ValueError,
        ["classes", "once", "['a', 'a']"],
    ),
    "text and numbers": (
        lambda: metrics.accuracy(np.full((2, 2), 0.5), np.array(["a", 1], object)),
        TypeError,
        ["labels", "object"],
    ),
    "likelihood of names": (
        lambda: metrics.negative_log_likelihood(dist.Categorical(probs=jnp.ones((2, 2)) / 2), ["a", "b"]),
        TypeError,
        ["targets", "<U1", "searchsorted", "log_loss"],
    ),
    "targets beyond 32 bits": (
        lambda: metrics.negative_log_likelihood(dist.Poisson(jnp.ones(2)), np.array([1, 2**33])),
        ValueError,
        ["targets", "8589934592", "int32"],
    ),
    "label -1": (lambda: metrics.brier_score(ROW, [-1]), ValueError, ["labels", "got -1", "0 to 1"]),
    "float labels": (lambda: metrics.accuracy(ROW, [1.0]), TypeError, ["labels", "integers", "float64"]),
    "one-hot labels": (lambda: metrics.accuracy(ROW, [[0, 1]]), ValueError, ["labels", "(1, 2)", "(1,)"]),
    "no bins": (lambda: metrics.expected_calibration_error(ROW, [0], bins=0), ValueError, ["bins", "got 0"]),
    "half a bin": (
        lambda: metrics.expected_calibration_error(ROW, [0], bins=0.5),
        TypeError,
        ["bins", "0.5"],
    ),
    "nan score": (lambda: metrics.auroc([0.0, np.nan], [1.0]), ValueError, ["scores_in", "nan", "row 1"]),
    "no score": (lambda: metrics.auroc([0.0], []), ValueError, ["scores_out", "(0,)"]),
    "matrix of scores": (
        lambda: metrics.auroc([0.0], [[1.0]]),
        ValueError,
        ["scores_out", "(1, 1)", "vector"],
    ),
}


@pytest.fixture
def as_a_user_runs_it():
    """No type checker: nothing but our messages stands in the way."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.usefixtures("as_a_user_runs_it")
@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(name):
    mistake, kind, pieces = MISTAKES[name]
    with pytest.raises(kind) as caught:
        mistake()
    message = str(caught.value)
    assert all(piece in message for piece in pieces), message


def test_promised_names():
    assert all(callable(getattr(metrics, name)) for name in metrics.__all__ if name != "LEVELS")
