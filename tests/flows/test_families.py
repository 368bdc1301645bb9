"""Families beyond the diagonal and the full-rank Gaussian: each finds a target that it contains."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.stats as st
from helpers import assert_close, assert_within, jit, key, monte_carlo

import measureflow as mf

optax_promotes = jax.numpy_dtype_promotion("standard")

# Σ = D² + uuᵀ, which neither a diagonal nor one direction without D holds.
U = np.array([0.8, -0.5, 0.6])
COVARIANCE = np.diag([0.5, 0.3, 0.8]) ** 2 + np.outer(U, U)
PRECISION, CENTRE = np.linalg.inv(COVARIANCE), np.array([0.5, -1.0, 0.2])
START = mf.Gaussian(jnp.zeros(3), 1.0)


def correlated(theta):
    z = theta - jnp.asarray(CENTRE, jnp.float32)
    return 0.5 * z @ jnp.asarray(PRECISION, jnp.float32) @ z


@optax_promotes
def test_one_direction_is_enough_where_the_target_has_one():
    problem = mf.Problem(correlated, 1.0 * mf.KL(mf.Flat()))
    optimiser = optax.adam(optax.exponential_decay(0.1, 500, 3e-3))

    def covariances(family):
        flow = mf.ParametricFlow(family, optimiser, samples=50)
        state = flow.init(problem, START)
        keys = jax.random.split(key(3), 8)
        run = jit(jax.vmap(lambda k: flow.measure(mf.run(problem, flow, state, None, k, 500)).factor()))
        factors = np.asarray(run(keys), np.float64)
        return factors @ np.swapaxes(factors, 1, 2)

    found = covariances(mf.LowRankGaussian(1))
    assert_within(COVARIANCE, *monte_carlo(found))
    assert np.abs(found.mean(axis=0) - COVARIANCE).max() < 0.03
    # Mutant: no direction. It finds the conditional variances, which are others.
    diagonal = covariances(mf.MeanFieldGaussian()).mean(axis=0)
    assert np.abs(np.diagonal(diagonal - COVARIANCE)).max() > 0.2


@pytest.mark.parametrize("rank", [1, 2])
def test_a_low_rank_beginning_keeps_variances(rank):
    family = mf.LowRankGaussian(rank)
    for initial in (mf.Gaussian(jnp.zeros(3), jnp.array([0.3, 1.0, 2.0])), full_rank()):
        member = family.member(family.parameters(initial))
        assert_close(member.deviations(), initial.deviations(), 1e-5)
        assert np.linalg.matrix_rank(np.asarray(family.parameters(initial)[2])) == rank
    # The direction is that of the correlation, and not any.
    member = mf.LowRankGaussian(1).member(mf.LowRankGaussian(1).parameters(full_rank()))
    off = np.asarray(member.covariance() - COVARIANCE)[np.triu_indices(3, 1)]
    assert np.abs(off).max() < 0.5 * np.abs(COVARIANCE[np.triu_indices(3, 1)]).max()


def full_rank():
    return mf.Gaussian(jnp.zeros(3), jnp.asarray(np.linalg.cholesky(COVARIANCE), jnp.float32))


# ---- Mixtures. ----

MEANS, SCALES, WEIGHTS = np.array([-2.0, 2.0]), np.array([0.5, 0.8]), np.array([0.7, 0.3])
TARGET = mf.GaussianMixture(jnp.asarray(MEANS)[:, None], jnp.asarray(SCALES)[:, None], jnp.asarray(WEIGHTS))


def test_a_mixture_has_the_density_of_scipy_and_draws_of_it():
    x = np.linspace(-4, 5, 7)
    expected = np.log(WEIGHTS @ st.norm.pdf(x, MEANS[:, None], SCALES[:, None]))
    assert_close(jax.vmap(TARGET.log_density)(jnp.asarray(x, jnp.float32)[:, None]), expected, 1e-5)
    drawn = np.asarray(TARGET.sample(key(0), 4_000)[:, 0], np.float64)

    def cdf(t):
        return WEIGHTS @ st.norm.cdf(t, MEANS[:, None], SCALES[:, None])

    assert st.kstest(drawn, cdf).pvalue > 1e-3
    # Mutant: weights forgotten.
    equal = mf.GaussianMixture(TARGET.means, TARGET.scales)
    assert st.kstest(np.asarray(equal.sample(key(0), 4_000)[:, 0], np.float64), cdf).pvalue < 1e-6


def test_strata_are_unbiased():
    """E θ² over many keys, in standard errors."""
    moments = jax.vmap(lambda k: TARGET.strata(k, 4).integrate(lambda t: t[0] ** 2))(
        jax.random.split(key(1), 2_000)
    )
    exact = WEIGHTS @ (MEANS**2 + SCALES**2)
    found = np.asarray(moments, np.float64)
    assert abs(found.mean() - exact) < 4 * found.std() / np.sqrt(len(found))


@optax_promotes
def test_a_mixture_finds_both_modes_and_their_masses():
    problem = mf.Problem(lambda theta: -TARGET.log_density(theta), 1.0 * mf.KL(mf.Flat()))
    start = mf.GaussianMixture(jnp.array([[-1.0], [1.0]]), jnp.ones((2, 1)))
    optimiser = optax.adam(optax.exponential_decay(0.1, 400, 3e-3))
    flow = mf.ParametricFlow(mf.MixtureOfGaussians(2), optimiser, samples=100)
    solution = mf.solve(problem, flow, start, 400, key(2))
    found = solution.measure
    assert_close(found.means[:, 0], MEANS, 0.03)
    assert_close(found.scales[:, 0], SCALES, 0.05)
    assert_close(found.weights, WEIGHTS, 0.04)
    # KL(Q, target) on a grid is nearly 0; that of the best Gaussian is not.
    grid = jnp.linspace(-6, 6, 1201)[:, None]
    q, p = (np.asarray(jax.vmap(m.log_density)(grid), np.float64) for m in (found, TARGET))
    assert np.sum(np.exp(q) * (q - p)) * 0.01 < 2e-3
    assert solution.history.value[-1] < 0.05 < solution.history.value[0]


def test_mixtures_begin_at_particles():
    problem = mf.Problem(lambda theta: jnp.sum(theta**2), 1.0 * mf.KL(mf.Flat()))
    flow = mf.ParametricFlow(mf.MixtureOfGaussians(3), optax.sgd(0.1), samples=9)
    particles = jnp.arange(14.0).reshape(7, 2)
    begun = flow.measure(flow.init(problem, particles))
    assert_close(begun.means, particles[::2][:3])
    assert_close(begun.weights, np.full(3, 1 / 3), 1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mf.LowRankGaussian(0), "LowRankGaussian rank must be .* got 0; with none"),
        (lambda: mf.MixtureOfGaussians(1), "MixtureOfGaussians components .* got 1; one is MeanField"),
        (lambda: mf.LowRankGaussian(4).parameters(START), "at most the number of dimensions, 3, got 4"),
        (lambda: mf.GaussianMixture(jnp.zeros((2, 1)), jnp.zeros((2, 1))), "scales"),
        (
            lambda: mf.GaussianMixture(jnp.zeros((2, 1)), jnp.ones((2, 1)), jnp.ones(3)),
            r"weights have shape \(3,\), and there are 2 components",
        ),
        (lambda: begin(mf.MixtureOfGaussians(2), START), "must be particles or a GaussianMixture"),
        (lambda: begin(mf.MeanFieldGaussian(), TARGET), "must be particles or a Gaussian, got"),
        (lambda: begin(mf.MixtureOfGaussians(3), TARGET), "initial has 2 components"),
        (lambda: begin(mf.MixtureOfGaussians(3), jnp.zeros((2, 1))), "initial holds 2 particles"),
        (
            lambda: mf.BuresWassersteinFlow(0.1).init(mf.Problem(jnp.sum, mf.KL(mf.Flat())), TARGET),
            "moves one Gaussian.*MixtureOfGaussians",
        ),
    ],
)
def test_bad_input(call, message, as_a_user_runs_it):
    with pytest.raises((ValueError, TypeError), match=message):
        call()


def begin(family, initial):
    flow = mf.ParametricFlow(family, optax.sgd(0.1), samples=4)
    return flow.init(mf.Problem(jnp.sum, mf.KL(mf.Flat())), initial)
