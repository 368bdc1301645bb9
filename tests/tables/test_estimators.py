"""scikit-learn's rules, awkward tables, and that predictions are those of the particles."""

import pickle
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
import scipy.special
import scipy.stats
from helpers import assert_close, assert_within, monte_carlo
from quick import quickly_compiled  # noqa: F401
from sklearn.base import clone
from sklearn.datasets import load_diabetes
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, KFold, StratifiedKFold, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from measureflow.prediction import metrics
from measureflow.runs.solution import DivergenceError
from measureflow.saving.documents import load
from measureflow.tables import crossvalidation, training, trials
from measureflow.tables.choosing import FACTORS, POWERS
from measureflow.tables.classifier import EnsembleClassifier
from measureflow.tables.crossvalidation import cross_validate
from measureflow.tables.methods import METHODS, WITHOUT_ENTROPY
from measureflow.tables.recipe import steps_for
from measureflow.tables.regressor import EnsembleRegressor
from measureflow.tables.stopping import PATIENCE

pytestmark = [
    # NumPyro and Optax promote integers and ranks.
    pytest.mark.standard_promotion,
    # Fits are short here; test_fitting.py looks at convergence.
    pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning"),
]

# Linear models without noise compile fastest, and the rules do not look at the method.
SHELL = {
    "method": "DE",
    "hidden": (),
    "encoding": 0,
    "particles": 3,
    "steps": 1_000,
    "step_size": 0.05,
    "prior_weight": 1.0,
}
# Programs are shared by all tests whose tables have the same shape: (40, 3) where nothing else is said.
QUICK = {
    "hidden": (8,),
    "encoding": 0,
    "particles": 4,
    "steps": 2_000,
    "step_size": 0.05,
    "prior_weight": 1.0,
    "random_state": 0,
}
NO_BITS = dict.fromkeys(
    (
        "check_sample_weight_equivalence_on_dense_data",
        "check_sample_weight_equivalence_on_sparse_data",
    ),
    "batches and single precision: weights and repeated rows are equal in law, not to the bit; "
    "test_a_row_of_weight_k_is_k_rows is in its place.",
)


def rules_for(estimator, of_classes=False):
    """scikit-learn's checks, of which those that may fail are slow tests. So are, for the classifier, all
    that are not about classes: they ask about what is in the base class of both estimators."""
    every = parametrize_with_checks([estimator], expected_failed_checks=lambda _: NO_BITS)
    names, checks = every.args
    marked = []
    for one in checks:
        values, marks = (one.values, list(one.marks)) if hasattr(one, "marks") else (one, [])
        check = getattr(values[1], "func", values[1])
        later = check.__name__ in NO_BITS or (of_classes and "class" not in check.__name__)
        slow = [pytest.mark.slow] if later else []
        marked.append(pytest.param(*values, marks=[*marks, *slow]))
    return pytest.mark.parametrize(names, marked, **every.kwargs)


@pytest.mark.xdist_group("regressor's checks")
@rules_for(EnsembleRegressor(**SHELL, likelihood="heteroscedastic"))
def test_the_regressor_keeps_to_the_rules(estimator, check):
    check(estimator)


@pytest.mark.xdist_group("classifier's checks")
@rules_for(EnsembleClassifier(**SHELL), of_classes=True)
def test_the_classifier_keeps_to_the_rules(estimator, check):
    check(estimator)


def table(rows=40, columns=3, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(rows, columns))
    return X, np.sin(2 * X[:, 0]) + X[:, -1] + 0.1 * rng.normal(size=rows)


X, Y = table()
TEST_X, TEST_Y = table(300, seed=1)


def regressor(**settings):
    return EnsembleRegressor(**({"likelihood": "heteroscedastic"} | QUICK | settings))


def shell(**settings):
    return EnsembleRegressor(**({"likelihood": "heteroscedastic"} | SHELL | {"random_state": 1} | settings))


@pytest.fixture(scope="module")
def fitted():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return regressor().fit(X, Y)


# What is predicted


def standardised(estimator, X):
    return jnp.asarray((X - estimator.input_mean_) / estimator.input_scale_, jnp.float32)


def outputs(estimator, X):
    """(particle, row, output), by hand."""
    apply = jax.vmap(estimator.network_.apply, (0, None))
    return np.asarray(apply(estimator.particles_, standardised(estimator, X)), np.float64)


def softplus(x):
    return np.logaddexp(x, 0.0)


def test_predictions_are_those_of_the_particles(fitted):
    of_particles = outputs(fitted, TEST_X)
    mean = of_particles[..., 0].mean(axis=0)
    variance = (softplus(of_particles[..., 1]) + 1e-3) ** 2
    deviation = np.sqrt(variance.mean(axis=0) + of_particles[..., 0].var(axis=0))
    found = fitted.predict(TEST_X, return_std=True)
    assert found[0].dtype == found[1].dtype == np.float64
    assert_close(found[0], Y.mean() + Y.std() * mean, 1e-5)
    assert_close(found[1], Y.std() * fitted.spread_ * deviation, 1e-5)
    assert_close(fitted.predict(TEST_X), found[0], 1e-12)
    law = fitted.predict_dist(TEST_X)
    assert law.batch_shape == (300,)
    assert law.mixture_size == QUICK["particles"]
    assert_close(law.mean, found[0], 1e-5)
    assert_close(np.sqrt(law.variance), found[1], 1e-5)


def test_intervals_hold_their_mass(fitted):
    law = fitted.predict_dist(TEST_X)
    for coverage in (0.5, 0.9):
        low, high = fitted.predict_interval(TEST_X, coverage)
        assert_close(law.cdf(low), np.full(300, (1 - coverage) / 2), 1e-3)
        assert_close(law.cdf(high), np.full(300, (1 + coverage) / 2), 1e-3)
    for coverage in (0.0, 1.0, 90.0):
        with pytest.raises(ValueError, match="coverage must be between 0 and 1"):
            fitted.predict_interval(X, coverage)


def test_the_spread_widens_about_the_middle(fitted):
    """m + 2(Y − m), m half-way between the quantiles ½ ± π/100."""
    wider = pickle.loads(pickle.dumps(fitted))
    wider.spread_ = 2 * fitted.spread_
    mean, deviation = fitted.predict(TEST_X, return_std=True)
    middle = fitted.predict_dist(TEST_X).quantile([0.5 - np.pi / 100, 0.5 + np.pi / 100]).mean(axis=0)
    assert_close(wider.predict(TEST_X), middle + 2 * (mean - middle), 1e-4)
    assert_close(wider.predict(TEST_X, return_std=True)[1], 2 * deviation, 1e-5)
    low, high = fitted.predict_interval(TEST_X)
    wide_low, wide_high = wider.predict_interval(TEST_X)
    assert_close(wide_high - wide_low, 2 * (high - low), 1e-4)


def test_an_ensemble_of_one_is_its_member():
    alone = shell(method="DRLE", particles=1).fit(X, Y)
    (member,) = outputs(alone, TEST_X)
    mean, deviation = alone.predict(TEST_X, return_std=True)
    assert_close(mean, Y.mean() + Y.std() * member[:, 0], 1e-6)
    assert_close(deviation, Y.std() * alone.spread_ * (softplus(member[:, 1]) + 1e-3), 1e-6)
    assert np.all(np.asarray(alone.predict_dist(TEST_X).epistemic_variance) == 0)


def test_the_order_of_particles_does_not_matter(fitted):
    turned = pickle.loads(pickle.dumps(fitted))
    turned.particles_ = jax.tree.map(lambda leaf: leaf[[2, 0, 3, 1]], fitted.particles_)
    for mine, other in zip(
        turned.predict(X, return_std=True), fitted.predict(X, return_std=True), strict=True
    ):
        assert_close(mine, other, 1e-6)


def test_what_is_predicted_for_a_row_does_not_depend_on_the_others(fitted):
    whole = fitted.predict(TEST_X)
    assert np.all(np.concatenate([fitted.predict(TEST_X[:1]), fitted.predict(TEST_X[1:])]) == whole)


@pytest.mark.few(3)
# PrO's members specialise, and forty rows are too few for that: test_methods.py has it. test_posterior.py has
# draws of the posterior.
@pytest.mark.parametrize("method", [name for name in METHODS if name not in ("PrO", "posterior")])
def test_methods_learn(method):
    # Of forty rows, four networks know too little of their noise.
    rows, targets = table(100)
    estimator = regressor(method=method).fit(rows, targets)
    assert estimator.score(TEST_X, TEST_Y) > 0.5
    law = estimator.predict_dist(TEST_X)
    if method not in ("DE", "DRE"):
        # Without an entropy, rows are learned by heart, their noise too.
        constant = -np.mean(scipy.stats.norm.logpdf(TEST_Y, targets.mean(), targets.std()))
        assert metrics.negative_log_likelihood(law, TEST_Y) < constant - 0.5
    assert jax.tree.leaves(estimator.particles_)[0].shape[0] == QUICK["particles"]
    assert np.all(np.asarray(law.epistemic_variance) > 0)
    again = estimator.set_params(warm_start=True).fit(rows, targets)
    assert again.score(TEST_X, TEST_Y) > 0.5, "it can go on"


def test_the_prior_weight_and_the_spread_are_chosen_where_there_are_rows():
    many = np.random.default_rng(0).normal(size=(60, 2))
    noise = 0.3 * np.random.default_rng(1).normal(size=60)
    estimator = shell(prior_weight=None).fit(many, many[:, 0] + noise)
    candidates = [tuple(candidate) for candidate in WITHOUT_ENTROPY if candidate.prior_weight == 1]
    tried = estimator.validation_scores_
    assert list(zip(tried["prior_weight"], tried["share_of_steps"], strict=True)) == candidates
    chosen = (estimator.prior_weight_, estimator.n_iter_ / SHELL["steps"])
    assert chosen in candidates
    assert estimator.members_["prior_weight"].tolist() == [1.0] * SHELL["particles"]
    assert tried["share"].max() == 1.0, "three networks are one part"
    assert estimator.spread_ in FACTORS
    assert estimator.spread_power_ in POWERS
    best = max(tried["log_density"])
    assert tried["log_density"][candidates.index(chosen)] > best - 0.5
    # A Gaussian that knew the noise would reach −½ log 2πe + log(deviation of y/0.3).
    assert best > -1.419 + np.log(1 / 0.3) - 0.6


# Sample weights


def pair_of_targets():
    """At every x the targets 1 and −1, of which one weighs three times as much as the other."""
    x = np.repeat(np.linspace(-1, 1, 12), 2)[:, None]
    y = np.tile([1.0, -1.0], 12)
    return x, y, np.tile([3, 1], 12)


def replicated(rows, weights):
    """Predictive means and deviations at a few points, of 16 independent fits, in one program."""
    x, y, _ = pair_of_targets()
    settings = {"method": "DLE", "likelihood": "homoscedastic", "prior_weight": 0.1, "particles": 10}
    fits = [shell(**settings, batch_size=8) for _ in range(16)]
    tables = [one._prepare(x[rows], y[rows], weights) for one in fits]
    fits[0]._learn(fits, tables)
    points = np.linspace(-1, 1, 5)[:, None]
    predictions = [np.concatenate(one.predict(points, return_std=True)) for one in fits]
    return fits[0], *monte_carlo(predictions)


def test_a_row_of_weight_k_is_k_rows():
    _, _, weights = pair_of_targets()
    rows = np.arange(24)
    weighted, mean, error = replicated(rows, weights)
    repeated, other, other_error = replicated(np.repeat(rows, weights), None)
    _, wrong, _ = replicated(rows, None)
    assert weighted.target_mean_ == pytest.approx(0.5)
    assert weighted.target_mean_ == pytest.approx(repeated.target_mean_)
    assert weighted.target_scale_ == pytest.approx(repeated.target_scale_)
    assert weighted.input_scale_ == pytest.approx(repeated.input_scale_)
    both = np.hypot(error, other_error)
    assert_within(mean, other, both)
    assert np.all(both < 0.05)
    # What a fit that forgets the weights would say, is far away.
    assert np.all(np.abs(wrong[:5] - other[:5]) > 7 * both[:5])


def test_cases_are_the_sum_of_the_weights():
    x, y, weights = pair_of_targets()
    prepared = shell()._prepare(x, y, weights).table
    assert prepared.cases == 48
    assert_close(prepared.weights, weights / 2, 1e-7)
    assert shell()._prepare(x, y, 1e-30 * weights).table.cases == pytest.approx(48e-30)


def test_rows_of_weight_zero_are_not_there():
    inside = np.arange(40) < 33
    everything = shell().fit(X, Y, sample_weight=inside.astype(int))
    some = shell().fit(X[inside], Y[inside])
    assert np.all(everything.predict(TEST_X) == some.predict(TEST_X))
    with pytest.raises(ValueError, match=r"zero for every row|at least one non-zero"):
        shell().fit(X, Y, sample_weight=np.zeros(40))
    with pytest.raises(ValueError, match="Negative"):
        shell().fit(X, Y, sample_weight=-np.ones(40))


# Awkward tables


@pytest.mark.parametrize(("slope", "shift"), [(1e8, 1e9), (1e-8, 1e-5), (-3.0, 70.0)])
def test_units_of_the_targets_do_not_matter(slope, shift):
    plain, other = shell().fit(X, Y), shell().fit(X, slope * Y + shift)
    mean, deviation = plain.predict(TEST_X, return_std=True)
    if slope < 0:
        # The mirror image is another problem, with the same answer where it is unique.
        assert_close(other.predict(TEST_X), slope * mean + shift, 0.05)
        return
    found = other.predict(TEST_X, return_std=True)
    assert_close((found[0] - shift) / slope, mean, 1e-6)
    assert_close(found[1] / slope, deviation, 1e-6)
    low, high = plain.predict_interval(TEST_X)
    found = other.predict_interval(TEST_X)
    assert_close((found[0] - shift) / slope, low, 1e-6)
    assert_close((found[1] - shift) / slope, high, 1e-6)


def test_large_targets_keep_their_digits():
    """Seconds since 1970, give or take a minute: single precision counts them in steps of 128."""
    seconds = 1.7e9 + 60 * Y
    found = shell().fit(X, seconds)
    assert_close(found.predict(TEST_X) - 1.7e9, 60 * shell().fit(X, Y).predict(TEST_X), 0.01)


@pytest.mark.parametrize("scale", [1e8, 1e-8])
def test_units_of_the_inputs_do_not_matter(scale):
    units = np.array([scale, 1.0, -1 / scale])
    signs = np.sign(units)
    plain, other = shell().fit(signs * X, Y), shell().fit(units * (X + 5), Y)
    assert_close(other.predict(units * (TEST_X + 5)), plain.predict(signs * TEST_X), 1e-5)


def test_kinds_of_numbers_do_not_matter():
    whole_x, whole_y = np.round(10 * X), np.round(10 * Y)
    expected = shell().fit(whole_x, whole_y).predict(whole_x)
    kinds = [(np.int64, np.int32), (np.float32, np.float32), (np.int16, object)]
    for kind, of_targets in kinds:
        found = shell().fit(whole_x.astype(kind), whole_y.astype(of_targets)).predict(whole_x.astype(kind))
        assert np.all(found == expected)
    assert np.all(shell().fit(whole_x.tolist(), whole_y.tolist()).predict(whole_x.tolist()) == expected)


def test_a_constant_column_says_nothing():
    def fit(constant):
        inputs = X.copy()
        inputs[:, 1] = constant
        return shell().fit(inputs, Y), inputs

    (one, inputs), (other, others) = fit(0.1), fit(-3e7)
    assert np.all(one.predict(inputs) == other.predict(others))
    assert np.all(np.isfinite(one.predict(TEST_X)))


def test_a_constant_target_is_learned():
    estimator = shell(steps=4_000).fit(X, np.full(40, 7.0))
    mean, deviation = estimator.predict(TEST_X, return_std=True)
    assert np.max(np.abs(mean - 7)) < 0.5
    assert np.max(deviation) < 0.5
    low, high = estimator.predict_interval(X)
    assert np.mean((low <= 7) & (high >= 7)) > 0.9


@pytest.mark.parametrize("rows", [1, 2])
def test_few_rows(rows):
    estimator = shell().fit(X[:rows], Y[:rows])
    mean, deviation = estimator.predict(TEST_X, return_std=True)
    assert np.all(np.isfinite(mean) & np.isfinite(deviation) & (deviation > 0))
    assert np.max(np.abs(estimator.predict(X[:rows]) - Y[:rows])) < 0.5


@pytest.mark.slow
def test_many_columns():
    rng = np.random.default_rng(0)
    wide = rng.normal(size=(20, 10_000))
    estimator = shell(hidden=(4,), steps=None, method="DLE").fit(wide, wide[:, 0])
    assert estimator.n_iter_ == steps_for(20, 10_000 * 4 + 4 + 4 * 2 + 2, classes=False)
    assert estimator.score(wide, wide[:, 0]) > 0.1
    # One column of 10,000 cannot be found in 20 rows: elsewhere three draws from about the prior predict, and
    # their mean has a variance of about 1.
    new = rng.normal(size=(200, 10_000))
    error = np.sqrt(np.mean((estimator.predict(new) - new[:, 0]) ** 2))
    assert error < 1.6 * np.std(new[:, 0])


def test_far_away_inputs_give_finite_predictions(fitted):
    with np.errstate(all="raise"):
        mean, deviation = fitted.predict(np.full((1, 3), 1e30), return_std=True)
    assert np.all(np.isfinite(mean) & np.isfinite(deviation))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_a_number_raises(fitted, bad):
    wrong_x, wrong_y = X.copy(), Y.copy()
    wrong_x[3, 1] = wrong_y[5] = bad
    for attempt in (
        lambda: shell().fit(wrong_x, Y),
        lambda: shell().fit(X, wrong_y),
        lambda: fitted.predict(wrong_x),
        lambda: fitted.predict_interval(wrong_x),
        lambda: fitted.predict_dist(wrong_x),
    ):
        with pytest.raises(ValueError, match=r"NaN|infinity"):
            attempt()


def test_data_frames(fitted):
    frame, target = pd.DataFrame(X, columns=["a", "b", "c"]), pd.Series(Y, name="y")
    estimator = regressor().fit(frame, target)
    assert estimator.feature_names_in_.tolist() == ["a", "b", "c"]
    assert np.all(estimator.predict(frame) == fitted.predict(X))
    with pytest.raises(ValueError, match="feature names should match"):
        estimator.predict(frame[["b", "a", "c"]])
    with pytest.raises(ValueError, match="feature names should match"):
        estimator.predict(frame.rename(columns={"a": "z"}))
    with pytest.warns(UserWarning, match="does not have valid feature names"):
        estimator.predict(X)


# Targets


def test_several_targets():
    two = np.column_stack([Y, 100 - 50 * X[:, 0]])
    estimator = shell().fit(X, two)
    mean, deviation = estimator.predict(TEST_X, return_std=True)
    low, high = estimator.predict_interval(TEST_X)
    assert mean.shape == deviation.shape == low.shape == high.shape == (300, 2)
    law = estimator.predict_dist(TEST_X)
    assert law.batch_shape == (300,)
    assert law.event_shape == (2,)
    assert_close(law.mean, mean, 1e-5)
    assert law.log_prob(np.column_stack([TEST_Y, TEST_Y]).astype(np.float32)).shape == (300,)
    assert np.all((low < mean) & (mean < high))
    of_particles = outputs(estimator, TEST_X)
    assert_close(mean, two.mean(axis=0) + two.std(axis=0) * of_particles[..., :2].mean(axis=0), 1e-5)
    assert estimator.score(X, two) > 0.5


def test_one_column_in_one_column_out():
    column, flat = shell().fit(X, Y[:, None]), shell().fit(X, Y)
    assert column.predict(X).shape == (40, 1)
    assert all(part.shape == (40, 1) for part in column.predict(X, return_std=True))
    assert all(part.shape == (40, 1) for part in column.predict_interval(X))
    assert column.predict_dist(X).event_shape == ()
    assert np.all(column.predict(X)[:, 0] == flat.predict(X))


def test_homoscedastic_noise_is_the_same_everywhere():
    """Also of several targets, each of which has its own."""
    two = np.column_stack([Y, X[:, 0] + 1])
    estimator = shell(likelihood="homoscedastic").fit(X, two)
    noise = np.asarray(estimator.predict_dist(TEST_X).aleatoric_variance)
    assert_close(noise, np.tile(noise[0], (300, 1)), 1e-5)
    assert noise[0, 0] > 4 * noise[0, 1], "the second target is the line that the network can be"
    assert estimator.score(X, two) > 0.5


def test_heteroscedastic_noise_depends_on_the_input():
    x = np.tile(np.linspace(-1, 1, 20), 2)[:, None]
    y = np.repeat([1.0, -1.0], 20) * np.exp(x[:, 0])
    estimator = shell(steps=4_000).fit(x, y)
    _, deviation = estimator.predict(np.array([[-0.9], [0.9]]), return_std=True)
    assert deviation[1] > 2 * deviation[0]


def test_student_tails_resist_outliers():
    x = np.linspace(-1, 1, 40)[:, None]
    y = x[:, 0] + 0.01 * np.sin(99 * x[:, 0])
    y[::10] += 10.0
    line = np.linspace(-1, 1, 9)[:, None]
    errors = {
        likelihood: np.abs(shell(likelihood=likelihood, steps=4_000).fit(x, y).predict(line) - line[:, 0])
        for likelihood in ("student_t", "homoscedastic")
    }
    assert np.max(errors["student_t"]) < 0.3
    assert np.mean(errors["homoscedastic"]) > 0.8


@pytest.mark.few(1)
@pytest.mark.parametrize("likelihood", ["poisson", "negative_binomial"])
def test_counts(likelihood):
    group = np.repeat([0.0, 1.0], 20)
    y = np.random.default_rng(0).poisson(np.where(group == 1, 200.0, 20.0))
    estimator = shell(likelihood=likelihood).fit(group[:, None], y)
    mean, deviation = estimator.predict([[0.0], [1.0]], return_std=True)
    truth = np.array([y[:20].mean(), y[20:].mean()])
    assert_close(mean / truth, np.ones(2), 0.05)
    assert np.all(deviation > 0.9 * np.sqrt(truth))
    low, high = estimator.predict_interval([[0.0], [1.0]])
    assert np.all((low == np.round(low)) & (low < mean) & (mean < high))
    assert estimator.predict_dist([[0.0]]).is_discrete
    before_learning = estimator.likelihood_(jnp.zeros((1, 1 if likelihood == "poisson" else 2)))
    assert_close(before_learning.mean, [y.mean()], 1e-5)
    for wrong in (-1, 0.5):
        with pytest.raises(ValueError, match=f"must hold counts .* got {wrong}"):
            shell(likelihood=likelihood).fit([[0.0], [1.0]], [1, wrong])


def test_a_mean_that_is_infinite_is_told():
    estimator = shell(likelihood="log_normal").fit(X, np.exp(Y))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        estimator.predict(X)
    # Of a law so wide, the exponential of the squared width is no number.
    estimator.spread_ = 1e3
    with pytest.warns(UserWarning, match="the mean of 3 rows is infinite, of row 0 first.*predict_interval"):
        assert np.isinf(estimator.predict(X[:3])).all()


@pytest.mark.parametrize("likelihood", ["log_normal", "log_mixture"])
def test_far_away_a_law_of_log_y_stays_near_the_targets(likelihood):
    """A Normal of little weight far above all targets would make the mean: no row's was then believable."""
    y = np.exp(2 * Y)
    estimator = shell(likelihood=likelihood).fit(X, y)
    far = 100 * X
    # At most half a deviation of log y above the largest.
    assert np.all(np.log(estimator.predict_dist(far).median / y.max()) < 0.5 * estimator.target_scale_)
    # Mutant: without the bounds of its locations.
    estimator.likelihood_ = eqx.tree_at(lambda law: law.bounds, estimator.likelihood_, None)
    assert np.any(estimator.predict_dist(far).median > 100 * y.max())


def test_where_targets_are_of_many_orders_no_component_makes_the_mean():
    """One of little weight among the largest targets is no wider than √2 in log y, where these have 4."""
    y = np.exp(4 * (Y - Y.mean()) / Y.std())
    estimator = shell(likelihood="log_mixture", steps=1).fit(X, y)
    law = estimator.likelihood_
    assert 0.7 < float(law.largest_scale) * estimator.target_scale_ < 1.5
    # All weight but a hundredth is low down, and that is as high and as wide as can be.
    logits, means, scales = np.log([0.99, *[1e-9] * 3, 0.01]), [-2.0, 0, 0, 0, 1e3], [-9.0, 0, 0, 0, 1e3]
    outputs = jnp.asarray([*logits, *means, *scales], jnp.float32)

    def mean_of(law):
        mixture, unit = law.law(outputs), estimator.target_scale_
        normal, shares = mixture.component_distribution, mixture.mixing_distribution.probs
        return np.sum(shares * np.exp(unit * normal.loc + (unit * normal.scale) ** 2 / 2))

    high = float(law.bounds[1]) * estimator.target_scale_
    assert mean_of(law) < 0.01 * np.exp(high + 1.1)
    # Mutant: as wide as all targets.
    assert mean_of(eqx.tree_at(lambda law: law.largest_scale, law, jnp.float32(1.0))) > np.exp(high + 2)


def test_labels_of_any_kind():
    inputs, numbers = X, (Y > 0).astype(int) + (Y > 1)
    plain = EnsembleClassifier(**SHELL, random_state=0).fit(inputs, numbers)
    assert plain.score(inputs, numbers) > 0.7
    assert_close(plain.predict_proba(TEST_X).sum(axis=1), np.ones(300), 1e-12)
    kinds = [
        np.array(["a", "bb", "c"]),
        np.array([-7, 0, 900]),
        np.array(["no", "perhaps", "yes"], dtype=object),
    ]
    for names in kinds:
        estimator = EnsembleClassifier(**SHELL, random_state=0).fit(inputs, names[numbers])
        assert estimator.classes_.tolist() == names.tolist()
        assert np.all(estimator.predict_proba(TEST_X) == plain.predict_proba(TEST_X))
        assert np.all(estimator.predict(TEST_X) == names[plain.predict(TEST_X)])
    truth = EnsembleClassifier(**SHELL, random_state=0).fit(inputs, Y > 0)
    assert truth.predict(inputs).dtype == bool
    assert truth.classes_.tolist() == [False, True]
    assert truth.score(inputs, Y > 0) > 0.7


def test_probabilities_are_the_mean_over_particles():
    estimator = EnsembleClassifier(**SHELL, random_state=0).fit(X, Y > 0)
    logits = outputs(estimator, TEST_X)
    members = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    assert_close(estimator.predict_proba(TEST_X), members.mean(axis=0), 1e-5)
    assert np.all(np.asarray(estimator.predict_dist(TEST_X).mutual_information()) >= 0)
    # At another temperature, as held-out rows may choose it.
    estimator.spread_ = 2.5
    members = scipy.special.softmax(logits / 2.5, axis=-1)
    assert_close(estimator.predict_proba(TEST_X), members.mean(axis=0), 1e-5)
    assert_close(np.asarray(estimator.predict_dist(TEST_X).probs), members.mean(axis=0), 1e-5)


def test_weights_of_classes_are_weights_of_rows(tmp_path):
    y = np.where(Y > 1.0, "rare", "usual")
    frequent = np.where(y == "rare", np.mean(y == "rare"), np.mean(y == "usual"))
    balanced = EnsembleClassifier(**SHELL, random_state=0, class_weight="balanced").fit(X, y)
    by_rows = EnsembleClassifier(**SHELL, random_state=0).fit(X, y, sample_weight=0.5 / frequent)
    assert_close(balanced.predict_proba(TEST_X), by_rows.predict_proba(TEST_X), 1e-5)
    plain = EnsembleClassifier(**SHELL, random_state=0).fit(X, y)
    assert np.mean(balanced.predict_proba(TEST_X)[:, 0]) > np.mean(plain.predict_proba(TEST_X)[:, 0]) + 0.02
    given = EnsembleClassifier(**SHELL, random_state=0, class_weight={"rare": 3.0}).fit(X, y)
    by_rows = EnsembleClassifier(**SHELL, random_state=0).fit(X, y, np.where(y == "rare", 3.0, 1.0))
    assert np.all(given.predict_proba(TEST_X) == by_rows.predict_proba(TEST_X))
    given.save(tmp_path / "model.mf")
    assert load(tmp_path / "model.mf").class_weight == {"rare": 3.0}
    with pytest.raises(ValueError, match="class_weight"):
        EnsembleClassifier(**SHELL, class_weight="even").fit(X, y)


def test_sets_of_classes():
    estimator = EnsembleClassifier(**SHELL, random_state=0).fit(X, np.digitize(Y, [-0.5, 0.5]))
    sets, probabilities = estimator.predict_set(TEST_X, 0.8), estimator.predict_proba(TEST_X)
    assert sets.shape == probabilities.shape
    assert np.all(np.sum(sets * probabilities, axis=1) >= 0.8 - 1e-6)
    assert np.all(sets[np.arange(300), probabilities.argmax(axis=1)])
    with pytest.raises(ValueError, match="coverage must be between 0 and 1, got 90"):
        estimator.predict_set(TEST_X, 90)


# Settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "SVGD"}, "method must be one of DRLE, DRE, DLE, DE, FD-GVI, PrO, posterior, got 'SVGD'"),
        ({"likelihood": "cauchy"}, "likelihood must be one of .* got 'cauchy'"),
        ({"particles": 0}, "particles must be at least 1, got 0"),
        ({"hidden": 50}, "hidden"),
        ({"activation": "step"}, "activation is unknown, got 'step'"),
        ({"mmd": -1.0}, "mmd must be > 0"),
        ({"step_size": 0.0}, "step_size must be > 0"),
        ({"prior_weight": 0.0}, "prior_weight must be > 0"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"batch_size": 2.5}, "batch_size must be an integer, got 2.5"),
        ({"validation_fraction": 1.0}, "validation_fraction must be between 0 and 1, got 1.0"),
        ({"early_stopping": True, "validation_fraction": 0.99}, "leaves none to train on"),
    ],
)
def test_wrong_settings_raise_when_fitted(settings, message):
    estimator = shell().set_params(**settings)
    with pytest.raises((TypeError, ValueError), match=message):
        estimator.fit(X, Y)


def test_a_run_that_diverges_says_so():
    estimator = shell(method="DLE", step_size=1e30)
    with pytest.raises(DivergenceError, match=r"became NaN or infinite .* step_size=1e\+30; try a smaller"):
        estimator.fit(X, Y)
    with pytest.raises(NotFittedError):
        estimator.predict(X)


def test_a_warm_start_that_diverges_leaves_the_earlier_fit():
    estimator = shell(warm_start=True).fit(X, Y)
    before = estimator.predict(TEST_X)
    with pytest.raises(DivergenceError, match="step_size"):
        estimator.set_params(step_size=1e30).fit(X, Y)
    assert np.all(estimator.predict(TEST_X) == before)


# scikit-learn's tools


def test_the_same_random_state_gives_the_same_bits(fitted):
    again = clone(fitted).fit(X, Y)
    for mine, other in zip(
        again.predict(X, return_std=True), fitted.predict(X, return_std=True), strict=True
    ):
        assert np.all(mine == other)
    other = regressor(random_state=1).fit(X, Y)
    assert np.all(other.predict(X) != fitted.predict(X))
    drawn = [
        regressor(random_state=np.random.RandomState(3)).fit(X, Y).predict(X),
        regressor(random_state=np.random.RandomState(3)).fit(X, Y).predict(X),
    ]
    assert np.all(drawn[0] == drawn[1])
    free = regressor(random_state=None)
    assert np.any(clone(free).fit(X, Y).predict(X) != clone(free).fit(X, Y).predict(X))


def test_pickles_predict_the_same_bits(fitted):
    classes = EnsembleClassifier(**SHELL, random_state=0).fit(X, np.where(Y > 0, "yes", "no"))
    counts = shell(likelihood="negative_binomial").fit(X, np.round(10 + 5 * Y).clip(0))
    for estimator in (fitted, classes, counts):
        again = pickle.loads(pickle.dumps(estimator))
        assert np.all(again.predict(TEST_X) == estimator.predict(TEST_X))
        assert again.get_params() == estimator.get_params()
    again = pickle.loads(pickle.dumps(classes))
    assert np.all(again.predict_proba(TEST_X) == classes.predict_proba(TEST_X))


def test_pipelines():
    estimator = make_pipeline(StandardScaler(), shell()).fit(X, Y)
    assert_close(estimator.predict(TEST_X), shell().fit(X, Y).predict(TEST_X), 1e-4)
    mean, deviation = estimator.predict(TEST_X, return_std=True)
    assert mean.shape == deviation.shape == (300,)


def test_grid_search():
    grid = {"method": ["DE", "DLE"], "prior_weight": [0.1, 1e4]}
    search = GridSearchCV(shell(), grid, cv=2).fit(X, Y)
    assert search.best_params_["prior_weight"] == 0.1, "the other leaves the prior, which knows nothing"
    assert search.best_score_ > 0.3
    assert len(search.cv_results_["params"]) == 4


def test_warm_start_goes_on():
    estimator = shell(warm_start=True).fit(X, Y)
    before, mean = estimator.particles_, estimator.target_mean_
    estimator.set_params(step_size=1e-6).fit(X + 1, Y + 100)
    moved = jax.tree.map(lambda new, old: np.max(np.abs(new - old)), estimator.particles_, before)
    assert 0 < max(jax.tree.leaves(moved)) < 0.01, "from where they were"
    assert estimator.target_mean_ == mean, "in the same units"
    anew = shell(step_size=1e-6).fit(X, Y)
    assert np.max(np.abs(anew.particles_[0]["weight"] - before[0]["weight"])) > 0.1
    # With enough steps it learns the new table in the old units.
    estimator.set_params(step_size=0.05, prior_weight=7.0).fit(X, Y + 3)
    assert np.mean(estimator.predict(X) - Y) == pytest.approx(3, abs=0.3)
    assert estimator.prior_weight_ == 7.0, "as asked for"
    estimator.set_params(prior_weight=None, steps=1).fit(X, Y + 3)
    assert estimator.prior_weight_ == 7.0, "kept"
    with pytest.raises(ValueError, match="expecting 3 features"):
        estimator.fit(X[:, :2], Y)
    with pytest.raises(ValueError, match="set warm_start=False"):
        estimator.fit(X, np.column_stack([Y, Y]))


@pytest.mark.parametrize(
    "change", [{"particles": 4}, {"hidden": (5,)}, {"activation": "tanh"}, {"likelihood": "poisson"}]
)
def test_a_warm_start_with_other_settings_is_refused(change):
    estimator = shell(warm_start=True).fit(X, Y).set_params(**change)
    with pytest.raises(ValueError, match="encoding, activation, particles, likelihood or ordinal were"):
        estimator.fit(X, np.abs(np.round(Y)))


def test_cross_validation_of_something_else_is_refused():
    with pytest.raises(TypeError, match=r"estimator must be.*got str.*sklearn.model_selection"):
        cross_validate("DRLE", X, Y)


def test_warm_start_of_classes():
    estimator = EnsembleClassifier(**SHELL, warm_start=True).fit(X, Y > 0)
    estimator.fit(X, np.ones(40, bool) & (X[:, 0] > 0))
    with pytest.raises(ValueError, match="set warm_start=False"):
        estimator.fit(X, (Y > 0).astype(int) + 5)


class Counted:
    """How many steps are taken, in all compiled calls together."""

    def __init__(self, monkeypatch):
        self.steps, advance = 0, trials.Trials.advance

        def counting(run, *arguments):
            before = run.step
            advance(run, *arguments)
            self.steps += run.step - before

        monkeypatch.setattr(trials.Trials, "advance", counting)


def test_tables_of_about_as_many_rows_share_their_programs(monkeypatch):
    traced, advance = [], trials.Plan.advance

    def counting(*arguments):
        traced.append(1)
        return advance(*arguments)

    monkeypatch.setattr(trials.Plan, "advance", counting)
    for rows in (39, 40, 38):
        shell(steps=20, batch_size=10).fit(X[:rows], Y[:rows])
    assert len(traced) == 1
    shell(steps=20, batch_size=10).fit(X[:30], Y[:30])
    assert len(traced) == 2


def test_laws_are_compared_in_the_units_of_the_rows_that_weigh():
    """Eight rows far away, which weigh next to nothing, must not change by what laws are compared."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(60, 1))
    counts = np.clip(np.round(9 + 4 * x[:, 0]), 0, None)
    counts[:8], weights = 400, np.where(np.arange(60) < 8, 1e-6, 1.0)
    estimator, found = EnsembleRegressor(), {}
    for name, rows in (("weighed", slice(None)), ("dropped", slice(8, None))):
        prepared = estimator._prepare(x[rows], counts[rows], weights[rows])
        (model,) = (model for model in prepared.models if model.shape.likelihood == "negative_binomial")
        found[name] = model.log_volume(counts[8:12].astype(np.float32))
    assert_close(found["weighed"], found["dropped"], 1e-3)


def test_splits_with_bins_in_other_columns_are_programs_of_their_own():
    rng = np.random.default_rng(0)
    x = np.column_stack([rng.integers(0, 2, (120, 2)), rng.normal(size=120)]).astype(float)
    x[0, 0] = x[119, 1] = 2
    halves = [np.arange(100), np.arange(20, 120)]
    estimators, prepared = crossvalidation._prepared(
        EnsembleRegressor(), x, x.sum(axis=1), halves, [None] * 2
    )
    assert len(crossvalidation._alike(estimators, prepared)) == 2


def test_early_stopping(monkeypatch):
    """Noise cannot be learned: the held-out rows soon see it."""
    noise = np.random.default_rng(5).normal(size=40)
    taken, fit, seen = Counted(monkeypatch), training.Trainer.fit, []

    def watched(trainer, tables, key, *, validation, **rest):
        seen.extend([*tables, *(validation or [])])
        return fit(trainer, tables, key, validation=validation, **rest)

    monkeypatch.setattr(training.Trainer, "fit", watched)
    settings = {"steps": 20_000, "early_stopping": True, "validation_fraction": 0.25, "prior_weight": 1e-3}
    estimator = shell(**settings).fit(X, noise)
    assert 0 < estimator.n_iter_ < 10_000
    assert taken.steps == estimator.n_iter_ + 500 * PATIENCE
    assert [len(table.weights) for table in seen] == [30, 10], "of 40 rows a quarter is held out"
    rows = np.concatenate([table.inputs for table in seen])
    assert_close(np.sort(rows[:, 0]), np.sort(np.asarray(standardised(estimator, X))[:, 0]), 1e-6)
    few = shell(early_stopping=True, steps=300).fit(X, Y)
    assert few.n_iter_ == 300
    assert shell(steps=300).fit(X, Y).n_iter_ == 300


def test_progress_goes_to_stderr(capfd):
    shell().fit(X, Y)
    assert capfd.readouterr() == ("", "")
    shell(verbose=1).fit(X, Y)
    out, err = capfd.readouterr()
    assert out == ""
    assert "training DE" in err
    assert "1000/1000" in err


def compiled(caplog, action):
    """The names of the programs that an action compiles."""
    caplog.clear()
    with jax.log_compiles():
        action()
    return [record.getMessage() for record in caplog.records if "Compiling" in record.getMessage()]


def test_new_numbers_compile_nothing(caplog, fitted):
    other_x, other_y = table(seed=7)

    def another():
        regressor(random_state=5, prior_weight=3.0, step_size=0.02, mmd=2.0).fit(other_x, other_y)

    def predictions():
        fitted.predict_interval(TEST_X[:17], 0.7)
        fitted.predict(TEST_X[:1], return_std=True)
        fitted.predict(TEST_X[:270])

    fitted.predict_interval(TEST_X), fitted.predict(TEST_X), fitted.predict(TEST_X, return_std=True)
    assert compiled(caplog, lambda: shell(hidden=(2,)).fit(X, Y)), "the test sees what is compiled"
    assert compiled(caplog, another) == []
    assert compiled(caplog, predictions) == []


# Cross-validation


@pytest.fixture(scope="module")
def regression_folds():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        cut = KFold(3, shuffle=True, random_state=0)
        return cut, cross_validate(shell(), X, Y, cv=cut, coverage=0.8, return_estimator=True)


def test_scores_are_those_of_the_estimators(regression_folds):
    cut, found = regression_folds
    assert set(found) == {
        "negative_log_likelihood",
        "root_mean_square_error",
        "crps",
        "coverage",
        "width",
        "estimator",
    }
    for fold, (train, test) in enumerate(cut.split(X)):
        estimator = found["estimator"][fold]
        assert estimator.target_mean_ == pytest.approx(Y[train].mean())
        law = estimator.predict_dist(X[test])
        mean, deviation = estimator.predict(X[test], return_std=True)
        low, high = estimator.predict_interval(X[test], 0.8)
        assert found["root_mean_square_error"][fold] == pytest.approx(
            np.sqrt(np.mean((mean - Y[test]) ** 2)), rel=1e-4
        )
        members = law.component_distribution
        densities = scipy.stats.norm.pdf(Y[test][:, None], members.loc, members.scale).mean(axis=1)
        assert found["negative_log_likelihood"][fold] == pytest.approx(-np.mean(np.log(densities)), rel=1e-4)
        assert found["coverage"][fold] == np.mean((low <= Y[test]) & (Y[test] <= high))
        assert found["width"][fold] == pytest.approx(np.mean(high - low))
        assert found["crps"][fold] == pytest.approx(metrics.crps(law, Y[test]))
        assert np.all(deviation > 0)


def test_folds_are_one_program(monkeypatch, regression_folds):
    taken = Counted(monkeypatch)
    cut, _ = regression_folds
    cross_validate(shell(), X, Y, cv=cut)
    assert taken.steps == SHELL["steps"]


def test_folds_agree_with_fits_one_by_one():
    """In law: the mean over seeds of what each fold's estimator predicts. Folds of 13 and of 14 rows."""
    cut = list(KFold(3).split(X))
    assert {len(test) for _, test in cut} == {13, 14}
    one = shell(method="DLE", likelihood="homoscedastic", prior_weight=0.1)
    together = cross_validate(one, X, Y, cv=cut * 8, return_estimator=True)["estimator"]
    for fold, (train, test) in enumerate(cut):
        mean, error = monte_carlo([several.predict(X[test]) for several in together[fold::3]])
        alone = [
            one.set_params(random_state=seed).fit(X[train], Y[train]).predict(X[test])
            for seed in range(100, 108)
        ]
        other, other_error = monte_carlo(alone)
        assert_within(mean, other, np.hypot(error, other_error))
        assert np.all(other_error < 0.2)


def test_classes_are_cross_validated():
    labels = np.where(Y > 0, "up", "down")
    cut = StratifiedKFold(2)
    found = cross_validate(EnsembleClassifier(**SHELL), X, labels, cv=cut, return_estimator=True)
    for fold, (_, test) in enumerate(cut.split(X, labels)):
        estimator = found["estimator"][fold]
        probabilities = estimator.predict_proba(X[test])
        numbers = (labels[test] == "up").astype(int)
        assert found["accuracy"][fold] == estimator.score(X[test], labels[test])
        of_label = probabilities[np.arange(len(test)), numbers]
        assert found["negative_log_likelihood"][fold] == pytest.approx(-np.mean(np.log(of_label)), rel=1e-4)
        truth = np.eye(2)[numbers]
        brier = np.mean(np.sum((probabilities - truth) ** 2, axis=1))
        assert found["brier_score"][fold] == pytest.approx(brier)
        assert 0 <= found["expected_calibration_error"][fold] <= 1
    by_number = cross_validate(EnsembleClassifier(**SHELL), X, labels, cv=2)
    assert len(by_number["accuracy"]) == 2, "a number of folds is stratified"
    assert np.min(by_number["accuracy"]) > 0.7


def test_classes_that_are_missing_from_a_fold_raise():
    labels = np.repeat([0, 1, 2], [14, 13, 13])
    with pytest.raises(ValueError, match="different classes; stratify"):
        cross_validate(EnsembleClassifier(**SHELL), X, labels, cv=KFold(3))
    only = [(np.arange(27), np.arange(27, 40))]
    with pytest.raises(ValueError, match="test rows have classes"):
        cross_validate(EnsembleClassifier(**SHELL), X, labels, cv=only)


def test_data_frames_are_cross_validated(regression_folds):
    cut, expected = regression_folds
    frame = pd.DataFrame(X, columns=["a", "b", "c"], index=np.arange(40)[::-1])
    found = cross_validate(
        shell(), frame, pd.Series(Y, index=frame.index), cv=cut, coverage=0.8, return_estimator=True
    )
    for name in set(expected) - {"estimator"}:
        assert np.all(found[name] == expected[name])
    assert found["estimator"][0].feature_names_in_.tolist() == ["a", "b", "c"]


def test_counts_of_folds_start_from_their_own_means():
    """One fold learns from counts around 2, the other from counts around 2,000."""
    rng = np.random.default_rng(0)
    y = np.concatenate([rng.poisson(2.0, 20), rng.poisson(2_000.0, 20)])
    small, large = np.arange(20), np.arange(20, 40)
    found = cross_validate(
        shell(likelihood="poisson", hidden=()), np.zeros((40, 1)), y, cv=[(small, small), (large, large)]
    )
    for fold, rows in enumerate((small, large)):
        counts = np.arange(4_000)
        below = scipy.stats.poisson.cdf(counts, y[rows].mean())
        exact = np.mean(np.sum((below - (counts >= y[rows, None])) ** 2, axis=1))
        # A wrong mean, by a fraction of the deviation, is worth its square.
        assert found["crps"][fold] == pytest.approx(exact, rel=0.1)
        best = -np.mean(scipy.stats.poisson.logpmf(y[rows], y[rows].mean()))
        assert found["negative_log_likelihood"][fold] == pytest.approx(best, abs=0.5)


def test_several_targets_are_cross_validated():
    two = np.column_stack([Y, X[:, 0]])
    found = cross_validate(shell(), X, two, cv=2)
    assert all(values.shape == (2,) and np.all(np.isfinite(values)) for values in found.values())


# Quality


def test_diabetes():
    """Better than a Gaussian that knows mean and variance; benchmarks/tabular.py compares the defaults."""
    inputs, targets = load_diabetes(return_X_y=True)
    train_x, test_x, train_y, test_y = train_test_split(inputs, targets, random_state=0)
    estimator = shell(method="DLE").fit(train_x, train_y)
    constant = -np.mean(scipy.stats.norm.logpdf(test_y, train_y.mean(), train_y.std()))
    found = metrics.negative_log_likelihood(estimator.predict_dist(test_x), test_y)
    assert found < constant - 0.1
