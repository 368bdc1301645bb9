"""Rényi and α divergences between Gaussians: integrals by quadrature, limits, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.optimize
import scipy.stats as st
from helpers import jit, key

import measureflow as mf
from measureflow.numerics.integration import draws
from measureflow.statement.divergences import kl_of_gaussians
from measureflow.statement.orders import renyi_of_gaussians

Q, P = mf.Gaussian(jnp.array([0.5]), 0.7), mf.Gaussian(jnp.array([-0.3]), 1.2)
GRID = np.linspace(-15, 15, 60_001)
RENYI = jit(renyi_of_gaussians)


def integral(order, q=(0.5, 0.7), p=(-0.3, 1.2)):
    """∫ q^α p^{1−α}."""
    return np.sum(st.norm.pdf(GRID, *q) ** order * st.norm.pdf(GRID, *p) ** (1 - order)) * (GRID[1] - GRID[0])


@pytest.mark.parametrize("order", [0.3, 0.5, 1.4])
def test_closed_forms_are_their_integrals(order):
    exact = integral(order)
    renyi, alpha = np.log(exact) / (order - 1), (exact - 1) / (order * (order - 1))
    assert float(RENYI(Q, P, jnp.asarray(order))) == pytest.approx(renyi, rel=1e-5)
    found = mf.AlphaDivergence(P, order).gaussian_value(Q, draws(Q, key(0), 2))
    assert float(found) == pytest.approx(alpha, rel=1e-5)
    # Q and P exchanged, and the order 1 − α, are others, but for α = ½.
    exchanged = np.log(integral(order, (-0.3, 1.2), (0.5, 0.7))) / (order - 1)
    for wrong in (exchanged, np.log(integral(1 - order)) / -order, 2 * renyi):
        assert order == 0.5 or abs(renyi - wrong) > 0.01


def test_order_one_is_kl_and_full_covariances_are_rotations():
    for a, b in ((Q, P), (rotated(Q), rotated(P))):
        kl = float(kl_of_gaussians(a, b))
        below, above = (float(RENYI(a, b, jnp.asarray(order))) for order in (0.99, 1.01))
        assert below < kl < above
        # D_α is smooth in α: the mean of the two is KL up to O(0.01²).
        assert (below + above) / 2 == pytest.approx(kl, rel=1e-3)
    # A rotation of independent coordinates changes nothing: those of two are the sum of each.
    apart = float(RENYI(Q, P, jnp.asarray(0.5))) + float(RENYI(Q, Q, jnp.asarray(0.5)))
    assert float(RENYI(rotated(Q), rotated(P), jnp.asarray(0.5))) == pytest.approx(apart, rel=1e-5)


def rotated(measure):
    """The measure times N(0.5, 0.7²), turned by 30 degrees."""
    c, s = np.cos(np.pi / 6), np.sin(np.pi / 6)
    turn = np.array([[c, -s], [s, c]])
    mean = turn @ np.array([float(measure.mean[0]), 0.5])
    covariance = turn @ np.diag([float(measure.scale) ** 2, 0.49]) @ turn.T
    factor = jnp.asarray(np.linalg.cholesky(covariance), jnp.float32)
    return mf.Gaussian(jnp.asarray(mean, jnp.float32), factor)


def test_too_wide_is_infinite():
    for measure in (mf.Gaussian(jnp.zeros(1), 2.0), mf.Gaussian(jnp.zeros(1), jnp.full((1, 1), 2.0))):
        assert float(RENYI(measure, P, jnp.asarray(2.0))) == np.inf


def test_a_family_finds_the_minimiser():
    """½ E(θ − 1)² + Rényi: the minimum over (m, log s), by SciPy, has no gradient; that of KL has."""

    def value(nu, order=0.5):
        m, s = nu[0], np.exp(nu[1])
        return 0.5 * ((m - 1) ** 2 + s**2) + np.log(integral(order, (m, s))) / (order - 1)

    best = scipy.optimize.minimize(value, [0.0, 0.0]).x
    problem = mf.Problem(lambda theta: 0.5 * jnp.sum((theta - 1) ** 2), 1.0 * mf.Renyi(P, 0.5))
    flow = mf.ParametricFlow(mf.MeanFieldGaussian(), optax.sgd(0.1), samples=20_000)

    def gradient(nu, problem):
        return jax.grad(lambda x: sum(flow.objective_parts(x, problem, None, key(0)).values()))(nu)

    nu = (jnp.asarray(best[:1], jnp.float32), jnp.asarray(best[1:], jnp.float32))
    # The loss is a mean over 20,000 draws.
    assert np.max(np.abs(np.ravel(jit(gradient)(nu, problem)))) < 4 * 1.5 / np.sqrt(20_000)
    other = mf.Problem(problem.objective, 1.0 * mf.KL(P))
    assert np.max(np.abs(np.ravel(jit(gradient)(nu, other)))) > 0.1
    assert "1·Rényi_0.5(Q, Gaussian)" in problem.describe()


def solve_particles():
    problem = mf.Problem(lambda theta: jnp.sum(theta**2), 1.0 * mf.AlphaDivergence(P, 0.5))
    return mf.solve(problem, mf.WassersteinFlow(0.1), jnp.ones((3, 1)), 2, key(0))


BAD = {
    "order 1": (lambda: mf.Renyi(P, 1.0), ValueError, r"order must not be 1.*use mf.KL"),
    "order 0": (lambda: mf.AlphaDivergence(P, 0.0), ValueError, "AlphaDivergence order must be > 0"),
    "reference": (lambda: mf.Renyi(mf.Flat(), 0.5), TypeError, r"Renyi reference must be a Gaussian, got"),
    "particles": (solve_particles, ValueError, r"needs the density of Q.*mf.ParametricFlow"),
}


@pytest.mark.usefixtures("as_a_user_runs_it")
@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    call, error, message = BAD[name]
    with pytest.raises(error, match=message):
        call()
