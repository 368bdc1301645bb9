"""The Gaussian process whose predictions networks may see: what it says, that it says it of rows it has not
seen, and where it is chosen."""

import copy

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close
from quick import quickly_compiled  # noqa: F401
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

import measureflow as mf
from measureflow.tables import smoothing
from measureflow.tables.choosing import Candidate, Choice, Fold, Trial, combined_beside_smoothers, folds
from measureflow.tables.models import Model, Shape
from measureflow.tables.predictor import Predictor
from measureflow.tables.smoother import Smoother
from measureflow.tables.smoothing import near
from measureflow.tables.smoothness import Distinct, Smoothness, negative_evidence
from measureflow.tables.table import Table
from measureflow.tables.views import View

pytestmark = pytest.mark.standard_promotion

SMOOTH = Smoothness((0.7, 1.5), 0.8, 0.05)


def table(rows=60, weights=None, seed=0):
    """A smooth function of two columns, with noise of variance 0.05."""
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=(rows, 2)).astype(np.float32)
    targets = np.sin(2 * inputs[:, 0]) + 0.3 * inputs[:, 1] + np.sqrt(0.05) * rng.normal(size=rows)
    return Table.of(inputs, targets.astype(np.float32), np.ones(rows) if weights is None else weights)


def exactly(seen, inputs, smoothness=SMOOTH):
    """scikit-learn's process, noise included: mean, and log of the deviation."""
    kernel = ConstantKernel(smoothness.signal) * Matern(smoothness.lengthscales, nu=2.5)
    process = GaussianProcessRegressor(kernel, alpha=smoothness.noise, optimizer=None)
    mean, deviation = process.fit(seen.inputs, seen.targets).predict(inputs, return_std=True)
    return np.stack([mean, 0.5 * np.log(deviation**2 + smoothness.noise)], axis=1)


def test_it_is_the_process_of_scikit_learn():
    seen, new = table(), table(40, seed=1).inputs
    smoother, _ = Smoother.of(SMOOTH, seen)
    assert_close(smoother(new), exactly(seen, new), 1e-4)
    # Mutants: another smoothness, or another noise, is far away.
    for changed in (SMOOTH._replace(lengthscales=(1.5, 0.7)), SMOOTH._replace(noise=0.1)):
        assert np.max(np.abs(Smoother.of(changed, seen)[0](new) - exactly(seen, new))) > 0.05


def test_other_libraries_compute_the_same():
    smoother, _ = Smoother.of(SMOOTH, table())
    new = table(40, seed=1).inputs
    with jax.enable_x64(True):
        found = smoother.of_rows(jnp.asarray(new, jnp.float64), jnp)
    assert_close(np.asarray(found), smoother(new), 1e-6)


def test_of_rows_that_it_has_seen_it_says_what_it_would_without_them():
    seen = table(30)
    smoother, said = Smoother.of(SMOOTH, seen)
    rows = np.arange(30)
    expected = [exactly(seen.rows(rows != row), seen.inputs[row : row + 1])[0] for row in rows]
    assert_close(said, np.array(expected), 1e-4)
    # Mutant: what it says of them after it has seen them knows their noise.
    errors = [np.mean((columns[:, 0] - seen.targets) ** 2) for columns in (said, smoother(seen.inputs))]
    assert errors[1] < 0.7 * errors[0]


def test_rows_with_the_same_inputs_are_left_out_together():
    seen = table(30)
    twice = Table.of(*(np.concatenate([part, part]) for part in seen[:3]))
    rows = np.tile(np.arange(30), 2)
    expected = [exactly(twice.rows(rows != row), twice.inputs[row : row + 1])[0] for row in rows]
    assert_close(Smoother.of(SMOOTH, twice)[1], np.array(expected), 1e-4)


def test_a_row_of_weight_k_is_k_equal_rows():
    seen = table(30)
    inputs = np.concatenate([seen.inputs, seen.inputs[:10]])
    targets = np.concatenate([seen.targets, seen.targets[:10] + 1])
    weighted = Table.of(inputs, targets, np.repeat([1.0, 3.0], [30, 10]))
    order = np.repeat(np.arange(40), np.repeat([1, 3], [30, 10]))
    repeated, first = (
        Table.of(inputs[order], targets[order], np.ones(60)),
        np.unique(order, return_index=True)[1],
    )
    assert_close(Smoother.of(SMOOTH, weighted)[1], Smoother.of(SMOOTH, repeated)[1][first], 1e-5)


def test_smoothness_is_learned():
    """300 rows tell the noise of variance 0.05, in units of targets of variance 1, to a fifth."""
    seen = table(300)
    scale = seen.targets.std()
    smoothness = Smoothness.learn(seen._replace(targets=(seen.targets - seen.targets.mean()) / scale))
    assert abs(np.log(smoothness.noise * scale**2 / 0.05)) < 0.25
    assert smoothness.lengthscales[0] < smoothness.lengthscales[1], "the second column acts linearly"
    assert Smoothness.learn(table(49)) is None
    few = table(100)
    assert Smoothness.learn(few._replace(inputs=np.sign(few.inputs))) is None, "few distinct rows"


def test_what_it_learns_by_is_the_marginal_likelihood_of_scikit_learn():
    """Its value but for a constant, and its gradient."""
    seen = table(40)
    points, targets = seen.inputs.astype(np.float64), seen.targets.astype(np.float64)
    kernel = ConstantKernel(1.0) * Matern([1.0, 1.0], nu=2.5) + WhiteKernel(1.0)
    process = GaussianProcessRegressor(kernel, alpha=0.0, optimizer=None).fit(points, targets)
    for logs in np.random.default_rng(0).normal(scale=0.5, size=(3, 4)):
        # scikit-learn has the signal first.
        theirs = process.log_marginal_likelihood(logs[[2, 0, 1, 3]], eval_gradient=True)
        value, gradient = negative_evidence(logs, Distinct.of(seen))
        assert_close(-theirs[0], value + 20 * np.log(2 * np.pi), 1e-9)
        assert_close(-theirs[1][[1, 2, 0, 3]], gradient, 1e-7)


def replicated(counts, seed=0):
    """Rows of some inputs each so many times; noise of variance 0.05."""
    rng = np.random.default_rng(seed)
    inputs = np.repeat(rng.normal(size=(len(counts), 2)), counts, axis=0).astype(np.float32)
    targets = np.sin(2 * inputs[:, 0]) + 0.3 * inputs[:, 1] + np.sqrt(0.05) * rng.normal(size=len(inputs))
    return Table.of(inputs, targets.astype(np.float32), np.ones(len(inputs)))


def test_rows_with_the_same_inputs_tell_the_noise():
    """Five rows of each input: the noise is that of a row, and not that of a mean. 480 differences tell its
    logarithm to √(2/480) = 0.065."""
    seen = replicated([5] * 120)
    assert abs(np.log(Smoothness.learn(seen).noise / 0.05)) < 4 * 0.065
    # Mutant: means alone have a fifth of it.
    means = Distinct.of(seen)
    alone = Table.of(means.points.astype(np.float32), means.means.astype(np.float32), np.ones(120))
    assert Smoothness.learn(alone).noise < 0.6 * 0.05
    # As sure of a mean as scikit-learn's process that sees all rows.
    smoother, _ = Smoother.of(SMOOTH, seen)
    new = table(40, seed=1).inputs
    assert_close(smoother(new), exactly(seen, new), 1e-5)


def test_rows_of_hardly_any_weight_say_hardly_anything():
    good, rng = table(160), np.random.default_rng(1)
    wrong = good.targets[:40] + 10 * rng.normal(size=40).astype(np.float32)
    inputs = np.concatenate([good.inputs, good.inputs[:40] + 0.01])
    both = Table.of(inputs, np.concatenate([good.targets, wrong]), np.repeat([1.0, 1e-6], [160, 40]))
    learned = [Smoothness.learn(seen) for seen in (good, both)]
    assert learned[1].noise == pytest.approx(learned[0].noise, rel=0.05)
    new = table(100, seed=2).inputs
    said = [Smoother.of(learned[0], seen)[0](new) for seen in (good, both)]
    assert_close(said[1], said[0], 1e-3)


@pytest.mark.parametrize("weight", [1e6, 1e12])
def test_rows_may_stand_for_millions(weight):
    """As surveys have it: nothing but rounding is left of the noise of a mean."""
    inputs = np.random.default_rng(0).uniform(-2, 2, size=(300, 1)).astype(np.float32)
    seen = Table.of(inputs, np.sin(inputs[:, 0]), np.full(300, weight))
    smoother, said = Smoother.of(Smoothness.learn(seen), seen)
    assert np.all(np.isfinite(said))
    assert np.max(np.abs(smoother(inputs)[:, 0] - np.sin(inputs[:, 0]))) < 0.01


def curved(rows, seed=0):
    """A function without noise that bends little: its signal is thousands of times its noise."""
    inputs = np.random.default_rng(seed).uniform(-1.7, 1.7, size=(rows, 4)).astype(np.float32)
    targets = np.exp(inputs[:, 0]) + inputs[:, 1] * inputs[:, 2]
    return Table.of(inputs, (targets - 1.5) / 1.5, np.ones(rows))


def test_where_there_is_no_noise_no_digit_is_lost():
    """Of the variance a thousandth or less is left: in single precision rounding is larger than that."""
    seen, new = curved(300), curved(500, seed=1).inputs
    smoothness = Smoothness.learn(seen)
    assert smoothness.signal > 1e3 * smoothness.noise
    smoother, said = Smoother.of(smoothness, seen)
    found = smoother(new)
    assert_close(found, exactly(seen, new, smoothness), 1e-4)
    assert np.mean(found[:, 1] > 0.5 * np.log(smoothness.noise) + 1e-4) > 0.9, "it is less sure than of noise"
    # What networks learn from is of the same kind as what they are shown afterwards.
    assert abs(np.median(said[:, 1]) - np.median(found[:, 1])) < 0.05
    rounded = eqx.tree_at(lambda s: s.features, smoother, smoother.features.astype(np.float32).astype(float))
    assert np.max(np.abs(rounded(new) - found)) > 0.01, "mutant"


@pytest.mark.parametrize(("ahead", "chosen"), [(0.05, False), (0.2, True)])
def test_networks_that_see_it_must_be_clearly_ahead(ahead, chosen):
    plain, smoothed = Trial(0, Candidate(1.0)), Trial(0, Candidate(1.0), View(smoothed=True))
    before = Choice((plain,) * 4, scores={plain: -1.0}, shares={plain: 1.0})
    densities = {plain: np.full((1, 200), -1.0), smoothed: np.full((1, 200), -1.0 + ahead)}
    choice = combined_beside_smoothers(densities, np.ones(200), before, 4)
    assert choice.parts == ((smoothed if chosen else plain),) * 4
    assert choice.shares == {plain: float(not chosen), smoothed: float(chosen)}
    assert set(choice.scores) == {plain, smoothed}


# In an estimator


def smooth_rows(rows, seed=0):
    """Six columns, a function without noise."""
    rng = np.random.default_rng(seed)
    X = rng.uniform(-2, 2, size=(rows, 6))
    return X, np.sin(X[:, 0] + X[:, 1]) + np.cos(X[:, 2]) * X[:, 3]


# Of one small layer, which is soon compiled.
SMALL = {"hidden": (8,), "particles": 4, "prior_weight": 1.0, "random_state": 0}


@pytest.fixture(scope="module")
def smoothed():
    return mf.EnsembleRegressor(**SMALL, steps=800).fit(*smooth_rows(200))


def test_it_is_chosen_where_it_says_more(smoothed):
    """Without one the error of networks of this size is 0.56 of the deviation of targets, and of others, with
    more steps, 0.3."""
    assert smoothed.smoother_ is not None
    assert np.any(smoothed.members_["smoothed"] == 1)
    scores = smoothed.validation_scores_
    best = {flag: np.max(scores["log_density"][scores["smoothed"] == flag]) for flag in (0, 1)}
    assert best[1] > best[0] + 0.1
    X, y = smooth_rows(300, seed=1)
    assert np.sqrt(np.mean((smoothed.predict(X) - y) ** 2)) < 0.15 * np.std(y)
    assert mf.metrics.coverage(*smoothed.predict_interval(X), y) > 0.8


def test_it_is_not_chosen_where_a_linear_function_says_all():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(150, 3))
    y = X.sum(axis=1) + 3 * rng.normal(size=150)
    fitted = mf.EnsembleRegressor(**SMALL, steps=400).fit(X, y)
    assert fitted.smoother_ is None
    assert not np.any(fitted.members_["smoothed"])
    assert fitted.particles_[0]["weight"].shape[1] == fitted.encoding_.width, "no room is left"


def test_it_is_saved_exported_and_fitted_again(smoothed, tmp_path):
    X, _ = smooth_rows(50, seed=1)
    smoothed.save(tmp_path / "model.mf")
    assert_close(mf.load(tmp_path / "model.mf").predict(X), smoothed.predict(X), 1e-6)
    rows = np.random.default_rng(0).permutation(50)
    assert_close(smoothed.predict(X[rows]), smoothed.predict(X)[rows], 1e-5)
    given = {"hidden": smoothed.shape_.hidden, "encoding": smoothed.shape_.encoding}
    smoothed.export(tmp_path / "exported")
    assert_close(Predictor(tmp_path / "exported").predict(X.tolist())["mean"], smoothed.predict(X), 1e-5)
    again = mf.EnsembleRegressor(
        particles=4,
        steps=800,
        likelihood=smoothed.shape_.likelihood,
        members=smoothed.members_,
        random_state=0,
        **given,
    ).fit(*smooth_rows(200))
    assert again.smoother_ is not None
    assert again.smoother_.smoothness == smoothed.smoother_.smoothness
    assert np.corrcoef(again.predict(X), smoothed.predict(X))[0, 1] > 0.99


def test_a_warm_start_sees_rows_as_a_smoother_that_has_not(smoothed):
    X, y = smooth_rows(200, seed=2)
    went_on = copy.deepcopy(smoothed).set_params(warm_start=True, steps=50).fit(X, y)
    assert went_on.smoother_.smoothness == smoothed.smoother_.smoothness
    assert not np.array_equal(went_on.smoother_.centres, smoothed.smoother_.centres), "it has seen these rows"
    # Mutant: of rows that it has seen it would say that it hardly errs, and networks would believe it.
    X, y = smooth_rows(300, seed=1)
    assert mf.metrics.coverage(*went_on.predict_interval(X), y) > 0.8


def test_a_warm_start_sees_only_what_a_process_can(smoothed):
    went_on = copy.deepcopy(smoothed).set_params(warm_start=True, steps=50)
    X, y = smooth_rows(1600)
    with pytest.raises(ValueError, match=r"may have 1,500 rows, got 1,600; pass warm_start=False"):
        went_on.fit(X, y)
    with pytest.raises(ValueError, match="censoring and several targets are not for networks that see"):
        went_on.fit(X[:200], y[:200], censoring=np.where(y[:200] > 1, 1, 0))
    assert_close(went_on.predict(X[:9]), smoothed.predict(X[:9]), 0)


def test_members_cannot_see_what_is_not_there(smoothed):
    X, y = smooth_rows(40)
    model = mf.EnsembleRegressor(particles=4, members=smoothed.members_, hidden=(4,), encoding=0)
    with pytest.raises(ValueError, match="members has networks that are smoothed"):
        model.fit(X, y)
    classes = mf.EnsembleClassifier(particles=4, members=smoothed.members_, hidden=(4,), encoding=0)
    with pytest.raises(ValueError, match="members has networks that are smoothed"):
        classes.fit(np.repeat(X, 2, axis=0), np.repeat(y > 0, 2))


# Whether it comes near


def test_it_is_judged_by_rows_that_it_has_not_seen(monkeypatch):
    """120 rows of 25 columns, of which one matters: lengthscales learned from rows that are held out know
    some of them by heart."""
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(120, 25)).astype(np.float32)
    targets = (0.6 * inputs[:, 0] + 0.8 * rng.normal(size=120)).astype(np.float32)
    seen, constant = Table.of(inputs, targets, np.ones(120)), -1.42
    cut = [Fold(0, seen.rows(train), seen.rows(out)) for train, out in folds(120, rng)]
    network = mf.Network.mlp(25, (), 2)
    loss = mf.NegativeLogLikelihood(network, mf.likelihoods.Heteroscedastic())
    model = Model(Shape((), 0), loss, network.prior(), 1, 1)
    assert near(model, cut, constant - 0.5) is None, "targets are mostly noise to it"
    monkeypatch.setattr(smoothing, "MUCH_NOISE", -np.inf)
    assert len(near(model, cut, constant - 0.5)) == 3
    assert near(model, cut, constant) is None
    # Mutant: one that has learned from all rows seems to know more than a constant.
    whole = Smoothness.learn(seen)
    monkeypatch.setattr(smoothing.Smoothness, "learn", lambda table: whole)
    assert near(model, cut, constant) is not None
