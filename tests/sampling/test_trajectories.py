"""Trajectories leave a law that they begin with as it is, whatever the size of their steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import measureflow as mf
from measureflow.flows.ensembles import ensemble_covariance
from measureflow.sampling import trajectories
from measureflow.sampling.phases import DEEPEST, deepened, draw, looked_at
from measureflow.sampling.trajectories import Target, Tuning

N = 20_000


def log_gamma(theta):
    """U of log G with G ~ Gamma(2): skewed, and stiff to the right."""
    return jnp.sum(jnp.exp(theta) - 2 * theta)


def drawn(size, depth):
    exact = np.log(np.random.default_rng(0).gamma(2, size=(N, 1))).astype(np.float32)
    target = Target(mf.Problem(log_gamma, mf.KL(mf.Flat())), jnp.zeros(1))
    state = looked_at(target, jnp.asarray(exact))
    numbers = (
        jnp.log(jnp.asarray(size, jnp.float32)),
        jnp.asarray(1.6, jnp.float32),
        jnp.asarray(depth, jnp.int32),
    )
    tuning = Tuning(ensemble_covariance(state.rows), *numbers)
    after, _, _, report = draw(target, state, tuning, jax.random.key(1), jnp.asarray(2, jnp.int32), 2)
    return np.asarray(after.rows[:, 0]), exact[:, 0], report


@pytest.mark.parametrize(("size", "depth"), [(0.3, 0), (1.2, 0), (1.2, 2)])
def test_exact_draws_stay_exact(size, depth):
    rows, exact, report = drawn(size, depth)
    assert np.mean(rows != exact) > 0.5
    assert stats.kstest(np.exp(rows), "gamma", (2,)).pvalue > 1e-3
    assert 0 < float(report.acceptance) <= 1


def test_without_rejection_coarse_steps_bend_the_law(monkeypatch):
    monkeypatch.setattr(trajectories, "acceptance", lambda ratio: jnp.where(jnp.isfinite(ratio), 1.0, 0.0))
    jax.clear_caches()
    rows, _, _ = drawn(1.2, 0)
    assert stats.kstest(np.exp(rows), "gamma", (2,)).pvalue < 1e-6
    jax.clear_caches()


def test_necks_that_no_step_size_enters_are_reported():
    """Of ten trajectories none may be of the finest size; what was found before still counts."""
    problem = mf.Problem(lambda theta: 1e12 * jnp.sum(jnp.abs(jnp.sin(1e6 * theta))), mf.KL(mf.Flat()))
    target = Target(problem, jnp.zeros(1))
    state = looked_at(target, jnp.asarray(np.random.default_rng(0).normal(size=(200, 1)), jnp.float32))
    log_size, length = (jnp.asarray(x, jnp.float32) for x in (np.log(0.3), 1.6))
    tuning = Tuning(ensemble_covariance(state.rows), log_size, length, jnp.asarray(0, jnp.int32))
    _, tuning, stiff, _ = deepened(target, state, tuning, jax.random.key(0))
    assert int(tuning.depth) == DEEPEST
    assert float(stiff) > 0.3
    _, _, _, report = draw(target, state, tuning, jax.random.key(1), jnp.asarray(1, jnp.int32), 2)
    assert np.isfinite(float(report.stiff))
    assert np.isfinite(float(report.acceptance))
