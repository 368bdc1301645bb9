"""Conformal intervals: their coverage is exact for any model and any number of rows."""

import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from helpers import assert_close, assert_within

import measureflow as mf
from measureflow.prediction.mixture import Mixture
from measureflow.prediction.sets import mass_before, smallest_sets

pytestmark = pytest.mark.standard_promotion


def law(rows, scale=1.0):
    return Mixture(dist.Normal(jnp.zeros((rows, 2)), scale * jnp.ones((rows, 2))))


@pytest.mark.few(2)
@pytest.mark.parametrize(("rows", "coverage", "wrong"), [(9, 0.9, 0.3), (19, 0.8, 3.0), (50, 0.9, 0.5)])
def test_coverage_is_exact_for_a_wrong_model(rows, coverage, wrong):
    """A law that is far too narrow or too wide: a new row is inside with probability k/(n + 1), exactly."""
    rng, hits = np.random.default_rng(0), []
    for _ in range(400):
        y, new = rng.normal(size=rows), rng.normal(size=20)
        low, high = mf.Conformal(law(rows, wrong), y).interval(law(20, wrong), coverage)
        hits.append(np.mean((low <= new) & (new <= high)))
    exact = np.ceil((rows + 1) * coverage - 1e-9) / (rows + 1)
    error = np.std(hits) / np.sqrt(len(hits))
    assert_within(exact, np.mean(hits), error)
    # Mutant: the law's own interval.
    low, high = law(1, wrong).interval(coverage)
    own = np.mean((low <= (z := rng.normal(size=10_000))) & (z <= high))
    assert abs(own - exact) > 0.05


def test_groups_hold_each_by_itself():
    """Two groups, one three times as noisy, of which a model knows nothing."""
    rng = np.random.default_rng(0)
    groups = np.repeat(["calm", "wild"], 200)
    noise = np.where(groups == "wild", 3.0, 1.0)
    fresh, hits = np.repeat(["calm", "wild"], 5_000), {}
    new = np.where(fresh == "wild", 3.0, 1.0) * rng.normal(size=10_000)
    y = noise * rng.normal(size=400)
    for grouped in (True, False):
        rows = mf.Conformal(law(400), y, groups if grouped else None)
        low, high = rows.interval(law(10_000), 0.9, fresh if grouped else None)
        inside = (low <= new) & (new <= high)
        hits[grouped] = [inside[fresh == name].mean() for name in ("calm", "wild")]
    # Over draws of 200 rows, coverage has a standard deviation of √(0.9 · 0.1/200).
    assert np.all(np.abs(np.array(hits[True]) - 0.9) < 4 * np.sqrt(0.09 / 200))
    assert hits[False][0] > 0.97
    assert hits[False][1] < 0.87


def test_too_few_rows_give_infinite_intervals():
    low, high = mf.Conformal(law(5), np.zeros(5)).interval(law(2), 0.9)
    assert np.all(low == -np.inf)
    assert np.all(high == np.inf)


def classes(probabilities):
    """Two particles, that agree."""
    table = jnp.log(jnp.maximum(jnp.asarray(probabilities), 1e-30))
    return Mixture(dist.Categorical(logits=jnp.stack([table, table], axis=-2)))


def test_sets_of_classes_hold_the_right_one():
    """Random probabilities, from which the classes come, and a model that is far too sure. Sets are of whole
    classes, so that coverage is at least k/(n + 1), and here no more than that and a tenth."""
    rng, hits, own = np.random.default_rng(0), [], []
    for _ in range(200):
        truth = rng.dirichlet(np.full(4, 0.5), size=49)
        y = np.array([rng.choice(4, p=p) for p in truth])
        said = truth**6 / np.sum(truth**6, axis=1, keepdims=True)
        sets = mf.Conformal(classes(said[:29]), y[:29]).sets(classes(said[29:]), 0.8)
        hits.append(np.mean(sets[np.arange(20), y[29:]]))
        own.append(np.mean(smallest_sets(said[29:], 0.8)[np.arange(20), y[29:]]))
    error = np.std(hits) / np.sqrt(len(hits))
    assert 0.8 - 4 * error < np.mean(hits) < 0.9
    # Mutant: the model's own sets.
    assert np.mean(own) < 0.8 - 4 * error


def test_the_most_probable_classes_come_first():
    table = np.array([[0.5, 0.2, 0.3], [0.4, 0.4, 0.2], [1.0, 0.0, 0.0]])
    assert_close(mass_before(table), [[0.0, 0.8, 0.5], [0.0, 0.0, 0.8], [0.0, 1.0, 1.0]], 1e-12)
    assert smallest_sets(table, 0.8).tolist() == [
        [True, False, True],
        [True, True, False],
        [True, False, False],
    ]
    # At random, every set is the smallest of all that are probable enough.
    rng = np.random.default_rng(0)
    subsets = np.array([[bool(n >> c & 1) for c in range(4)] for n in range(16)])
    for p in rng.dirichlet(np.ones(4), size=50):
        (found,) = smallest_sets(p[None], 0.7)
        enough = subsets[subsets @ p >= 0.7]
        assert found @ p >= 0.7
        assert found.sum() == enough.sum(axis=1).min()


def test_too_few_rows_give_sets_of_all_classes():
    law_of_three = classes(np.full((5, 3), 1 / 3))
    assert mf.Conformal(law_of_three, np.zeros(5, int)).sets(law_of_three, 0.9).all()


def test_intervals_are_for_numbers_and_sets_for_classes(as_a_user_runs_it):
    numbers, of_classes = law(3), classes(np.full((3, 2), 0.5))
    with pytest.raises(TypeError, match="use interval, for numbers"):
        mf.Conformal(numbers, np.zeros(3)).sets(numbers)
    with pytest.raises(TypeError, match="use sets, for classes"):
        mf.Conformal(of_classes, np.zeros(3, int)).interval(of_classes)
    with pytest.raises(ValueError, match="numbers of classes from 0 to 1, got 2"):
        mf.Conformal(of_classes, np.full(3, 2))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: mf.Conformal(law(3), np.zeros(3)).interval(law(2), 1.0), "coverage must be between 0 and 1"),
        (lambda: mf.Conformal(law(3), np.zeros(2)), "targets has shape"),
        (lambda: mf.Conformal(law(3), np.zeros(3), ["a", "b"]), "groups has shape"),
        (lambda: mf.Conformal(law(3), np.zeros(3)).interval(law(1), groups=["a"]), "takes none"),
        (lambda: mf.Conformal(law(3), np.zeros(3), list("aab")).interval(law(1)), "needs the groups"),
        (
            lambda: mf.Conformal(law(3), np.zeros(3), list("aab")).interval(law(1), groups=["c"]),
            "groups holds 'c', which no held-out row has",
        ),
    ],
)
def test_wrong_arguments_raise(make, said, as_a_user_runs_it):
    with pytest.raises(ValueError, match=said):
        make()
