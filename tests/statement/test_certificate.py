"""The certificate: exact draws pass, wrong ensembles do not, whatever the condition of the posterior."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from verification.laws import PRIOR, dle, drle, exact

import measureflow as mf
from measureflow.statement import stein_moments


def gaussian(number, condition, seed=0):
    """A posterior N(m, Σ) whose Σ has this condition number, and the root of Σ."""
    rng = np.random.default_rng(seed)
    basis = np.linalg.qr(rng.normal(size=(number, number)))[0]
    root = basis * np.logspace(0, -0.5 * np.log10(condition), number)
    mean, precision = rng.normal(size=number), np.linalg.inv(root @ root.T)
    mean, precision = jnp.asarray(mean, jnp.float32), jnp.asarray(precision, jnp.float32)

    def potential(theta):
        away = theta - mean
        return 0.5 * away @ jnp.matmul(precision, away, precision="highest")

    return mf.Problem(potential, mf.KL(mf.Flat())), np.asarray(mean), root


def draws(mean, root, n, seed, shift=None, stretch=None, by=None):
    """N draws, whitened ones moved by `shift` sd along `by`, or stretched there."""
    z = np.random.default_rng(seed).normal(size=(n, len(mean)))
    if shift is not None:
        z = z + shift * by
    if stretch is not None:
        z = z + (stretch - 1) * np.outer(z @ by, by)
    return jnp.asarray(mean + z @ root.T, jnp.float32)


def of_coordinate(root, j):
    """The direction of whitened space that moves coordinate j by its standard deviation."""
    return root[j] / np.linalg.norm(root[j])


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("number", "n", "condition"), [(1, 60, 1.0), (5, 300, 1e6), (50, 500, 1e4), (30, 20, 10.0)]
)
def test_exact_draws_pass(number, n, condition):
    problem, mean, root = gaussian(number, condition)
    found = [problem.certify(draws(mean, root, n, seed)) for seed in range(5)]
    assert all(found), [str(certificate) for certificate in found]


@pytest.mark.few(3)
@pytest.mark.parametrize(("number", "n", "condition"), [(5, 500, 1e6), (50, 1_000, 1e6)])
@pytest.mark.parametrize(
    "wrong", [{"shift": 0.35}, {"stretch": 1.25}, {"stretch": 0.8}], ids=["mean", "wide", "narrow"]
)
def test_wrong_ensembles_do_not(number, n, condition, wrong):
    problem, mean, root = gaussian(number, condition)
    for j in (0, number - 1):
        for by in (of_coordinate(root, j), np.eye(number)[j]):
            certificate = problem.certify(draws(mean, root, n, j, **wrong, by=by))
            assert not certificate, str(certificate)
            assert "Take more steps" in str(certificate)


def test_the_text_says_what_is_wrong():
    problem, mean, root = gaussian(5, 1e4)
    wide = problem.certify(draws(mean, root, 1_000, 0, stretch=1.5, by=of_coordinate(root, 2)))
    assert "times the right one" in str(wide)
    assert wide.estimate == pytest.approx(1.5, rel=0.2)
    moved = problem.certify(draws(mean, root, 1_000, 0, shift=1.0, by=of_coordinate(root, 2)))
    assert "standard deviations" in str(moved)
    assert abs(moved.estimate) == pytest.approx(1.0, rel=0.3)
    assert "stationary, as far as 1000 particles" in str(problem.certify(draws(mean, root, 1_000, 1)))


def test_heavy_tails_and_skewness_are_no_reason_to_reject():
    student = mf.Problem(lambda t: 2.5 * jnp.sum(jnp.log1p(t**2 / 4)), mf.KL(mf.Flat()))
    log_exponential = mf.Problem(lambda t: jnp.sum(jnp.exp(t) - t), mf.KL(mf.Flat()))
    for seed in range(10):
        rng = np.random.default_rng(seed)
        assert student.certify(jnp.asarray(rng.standard_t(4, size=(200, 3)), jnp.float32))
        assert log_exponential.certify(jnp.asarray(np.log(rng.exponential(size=(200, 3))), jnp.float32))


def rejected(n, number, repetitions):
    """How many of some ensembles of exact draws are."""
    count = 0
    for seed in range(repetitions):
        rng = np.random.default_rng([seed, n, number])
        z, mixing = rng.normal(size=(n, number)), rng.normal(size=(number, number))
        rows, scores = z @ mixing.T, z @ np.linalg.inv(mixing)
        found = stein_moments.cross_moments(rows, scores)
        errors = np.concatenate([stein_moments.standard_errors(part.values) for part in found])
        whole = stein_moments.whole_mean(stein_moments.mean_terms(rows, scores))
        count += max(errors.max(), whole) > stein_moments.limit(len(errors) + 1, 1e-3)
    return count


@pytest.mark.few(1)
@pytest.mark.parametrize(("n", "number"), [(8, 1), (50, 10), (200, 5)])
def test_the_level_is_kept(n, number):
    """Of 400 ensembles, one in a thousand: more than 4 happen once in ten thousand times."""
    assert rejected(n, number, 400) <= 4


def test_particles_that_interact_are_tested_against_their_own_score():
    problem = drle(mmd=2.0)
    law = exact(problem)
    right = [jnp.asarray(law.sample(np.random.default_rng(seed), (600, 1)), jnp.float32) for seed in range(6)]
    assert all(problem.certify(particles) for particles in right)
    # The law without the interaction, and the law stretched, are not its own.
    other = exact(dle())
    alone = jnp.asarray(other.sample(np.random.default_rng(1), (2_000, 1)), jnp.float32)
    assert dle().certify(alone)
    assert not problem.certify(alone)
    assert not problem.certify(1.3 * right[0])


def test_a_functional_that_is_not_linear_is_tested_too():
    """A moment with φ(m) = m²/2 and g(θ) = θ: the law is N(0, 1) to a prior N(0, 1), as m = 0 there."""
    moment = mf.Moment(lambda theta: theta, lambda mean: 0.5 * jnp.sum(mean**2))
    problem = mf.Problem(moment, mf.KL(mf.Gaussian(jnp.zeros(2), 1.0)))
    z = np.random.default_rng(0).normal(size=(600, 2))
    assert problem.certify(jnp.asarray(z, jnp.float32))
    assert not problem.certify(jnp.asarray(z + 0.4, jnp.float32))


def test_collapsed_and_lost_particles_fail():
    problem, mean, root = gaussian(3, 10.0)
    right = draws(mean, root, 100, 0)
    collapsed = problem.certify(right.at[:, 1].set(2.0))
    assert not collapsed
    assert "all particles have the same θ[1]" in str(collapsed)
    assert not problem.certify(right.at[3, 0].set(jnp.nan))


def test_bad_input():
    problem, mean, root = gaussian(3, 10.0)
    with pytest.raises(ValueError, match="certify needs at least 8 particles, got 5"):
        problem.certify(draws(mean, root, 5, 0))
    with pytest.raises(ValueError, match="without temperature"):
        mf.deep_ensemble(lambda theta: jnp.sum(theta**2)).certify(jnp.ones((20, 1)))


def test_stationarity_is_higher_on_wrong_runs_than_on_exact_draws_where_the_posterior_is_ill_conditioned():
    problem, mean, root = gaussian(5, 1e6)
    right = [float(problem.stationarity(draws(mean, root, 300, seed))) for seed in range(5)]
    for j in range(5):
        for wrong in ({"shift": 1.0}, {"stretch": 0.5}, {"stretch": 2.0}):
            particles = draws(mean, root, 300, 9, **wrong, by=np.eye(5)[j])
            assert float(problem.stationarity(particles)) > max(right), (j, wrong)


# ---- Who calls it. ----


@pytest.mark.certifies
def test_solve_warns_where_its_particles_are_not_stationary():
    problem, flow, key = dle(), mf.WassersteinFlow(5e-3), jax.random.key(0)
    start = 3 + 0.01 * PRIOR.sample(key, 200)
    with pytest.warns(mf.NotStationaryWarning, match="the particles are not stationary"):
        mf.solve(problem, flow, start, 5, key)


@pytest.mark.certifies
@pytest.mark.filterwarnings("error")
def test_solve_is_silent_where_they_are():
    problem, flow, key = dle(), mf.WassersteinFlow(5e-3), jax.random.key(0)
    law = exact(problem)
    start = jnp.asarray(law.sample(np.random.default_rng(0), (200, 1)), jnp.float32)
    mf.solve(problem, flow, start, 50, key)
    # Few particles, or none that claim to be draws, are not asked.
    mf.solve(problem, flow, jnp.full((20, 1), 3.0), 5, key)
    mf.solve(mf.deep_ensemble(mf.theory.quartic_loss), flow, jnp.linspace(2, 3, 200)[:, None], 5, key)
    mf.solve(problem, flow, jnp.linspace(2, 3, 200)[:, None], 5, key, certify=False)
