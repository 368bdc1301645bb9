"""SVGD: the drift of its peers, exact moments with the linear kernel, and other coordinates."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from helpers import RADIAL, SMALL, assert_close, assert_within, draw, jit, key, monte_carlo, rows
from helpers import squared_distances as distances
from jax.flatten_util import ravel_pytree
from numpyro.contrib.einstein import SVGD, IMQKernel, RBFKernel
from numpyro.contrib.einstein.stein_util import median_bandwidth

import measureflow as mf
from measureflow.core.medians import median_of_pairs
from measureflow.flows.scalings import Dense, Diagonal, Identity, LowRank
from measureflow.numerics import pair_sums
from measureflow.numerics.interactions import EXACT

MEAN, COVARIANCE = np.array([1.0, -2.0]), np.array([[2.0, 0.6], [0.6, 0.5]])
TARGET = mf.Gaussian(jnp.asarray(MEAN, jnp.float32), jnp.asarray(np.linalg.cholesky(COVARIANCE), jnp.float32))


def negative_log_target(theta):
    return -TARGET.log_density(theta)


PROBLEM = mf.Problem(negative_log_target, 1.0 * mf.KL(mf.Flat()))


class Linear(mf.AbstractKernel):
    """k(x, y) = 1 + x·y."""

    def __call__(self, x, y):
        return 1 + jnp.sum(x * y)


def descended(kernel, particles, forces, temperature=1.0, way=EXACT, scaling=None):
    flow = mf.SteinFlow(kernel, 1.0, interactions=way)
    tau = None if temperature is None else jnp.asarray(temperature)
    return flow.descended(particles, forces, tau, scaling or Identity(), key(9))


def moved(flow, problem, particles):
    """What one step adds."""
    return jit(flow.step)(problem, flow.init(problem, particles), None, key(0)).particles - particles


# ---- The same drift as others'. ----

# What a wrong sign, factor or mean would be: (of the attraction, of the repulsion).
MUTANTS = {"sign": (1, -1), "twice": (1, 2), "half": (0.5, 1), "a sum": (7, 7), "ascent": (-1, 1)}


@pytest.mark.standard_promotion
@pytest.mark.parametrize(
    "peer", [RBFKernel(), pytest.param(IMQKernel(), marks=pytest.mark.slow)], ids=["RBF", "IMQ"]
)
def test_drift_is_that_of_numpyro(peer):
    def model():
        numpyro.sample("x", dist.MultivariateNormal(jnp.asarray(MEAN), jnp.asarray(COVARIANCE)))

    stein = SVGD(model, numpyro.optim.SGD(1.0), peer, num_stein_particles=7)
    state = jit(stein.init)(key(0))
    particles = stein.get_params(state)["x_auto_loc"]
    theirs = stein.get_params(jit(stein.update)(state)[0])["x_auto_loc"] - particles
    kernel = mf.InverseMultiquadric(1.0)
    if isinstance(peer, RBFKernel):
        # Their median counts each particle's distance from itself, too.
        kernel = mf.SquaredExponential(jnp.sqrt(median_bandwidth(particles, lambda n: 1 / jnp.log(n)) / 2))
    np.testing.assert_allclose(moved(mf.SteinFlow(kernel, 1.0), PROBLEM, particles), theirs, atol=1e-6)
    forces = PROBLEM.wasserstein_gradient(particles)
    attraction = descended(kernel, particles, forces, None)
    repulsion = descended(kernel, particles, jnp.zeros_like(forces))
    for name, (one, other) in MUTANTS.items():
        wrong = -(one * attraction + other * repulsion)
        assert np.max(np.abs(wrong - theirs)) > 0.01, name


def drift_of_blackjax(log_density, particles):
    """BlackJAX's formula as it is published (`blackjax.vi.svgd`, Algorithm 1 of Liu and Wang, 2016): it is no
    dependency. The kernel is exp(−‖x − y‖²/h) with h = median²/log n of distances below the diagonal."""
    points = jax.vmap(lambda p: ravel_pytree(p)[0])(particles)
    norms = jnp.linalg.norm(points[:, None] - points[None], axis=-1)
    n = len(points)
    scale = jnp.median(norms[jnp.tril_indices(n, k=-1)]) ** 2 / jnp.log(n)

    def kernel(x, y):
        return jnp.exp(-(1 / scale) * ravel_pytree(jax.tree.map(lambda a, b: (a - b) ** 2, x, y))[0].sum())

    def summand(x, y):
        k, slope = jax.value_and_grad(kernel)(x, y)
        return jax.tree.map(lambda g, s: -(k * g) - s, jax.grad(log_density)(x), slope)

    summands = jax.vmap(lambda y: jax.vmap(lambda x: summand(x, y))(particles))(particles)
    return jax.tree.map(lambda leaf: leaf.mean(axis=1), summands)


@pytest.mark.standard_promotion
def test_drift_is_that_of_blackjax():
    """With the median of every step, on a pytree."""
    particles = draw(SMALL, 9)

    def loss(theta):
        return jnp.sum(theta["vector"] ** 2) + jnp.cos(theta["scalar"]) + jnp.sum(jnp.tanh(theta["matrix"]))

    problem = mf.Problem(loss, 1.0 * mf.KL(mf.Flat()))
    theirs = jit(drift_of_blackjax)(lambda theta: -loss(theta), particles)
    flow = mf.SteinFlow(mf.MedianBandwidth(), 1.0)
    ours = jit(flow.step)(problem, flow.init(problem, particles), None, key(0)).particles
    np.testing.assert_allclose(rows(particles) - rows(ours), rows(theirs), atol=1e-6)
    # A lengthscale without the logarithm would not do.
    other = mf.SteinFlow(mf.SquaredExponential(mf.median_heuristic(particles)), 1.0)
    wrong = jit(other.step)(problem, other.init(problem, particles), None, key(0)).particles
    assert np.max(np.abs(rows(particles) - rows(wrong) - rows(theirs))) > 1e-2


# ---- Of any free energy, any kernel. ----


def test_interactions_and_temperature_enter_as_in_the_formula():
    """(1/N) Σⱼ [k f(θⱼ) − τ∇₁k(θⱼ, θᵢ)] in float64, with the f of a problem that has V, W and a rest."""
    kernel, profile = RADIAL["sum"]
    prior = mf.Gaussian(jnp.zeros(3), 1.0)
    regulariser = 0.3 * mf.SquaredMMD(prior, mf.SquaredExponential(0.8)) + 0.7 * mf.KL(prior)
    problem = mf.Problem(mf.Moment(lambda theta: theta, lambda mean: jnp.sum(mean**4)), regulariser)
    particles = prior.sample(key(1), 6)
    x, f = rows(particles), rows(problem.wasserstein_gradient(particles))
    squares, step = distances(x, x), 1e-6
    slope = (profile(np, squares + step) - profile(np, np.maximum(squares - step, 0))) / (2 * step)
    slope[np.diag_indices(6)] = 0
    push = 2 * np.einsum("ji,jic->ic", slope, x[:, None] - x[None])
    expected = (profile(np, squares) @ f - 0.7 * push) / 6
    found = moved(mf.SteinFlow(kernel, 1.0), problem, particles)
    np.testing.assert_allclose(found, -expected, rtol=1e-4, atol=1e-5)


def test_kernels_on_features_are_differentiated_where_the_others_are():
    def features(theta):
        return {"a": jnp.sin(theta["vector"]), "b": theta["scalar"] * theta["vector"][:1]}

    particles, forces = draw(SMALL, 7), draw(SMALL, 7, seed=1)
    kernel = mf.SquaredExponential(0.9).on(features)

    def brute(x, f):
        pairs = jax.vmap(lambda y: jax.vmap(lambda z: jax.value_and_grad(kernel)(z, y))(x))(x)
        return jax.tree.map(
            lambda leaf, slope: (jnp.tensordot(pairs[0], leaf, axes=1) - 0.7 * slope.sum(axis=1)) / 7,
            f,
            pairs[1],
        )

    expected = jit(brute)(particles, forces)
    assert_close(rows(jit(descended)(kernel, particles, forces, 0.7)), rows(expected))
    median = mf.MedianBandwidth().on(features).at(particles)
    inner = mf.MedianBandwidth().at(jax.vmap(features)(particles))
    np.testing.assert_allclose(median.kernel.lengthscale, inner.lengthscale)


def test_tiles_and_random_batches_are_the_whole(monkeypatch):
    particles, forces = draw(SMALL, 12), draw(SMALL, 12, seed=1)
    kernel = RADIAL["SE"][0]
    whole = rows(jit(descended)(kernel, particles, forces))
    assert_close(rows(jit(descended)(kernel, particles, forces, 1.0, mf.RandomBatches(12))), whole)
    with monkeypatch.context() as patch:
        patch.setattr(pair_sums, "_ROWS", 5)
        patch.setattr(pair_sums, "_COLUMNS", 5)
        assert_close(rows(jit(descended)(kernel, particles, forces)), whole)
    flow = mf.SteinFlow(kernel, 1.0, interactions=mf.RandomBatches(3))
    one = jit(jax.vmap(lambda k: flow.descended(particles, forces, jnp.ones(()), Identity(), k)))
    found = jax.tree.map(monte_carlo, one(jax.random.split(key(2), 4_000)), is_leaf=eqx.is_array)
    assert_within(whole[:, -3:], *found["vector"])


# ---- Exact laws. ----


def moments(particles):
    x = np.asarray(particles, np.float64)
    return np.concatenate([x.mean(axis=0), np.cov(x.T, bias=True).ravel()])


EXACT_MOMENTS = np.concatenate([MEAN, COVARIANCE.ravel()])


def test_the_linear_kernel_has_exact_moments_with_four_particles_in_two_dimensions():
    """Liu and Wang (2018), to rounding; at another temperature the covariance is τΣ."""
    four = mf.Gaussian(jnp.zeros(2), 1.0).sample(key(3), 4)
    flow = mf.SteinFlow(Linear(), 0.05)
    for tau in (1.0, 0.5):
        problem = mf.Problem(negative_log_target, tau * mf.KL(mf.Flat()))
        solution = mf.solve(problem, flow, four, 5_000, key(0), record_every=5_000)
        error = np.abs(moments(solution.measure.particles) - EXACT_MOMENTS)
        assert np.all(error[:2] < 1e-5)
        assert (np.max(error[2:]) < 1e-5) == (tau == 1.0), "τ of another problem is noticed"
        scaled = moments(solution.measure.particles)[2:] / tau
        np.testing.assert_allclose(scaled, COVARIANCE.ravel(), atol=1e-5)
        assert solution.history.velocity[-1] < 1e-5 < solution.history.velocity[0]


def test_a_nonlinear_functional_has_the_mean_of_ridge_regression():
    """Mean-field: φ(∫ g dQ) with g linear and φ the squared error; q* has the prior's covariance."""
    inputs = jax.random.normal(key(4), (50, 2))
    outputs = inputs @ jnp.array([1.0, -2.0])
    prior = mf.Gaussian(jnp.zeros(2), 1.0)
    objective = mf.Moment(lambda theta, x: x[0] @ theta, lambda mean, x: 0.5 * jnp.mean((mean - x[1]) ** 2))
    problem = mf.Problem(objective, 0.1 * mf.KL(prior))
    solution = mf.solve(
        problem, mf.SteinFlow(Linear(), 0.2), prior.sample(key(5), 4), 3_000, key(0), data=(inputs, outputs)
    )
    x, y = np.asarray(inputs, np.float64), np.asarray(outputs, np.float64)
    ridge = np.linalg.solve(x.T @ x / 50 + 0.1 * np.eye(2), x.T @ y / 50)
    found = moments(solution.measure.particles)
    np.testing.assert_allclose(found, np.concatenate([ridge, np.eye(2).ravel()]), atol=1e-4)
    # Without the prior's pull it would be the least squares of the data.
    assert np.max(np.abs(found[:2] - [1.0, -2.0])) > 0.05


# ---- Other coordinates, and optimisers. ----


@pytest.mark.parametrize("kind", ["diagonal", "dense", "low rank"])
def test_roots_have_their_inverse(kind):
    particles = draw({"vector": (6,)}, 5)
    matrix = jnp.eye(6) + 0.3 * jax.random.normal(key(6), (6, 6))
    directions = jnp.linalg.qr(matrix)[0][:, :2]
    scaling = {
        "diagonal": Diagonal({"vector": jnp.arange(1.0, 7.0)}),
        "dense": Dense(matrix),
        "low rank": LowRank(jnp.arange(1.0, 7.0), directions, jnp.array([3.0, 8.0])),
    }[kind]
    assert_close(rows(scaling.root_inverse(scaling.root(particles))), rows(particles))


def test_a_preconditioner_is_another_choice_of_coordinates():
    """The law of affine maps: with the root AL in the place of L, Aθ + b moves by A times what θ does."""
    matrix, shift = jnp.array([[3.0, 0.0], [-20.0, 0.1]]), jnp.array([5.0, -7.0])
    particles = mf.Gaussian(jnp.zeros(2), 1.0).sample(key(7), 30)
    forces = PROBLEM.wasserstein_gradient(particles)
    root = jnp.array([[1.0, 0.5], [0.0, 2.0]])

    def both(kernel):
        here = descended(kernel, particles, forces, 0.7, EXACT, Dense(root))
        images = particles @ matrix.T + shift[None], jnp.linalg.solve(matrix.T, forces.T).T
        return here @ matrix.T, descended(kernel, *images, 0.7, EXACT, Dense(matrix @ root))

    here, there = jit(both)(mf.MedianBandwidth())
    assert_close(there, here, 1e-3)
    # In the coordinates of a preconditioner, and back.
    flow = mf.SteinFlow(mf.SquaredExponential(0.5), 0.1, preconditioner=mf.FixedPreconditioner(4.0))
    wide = mf.SteinFlow(mf.SquaredExponential(1.0), 0.1)
    expected = 4 * (descended(wide.kernel, particles, forces, None) * 0.1)
    expected = expected + 4 * 0.1 * descended(wide.kernel, particles, jnp.zeros_like(forces))
    assert_close(moved(flow, PROBLEM, particles), -expected)


@pytest.mark.standard_promotion
def test_any_optimiser_takes_the_steps_also_with_temperature():
    start = mf.Gaussian(jnp.zeros(2), 1.0).sample(key(8), 4)
    flow = mf.SteinFlow(Linear(), optimiser=optax.adam(optax.exponential_decay(0.1, 1_000, 0.1)))
    whole = mf.solve(PROBLEM, flow, start, 4_000, key(0), record_every=1_000)
    np.testing.assert_allclose(moments(whole.measure.particles), EXACT_MOMENTS, atol=1e-3)
    part = mf.solve(PROBLEM, flow, start, 1_000, key(0))
    rest = mf.solve(PROBLEM, flow, part.state, 3_000, key(0), record_every=1_000)
    np.testing.assert_array_equal(rest.measure.particles, whole.measure.particles)


def test_schedules_and_other_kernels_of_the_same_kind_are_the_same_program():
    traces = []

    def loss(theta):
        traces.append(theta)
        return jnp.sum(theta**2)

    problem, start = mf.Problem(loss, 1.0 * mf.KL(mf.Flat())), jnp.arange(6.0).reshape(3, 2)
    for lengthscale, rate in ((1.0, 0.1), (2.0, 0.2)):
        flow = mf.SteinFlow(mf.SquaredExponential(lengthscale), optax.linear_schedule(rate, 0.01, 20))
        mf.solve(problem, flow, start, 20, key(0))
        counted = len(traces)
        traces.clear()
    assert counted == 0


# ---- The median. ----

MEDIAN = jit(median_of_pairs)


@pytest.mark.parametrize("n", [2, 3, 40, 41])
@pytest.mark.parametrize("kind", ["apart", "coincident", "on a lattice", "far"])
def test_the_median_is_found_without_sorting(n, kind):
    points = np.random.default_rng(n).normal(size=(n, 3)).astype(np.float32)
    if kind == "coincident":
        points[n // 3 :] = points[0]
    if kind == "on a lattice":
        points = np.round(points)
    if kind == "far":
        points[-1] = 1e12
    squares = distances(points, points).astype(np.float32)
    expected = np.median(squares[np.triu_indices(n, 1)])
    np.testing.assert_allclose(MEDIAN(jnp.asarray(squares)), expected, rtol=1e-6)


def test_the_bandwidth_of_few_of_many_and_of_collapsed_particles():
    bandwidth = mf.MedianBandwidth(mf.InverseMultiquadric)
    many = mf.Gaussian(jnp.zeros(3), 1.0).sample(key(1), 1_000)
    kernel = jit(bandwidth.at)(many)
    assert isinstance(kernel, mf.InverseMultiquadric)
    squares = distances(rows(many), rows(many))[np.triu_indices(1_000, 1)]
    # 256 particles: the median distance is known to a few per cent.
    assert float(kernel.lengthscale) == pytest.approx(
        np.sqrt(np.median(squares) / (2 * np.log(1e3))), rel=0.05
    )
    for few in (jnp.ones((1, 3)), jnp.ones((4, 3))):
        assert np.isfinite(jit(bandwidth.at)(few).lengthscale)
    assert repr(bandwidth.on(jnp.sin)) == "MedianBandwidth(InverseMultiquadric).on(sin)"


# ---- Bad input. ----


def init(**options):
    return mf.SteinFlow(Linear(), 0.1, **options).init(PROBLEM, jnp.ones((4, 2)))


BAD = {
    "kernel": (lambda: mf.SteinFlow(0.5, 0.1), TypeError, "SteinFlow kernel must be a kernel, got 0.5"),
    "a class": (
        lambda: mf.SteinFlow(mf.SquaredExponential, 0.1),
        TypeError,
        "mf.MedianBandwidth",
    ),
    "no step": (lambda: mf.SteinFlow(Linear()), ValueError, "either step_size or optimiser"),
    "step 0": (lambda: mf.SteinFlow(Linear(), 0.0), ValueError, "step_size must be > 0"),
    "two movers": (
        lambda: init(optimiser=optax.adam(0.1)),
        ValueError,
        "either step_size or optimiser",
    ),
    "not radial": (
        lambda: init(preconditioner=mf.FixedPreconditioner(2.0)),
        ValueError,
        "not radial.*use a radial kernel",
    ),
    "features": (
        lambda: moved(
            mf.SteinFlow(mf.SquaredExponential(1.0), 0.1, interactions=mf.RandomFeatures(5)),
            PROBLEM,
            jnp.ones((4, 2)),
        ),
        TypeError,
        "RandomFeatures.*use mf.ExactInteractions",
    ),
    "batches of a nonlinear functional": (
        lambda: moved(
            mf.SteinFlow(mf.SquaredExponential(1.0), 0.1, interactions=mf.RandomBatches(2)),
            mf.Problem(mf.Moment(lambda theta: theta, lambda mean: jnp.sum(mean**2)), PROBLEM.regulariser),
            jnp.ones((4, 2)),
        ),
        ValueError,
        "biased then; use mf.ExactInteractions",
    ),
    "bandwidth": (
        lambda: mf.MedianBandwidth(mf.SquaredExponential(1.0)),
        TypeError,
        "must be a function of a lengthscale",
    ),
    "noise": (
        lambda: mf.SteinFlow(Linear(), 0.1, integrator=mf.EulerMaruyama()),
        ValueError,
        "draws no noise.*WassersteinFlow",
    ),
    "metropolis": (
        lambda: mf.SteinFlow(Linear(), 0.1, metropolis=True),
        ValueError,
        "draws no noise.*WassersteinFlow",
    ),
}


@pytest.mark.usefixtures("as_a_user_runs_it")
@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    call, error, message = BAD[name]
    with pytest.raises(error, match=message):
        call()


def test_is_shown_in_one_line():
    assert (
        repr(mf.SteinFlow(mf.MedianBandwidth(), 0.1))
        == "SteinFlow(kernel=MedianBandwidth(SquaredExponential), step_size=0.1)"
    )
    assert eqx.tree_equal(mf.SteinFlow(Linear(), 0.1), mf.SteinFlow(Linear(), 0.1))
