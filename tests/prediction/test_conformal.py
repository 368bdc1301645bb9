"""Conformal intervals: their coverage is exact for any model and any number of rows."""

import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from helpers import assert_within

import measureflow as mf
from measureflow.prediction.mixture import Mixture

pytestmark = pytest.mark.standard_promotion


def law(rows, scale=1.0):
    return Mixture(dist.Normal(jnp.zeros((rows, 2)), scale * jnp.ones((rows, 2))))


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
