"""∇V + ∫∇₁W dQ_N against autodiff of the energy of the empirical measure, and what it costs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    LARGE,
    RADIAL,
    SMALL,
    Inner,
    assert_close,
    draw,
    equations,
    inverse_multiquadric,
    jit,
    largest_array,
    matern,
    rows,
    squared_exponential,
)

import measureflow as mf
from measureflow.numerics.interactions import EXACT

N, ATOMS = 12, 5


def identity(theta):
    return theta


def predictions(theta):
    """Nonlinear features of all leaves, as a pytree."""
    hidden = jnp.tanh(theta["matrix"] @ theta["vector"][: theta["matrix"].shape[1]] + theta["scalar"])
    return {"hidden": hidden, "more": jnp.sin(3 * theta["vector"])}


def layer(theta):
    return 4.0 * theta["vector"]


# name: (the kernel, [(features, profile)]): κ(x, y) = Σ profile(‖f(x) − f(y)‖²)
KERNELS = {name: (kernel, [(identity, phi)]) for name, (kernel, phi) in RADIAL.items()} | {
    "pull-back Matern-0.5": (
        mf.Matern(0.5, 0.8).on(predictions),
        [(predictions, lambda xp, s: matern(xp, s, 0.5, 0.8))],
    ),
    "one layer": (
        mf.InverseMultiquadric(1.5).on(layer),
        [(layer, lambda xp, s: inverse_multiquadric(xp, s, 1.5))],
    ),
    "pull-back and radial": (
        0.5 * mf.Matern(1.5, 0.7).on(predictions)
        + 2.0 * (mf.SquaredExponential(1.3) + 1.0 * mf.Matern(2.5, 1.6)),
        [
            (predictions, lambda xp, s: 0.5 * matern(xp, s, 1.5, 0.7)),
            (identity, lambda xp, s: 2 * squared_exponential(xp, s, 1.3) + 2 * matern(xp, s, 2.5, 1.6)),
        ],
    ),
    "pull-back of a sum": (
        (mf.SquaredExponential(0.8) + 3.0 * mf.Matern(0.5, 0.8)).on(predictions).on(identity),
        [(predictions, lambda xp, s: squared_exponential(xp, s, 0.8) + 3 * matern(xp, s, 0.5, 0.8))],
    ),
}


def coincident(particles):
    """Particles 0, 1 and 2, 3, 4 are equal."""
    return jax.tree.map(lambda x: x.at[1].set(x[0]).at[3:5].set(x[2]), particles)


def loss(theta):
    return 0.02 * (jnp.sum(jnp.sin(3 * theta["matrix"])) + jnp.sum(theta["vector"] ** 2) * theta["scalar"])


def as_rows(tree):
    return jnp.concatenate([x.reshape(len(x), -1) for x in jax.tree.leaves(tree)], axis=1)


def energy(terms, weight, particles, atoms):
    """∫ℓ dQ + w (∬κ dQdQ − 2∬κ dQdP) of empirical Q and P, every difference written out."""
    total = jnp.mean(jax.vmap(loss)(particles))
    for features, phi in terms:
        x, y = as_rows(jax.vmap(features)(particles)), as_rows(jax.vmap(features)(atoms))
        within = jnp.sum((x[:, None] - x[None]) ** 2, axis=-1)
        across = jnp.sum((x[:, None] - y[None]) ** 2, axis=-1)
        total = total + weight * (jnp.mean(phi(jnp, within)) - 2 * jnp.mean(phi(jnp, across)))
    return total


@pytest.mark.few(7)
@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        *((name, LARGE) for name in KERNELS),
        # Few dimensions have their own distances, whatever the kernel.
        ("Matern-0.5", SMALL),
        ("sum", SMALL),
        ("pull-back and radial", SMALL),
    ],
    ids=lambda value: value if isinstance(value, str) else f"J={8 if value is SMALL else 60}",
)
def test_wasserstein_gradient_is_the_gradient_of_the_energy(name, shapes):
    kernel, terms = KERNELS[name]
    particles = coincident(draw(shapes, N))
    atoms = draw(shapes, ATOMS, seed=1)
    if name in RADIAL:
        # The first atom lies on two of the particles. (Features of one point, computed in two programs,
        # differ by rounding, and a cusp makes a direction of that.)
        atoms = jax.tree.map(lambda x, y: x.at[0].set(y[0]), atoms, particles)
    problem = mf.Problem(loss, 0.4 * mf.SquaredMMD(mf.Empirical(atoms), kernel))
    gradient = jit(problem.free_energy().wasserstein_gradient)(particles)
    exact = jit(jax.grad(lambda x: N * energy(terms, 0.4, x, atoms)))(particles)
    assert jax.tree.map(jnp.shape, gradient) == jax.tree.map(jnp.shape, particles)
    assert_close(rows(gradient), rows(exact))
    # Equal particles feel equal forces: nothing is made of a distance that is only rounding.
    assert_close(rows(gradient)[1], rows(gradient)[0], relative=1e-6)


@pytest.mark.parametrize("name", ["sum", "pull-back of a sum"])
def test_all_particles_in_one_place_do_not_repel(name):
    one = draw(SMALL, 1)
    particles = jax.tree.map(lambda x: jnp.repeat(x, 4, axis=0), one)
    for leaf in jax.tree.leaves(jit(EXACT.gradient)(KERNELS[name][0], particles)):
        np.testing.assert_array_equal(leaf, 0)


@pytest.mark.parametrize("kind", ["SE", "IMQ"])
@pytest.mark.parametrize("apart", [0.0, 1e-3])
def test_nearly_coincident_particles_in_high_dimension(kind, apart):
    """Pairs a relative distance `apart` from each other, far from the origin, in J = 300."""
    rng = np.random.default_rng(0)
    x = 20 + rng.normal(size=(16, 300))
    x[8:] = x[:8] + apart * rng.normal(size=(8, 300))
    particles = jnp.asarray(x, jnp.float32)
    x = np.asarray(particles, np.float64)
    difference = x[:, None] - x[None]
    s, scale = np.sum(difference**2, axis=-1), 11.0
    if kind == "SE":
        kernel, slope = mf.SquaredExponential(scale), -np.exp(-s / (2 * scale**2)) / (2 * scale**2)
    else:
        kernel, slope = mf.InverseMultiquadric(scale), -0.5 * (1 + s / scale**2) ** -1.5 / scale**2
    exact = np.mean(2 * slope[:, :, None] * difference, axis=1)
    assert_close(jit(EXACT.gradient)(kernel, particles), exact)
    # The power of this test: without centring, float32 loses these distances.
    gram = np.asarray(particles) @ np.asarray(particles).T
    size = np.diag(gram)
    assert np.max(np.abs(size[:, None] + size[None] - 2 * gram - s)) > 1e-5 * np.max(s)


@pytest.mark.parametrize("name", ["SE", "Matern-0.5", "IMQ", "sum"])
def test_radial_repulsion_makes_no_array_of_all_differences(name):
    n, dimensions = 32, 300
    particles = {"a": jnp.zeros((n, 10, 25)), "b": jnp.zeros((n, 50))}
    program = jax.make_jaxpr(lambda x: EXACT.gradient(RADIAL[name][0], x))(particles)
    assert largest_array(program) <= n * max(n, dimensions)


def test_kernels_of_any_form():
    """They are summed by autodiff; and the array that radial kernels avoid would be seen."""
    particles = draw({"x": (3,)}, 6)["x"]
    x = np.asarray(particles, np.float64)
    exact = np.exp(x @ x.T) @ x / 6
    assert_close(EXACT.gradient(Inner(), particles), exact)
    assert largest_array(jax.make_jaxpr(lambda x: EXACT.gradient(Inner(), x))(particles)) >= 6 * 6 * 3


def test_pull_back_evaluates_features_once_per_particle():
    n, anchors, calls = 16, 7, []
    matrix = jnp.asarray(np.random.default_rng(0).normal(size=(anchors, 40)), jnp.float32)

    def network(theta):
        calls.append(theta.shape)
        return jnp.tanh(matrix @ theta)

    program = jax.make_jaxpr(
        lambda x: EXACT.gradient(mf.SquaredExponential(1.0).on(network), x),
    )(jnp.zeros((n, 40)))
    assert calls == [(40,)], "traced once, for one particle"
    sizes = [e.outvars[0].aval.size for e in equations(program) if e.primitive.name == "tanh"]
    assert sizes == [n * anchors], "N evaluations, not N²"
    assert largest_array(program) <= n * 40


def test_wasserstein_gradient_takes_a_batch():
    x = jnp.array([[1.0], [2.0], [-1.0]])
    problem = mf.Problem(lambda theta, batch: jnp.mean(batch) * jnp.sum(theta**3))
    np.testing.assert_allclose(problem.wasserstein_gradient(x, jnp.array([1.0, 3.0])), 6 * x**2)


@pytest.mark.parametrize("n", [512, 513, 1300])
def test_tiles_are_the_whole(n):
    """More than one tile of rows, whether or not they fill it: the same sums, in O(N) memory."""
    x = np.random.default_rng(0).normal(size=(n, 2))
    kernel = mf.Matern(1.5, 0.9) + mf.SquaredExponential(0.5)
    difference = x[:, None] - x[None]
    s = (difference**2).sum(-1)
    slope = -1.5 / 0.81 * np.exp(-np.sqrt(3 * s) / 0.9) - 2 * np.exp(-2 * s)
    profile = (1 + np.sqrt(3 * s) / 0.9) * np.exp(-np.sqrt(3 * s) / 0.9) + np.exp(-2 * s)
    particles = jnp.asarray(x, jnp.float32)
    expected = 2 * (slope[..., None] * difference).mean(axis=1)
    found = jit(lambda p: EXACT.gradient(kernel, p))(particles)
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())
    np.testing.assert_allclose(jit(lambda p: EXACT.mean(kernel, p))(particles), profile.mean(), rtol=1e-5)
    program = jax.jit(lambda p: EXACT.gradient(kernel, p)).lower(particles).compile()
    assert program.memory_analysis().temp_size_in_bytes < 6 * 512 * n * 4
