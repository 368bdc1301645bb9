"""Exact minimisers and limits on grids, against closed forms and independent solvers."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from scipy import stats
from scipy.optimize import minimize

import measureflow as mf

GRID = np.linspace(-6, 6, 601)
PLANE = np.stack(np.meshgrid(np.linspace(-5, 5, 61), np.linspace(-4, 4, 41), indexing="ij"), axis=-1)


def quadratic(theta):
    return 0.5 * jnp.sum((theta - 1.0) ** 2)


def test_dle_is_the_gibbs_measure_in_closed_form():
    """Quadratic loss and Gaussian prior: precision 1/w + 1/4, for KL weight w."""
    problem = mf.deep_langevin_ensemble(quadratic, mf.Gaussian(jnp.zeros(1), 2.0), kl=0.5)
    density = mf.theory.minimiser(problem, GRID)
    precision = 1 / 0.5 + 1 / 4
    expected = stats.norm((1 / 0.5) / precision, precision**-0.5).pdf(GRID)
    np.testing.assert_allclose(density, expected, atol=1e-5)
    assert density.sum() * (GRID[1] - GRID[0]) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("indexing", ["ij", "xy"])
def test_grids_of_two_dimensions_keep_their_shape(indexing):
    axes = (np.linspace(-5, 5, 61), np.linspace(-4, 4, 41))
    plane = np.stack(np.meshgrid(*axes, indexing=indexing), axis=-1)
    prior = mf.Gaussian({"a": jnp.zeros(()), "b": jnp.zeros(1)}, 1.0)
    problem = mf.deep_langevin_ensemble(
        lambda t: 0.5 * (t["a"] - 1.0) ** 2 + jnp.sum(t["b"] ** 2), prior, kl=1.0
    )
    density = mf.theory.minimiser(problem, plane)
    expected = stats.norm(0.5, 0.5**0.5).pdf(plane[..., 0]) * stats.norm(0, 3**-0.5).pdf(plane[..., 1])
    assert density.shape == plane.shape[:2]
    np.testing.assert_allclose(density, expected, atol=2e-5)


PRIOR = mf.Gaussian(jnp.zeros(1), 1.0)
KERNELS = {
    "squared exponential": mf.SquaredExponential(0.7),
    "sum": mf.SquaredExponential(0.3) + 2.0 * mf.SquaredExponential(2.0),
    "pull-back": mf.SquaredExponential(0.7).on(lambda theta: 2.0 * theta),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("mmd", [0.5, 20.0])
def test_drle_solves_the_normalised_fixed_point(kernel, mmd):
    grid = np.linspace(-4, 3.5, 301)
    problem = mf.deep_repulsive_langevin_ensemble(mf.theory.quartic_loss, PRIOR, kernel, mmd=mmd, kl=1.0)
    density = mf.theory.minimiser(problem, grid)
    assert mf.theory.stationarity_residual(problem, grid, density) < 1e-9
    # Independently: log q + (V + ∫W dq)/τ is constant, with V and W from their formulas.
    h = grid[1] - grid[0]
    theta = jnp.asarray(grid, jnp.float32)[:, None]
    gram = np.asarray(jax.vmap(lambda x: jax.vmap(lambda y: kernel(x, y))(theta))(theta), dtype=np.float64)
    p = stats.norm.pdf(grid)
    loss = 1.5 * (grid**4 / 4 + grid**3 / 3 - grid**2) - 3 / 8
    embedding = gram @ p * h
    variation = np.log(density) + loss - np.log(p) + 2 * mmd * (gram @ density * h - embedding)
    bulk = density > 1e-6
    # The embedding here is a sum over a grid that ends at −4 and 3.5: that is its error.
    assert np.ptp(variation[bulk]) < 2e-3 * mmd + 1e-4
    # It is the minimiser: any other density costs more.
    value = mf.theory.value(problem, grid, density)
    gibbs = mf.theory.minimiser(mf.deep_langevin_ensemble(mf.theory.quartic_loss, PRIOR, kl=1.0), grid)
    for other in (gibbs, 0.9 * density + 0.1 * gibbs, 0.99 * density + 0.01 * p / (p.sum() * h)):
        assert mf.theory.value(problem, grid, other) > value


@pytest.mark.parametrize("mmd", [0.5, 3.0, 30.0])
def test_dre_solves_the_quadratic_programme(mmd):
    grid = np.linspace(-3.5, 2.5, 61)
    problem = mf.deep_repulsive_ensemble(mf.theory.quartic_loss, PRIOR, mf.SquaredExponential(0.7), mmd=mmd)
    density = mf.theory.minimiser(problem, grid)
    h = grid[1] - grid[0]
    assert density.min() >= 0
    assert density.sum() * h == pytest.approx(1)
    assert 0 <= mf.theory.stationarity_residual(problem, grid, density) + 1e-12 < 1e-5
    # SciPy's general solver, on the same programme from the formulas.
    gram = np.exp(-0.5 * (grid[:, None] - grid[None]) ** 2 / 0.49)
    loss = 1.5 * (grid**4 / 4 + grid**3 / 3 - grid**2) - 3 / 8
    wide = 1 + 0.49
    potential = loss - 2 * mmd * np.sqrt(0.49 / wide) * np.exp(-0.5 * grid**2 / wide)
    found = minimize(
        lambda m: potential @ m + mmd * m @ gram @ m,
        np.full(61, 1 / 61),
        jac=lambda m: potential + 2 * mmd * gram @ m,
        bounds=[(0, None)] * 61,
        constraints={"type": "eq", "fun": lambda m: m.sum() - 1, "jac": np.ones_like},
        method="SLSQP",
        options={"maxiter": 1000, "ftol": 1e-13},
    )
    mass = density * h
    ours = potential @ mass + mmd * mass @ gram @ mass
    assert ours <= found.fun + 1e-5
    if mmd == 30.0:
        assert np.count_nonzero(mass) > 2


def test_neighbouring_grid_points_are_one_atom():
    grid, density = np.linspace(0, 1, 11), np.zeros(11)
    density[[2, 3, 8]] = [1.0, 3.0, 4.0]
    law = mf.theory.AtomicLaw.on_grid(grid, density)
    np.testing.assert_allclose(law.atoms, [0.275, 0.8])
    np.testing.assert_allclose(law.cumulative, [0.5, 1.0])


def test_the_residual_sees_a_wrong_density():
    for problem in (
        mf.deep_repulsive_langevin_ensemble(quadratic, PRIOR, mf.SquaredExponential(1.0), mmd=1.0, kl=1.0),
        mf.deep_repulsive_ensemble(quadratic, PRIOR, mf.SquaredExponential(1.0), mmd=1.0),
    ):
        right = mf.theory.minimiser(problem, GRID)
        wrong = np.roll(right, 5)
        assert mf.theory.stationarity_residual(problem, GRID, wrong) > 1e-3


def test_the_minimiser_of_a_deep_ensemble_is_the_global_minimum():
    density = mf.theory.minimiser(mf.deep_ensemble(mf.theory.quartic_loss), np.linspace(-3, 3, 601))
    assert np.flatnonzero(density).tolist() == [100]


def test_value_on_a_grid_is_the_value_of_many_particles():
    problem = mf.deep_repulsive_langevin_ensemble(
        mf.theory.quartic_loss, PRIOR, mf.SquaredExponential(0.7), mmd=0.5, kl=1.0
    )
    density = mf.theory.minimiser(problem, GRID)
    law, rng = mf.theory.GridLaw(GRID, density), np.random.default_rng(0)
    values = [
        float(problem.value(mf.Empirical(jnp.asarray(law.sample(rng, (2_000, 1)), jnp.float32))))
        for _ in range(20)
    ]
    standard_error = np.std(values, ddof=1) / np.sqrt(20)
    # The nearest-neighbour entropy has a bias of order 1/N, here below a standard error.
    assert abs(np.mean(values) - mf.theory.value(problem, GRID, density)) < 5 * standard_error
    assert standard_error < 0.01


def test_theorem_1_in_the_plane():
    """The four modes are symmetric under N(0, I): a quarter each."""
    plane = np.stack(np.meshgrid(*[np.linspace(-4.6, 4.6, 47)] * 2), axis=-1)
    initial = mf.Gaussian(jnp.zeros(2), 1.0)
    atoms, weights = mf.theory.deep_ensemble_limit(mf.theory.four_modes_loss, initial, plane)
    assert atoms.shape == (4, 2)
    np.testing.assert_allclose(np.abs(atoms), 3, atol=2e-3)
    # Points on the axes lie between basins, and go to one of them.
    np.testing.assert_allclose(weights, 0.25, atol=0.02)
    shifted = mf.Gaussian(jnp.array([1.0, 0.0]), 1.0)
    atoms, weights = mf.theory.deep_ensemble_limit(mf.theory.four_modes_loss, shifted, plane)
    right = weights[atoms[:, 0] > 0].sum()
    assert right == pytest.approx(stats.norm.cdf(1.0), abs=0.01)


@pytest.mark.parametrize("grid", [np.linspace(-10, 10, 21), np.linspace(-30, 30, 601)])
def test_coarse_and_wide_grids_find_minima_only(grid):
    atoms, weights = mf.theory.deep_ensemble_limit(mf.theory.quartic_loss, PRIOR, grid)
    np.testing.assert_allclose(np.sort(atoms[:, 0]), [-2, 1], atol=1e-4)
    np.testing.assert_allclose(weights, 0.5, atol=1e-3)


def test_minimisers_are_in_double_precision():
    """A large constant and a small temperature, as losses with data have: 1/τ amplifies rounding."""
    problem = mf.deep_langevin_ensemble(lambda t: 0.5 * jnp.sum((t - 5.0) ** 2) + 1000.0, mf.Flat(), kl=1e-4)
    grid = np.linspace(4.9, 5.1, 401)
    expected = stats.norm.pdf(grid, 5.0, 0.01)
    np.testing.assert_allclose(mf.theory.minimiser(problem, grid), expected, atol=1e-6 * expected.max())


def test_a_grid_that_cuts_the_mass_is_reported():
    problem = mf.deep_langevin_ensemble(mf.theory.quartic_loss, PRIOR, kl=1.0)
    with pytest.warns(UserWarning, match="widen the grid"):
        mf.theory.minimiser(problem, np.linspace(-1, 4, 5001))


def test_the_limit_needs_minima():
    with pytest.raises(RuntimeError, match="had not reached a minimum"):
        mf.theory.deep_ensemble_limit(lambda t: 0.1 * jnp.sum(t), PRIOR, np.linspace(-3, 3, 31))


@pytest.mark.parametrize("kind", ["grid", "atoms"])
def test_wasserstein_distance_is_scipys(kind):
    rng = np.random.default_rng(0)
    particles = rng.normal(size=(137, 1))
    if kind == "grid":
        density = stats.norm.pdf(GRID)
        law = mf.theory.GridLaw(GRID, density)
        expected = stats.wasserstein_distance(particles[:, 0], GRID, None, density)
    else:
        atoms, weights = np.array([0.5, -1.0, 2.0]), np.array([0.2, 0.5, 0.3])
        law = mf.theory.AtomicLaw(atoms, weights)
        expected = stats.wasserstein_distance(particles[:, 0], atoms, None, weights)
        assert law.mass_below(0.0) == pytest.approx(0.5)
        assert law.mass_below(1.0) == pytest.approx(0.7)
    assert law.wasserstein_1(particles) == pytest.approx(expected, rel=5e-3)
    mean, deviation = law.expected_wasserstein_1(rng, 137)
    assert 0 < deviation < mean


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        (np.array([0.0, 1.0, 3.0]), "not uniform"),
        (np.zeros((4, 2)), "one axis per dimension"),
        (PLANE, "2 dimensions, the problem's reference 1"),
    ],
)
def test_bad_grids(grid, message):
    with pytest.raises(ValueError, match=message):
        mf.theory.minimiser(mf.deep_langevin_ensemble(quadratic, PRIOR, kl=1.0), grid)


def test_a_start_far_away_does_not_keep_steps_short():
    """Two groups of rows with slopes ±1 under narrow noise: far from the minimiser the log score is so steep
    that only tiny steps descend."""
    rng = np.random.default_rng(0)
    x, sign = rng.uniform(-2, 2, 200), rng.choice([-1.0, 1.0], 200)
    inputs = jnp.asarray(x, jnp.float32)
    targets = jnp.asarray(sign * x + 0.3 * rng.normal(size=200), jnp.float32)
    score = mf.LogScore(lambda theta: -0.5 * ((targets - theta[0] * inputs) / 0.3) ** 2)
    problem = mf.Problem(score, 0.1 * mf.KL(mf.Gaussian(jnp.zeros(1), 1.5)))
    grid = np.linspace(-8, 8, 161)
    density = mf.theory.minimiser(problem, grid)
    assert mf.theory.stationarity_residual(problem, grid, density) < 1e-8
    assert density[np.abs(np.abs(grid) - 1) < 0.3].sum() > 0.8 * density.sum()


@pytest.mark.standard_promotion
def test_strong_repulsion_at_a_low_temperature():
    """Of a wide grid the CRPS has a large W, and the step that Pinsker's inequality allows is tiny."""
    y = jnp.asarray(1.2 * np.linspace(-2, 2, 20), jnp.float32)
    score = mf.RankedProbabilityScore(lambda t: (dist.Normal(jnp.broadcast_to(t[0], y.shape), 1.0), y))
    problem, grid = mf.Problem(score, 0.002 * mf.KL(mf.Gaussian(jnp.zeros(1), 1.5))), np.linspace(-8, 8, 81)
    density = mf.theory.minimiser(problem, grid)
    assert mf.theory.stationarity_residual(problem, grid, density) < 1e-8
    variance = (density @ grid**2) / density.sum()
    assert variance == pytest.approx(np.var(1.2 * np.linspace(-2, 2, 20)) - 1, rel=0.4)
