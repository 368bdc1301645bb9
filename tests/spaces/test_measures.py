"""P, Q₀, Q: densities against SciPy, moments in standard errors, entropies."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
import scipy.stats as st
from helpers import SMALL, assert_close, assert_within, draw, jit, key, monte_carlo, rows

import measureflow as mf

MEAN = {"a": jnp.array([[1.0, -2.0], [0.5, 3.0]]), "b": jnp.array(4.0), "c": jnp.array([-1.0])}
FLAT_MEAN = np.array([1.0, -2.0, 0.5, 3.0, 4.0, -1.0])
SCALES = {"a": jnp.array([[0.5, 1.0], [2.0, 0.1]]), "b": jnp.array(3.0), "c": jnp.array([0.7])}
FACTOR = np.tril(np.random.default_rng(3).normal(size=(6, 6)), -1) + np.diag([0.5, 1.0, 2.0, 0.3, 3.0, 0.7])
DEVIATIONS = np.array([0.5, 1.0, 2.0, 0.1, 3.0, 0.7])

# name: (the measure, its covariance)
GAUSSIANS = {
    "scalar": (mf.Gaussian(MEAN, 0.6), 0.36 * np.eye(6)),
    "pytree": (mf.Gaussian(MEAN, SCALES), np.diag(DEVIATIONS**2)),
    "scalar leaves": (
        mf.Gaussian(MEAN, {"a": 0.5, "b": jnp.array(3.0), "c": jnp.array([0.7])}),
        np.diag(np.array([0.5, 0.5, 0.5, 0.5, 3.0, 0.7]) ** 2),
    ),
    "matrix": (mf.Gaussian(MEAN, jnp.asarray(FACTOR, jnp.float32)), FACTOR @ FACTOR.T),
}


@pytest.mark.parametrize("name", GAUSSIANS)
def test_gaussian_density_and_entropy(name):
    measure, covariance = GAUSSIANS[name]
    exact = st.multivariate_normal(FLAT_MEAN, covariance)
    points = draw({"a": (2, 2), "b": (), "c": (1,)}, 7)
    points = jax.tree.map(lambda x, m: x + m[None], points, MEAN)
    density = jit(jax.vmap(measure.log_density))(points)
    np.testing.assert_allclose(density, exact.logpdf(rows(points)), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(measure.entropy(), exact.entropy(), rtol=1e-6)
    np.testing.assert_allclose(measure.covariance(), covariance, rtol=1e-5, atol=1e-6)
    assert measure.has_full_support


@pytest.mark.few(2)
@pytest.mark.parametrize("name", GAUSSIANS)
def test_gaussian_samples(name):
    measure, covariance = GAUSSIANS[name]
    n = 4000
    sample = measure.sample(key(1), n)
    assert jax.tree.map(jnp.shape, sample) == {"a": (n, 2, 2), "b": (n,), "c": (n, 1)}
    x = rows(sample) - FLAT_MEAN
    assert_within(x.mean(axis=0), 0.0, np.sqrt(np.diag(covariance) / n))
    # Of a Gaussian, xᵢxⱼ has variance ΣᵢᵢΣⱼⱼ + Σᵢⱼ².
    variance = np.outer(np.diag(covariance), np.diag(covariance)) + covariance**2
    assert_within(x.T @ x / n, covariance, np.sqrt(variance / n))
    # Leaves and particles are independent: the whitened coordinates pass a test of normality.
    white = rows(jax.vmap(measure.to_standard)(sample))
    assert st.kstest(white.ravel(), "norm").pvalue > 1e-4


@pytest.mark.parametrize("name", GAUSSIANS)
def test_gaussian_standard_coordinates(name):
    measure, covariance = GAUSSIANS[name]
    z = draw({"a": (2, 2), "b": (), "c": (1,)}, 5, seed=2)
    theta = jit(jax.vmap(measure.from_standard))(z)
    factor = np.linalg.cholesky(covariance)
    assert_close(rows(theta), FLAT_MEAN + rows(z) @ factor.T)
    assert_close(rows(jit(jax.vmap(measure.to_standard))(theta)), rows(z), relative=1e-4)


def test_gaussian_of_one_number():
    measure = mf.Gaussian(0.5, 2.0)
    assert measure.sample(key(), 3).shape == (3,)
    np.testing.assert_allclose(measure.log_density(jnp.array(1.0)), st.norm(0.5, 2).logpdf(1.0), rtol=1e-6)
    assert mf.Gaussian(jnp.array([1, 2]), 1).mean.dtype == jnp.float32, "integers become floats"


def test_uniform():
    low, high = {"a": jnp.array([0.0, -1.0]), "b": jnp.array(2.0)}, {"a": jnp.array([4.0, 1.0]), "b": 2.5}
    measure = mf.Uniform(low, high)
    inside = {"a": jnp.array([1.0, 0.0]), "b": jnp.array(2.2)}
    np.testing.assert_allclose(measure.log_density(inside), -np.log(4 * 2 * 0.5), rtol=1e-6)
    for outside in ({**inside, "b": jnp.array(2.6)}, {**inside, "a": jnp.array([-0.1, 0.0])}):
        assert measure.log_density(outside) == -np.inf
    n = 4000
    x = rows(jit(lambda k: measure.sample(k, n))(key()))
    for column, (a, b) in zip(x.T, [(0, 4), (-1, 1), (2, 2.5)], strict=True):
        assert st.kstest(column, st.uniform(a, b - a).cdf).pvalue > 1e-4
    correlation = np.corrcoef(x.T)[np.triu_indices(3, 1)]
    assert_within(correlation, 0.0, 1 / np.sqrt(n))
    assert not measure.has_full_support


def test_flat():
    assert mf.Flat().log_density({"a": jnp.ones(3)}) == 0
    assert mf.Flat().has_full_support
    assert mf.Flat().template() is None
    with pytest.raises(ValueError, match=r"Flat.*sampled.*Gaussian"):
        mf.Flat().sample(key(), 3)


def test_empirical_samples_its_particles_jointly_and_evenly():
    particles = {"a": jnp.arange(5.0), "b": 10 * jnp.arange(5.0)[:, None]}
    sample = mf.Empirical(particles).sample(key(), 5000)
    np.testing.assert_array_equal(10 * sample["a"], sample["b"][:, 0])
    counts = np.bincount(np.asarray(sample["a"], int), minlength=5)
    assert st.chisquare(counts).pvalue > 1e-4
    assert jax.tree.map(jnp.shape, mf.Empirical(particles).template()) == {"a": (), "b": (1,)}
    with pytest.raises(ValueError, match=r"Empirical.*no density.*MMD"):
        mf.Empirical(particles).log_density({"a": jnp.zeros(()), "b": jnp.zeros(1)})


def test_empirical_moments():
    particles = draw(SMALL, 9)
    matched = mf.Empirical(particles).moment_matched()
    assert_close(rows(jax.tree.map(lambda x: x[None], matched.mean))[0], rows(particles).mean(axis=0))
    assert_close(rows(jax.tree.map(lambda x: x[None], matched.scale))[0], rows(particles).std(axis=0))


@pytest.mark.parametrize("dimensions", [1, 2])
def test_nearest_neighbour_entropy(dimensions):
    """Its standard error is √((Var log q + ψ′(k))/N), with Var log q = J/2 and ψ′(5) = 0.22."""
    n = 2000
    factor = np.array([[0.5, 0.0], [0.8, 1.5]])[:dimensions, :dimensions]
    x = np.random.default_rng(dimensions).normal(size=(n, dimensions)) @ factor.T
    exact = 0.5 * dimensions * np.log(2 * np.pi * np.e) + np.log(np.abs(np.linalg.det(factor)))
    estimate = float(mf.Empirical(jnp.asarray(x, jnp.float32)).entropy())
    assert_within(estimate, exact, np.sqrt((dimensions / 2 + 0.22) / n))
    # Exact laws: H(aX + b) = H(X) + J log a.
    moved = mf.Empirical({"x": jnp.asarray(4 * x + 1, jnp.float32)}).entropy()
    np.testing.assert_allclose(moved, estimate + dimensions * np.log(4), atol=1e-4)


def test_nearest_neighbour_entropy_formula():
    """Against the Kozachenko–Leonenko estimator by brute force, for another k."""
    x = np.random.default_rng(0).uniform(size=(50, 1))
    third = np.sort(np.abs(x - x.T), axis=1)[:, 3]
    exact = np.sum(1 / np.arange(1, 50)) - np.sum(1 / np.arange(1, 3)) + np.log(2) + np.mean(np.log(third))
    np.testing.assert_allclose(mf.Empirical(jnp.asarray(x, jnp.float32)).entropy(3), exact, rtol=1e-4)


def test_entropy_where_there_is_none():
    with pytest.raises(ValueError, match=r"39 particles in 1 dimensions.*stationarity"):
        mf.Empirical(jnp.linspace(0, 1, 39)[:, None]).entropy()
    with pytest.raises(ValueError, match=r"1000 particles in 8 dimensions"):
        mf.Empirical(draw(SMALL, 1000)).entropy()
    atoms = jnp.repeat(jnp.linspace(0.0, 1.0, 10), 10)[:, None]
    assert mf.Empirical(atoms).entropy() == -np.inf


@pytest.mark.parametrize(
    ("distribution", "full"),
    [
        (dist.Normal(0.0, 1.0), True),
        (dist.Normal(jnp.zeros(3), 1.0).to_event(1), True),
        (dist.Normal(0.0, 1.0).expand([2, 3]), True),
        (dist.StudentT(3.0), True),
        (dist.MultivariateNormal(jnp.zeros(2), jnp.eye(2)), True),
        ({"a": dist.Normal(0.0, 1.0), "b": dist.Laplace(0.0, 1.0)}, True),
        (dist.HalfNormal(1.0), False),
        (dist.LogNormal(0.0, 1.0), False),
        (dist.Uniform(jnp.zeros(2), 1.0), False),
        (dist.TruncatedNormal(0.0, 1.0, low=0.0), False),
        (dist.Dirichlet(jnp.ones(3)), False),
        (dist.Poisson(1.0), False),
        (dist.Delta(0.0), False),
        ({"a": dist.Normal(0.0, 1.0), "b": dist.Gamma(2.0, 1.0)}, False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_distribution_support(distribution, full):
    measure = mf.FromDistribution(distribution)
    assert measure.has_full_support is full
    if not full:
        with pytest.raises(ValueError, match="full support"):
            mf.KL(measure)


@jax.numpy_rank_promotion("allow")  # NumPyro's own code promotes ranks
def test_distributions_as_a_measure():
    covariance = np.array([[2.0, 0.6], [0.6, 0.5]])
    measure = mf.FromDistribution(
        {
            "joint": dist.MultivariateNormal(jnp.array([1.0, 2.0]), jnp.asarray(covariance, jnp.float32)),
            "rates": dist.LogNormal(jnp.full(3, 0.5), 0.8),
            "one": dist.Laplace(1.0, 2.0),
        }
    )
    theta = {"joint": jnp.array([0.0, 2.5]), "rates": jnp.array([0.1, 0.5, 2.0]), "one": jnp.array(-1.0)}
    exact = (
        st.multivariate_normal([1, 2], covariance).logpdf([0, 2.5])
        + st.lognorm(0.8, scale=np.exp(0.5)).logpdf([0.1, 0.5, 2.0]).sum()
        + st.laplace(1, 2).logpdf(-1.0)
    )
    np.testing.assert_allclose(jit(measure.log_density)(theta), exact, rtol=1e-5)
    shapes = {"joint": (2,), "rates": (3,), "one": ()}
    assert jax.tree.map(jnp.shape, measure.template()) == shapes
    n = 3000
    sample = jit(lambda k: measure.sample(k, n))(key())
    assert jax.tree.map(jnp.shape, sample) == {name: (n, *shape) for name, shape in shapes.items()}
    assert_within([1, 2], *monte_carlo(sample["joint"]))
    assert (
        st.kstest(np.asarray(sample["rates"]).ravel(), st.lognorm(0.8, scale=np.exp(0.5)).cdf).pvalue > 1e-4
    )
    assert st.kstest(np.asarray(sample["one"]), st.laplace(1, 2).cdf).pvalue > 1e-4
