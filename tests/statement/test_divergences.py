"""KL, MMD² and their sums: values against closed forms, and the table of normal forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats as st
from helpers import RADIAL, SMALL, assert_close, assert_within, draw, jit, monte_carlo, rows
from helpers import squared_distances as distances

import measureflow as mf
from measureflow.numerics.integration import Points, draws, quadrature
from measureflow.statement.divergences import kl_of_gaussians

MEANS = np.array([[0.5, -1.0, 0.3], [0.0, 0.4, -0.8]])
FACTORS = np.array(
    [
        [[0.8, 0, 0], [0.5, 0.6, 0], [-0.4, 0.3, 1.1]],
        [[1.3, 0, 0], [-0.5, 0.9, 0], [0.2, 0.7, 0.5]],
    ]
)
PRIOR = mf.Gaussian(jnp.array([0.5, -1.0]), jnp.array([0.7, 1.5]))
SE = mf.SquaredExponential(0.9)


def tree(row):
    row = jnp.asarray(row, jnp.float32)
    return {"a": row[:2], "b": row[2]}


def gaussian(which, kind):
    """(the measure, its covariance)"""
    factor = {
        "scalar": 0.7 * np.eye(3),
        "diagonal": np.diag(np.diag(FACTORS[which])),
        "full": FACTORS[which],
    }[kind]
    scale = {"scalar": 0.7, "diagonal": tree(np.diag(factor)), "full": jnp.asarray(factor, jnp.float32)}[kind]
    return mf.Gaussian(tree(MEANS[which]), scale), factor @ factor.T


def exact_kl(q_mean, q_covariance, p_mean, p_covariance):
    precision, difference = np.linalg.inv(p_covariance), p_mean - q_mean
    determinants = np.linalg.slogdet(p_covariance)[1] - np.linalg.slogdet(q_covariance)[1]
    trace = np.trace(precision @ q_covariance)
    return 0.5 * (trace + difference @ precision @ difference - len(q_mean) + determinants)


@pytest.mark.parametrize("q", ["scalar", "diagonal", "full"])
@pytest.mark.parametrize("p", ["scalar", "diagonal", "full"])
def test_kl_of_gaussians(q, p):
    (q_measure, q_covariance), (p_measure, p_covariance) = gaussian(0, q), gaussian(1, p)
    exact = exact_kl(MEANS[0], q_covariance, MEANS[1], p_covariance)
    np.testing.assert_allclose(jit(kl_of_gaussians)(q_measure, p_measure), exact, rtol=1e-5)
    assert abs(jit(kl_of_gaussians)(q_measure, q_measure)) < 1e-5
    # The reference formula is itself no more than an average of log q/p.
    q_law, p_law = (
        st.multivariate_normal(MEANS[0], q_covariance),
        st.multivariate_normal(MEANS[1], p_covariance),
    )
    x = q_law.rvs(20_000, random_state=0)
    assert_within(exact, *monte_carlo(q_law.logpdf(x) - p_law.logpdf(x)))


def test_kl_of_gaussians_far_from_the_origin():
    """Only the difference of means matters, however large they are."""
    moved = [mf.Gaussian(tree([1e4, 1e4, 1e4]), jnp.asarray(0.01 * f, jnp.float32)) for f in FACTORS]
    covariances = [1e-4 * f @ f.T for f in FACTORS]
    exact = exact_kl(np.zeros(3), covariances[0], np.zeros(3), covariances[1])
    np.testing.assert_allclose(kl_of_gaussians(*moved), exact, rtol=1e-4)


@pytest.mark.parametrize("name", [*RADIAL, "pull-back"])
def test_squared_mmd_of_particles_is_exact(name):
    q, p = draw(SMALL, 30), jax.tree.map(lambda x: x + 0.2, draw(SMALL, 20, seed=1))
    x, y = rows(q), rows(p)
    if name == "pull-back":
        kernel, phi = RADIAL["SE"]
        kernel = kernel.on(lambda theta: jnp.sin(2 * theta["vector"]))
        x, y = (np.sin(2 * np.asarray(z["vector"], np.float64)) for z in (q, p))
    else:
        kernel, phi = RADIAL[name]
    exact = (
        phi(np, distances(x, x)).mean()
        - 2 * phi(np, distances(x, y)).mean()
        + phi(np, distances(y, y)).mean()
    )
    measure = mf.Empirical(q)
    value = jit(mf.SquaredMMD(mf.Empirical(p), kernel).value)(measure)
    np.testing.assert_allclose(value, exact, atol=2e-6)
    assert exact > 1e-3, "the test sees something"


def mmd_by_sampling(profile, x, y):
    """MMD² from independent pairs (x, x′, y, y′): a mean, with its standard error."""
    (x, x2), (y, y2) = np.split(x, 2), np.split(y, 2)

    def kernel(a, b):
        return profile(np.sum((a - b) ** 2, axis=1))

    return monte_carlo(kernel(x, x2) - kernel(x, y) - kernel(x2, y2) + kernel(y, y2))


@pytest.mark.parametrize("kind", ["scalar", "diagonal", "full"])
def test_squared_mmd_of_gaussians_is_closed(kind):
    (q, q_covariance), (p, p_covariance) = gaussian(0, kind), gaussian(1, "diagonal")
    rng = np.random.default_rng(0)
    x = rng.multivariate_normal(MEANS[0], q_covariance, 200_000)
    y = rng.multivariate_normal(MEANS[1], p_covariance, 200_000)
    # One draw, and a bad one: no closed form may use it.
    value = jit(mf.SquaredMMD(p, SE).gaussian_value)(q, points_at(tree_of(np.full((2, 3), 50.0))))
    assert_within(value, *mmd_by_sampling(lambda s: np.exp(-s / (2 * 0.81)), x, y))


def points_at(particles):
    return Points(mf.Empirical(particles), independent=True)


def tree_of(x):
    return {"a": jnp.asarray(x[:, :2], jnp.float32), "b": jnp.asarray(x[:, 2], jnp.float32)}


@pytest.mark.parametrize("reference", ["Uniform", "Empirical"])
def test_squared_mmd_of_a_gaussian_to_other_references(reference):
    """By quadrature, or draws, where there is no closed form: against independent draws."""
    q = mf.Gaussian(jnp.array([0.5]), jnp.array([0.8]))
    rng = np.random.default_rng(0)
    x = 0.5 + 0.8 * rng.normal(size=(400_000, 1))
    if reference == "Uniform":
        p, y = mf.Uniform(jnp.array([-1.0]), jnp.array([0.5])), rng.uniform(-1, 0.5, size=(400_000, 1))
        kernel, profile = SE, lambda s: np.exp(-s / (2 * 0.81))
    else:
        atoms = np.array([[-1.0], [0.2], [2.0]])
        p, y = mf.Empirical(jnp.asarray(atoms, jnp.float32)), atoms[rng.integers(3, size=400_000)]
        kernel, profile = (
            mf.Matern(1.5, 0.9),
            lambda s: (1 + np.sqrt(3 * s) / 0.9) * np.exp(-np.sqrt(3 * s) / 0.9),
        )
    n = 4_000
    rule = quadrature(q)[0] if reference == "Uniform" else draws(q, jax.random.key(3), n)
    expected, error = mmd_by_sampling(profile, x, y)
    # A U-statistic of n draws of a kernel ≤ 1 has standard error at most 2/√n · ½, cross terms included.
    error = error if reference == "Uniform" else np.hypot(error, 1 / np.sqrt(n))
    assert_within(jit(mf.SquaredMMD(p, kernel).gaussian_value)(q, rule), expected, error)


def test_double_integral_of_draws_leaves_out_the_diagonal():
    points = draw({"x": (2,)}, 6)["x"]
    kernel, phi = RADIAL["Matern-0.5"]
    off_diagonal = phi(np, distances(rows(points), rows(points)))[~np.eye(6, dtype=bool)]
    np.testing.assert_allclose(jit(points_at(points).double)(kernel), off_diagonal.mean(), rtol=1e-5)


@pytest.mark.parametrize("case", ["KL", "MMD²", "sum"])
def test_normal_form(case):
    """The table: V = −w log p, τ = w of w·KL; V = −2w μ_P, W = 2wκ of w·MMD²."""
    kl, mmd = 0.3, 0.4
    regulariser = {
        "KL": kl * mf.KL(PRIOR),
        "MMD²": mmd * mf.SquaredMMD(PRIOR, SE),
        "sum": mmd * mf.SquaredMMD(PRIOR, SE) + kl * mf.KL(PRIOR),
    }[case]
    energy = regulariser.free_energy()
    theta, other = np.array([0.1, 0.4]), np.array([-0.5, 1.0])
    m, s = np.array([0.5, -1.0]), np.array([0.7, 1.5])
    widened = s**2 + 0.81
    embedding = np.prod(0.9 / np.sqrt(widened)) * np.exp(-0.5 * np.sum((theta - m) ** 2 / widened))
    potential = {
        "KL": -kl * st.norm(m, s).logpdf(theta).sum(),
        "MMD²": -2 * mmd * embedding,
        "sum": -kl * st.norm(m, s).logpdf(theta).sum() - 2 * mmd * embedding,
    }[case]
    np.testing.assert_allclose(energy.potential(jnp.asarray(theta, jnp.float32)), potential, rtol=1e-5)
    if case == "KL":
        assert energy.interaction is None
    else:
        interaction = 2 * mmd * np.exp(-np.sum((theta - other) ** 2) / (2 * 0.81))
        points = (jnp.asarray(z, jnp.float32) for z in (theta, other))
        np.testing.assert_allclose(energy.interaction(*points), interaction, rtol=1e-5)
    if case == "MMD²":
        assert energy.temperature is None
    else:
        np.testing.assert_allclose(energy.temperature, kl, rtol=1e-6)


def test_normal_form_of_flat_references():
    assert mf.KL(mf.Flat()).free_energy().potential is None
    energy = (0.5 * mf.SquaredMMD(mf.Flat(), SE)).free_energy()
    assert energy.potential is None
    np.testing.assert_allclose(energy.interaction(jnp.zeros(2), jnp.zeros(2)), 1.0)


def test_arithmetic():
    a, b = mf.KL(PRIOR), mf.SquaredMMD(PRIOR, SE)

    def weights(regulariser):
        return [(divergence.name, round(float(w), 6)) for w, divergence in regulariser.terms()]

    assert weights(2.0 * a + b) == [("KL", 2), ("MMD²", 1)]
    assert weights(3 * (2.0 * a + 0.5 * (b + a)) + b) == [("KL", 6), ("MMD²", 1.5), ("KL", 1.5), ("MMD²", 1)]
    assert weights(a + a) == [("KL", 1), ("KL", 1)]
    for two in (
        2,
        2.0,
        np.float64(2),
        np.float32(2),
        np.int64(2),
        np.array(2.0),
        jnp.array(2.0),
        jnp.int32(2),
    ):
        for product in (two * a, a * two, two * (a + b)):
            weight = product.weights[0]
            assert weight.dtype == jnp.float32
            assert not weight.weak_type
            assert float(weight) == 2
    # Two temperatures, two potentials and two interactions add up.
    energy = (2.0 * a + 3.0 * a + 0.5 * b + 0.25 * b).free_energy()
    np.testing.assert_allclose(energy.temperature, 5.0)
    np.testing.assert_allclose(energy.interaction(jnp.zeros(2), jnp.zeros(2)), 1.5)


@pytest.mark.parametrize("weight", [-1.0, 0.0])
def test_weight_message(weight):
    with pytest.raises(ValueError) as caught:
        weight * mf.KL(PRIOR)
    message = str(caught.value)
    assert message.startswith("KL weight must be > 0")
    assert message.endswith(f"got {weight}; to leave KL out, drop the term.")


def test_energies_of_particles():
    """∫V dQ_N and ½∬W dQ_NdQ_N, and their gradients where a part is absent."""
    x = draw({"x": (2,)}, 9)["x"]
    points = rows(x)
    energy = (0.4 * mf.SquaredMMD(PRIOR, SE) + 0.3 * mf.KL(PRIOR)).free_energy()
    s = distances(points, points)
    np.testing.assert_allclose(jit(energy.interaction_energy)(x), 0.4 * np.exp(-s / 1.62).mean(), rtol=1e-5)
    only_kl = (0.3 * mf.KL(PRIOR)).free_energy()
    m, deviation = np.array([0.5, -1.0]), np.array([0.7, 1.5])
    exact = -0.3 * st.norm(m, deviation).logpdf(points).sum(axis=1).mean()
    np.testing.assert_allclose(jit(only_kl.potential_energy)(x), exact, rtol=1e-5)
    assert_close(jit(only_kl.potential_gradient)(x), 0.3 * (points - m) / deviation**2)
    assert only_kl.interaction_energy(x) == 0
    np.testing.assert_array_equal(only_kl.interaction_gradient(x), 0)
    assert mf.FreeEnergy().potential_energy(x) == 0
    np.testing.assert_array_equal(mf.FreeEnergy().wasserstein_gradient(x), 0)
