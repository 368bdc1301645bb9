"""κ: formulas, derivatives where particles coincide, and the median heuristic."""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import LARGE, RADIAL, SMALL, assert_close, draw, jit, rows, squared_distances

import measureflow as mf
from measureflow.spaces.kernels import AbstractRadialKernel


def gram(kernel, x, y):
    return jit(jax.vmap(jax.vmap(kernel, (None, 0)), (0, None)))(x, y)


@pytest.mark.parametrize("name", RADIAL)
def test_formula_on_pytrees(name):
    kernel, phi = RADIAL[name]
    x = draw(SMALL, 30)
    matrix = np.asarray(gram(kernel, x, x), np.float64)
    assert_close(matrix, phi(np, squared_distances(rows(x), rows(x))))
    np.testing.assert_array_equal(matrix, matrix.T)
    assert np.linalg.eigvalsh(matrix).min() > -1e-5, "positive definite"


@pytest.mark.parametrize("name", RADIAL)
def test_slope_is_the_derivative_of_the_profile(name):
    kernel, phi = RADIAL[name]
    s = np.geomspace(0.01, 20, 60)
    exact = (phi(np, s + 1e-6 * s) - phi(np, s - 1e-6 * s)) / (2e-6 * s)
    slope = jit(kernel.slope)(jnp.asarray(s, jnp.float32))
    np.testing.assert_allclose(slope, exact, rtol=1e-5)


@pytest.mark.parametrize("name", RADIAL)
def test_gradient_of_two_points(name):
    kernel, phi = RADIAL[name]
    x, y = draw(SMALL, 1), draw(SMALL, 1, seed=1)
    first, second = jit(jax.grad(lambda a, b: kernel(a, b), argnums=(0, 1)))(
        *(jax.tree.map(lambda a: a[0], z) for z in (x, y))
    )
    difference = rows(x) - rows(y)
    s = np.sum(difference**2)
    exact = (phi(np, s * (1 + 1e-6)) - phi(np, s * (1 - 1e-6))) / (2e-6 * s) * 2 * difference
    stacked = [rows(jax.tree.map(lambda a: a[None], g)) for g in (first, second)]
    assert_close(stacked[0], exact)
    assert_close(stacked[1], -exact)


@pytest.mark.parametrize("name", [*RADIAL, "pull-back"])
def test_gradient_at_coincidence_is_exactly_zero(name):
    kernel = mf.Matern(0.5, 0.9).on(jnp.tanh) if name == "pull-back" else RADIAL[name][0]
    x = jnp.asarray([0.3, -2.0, 1e3], jnp.float32)
    for gradient in jit(jax.grad(lambda x, y: kernel(x, y), argnums=(0, 1)))(x, x):
        np.testing.assert_array_equal(gradient, np.zeros(3))


@pytest.mark.parametrize(
    ("make", "phi"),
    [
        (mf.SquaredExponential, lambda s, scale: np.exp(-s / (2 * scale**2))),
        (lambda scale: mf.Matern(0.5, scale), lambda s, scale: np.exp(-np.sqrt(s) / scale)),
        (lambda scale: 3.0 * mf.InverseMultiquadric(scale), lambda s, scale: 3 / np.sqrt(1 + s / scale**2)),
    ],
    ids=["SE", "Matern-0.5", "IMQ"],
)
def test_derivative_in_the_lengthscale(make, phi):
    x, y = jnp.array([0.2, 0.5]), jnp.array([1.0, -0.4])
    s, h = 0.8**2 + 0.9**2, 1e-6
    exact = (phi(s, 0.7 + h) - phi(s, 0.7 - h)) / (2 * h)
    derivative = jax.grad(lambda scale: make(scale)(x, y))(jnp.float32(0.7))
    np.testing.assert_allclose(derivative, exact, rtol=1e-5)
    assert jax.grad(lambda scale: make(scale)(x, x))(jnp.float32(0.7)) == 0


def test_combinations():
    a, b = mf.SquaredExponential(1.0), mf.Matern(1.5, 2.0)
    features = b.on(lambda theta: theta**2)
    x, y = jnp.array([0.5, -1.0]), jnp.array([0.2, 0.4])
    assert isinstance(2.0 * (a + 3.0 * b) + a, AbstractRadialKernel), "sums of radial kernels stay radial"
    assert not isinstance(a + features, AbstractRadialKernel)
    # ‖x − y‖² = 2.05 and, of the squares, 0.21² + 0.84².
    value_a = np.exp(-2.05 / 2)
    value_b, value_f = (
        (1 + np.sqrt(3) * r) * np.exp(-np.sqrt(3) * r)
        for r in (np.sqrt(2.05) / 2, np.sqrt(0.21**2 + 0.84**2) / 2)
    )
    np.testing.assert_allclose((2.0 * (a + 3.0 * b) + a)(x, y), 3 * value_a + 6 * value_b, rtol=1e-6)
    mixed = 2.0 * (a + features) + features * 0.5
    np.testing.assert_allclose(mixed(x, y), 2 * value_a + 2.5 * value_f, rtol=1e-6)
    for two in (2.0, 2, np.float64(2), np.float32(2), np.array(2.0), jnp.array(2.0), jnp.float32(2)):
        assert eqx.tree_equal(two * a, 2.0 * a)
        assert eqx.tree_equal(a * two, 2.0 * a)


def test_pull_back_is_the_kernel_of_the_features():
    kernel, phi = RADIAL["IMQ"]
    x, y = draw(SMALL, 5), draw(SMALL, 4, seed=1)
    pulled = kernel.on(lambda theta: {"a": jnp.sin(theta["vector"]), "b": theta["scalar"] ** 2})
    fx, fy = (np.concatenate([np.asarray(z["scalar"])[:, None] ** 2, np.sin(z["vector"])], 1) for z in (x, y))
    assert_close(gram(pulled, x, y), phi(np, squared_distances(fx, fy)))
    twice = kernel.on(lambda v: 3 * v).on(lambda theta: theta["vector"])
    exact = phi(np, squared_distances(3 * np.asarray(x["vector"]), 3 * np.asarray(y["vector"])))
    assert_close(gram(twice, x, y), exact)


def test_whiten():
    mean = {"a": jnp.array([1.0, -2.0]), "b": jnp.array(0.5)}
    theta = {"a": jnp.array([2.0, 0.0]), "b": jnp.array(-1.0)}
    apart = mf.Whiten(mf.Gaussian(mean, {"a": jnp.array([2.0, 4.0]), "b": jnp.array(0.5)}))(theta)
    np.testing.assert_allclose(apart["a"], [0.5, 0.5])
    np.testing.assert_allclose(apart["b"], -3.0)
    factor = np.array([[2.0, 0, 0], [1.0, 0.5, 0], [-1.0, 0.3, 1.5]])
    joint = mf.Whiten(mf.Gaussian(mean, jnp.asarray(factor, jnp.float32)))(theta)
    exact = np.linalg.solve(factor, [1.0, 2.0, -1.5])
    np.testing.assert_allclose(joint["a"], exact[:2], rtol=1e-5)
    np.testing.assert_allclose(joint["b"], exact[2], rtol=1e-5)


@pytest.mark.parametrize("shapes", [SMALL, LARGE], ids=["J=8", "J=60"])
@pytest.mark.parametrize("n", [4, 31])
def test_median_heuristic(shapes, n):
    particles = draw(shapes, n)
    points = rows(particles)
    pairs = [np.sum((points[i] - points[j]) ** 2) for i, j in itertools.combinations(range(n), 2)]
    np.testing.assert_allclose(jit(mf.median_heuristic)(particles), np.sqrt(np.median(pairs) / 2), rtol=1e-5)


def test_median_heuristic_by_hand_and_under_vmap():
    # Squared distances of 0, 1, 3: 1, 4, 9, so σ² = 4/2.
    points = jnp.array([[0.0], [1.0], [3.0]])
    scales = jit(jax.vmap(lambda c: mf.median_heuristic(c * points)))(jnp.array([1.0, 0.0, 5.0]))
    np.testing.assert_allclose(scales, np.sqrt(2.0) * np.array([1, 0, 5]), rtol=1e-6)


def test_kernels_are_pytrees_whose_numbers_compile_nothing():
    traces = []

    @eqx.filter_jit
    def evaluate(kernel, x):
        traces.append(None)
        return kernel(x, x)

    for scale in (1.0, 2, np.float64(3), jnp.float32(4)):
        evaluate(scale * mf.Matern(1.5, scale) + mf.SquaredExponential(scale), jnp.zeros(2))
    assert len(traces) == 1
    assert mf.SquaredExponential(2).lengthscale.dtype == jnp.float32
    assert float(mf.SquaredExponential(mf.median_heuristic(draw(SMALL, 4))).lengthscale) > 0
