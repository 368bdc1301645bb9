"""Gaussians in the Bures–Wasserstein geometry: exact fixed points, the path of the equations, and their
curvature by two ways."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import jit, key

import measureflow as mf

# V = ½(θ − b)ᵀA(θ − b) and τ: q* = N(b, τA⁻¹).
A, B, TAU = np.array([[2.0, 0.9], [0.9, 1.0]]), np.array([1.0, -0.5]), 0.5
STAR = TAU * np.linalg.inv(A)


def quadratic(theta):
    z = jnp.append(theta["x"], theta["y"]) - jnp.asarray(B, jnp.float32)
    return 0.5 * z @ jnp.asarray(A, jnp.float32) @ z


PROBLEM = mf.Problem(quadratic, TAU * mf.KL(mf.Flat()))


def gaussian(mean, covariance):
    mean = jnp.asarray(mean, jnp.float32)
    factor = jnp.asarray(np.linalg.cholesky(covariance), jnp.float32)
    return mf.Gaussian({"x": mean[:1], "y": mean[1]}, factor)


def moments(state):
    factor = np.asarray(state.factor, np.float64)
    return np.append(state.mean["x"], state.mean["y"]), factor @ factor.T


def stepped(flow, start, steps, problem=PROBLEM):
    return moments(jit(lambda s: mf.run(problem, flow, s, None, key(0), steps))(flow.init(problem, start)))


@pytest.mark.parametrize("eta", [0.05, 0.3])
def test_a_gaussian_target_is_the_fixed_point(eta):
    """To rounding, at any step size below 1/λmax(A) = 0.39, and reached from elsewhere."""
    flow = mf.BuresWassersteinFlow(eta, samples=2)
    # A step rounds some ten times, and takes a share 2ηλ of what earlier ones left away, λ about 1/2.
    rounding = 10 * np.finfo(np.float32).epsneg / eta
    for start, steps in ((gaussian(B, STAR), 20), (gaussian([-2.0, 3.0], 4 * np.eye(2)), 600)):
        mean, covariance = stepped(flow, start, steps)
        np.testing.assert_allclose(mean, B, atol=rounding)
        np.testing.assert_allclose(covariance, STAR, atol=rounding)


def test_steps_follow_the_equations_at_first_order():
    """ṁ = −A(m − b), Σ̇ = −AΣ − ΣA + 2τI; the error of a step is O(η²), and mutants are O(η) away."""
    mean, covariance = np.array([-1.0, 0.5]), np.array([[1.0, 0.3], [0.3, 0.8]])
    eta = 1e-3
    after = stepped(mf.BuresWassersteinFlow(eta, samples=2), gaussian(mean, covariance), 1)
    m_dot, s_dot = (after[0] - mean) / eta, (after[1] - covariance) / eta
    np.testing.assert_allclose(m_dot, -A @ (mean - B), atol=5e-3)
    drift = -A @ covariance - covariance @ A
    np.testing.assert_allclose(s_dot, drift + 2 * TAU * np.eye(2), atol=2e-2)
    for wrong in (drift + TAU * np.eye(2), drift + 4 * TAU * np.eye(2), drift / 2 + 2 * TAU * np.eye(2)):
        assert np.max(np.abs(s_dot - wrong)) > 0.2


def test_interactions_and_nonlinear_functionals_have_their_curvature():
    """φ(∫θ dQ) with φ = ½(· − c)² pulls the mean alone: with τKL to N(0, 1), m = c/(1 + τ) and Σ = 1. Of MMD²
    to the prior alone the fixed point is the prior."""
    prior, c = mf.Gaussian(jnp.zeros(1), 1.0), 2.0
    moment = mf.Moment(lambda theta: theta, lambda mean: 0.5 * jnp.sum((mean - c) ** 2))
    flow = mf.BuresWassersteinFlow(0.1, samples=100)
    start = mf.Gaussian(jnp.ones(1), 2.0)
    solution = mf.solve(mf.Problem(moment, 0.5 * mf.KL(prior)), flow, start, 300, key(0))
    assert isinstance(solution.measure, mf.Gaussian)
    np.testing.assert_allclose(solution.measure.mean, c / 1.5, atol=1e-4)
    np.testing.assert_allclose(solution.measure.scale, 1.0, atol=1e-3)
    assert {"value", "moment", "KL", "gradient_norm"} <= set(solution.history)
    assert solution.history.value[-1] < solution.history.value[0]
    repelled = mf.Problem(
        lambda theta: 0.0 * jnp.sum(theta), 1.0 * mf.SquaredMMD(prior, mf.SquaredExponential(1.0))
    )
    flow = mf.BuresWassersteinFlow(optax.linear_schedule(1.0, 0.05, 300), samples=400)
    end = mf.solve(repelled, flow, mf.Gaussian(jnp.full(1, 0.5), 0.7), 400, key(0)).measure
    np.testing.assert_allclose(end.mean, 0.0, atol=0.02)
    # The diagonal of the double sum, 1/400 of it, does not repel.
    np.testing.assert_allclose(end.scale, 1.0, atol=0.05)


def test_starts_from_particles_and_is_kept_in_files(tmp_path):
    particles = gaussian(B, STAR).sample(key(1), 50)
    flow = mf.BuresWassersteinFlow(0.1)
    mf.save(flow.init(PROBLEM, particles), tmp_path / "state.safetensors")
    state = mf.load(tmp_path / "state.safetensors")
    measure = flow.measure(flow.resume(PROBLEM, state))
    rows = np.column_stack([particles["x"][:, 0], particles["y"]])
    np.testing.assert_allclose(measure.covariance(), np.cov(rows.T, bias=True), rtol=1e-4)


START = gaussian(B, STAR)
BAD = {
    "odd": (lambda: mf.BuresWassersteinFlow(0.1, samples=3), ValueError, "must be even, got 3.*pass 4"),
    "step": (lambda: mf.BuresWassersteinFlow(-0.1), ValueError, "step_size must be > 0"),
    "none": (lambda: mf.BuresWassersteinFlow(None), TypeError, "got None"),
    "no regulariser": (
        lambda: mf.BuresWassersteinFlow(0.1).init(mf.deep_ensemble(quadratic), START),
        ValueError,
        "shrink to a point; give the problem a KL term",
    ),
    "one particle": (
        lambda: mf.BuresWassersteinFlow(0.1).init(PROBLEM, {"x": jnp.ones((1, 1)), "y": jnp.ones(1)}),
        ValueError,
        "some direction has no spread",
    ),
}


@pytest.mark.usefixtures("as_a_user_runs_it")
@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    call, error, message = BAD[name]
    with pytest.raises(error, match=message):
        call()
