"""FD-GVI: known posteriors in Monte-Carlo standard errors, and unbiased gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.stats as st
from helpers import SMALL, assert_close, assert_within, draw, jit, key, monte_carlo, rows

import measureflow as mf

# ℓ(θ) = ½ (θ − b)ᵀA(θ − b), P = N(m, S) and KL weight w: q* = N(·, Λ⁻¹) with Λ = A/w + S⁻¹.
A = np.array([[2.0, 0.9], [0.9, 1.0]])
B, M, S, WEIGHT = np.array([1.0, -0.5]), np.array([-1.0, 0.5]), np.diag([0.6**2, 1.5**2]), 0.5
PRECISION = A / WEIGHT + np.linalg.inv(S)
MEAN = np.linalg.solve(PRECISION, A @ B / WEIGHT + np.linalg.solve(S, M))
PRIOR = mf.Gaussian(
    {"x": jnp.array([-1.0]), "y": jnp.array(0.5)}, {"x": jnp.array([0.6]), "y": jnp.array(1.5)}
)

optax_promotes = jax.numpy_dtype_promotion("standard")


def quadratic(theta):
    z = jnp.append(theta["x"], theta["y"]) - jnp.asarray(B, jnp.float32)
    return 0.5 * z @ jnp.asarray(A, jnp.float32) @ z


def many_runs(problem, flow, initial, steps, runs):
    """The measures of independent runs, as one vmapped program."""
    state = flow.init(problem, initial)
    states = jit(jax.vmap(lambda k: mf.run(problem, flow, state, None, k, steps)))(
        jax.random.split(key(7), runs)
    )
    return jax.vmap(flow.measure)(states)


def optimiser(steps):
    return optax.adam(optax.exponential_decay(0.1, steps, 3e-3))


@pytest.mark.parametrize("family", [mf.MeanFieldGaussian(), mf.FullRankGaussian()], ids=["diagonal", "full"])
@optax_promotes
def test_recovers_a_gaussian_posterior(family):
    """The best diagonal Gaussian has the posterior's mean and conditional variances 1/Λᵢᵢ; the best of
    all is the posterior. Each of 16 runs is within a few per cent, their mean within 5 standard errors."""
    steps = 600
    flow = mf.ParametricFlow(family, optimiser(steps), samples=50)
    problem = mf.Problem(quadratic, WEIGHT * mf.KL(PRIOR))
    found = many_runs(problem, flow, PRIOR, steps, 16)
    means = rows(found.mean)
    assert_within(MEAN, *monte_carlo(means))
    assert np.max(np.std(means, axis=0)) < 0.03
    if isinstance(family, mf.MeanFieldGaussian):
        covariances = rows(found.scale) ** 2
        exact = 1 / np.diag(PRECISION)
    else:
        factors = np.asarray(found.scale, np.float64)
        covariances = factors @ np.swapaxes(factors, 1, 2)
        exact = np.linalg.inv(PRECISION)
        assert abs(exact[0, 1]) > 0.05, "there is a correlation to be found"
    assert_within(exact, *monte_carlo(covariances))
    assert np.max(np.std(covariances, axis=0)) < 0.03 * np.max(exact)


@optax_promotes
def test_solve_records_what_it_descends():
    flow = mf.ParametricFlow(mf.MeanFieldGaussian(), optax.adam(0.05), samples=20)
    problem = mf.Problem(quadratic, WEIGHT * mf.KL(PRIOR))
    solution = mf.solve(problem, flow, PRIOR, 30, key())
    assert isinstance(solution.measure, mf.Gaussian)
    history = solution.history
    np.testing.assert_allclose(history.value, history.loss + history.KL, rtol=1e-5)
    np.testing.assert_allclose(history.KL[0], 0.0, atol=1e-6)
    assert history.value[-1] < history.value[0]


def objective(family, problem, measure, samples, seed):
    flow = mf.ParametricFlow(family, optax.sgd(0.1), samples=samples)
    return jit(flow.objective_parts)(family.parameters(measure), problem, None, key(seed))


@pytest.mark.parametrize("family", [mf.MeanFieldGaussian(), mf.FullRankGaussian()], ids=["diagonal", "full"])
def test_closed_forms_do_not_see_the_draws(family):
    """KL and MMD² are exact with any key; the loss is an average over the draws."""
    measure = mf.Gaussian({"x": jnp.array([0.2]), "y": jnp.array(-0.3)}, 0.4)
    kernel = mf.SquaredExponential(0.9)
    problem = mf.Problem(
        quadratic, 0.5 * mf.KL(PRIOR) + 2.0 * mf.SquaredMMD(PRIOR, kernel) + 1.0 * mf.KL(mf.Flat())
    )
    one, two = (objective(family, problem, measure, 3, seed) for seed in (1, 2))
    assert one["loss"] != two["loss"]
    q, p = st.norm([0.2, -0.3], 0.4), st.norm([-1.0, 0.5], [0.6, 1.5])
    kl = np.sum(0.5 * ((q.var() + (q.mean() - p.mean()) ** 2) / p.var() - 1) + np.log(p.std() / q.std()))

    def overlap(mean, variance):
        return np.prod(0.9 / np.sqrt(0.81 + variance) * np.exp(-0.5 * mean**2 / (0.81 + variance)))

    mmd = (
        overlap(0, 2 * q.var())
        - 2 * overlap(q.mean() - p.mean(), q.var() + p.var())
        + overlap(0, 2 * p.var())
    )
    for parts in (one, two):
        np.testing.assert_allclose(parts["KL"], 0.5 * kl - q.entropy().sum(), rtol=1e-5)
        np.testing.assert_allclose(parts["MMD²"], 2 * mmd, rtol=1e-4)


@pytest.mark.parametrize("family", [mf.MeanFieldGaussian(), mf.FullRankGaussian()], ids=["diagonal", "full"])
def test_parameters_and_members_are_inverse(family):
    for scale in (0.4, {"x": jnp.array([0.3]), "y": jnp.array(2.0)}, jnp.array([[0.5, 0.0], [-0.7, 1.2]])):
        measure = mf.Gaussian(PRIOR.mean, scale)
        member = family.member(family.parameters(measure))
        covariance = np.asarray(measure.covariance())
        if isinstance(family, mf.MeanFieldGaussian):
            covariance = np.diag(np.diag(covariance))
        np.testing.assert_allclose(member.covariance(), covariance, rtol=1e-5, atol=1e-7)
        assert member.mean == PRIOR.mean


def test_starts_from_the_moments_of_particles():
    particles = draw(SMALL, 40)
    points = rows(particles)
    problem = mf.Problem(lambda theta: jnp.sum(theta["vector"] ** 2))
    for family, covariance in (
        (mf.MeanFieldGaussian(), np.diag(points.var(axis=0))),
        (mf.FullRankGaussian(), np.cov(points.T, bias=True)),
    ):
        flow = mf.ParametricFlow(family, optax.adam(0.1), samples=2)
        measure = flow.measure(flow.init(problem, particles))
        assert_close(rows(jax.tree.map(lambda x: x[None], measure.mean))[0], points.mean(axis=0))
        assert_close(measure.covariance(), covariance)


def matern(s):
    return (1 + np.sqrt(3 * s) / 0.5) * np.exp(-np.sqrt(3 * s) / 0.5)


def test_gradient_is_unbiased_where_mmd_is_sampled():
    """Three draws and a Matérn kernel: a double sum that kept its diagonal would shrink ∬κ dQdQ's
    gradient by a third. The exact gradient is a finite difference of a fine quadrature."""
    atoms = np.array([-1.0, 0.3, 0.8])
    mean, deviation, h = 0.4, 0.7, 1e-3
    grid = np.linspace(-6, 6, 1201)
    mass = st.norm.pdf(grid) * (grid[1] - grid[0])

    def own(log_s):
        return mass @ matern((np.exp(log_s) * (grid[:, None] - grid[None])) ** 2) @ mass

    def exact(m, log_s):
        x = m + np.exp(log_s) * grid
        cross = mass @ matern((x[:, None] - atoms[None]) ** 2).mean(axis=1)
        return mass @ np.cos(x) + 2.0 * (own(log_s) - 2 * cross)

    gradient = [
        (exact(mean + h, np.log(deviation)) - exact(mean - h, np.log(deviation))) / (2 * h),
        (exact(mean, np.log(deviation) + h) - exact(mean, np.log(deviation) - h)) / (2 * h),
    ]
    reference = mf.Empirical(jnp.asarray(atoms, jnp.float32))
    problem = mf.Problem(jnp.cos, 2.0 * mf.SquaredMMD(reference, mf.Matern(1.5, 0.5)))
    family = mf.MeanFieldGaussian()
    flow = mf.ParametricFlow(family, optax.sgd(0.1), samples=3)
    parameters = family.parameters(mf.Gaussian(mean, deviation))

    def estimate(k):
        return jax.grad(lambda nu: sum(flow.objective_parts(nu, problem, None, k).values()))(parameters)

    estimates = jit(jax.vmap(estimate))(jax.random.split(key(3), 20_000))
    average, error = monte_carlo(np.stack(estimates, axis=1))
    assert_within(gradient, average, error)
    # The power: a third of what the repulsion ∬κ dQdQ adds to that gradient would be missing.
    repulsion = 2.0 * (own(np.log(deviation) + h) - own(np.log(deviation) - h)) / (2 * h)
    assert abs(repulsion / 3) > 10 * error[1]


@optax_promotes
def test_mmd_regularised_fit():
    """Loss zero, MMD² to a Gaussian in closed form: the fit is the reference, with no noise at all."""
    prior = mf.Gaussian(jnp.array([0.7]), jnp.array([0.5]))
    problem = mf.Problem(lambda theta: jnp.zeros(()), 1.0 * mf.SquaredMMD(prior, mf.SquaredExponential(0.6)))
    flow = mf.ParametricFlow(mf.MeanFieldGaussian(), optax.adam(0.05), samples=2)
    solution = mf.solve(problem, flow, mf.Gaussian(jnp.array([0.0]), jnp.array([1.0])), 400, key())
    np.testing.assert_allclose(solution.measure.mean, 0.7, atol=2e-3)
    np.testing.assert_allclose(solution.measure.scale, 0.5, atol=2e-3)
