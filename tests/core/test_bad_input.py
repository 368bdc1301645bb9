"""What a user may get wrong: each message names the argument, its value and the remedy."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import optax
import pytest
from helpers import key

import measureflow as mf

pytestmark = pytest.mark.usefixtures("as_a_user_runs_it")


def loss(theta):
    return jnp.sum(theta**2)


def batch_loss(theta, batch):
    return jnp.mean(batch) * jnp.sum(theta**2)


PRIOR = mf.Gaussian(jnp.zeros(2), 1.0)
SE = mf.SquaredExponential(1.0)
LANGEVIN = mf.Problem(loss, 1.0 * mf.KL(PRIOR))
REPULSIVE = mf.Problem(loss, 1.0 * mf.SquaredMMD(PRIOR, SE))
FLOW = mf.WassersteinFlow(step_size=0.1)
PARTICLES = jnp.array([[1.0, 2.0], [0.5, -1.0], [0.0, 3.0]])


def weighted(weight):
    return weight * mf.KL(PRIOR)


def solve(problem=LANGEVIN, flow=FLOW, initial=PARTICLES, steps=3, seed=None, **options):
    return mf.solve(problem, flow, initial, steps, key() if seed is None else seed, **options)


def parametric(family=None, optimiser=None, **options):
    return mf.ParametricFlow(family or mf.MeanFieldGaussian(), optimiser or optax.sgd(0.1), **options)


def forgets_to_return(theta):
    jnp.sum(theta)


# name: (what is done, the type of the error, the pieces of its message)
STATEMENTS = {
    "weight -1": (lambda: weighted(-1.0), ValueError, ["KL weight", "> 0", "-1.0", "drop the term"]),
    "weight 0": (lambda: weighted(0), ValueError, ["KL weight", "got 0", "drop the term"]),
    "weight nan": (lambda: weighted(float("nan")), ValueError, ["KL weight", "got nan"]),
    "weight inf": (lambda: weighted(jnp.inf), ValueError, ["KL weight", "finite", "got inf"]),
    "weight vector": (lambda: weighted(jnp.ones(2)), ValueError, ["KL weight", "(2,)|1. 1."]),
    "weight complex": (lambda: weighted(1j), (TypeError, ValueError), ["KL weight", "1j"]),
    "weight text": (lambda: weighted("0.1"), (TypeError, ValueError), ["KL weight", "0.1"]),
    "weight None": (lambda: weighted(None), (TypeError, ValueError), ["KL weight", "None"]),
    "weight of a sum": (
        lambda: -2.0 * (mf.KL(PRIOR) + mf.SquaredMMD(PRIOR, SE)),
        ValueError,
        ["KL + MMD² weight", "-2.0", "drop the term"],
    ),
    "kernel weight": (lambda: -1.0 * SE, ValueError, ["kernel weight", "-1.0", "drop the term"]),
    "sum with a number": (lambda: mf.KL(PRIOR) + 3, TypeError, ["functionals", "3", "mf.KL(prior)"]),
    "kernel plus a number": (lambda: SE + 3, TypeError, ["kernel", "3", "w * kernel"]),
    "lengthscale 0": (
        lambda: mf.SquaredExponential(0.0),
        ValueError,
        ["lengthscale", "0.0", "median_heuristic"],
    ),
    "lengthscale -1": (
        lambda: mf.Matern(0.5, -1.0),
        ValueError,
        ["Matern lengthscale", "-1.0", "median_heuristic"],
    ),
    "lengthscale nan": (lambda: mf.InverseMultiquadric(jnp.nan), ValueError, ["InverseMultiquadric", "nan"]),
    "lengthscale vector": (
        lambda: mf.SquaredExponential(jnp.ones(3)),
        ValueError,
        ["SquaredExponential lengthscale", "(3,)|1. 1. 1."],
    ),
    "lengthscale None": (
        lambda: mf.SquaredExponential(None),
        (TypeError, ValueError),
        ["lengthscale", "None"],
    ),
    "Matern nu": (lambda: mf.Matern(1.0, 1.0), ValueError, ["nu", "0.5, 1.5 or 2.5", "1.0"]),
    "features": (lambda: SE.on(3), TypeError, ["features", "3", "lambda theta"]),
    "median of one": (lambda: mf.median_heuristic(PARTICLES[:1]), ValueError, ["at least 2", "got 1"]),
    "median of equals": (
        lambda: mf.median_heuristic(jnp.ones((5, 2))),
        ValueError,
        ["median", "0.0", "by hand"],
    ),
    "scale -1": (
        lambda: mf.Gaussian(jnp.zeros(2), -1.0),
        ValueError,
        ["Gaussian scale", "-1.0", "deviation"],
    ),
    "scale nan": (lambda: mf.Gaussian(jnp.zeros(2), np.nan), ValueError, ["Gaussian scale", "nan"]),
    "scale shape": (
        lambda: mf.Gaussian(jnp.zeros(2), jnp.ones(3)),
        ValueError,
        ["Gaussian scale", "(3,)", "(2,)", "lower-triangular matrix of shape (2, 2)"],
    ),
    "scale structure": (
        lambda: mf.Gaussian({"a": jnp.zeros(2)}, {"b": 1.0}),
        ValueError,
        ["Gaussian scale", "'b'"],
    ),
    "scale empty": (lambda: mf.Gaussian({"a": jnp.zeros(2)}, {}), ValueError, ["Gaussian scale"]),
    "scale None": (
        lambda: mf.Gaussian(jnp.zeros(2), None),
        (TypeError, ValueError),
        ["Gaussian scale", "None"],
    ),
    "scale not triangular": (
        lambda: mf.Gaussian(jnp.zeros(2), jnp.array([[1.0, 0.5], [0.5, 1.0]])),
        ValueError,
        ["lower-triangular", "0.5", "cholesky"],
    ),
    "small scale not triangular": (
        lambda: mf.Gaussian(jnp.zeros(2), 1e-9 * jnp.array([[1.0, 0.5], [0.5, 1.0]])),
        ValueError,
        ["lower-triangular", "cholesky"],
    ),
    "scale with nan below": (
        lambda: mf.Gaussian(jnp.zeros(2), jnp.array([[1.0, 0.0], [jnp.nan, 1.0]])),
        ValueError,
        ["Gaussian scale", "nan"],
    ),
    "scale matrix diagonal": (
        lambda: mf.Gaussian(jnp.zeros(2), jnp.array([[1.0, 0.0], [0.5, -1.0]])),
        ValueError,
        ["Gaussian scale", "> 0", "-1."],
    ),
    "mean nan": (lambda: mf.Gaussian(jnp.array([jnp.nan]), 1.0), ValueError, ["Gaussian mean", "nan"]),
    "mean empty": (lambda: mf.Gaussian({}, 1.0), ValueError, ["Gaussian mean"]),
    "density of many": (lambda: PRIOR.log_density(PARTICLES), ValueError, ["(3, 2)", "(2,)"]),
    "whitened by another space": (
        lambda: mf.SquaredMMD(mf.Gaussian(jnp.zeros(1), 1.0), SE.on(mf.Whiten(PRIOR))),
        ValueError,
        ["(1,)", "(2,)"],
    ),
    "uniform ends": (
        lambda: mf.Uniform(jnp.ones(2), jnp.array([2.0, 0.5])),
        ValueError,
        ["Uniform high − low", "-0.5", "swap"],
    ),
    "uniform empty": (lambda: mf.Uniform(1.0, 1.0), ValueError, ["Uniform high − low", "got 0.0"]),
    "uniform shapes": (
        lambda: mf.Uniform(jnp.zeros(2), 1.0),
        ValueError,
        ["low and high", "(2,)", "shape of θ"],
    ),
    "empirical ragged": (
        lambda: mf.Empirical({"a": jnp.ones((3, 1)), "b": jnp.ones(2)}),
        ValueError,
        ["Empirical particles", "disagree", "(3, 1)", "same number of rows"],
    ),
    "empirical empty": (lambda: mf.Empirical(jnp.ones((0, 2))), ValueError, ["leading axis", "(0, 2)"]),
    "sample -1": (lambda: PRIOR.sample(key(), -1), ValueError, ["n", "-1"]),
    "sample 2.5": (lambda: PRIOR.sample(key(), 2.5), TypeError, ["n", "2.5", "integer"]),
    "not a distribution": (lambda: mf.FromDistribution(3.0), TypeError, ["NumPyro", "3.0"]),
    "KL uniform": (
        lambda: mf.KL(mf.Uniform(0.0, 1.0)),
        ValueError,
        ["Uniform", "full support", "Gaussian", "bijection"],
    ),
    "KL empirical": (
        lambda: mf.KL(mf.Empirical(PARTICLES)),
        ValueError,
        ["Empirical", "without", "Gaussian"],
    ),
    "KL half-normal": (
        lambda: mf.KL(mf.FromDistribution(dist.HalfNormal(1.0))),
        ValueError,
        ["full support"],
    ),
    "KL kernel": (lambda: mf.KL(SE), TypeError, ["KL reference", "mf.Gaussian"]),
    "MMD swapped": (
        lambda: mf.SquaredMMD(SE, PRIOR),
        TypeError,
        ["(reference, kernel)", "SquaredExponential, Gaussian"],
    ),
    "MMD without closed form": (
        lambda: mf.SquaredMMD(PRIOR, mf.Matern(1.5, 1.0)),
        mf.NoClosedFormError,
        ["Matern", "Gaussian", "mf.Empirical(prior.sample(key, 1000))"],
    ),
    "MMD of nonlinear features": (
        lambda: mf.SquaredMMD(PRIOR, SE.on(jnp.sin)),
        mf.NoClosedFormError,
        ["affine", "mf.Empirical(prior.sample(key, 1000))"],
    ),
    "loss": (lambda: mf.Problem(3.0), TypeError, ["loss", "3.0", "function"]),
    "regulariser": (lambda: mf.Problem(loss, PRIOR), TypeError, ["regulariser", "KL and SquaredMMD"]),
    "references apart": (
        lambda: mf.Problem(loss, mf.KL(PRIOR) + mf.KL(mf.Gaussian(jnp.zeros(3), 1.0))),
        ValueError,
        ["(2,)", "(3,)", "shape of θ"],
    ),
    "value of Flat": (lambda: LANGEVIN.value(mf.Flat()), TypeError, ["measure", "Flat", "mf.Empirical"]),
    "value of another space": (
        lambda: LANGEVIN.value(mf.Gaussian(jnp.zeros(1), 1.0)),
        ValueError,
        ["measure", "(1,)", "(2,)"],
    ),
    "value without key": (
        lambda: mf.Problem(loss).value(mf.Gaussian(jnp.zeros(3), 1.0)),
        ValueError,
        ["3 dimensions", "key="],
    ),
    "value with key 0": (lambda: LANGEVIN.value(PRIOR, key=0), TypeError, ["key", "got 0", "jax.random.key"]),
    "value with no samples": (
        lambda: LANGEVIN.value(PRIOR, key=key(), samples=0),
        ValueError,
        ["samples", "0"],
    ),
    "entropy of few": (
        lambda: LANGEVIN.value(mf.Empirical(PARTICLES)),
        ValueError,
        ["3 particles in 2 dimensions", "stationarity"],
    ),
    "gradient elsewhere": (
        lambda: LANGEVIN.wasserstein_gradient(jnp.ones((4, 3))),
        ValueError,
        ["particles", "(3,)", "(2,)", "same pytree"],
    ),
    "gradient of a measure": (
        lambda: LANGEVIN.wasserstein_gradient(mf.Empirical(PARTICLES)),
        (TypeError, ValueError),
        ["particles", "Empirical", ".particles"],
    ),
    "stationarity of one": (
        lambda: LANGEVIN.stationarity(PARTICLES[:1]),
        ValueError,
        ["at least 2", "got 1"],
    ),
}

RUNS = {
    "both": (
        lambda: mf.WassersteinFlow(0.1, optimiser=optax.sgd(0.1)),
        ValueError,
        ["step_size", "optimiser", "0.1", "learning rate"],
    ),
    "neither": (mf.WassersteinFlow, ValueError, ["either step_size or optimiser", "None"]),
    "step_size 0": (lambda: mf.WassersteinFlow(0.0), ValueError, ["step_size", "0.0", "1e-3"]),
    "step_size nan": (lambda: mf.WassersteinFlow(jnp.nan), ValueError, ["step_size", "nan"]),
    "step_size vector": (lambda: mf.WassersteinFlow(jnp.ones(3)), ValueError, ["step_size", "(3,)|1. 1. 1."]),
    "schedule": (
        lambda: solve(flow=mf.WassersteinFlow(lambda t: 1.0 - 2 * t)),
        ValueError,
        ["step_size", "-1.0", "step 1"],
    ),
    "preconditioner -1": (lambda: mf.FixedPreconditioner(-1.0), ValueError, ["scale", "-1.0", "step size"]),
    "preconditioner matrix": (
        lambda: mf.FixedPreconditioner(jnp.eye(2)),
        ValueError,
        ["FixedPreconditioner scale", "matrix of shape (2, 2)", "one number per coordinate", "diagonal("],
    ),
    "preconditioner covariance": (
        lambda: mf.RMSPreconditioner(10, scale=jnp.array([[1.0, -0.5], [-0.5, 1.0]])),
        ValueError,
        ["RMSPreconditioner scale", "matrix", "diagonal("],
    ),
    "preconditioner positive matrix": (
        lambda: solve(flow=mf.WassersteinFlow(0.1, mf.FixedPreconditioner(jnp.ones((2, 2))))),
        ValueError,
        ["FixedPreconditioner scale", "(2, 2)", "(2,)", "one number per coordinate"],
    ),
    "step size too small": (
        lambda: mf.WassersteinFlow(1e-60),
        ValueError,
        ["step_size", "1e-60", "float32", "rounds to 0"],
    ),
    "step size too large": (
        lambda: mf.WassersteinFlow(np.float64(1e60)),
        ValueError,
        ["step_size", "1e+60", "float32", "infinity"],
    ),
    "complex particles": (
        lambda: solve(initial=PARTICLES + 1j),
        TypeError,
        ["initial|particles", "real", "complex64", "z.imag"],
    ),
    "complex particles of NumPy, somewhere": (
        lambda: mf.Empirical({"w": np.ones(3), "b": np.ones(3, complex)}),
        TypeError,
        ["particles['b']", "real", "complex", "z.imag"],
    ),
    "complex mean": (
        lambda: mf.Gaussian(jnp.array([1j, 0.0]), 1.0),
        TypeError,
        ["mean", "real", "complex64"],
    ),
    "complex scale": (
        lambda: mf.Gaussian(jnp.zeros(2), jnp.array([1.0 + 1j, 1.0])),
        TypeError,
        ["real", "complex64"],
    ),
    "complex matrix": (
        lambda: mf.Gaussian(jnp.zeros(2), jnp.eye(2) * (1 + 1j)),
        TypeError,
        ["real", "complex64"],
    ),
    "complex bounds": (lambda: mf.Uniform(jnp.array(-1j), 1.0), TypeError, ["real", "complex64"]),
    "complex preconditioner": (
        lambda: mf.FixedPreconditioner(jnp.array([1.0, 1j])),
        TypeError,
        ["real", "complex64"],
    ),
    "preconditioner 3": (lambda: mf.WassersteinFlow(0.1, 3.0), TypeError, ["preconditioner", "3.0"]),
    "adapt_steps": (lambda: mf.RMSPreconditioner(0), ValueError, ["adapt_steps", "got 0"]),
    "decay": (lambda: mf.RMSPreconditioner(10, decay=1.0), ValueError, ["decay", "0.99"]),
    "largest drift 0": (lambda: mf.RMSPreconditioner(10, largest=0.0), ValueError, ["largest", "None"]),
    "largest drift in words": (lambda: mf.RMSPreconditioner(10, largest="2"), TypeError, ["largest", "'2'"]),
    "largest drift of velocities": (
        lambda: mf.KineticFlow(0.1, 1.0, mass=mf.RMSPreconditioner(10, largest=2.0)),
        ValueError,
        ["mass", "largest", "WassersteinFlow"],
    ),
    "largest drift of proposals": (
        lambda: mf.WassersteinFlow(0.1, mf.RMSPreconditioner(10, largest=2.0), metropolis=True),
        ValueError,
        ["metropolis=True", "largest"],
    ),
    "optimiser and preconditioner": (
        lambda: mf.WassersteinFlow(optimiser=optax.sgd(0.1), preconditioner=mf.FixedPreconditioner(1.0)),
        ValueError,
        ["either preconditioner or optimiser"],
    ),
    "optimiser and momentum": (
        lambda: mf.WassersteinFlow(optimiser=optax.sgd(0.1), momentum=0.9),
        ValueError,
        ["either momentum or optimiser"],
    ),
    "momentum 1": (lambda: mf.WassersteinFlow(0.1, momentum=1.0), ValueError, ["momentum", "0.9"]),
    "momentum -1": (lambda: mf.WassersteinFlow(0.1, momentum=-1.0), ValueError, ["momentum", "-1.0", "None"]),
    "optimiser 0.1": (lambda: mf.WassersteinFlow(optimiser=0.1), TypeError, ["optimiser", "0.1"]),
    "optimiser at τ > 0": (
        lambda: solve(flow=mf.WassersteinFlow(optimiser=optax.sgd(0.1))),
        ValueError,
        ["optimiser", "τ = 1.0", "Langevin", "step_size=", "RMSPreconditioner"],
    ),
    "family": (lambda: mf.ParametricFlow(3, optax.sgd(0.1)), TypeError, ["family", "3", "MeanFieldGaussian"]),
    "samples 1": (lambda: parametric(samples=1), ValueError, ["samples", "at least 2", "got 1"]),
    "samples 2.5": (lambda: parametric(samples=2.5), TypeError, ["samples", "integer", "2.5"]),
    "parametric optimiser": (lambda: parametric(optimiser=0.1), TypeError, ["optimiser", "0.1"]),
    "parametric from one": (lambda: solve(flow=parametric(), initial=PARTICLES[:1]), ValueError, ["initial"]),
    "full rank from few": (
        lambda: solve(flow=parametric(mf.FullRankGaussian()), initial=PARTICLES[:2]),
        ValueError,
        ["initial"],
    ),
    "parametric elsewhere": (
        lambda: solve(flow=parametric(), initial=mf.Gaussian(jnp.zeros(3), 1.0)),
        ValueError,
        ["initial", "(3,)", "(2,)"],
    ),
    "state of another flow": (
        lambda: solve(flow=parametric(), initial=mf.ParticleState(PARTICLES, jnp.zeros((), jnp.int32))),
        TypeError,
        ["initial", "ParticleState"],
    ),
    "initial ragged": (
        lambda: solve(mf.Problem(loss), initial={"a": jnp.ones((3, 1)), "b": jnp.ones((2, 1))}),
        ValueError,
        ["initial", "disagree", "(3, 1)", "(2, 1)"],
    ),
    "initial scalar": (
        lambda: solve(mf.Problem(loss), initial=1.0),
        ValueError,
        ["initial", "leading axis", "x[None]"],
    ),
    "initial empty": (lambda: solve(mf.Problem(loss), initial={}), ValueError, ["initial", "no arrays"]),
    "initial none left": (lambda: solve(initial=jnp.ones((0, 2))), ValueError, ["initial", "(0, 2)"]),
    "initial elsewhere": (
        lambda: solve(initial={"a": PARTICLES}),
        ValueError,
        ["initial", "['a']", "(2,)", "same pytree"],
    ),
    "initial a measure": (
        lambda: solve(initial=PRIOR),
        (TypeError, ValueError),
        ["initial", "Gaussian", ".sample"],
    ),
    "initial a measure, no reference": (
        lambda: solve(mf.Problem(lambda theta: 0.0), initial=mf.Gaussian(jnp.zeros(5), jnp.ones(5))),
        (TypeError, ValueError),
        ["initial", "Gaussian", ".sample"],
    ),
    "initial a solution's measure": (
        lambda: solve(initial=mf.Empirical(PARTICLES)),
        (TypeError, ValueError),
        ["initial", "Empirical", ".particles"],
    ),
    "initial nan": (
        lambda: solve(initial=PARTICLES.at[1, 0].set(jnp.nan)),
        ValueError,
        ["initial", "not finite", "NaN"],
    ),
    "loss nan": (
        lambda: solve(mf.Problem(lambda theta: jnp.sum(jnp.log(theta)))),
        ValueError,
        ["loss is nan", "step 0", "logarithms"],
    ),
    "loss vector": (
        lambda: solve(mf.Problem(lambda theta: theta**2)),
        ValueError,
        ["loss", "scalar", "(2,)", "jnp.sum"],
    ),
    "loss None": (
        lambda: solve(mf.Problem(forgets_to_return)),
        (TypeError, ValueError),
        ["loss", "scalar", "None"],
    ),
    "loss integer": (lambda: solve(mf.Problem(lambda theta: 1)), (TypeError, ValueError), ["loss", "int"]),
    "steps -1": (lambda: solve(steps=-1), ValueError, ["steps", "-1", "initial"]),
    "steps 1.5": (lambda: solve(steps=1.5), TypeError, ["steps", "integer", "1.5"]),
    "record_every": (lambda: solve(record_every=0), ValueError, ["record_every", "0", "every step"]),
    "key 0": (lambda: solve(seed=0), TypeError, ["key", "got 0", "jax.random.key(0)"]),
    "keys": (lambda: solve(seed=jax.random.split(key(), 3)), TypeError, ["key", "jax.random.key(0)"]),
    "batch_size large": (
        lambda: solve(mf.Problem(batch_loss), data=jnp.ones(4), batch_size=5),
        ValueError,
        ["batch_size=5", "4 cases", "at most 4"],
    ),
    "batch_size 0": (
        lambda: solve(mf.Problem(batch_loss), data=jnp.ones(4), batch_size=0),
        ValueError,
        ["batch_size", "got 0"],
    ),
    "batch_size 2.5": (
        lambda: solve(mf.Problem(batch_loss), data=jnp.ones(4), batch_size=2.5),
        TypeError,
        ["batch_size", "2.5"],
    ),
    "batch_size without data": (
        lambda: solve(batch_size=5),
        ValueError,
        ["batch_size=5", "without data", "data="],
    ),
    "batch_size with iterator": (
        lambda: solve(mf.Problem(batch_loss), data=iter([jnp.ones(2)] * 9), batch_size=2),
        ValueError,
        ["batch_size=2", "iterator"],
    ),
    "data scalar": (
        lambda: solve(mf.Problem(batch_loss), data=3.0),
        ValueError,
        ["data", "leading axis", "case"],
    ),
    "data ragged": (
        lambda: solve(mf.Problem(batch_loss), data=(jnp.ones((3, 1)), jnp.ones(4))),
        ValueError,
        ["data", "disagree", "(3, 1)", "(4,)"],
    ),
    "data beyond 32 bits": (
        lambda: solve(mf.Problem(batch_loss), data=(np.array([1, 2**40 + 7]),)),
        ValueError,
        ["data[0]", "1099511627783", "int32", "wrap around", "jax_enable_x64"],
    ),
    "batch beyond 32 bits": (
        lambda: mf.Problem(batch_loss).value(mf.Empirical(PARTICLES), np.array([1, 2**40 + 7])),
        ValueError,
        ["batch", "1099511627783", "int32"],
    ),
    "batch of a gradient beyond 32 bits": (
        lambda: mf.Problem(batch_loss).wasserstein_gradient(PARTICLES, {"x": np.array([1e300])}),
        ValueError,
        ["batch['x']", "1e+300", "float32", "infinite"],
    ),
    "batch of a discrepancy beyond 32 bits": (
        lambda: mf.Problem(batch_loss).stationarity(PARTICLES, np.array([2**32], np.uint64)),
        ValueError,
        ["batch", "4294967296", "uint32"],
    ),
    "data empty": (lambda: solve(mf.Problem(batch_loss), data=()), ValueError, ["data", "no arrays"]),
}


@pytest.mark.parametrize("name", [*STATEMENTS, *RUNS])
def test_message(name):
    act, kind, pieces = (STATEMENTS | RUNS)[name]
    with pytest.raises(kind) as caught:
        act()
    message = str(caught.value)
    for piece in pieces:
        assert any(alternative in message for alternative in piece.split("|")), f"{piece!r} not in: {message}"
    assert "; " in message, f"no remedy in: {message}"


def test_one_particle_with_repulsion_is_legal_and_warned_of():
    flow = mf.WassersteinFlow(0.1)
    with pytest.warns(
        UserWarning, match=r"one particle does not repel itself.*only the pull.*several particles"
    ):
        solution = solve(REPULSIVE, flow, PARTICLES[:1], steps=1)
    # θ − η(2θ − 2∇μ_P), with μ_P(θ) = ½ exp(−‖θ‖²/4): nothing of the interaction.
    theta = np.array([1.0, 2.0])
    pull = 0.5 * np.exp(-np.sum(theta**2) / 4) * theta / 2
    np.testing.assert_allclose(solution.measure.particles[0], theta - 0.1 * (2 * theta + 2 * pull), rtol=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        solve(REPULSIVE, flow, PARTICLES, steps=0)
        solve(LANGEVIN, flow, PARTICLES[:1], steps=0)


def test_no_steps_return_the_beginning():
    solution = solve(steps=0)
    np.testing.assert_array_equal(solution.measure.particles, PARTICLES)
    np.testing.assert_array_equal(solution.history.step, [0])
    np.testing.assert_allclose(solution.history.loss, [np.mean(np.sum(np.asarray(PARTICLES) ** 2, axis=1))])
    assert int(solution.state.step) == 0


def test_divergence_says_when_and_who():
    """Gradient descent on θ⁴/4 with η = 1, replayed in NumPy: only particles beyond √2 are lost."""
    start = np.array([[0.5], [1.6], [1.0], [1.5], [-3.0]], np.float32)
    replay, step = [start], 0
    with np.errstate(over="ignore", invalid="ignore"):
        while np.all(np.isfinite(replay[-1])):
            replay.append(replay[-1] - replay[-1] ** 3)
            step += 1
    problem = mf.Problem(lambda theta: jnp.sum(theta**4) / 4)
    with pytest.raises(mf.DivergenceError, match=rf"step {step}: 1 of 5.*smaller step_size") as caught:
        solve(problem, mf.WassersteinFlow(1.0), start, steps=40)
    error = caught.value
    assert error.step == step
    np.testing.assert_array_equal(error.lost, [4])
    assert int(error.state.step) == step - 1
    np.testing.assert_allclose(error.state.particles, replay[-2], rtol=1e-4)
    assert np.all(np.isfinite(error.state.particles))
    assert error.history.step[0] == 0
    np.testing.assert_allclose(error.history.loss[0], np.mean(start**4) / 4, rtol=1e-5)


def test_divergence_of_a_parametric_flow():
    flow = parametric(optimiser=optax.sgd(1e20), samples=3)
    with pytest.raises(mf.DivergenceError) as caught:
        solve(flow=flow, initial=PRIOR, steps=30)
    assert np.all(np.isfinite(caught.value.state.parameters[0]))


def test_an_exhausted_iterator_loses_nothing():
    """What `state` holds is what an uninterrupted run holds there, and it can be continued from."""
    problem, batches = mf.Problem(batch_loss), [np.full(2, 0.1 * k, np.float32) for k in range(30)]
    whole = solve(problem, steps=20, data=iter(batches))
    with pytest.raises(mf.DataExhaustedError, match=r"ended at.* step \d+.*`state`") as caught:
        solve(problem, steps=20, data=iter(batches[:17]))
    error, done = caught.value, int(caught.value.state.step)
    assert 0 < done <= 17, "the batches that did come are used"
    np.testing.assert_allclose(error.history.loss, whole.history.loss[: len(error.history.loss)])
    rest = solve(problem, initial=error.state, steps=20 - done, data=iter(batches[done:]))
    np.testing.assert_array_equal(rest.measure.particles, whole.measure.particles)
    # A loader that can be started over does not end.
    assert int(solve(problem, steps=20, data=Loader(batches[:3])).state.step) == 20


class Loader:
    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


def test_numbers_may_be_traced():
    """Checks look at concrete values only, so that all of it runs under jit and vmap."""

    def gradient(weight, scale):
        prior = mf.Gaussian(jnp.zeros(2), scale)
        kernel = weight * mf.SquaredExponential(scale)
        regulariser = weight * mf.SquaredMMD(prior, kernel) + weight * mf.KL(prior)
        return mf.Problem(loss, regulariser).wasserstein_gradient(PARTICLES)

    numbers = jnp.array([0.5, 1.0, 2.0]), jnp.array([1.0, 0.7, 1.5])
    together = jax.jit(jax.vmap(gradient))(*numbers)
    for k in range(3):
        weight, scale = (float(x[k]) for x in numbers)
        np.testing.assert_allclose(together[k], by_hand(weight, scale), rtol=1e-5)


def by_hand(weight, scale):
    x = np.asarray(PARTICLES, np.float64)
    bump = weight / 2 * np.exp(-np.sum(x**2, axis=1) / (4 * scale**2))
    difference = x[:, None] - x[None]
    slope = -weight * np.exp(-np.sum(difference**2, axis=-1) / (2 * scale**2)) / scale**2
    repulsion = 2 * weight * np.mean(slope[:, :, None] * difference, axis=1)
    return 2 * x + weight * x / scale**2 + 2 * weight * bump[:, None] * x / (2 * scale**2) + repulsion


def test_runs_over_weights_are_one_program():
    """A bad number among traced ones is not seen, and spoils no other."""

    def end(weight, step_size, low):
        prior = mf.Uniform(low, low + 1)
        kernel = mf.SquaredExponential(weight) + mf.Matern(0.5, weight)
        problem = mf.Problem(loss, weight * mf.SquaredMMD(mf.Empirical(PARTICLES), kernel))
        flow = mf.WassersteinFlow(step_size, mf.FixedPreconditioner(weight))
        state = flow.init(problem, PARTICLES + prior.sample(key(), 3))
        return mf.run(problem, flow, state, None, key(), 4).particles

    weights, steps = jnp.array([0.5, -1.0, 2.0]), jnp.array([0.1, 0.1, 0.05])
    low = jnp.zeros((3, 2))
    together = jax.jit(jax.vmap(end))(weights, steps, low)
    for k in (0, 2):
        alone = end(weights[k], steps[k], low[k])
        np.testing.assert_allclose(together[k], alone, rtol=1e-5, atol=1e-6)
