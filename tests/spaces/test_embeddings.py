"""μ_P and ∬κ dPdQ: closed forms against Monte Carlo, sums over atoms, and the errors where there are none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import RADIAL, SMALL, assert_close, assert_within, draw, jit, key, monte_carlo, rows
from helpers import squared_distances as distances

import measureflow as mf
from measureflow.spaces.embeddings import is_affine, mean_kernel

DRAWS = 100_000
SHAPES = {"a": (2,), "b": ()}
MEAN = {"a": jnp.array([0.5, -1.0]), "b": jnp.array(0.3)}
CENTRE = np.array([0.5, -1.0, 0.3])
FACTOR = np.array([[0.8, 0, 0], [0.5, 0.6, 0], [-0.4, 0.3, 1.1]])
OTHER_FACTOR = np.array([[0.3, 0, 0], [-0.5, 0.9, 0], [0.2, -0.3, 0.4]])
LOW, HIGH = np.array([-1.0, -2.0, 0.0]), np.array([1.0, 0.5, 0.4])
MATRIX = np.array([[1.0, 0.5, 0.0], [0.0, -2.0, 1.0], [0.3, 0.3, 0.3], [1.0, -1.5, 1.0]])
SE, MIXED = mf.SquaredExponential(0.9), 0.7 * mf.SquaredExponential(1.5) + 2.0 * mf.SquaredExponential(0.4)


def tree(row):
    row = jnp.asarray(row, jnp.float32)
    return {"a": row[:2], "b": row[2]}


def gaussian(factor):
    return mf.Gaussian(MEAN, jnp.asarray(factor, jnp.float32)), lambda z: CENTRE + z @ np.asarray(factor).T


def se(s, scale=0.9):
    return np.exp(-s / (2 * scale**2))


def mixed(s):
    return 0.7 * se(s, 1.5) + 2 * se(s, 0.4)


def affine(theta):
    """Four features of three coordinates: linearly dependent."""
    x = jnp.append(theta["a"], theta["b"])
    return jnp.asarray(MATRIX, jnp.float32) @ x + 1


DIAGONAL = {"a": jnp.array([0.8, 0.2]), "b": jnp.array(1.1)}
UNIFORM = mf.Uniform(tree(LOW), tree(HIGH)), lambda u: LOW + (HIGH - LOW) * u
SCALAR = mf.Gaussian(MEAN, 0.7), lambda z: CENTRE + 0.7 * z
SPREAD = mf.Gaussian(MEAN, DIAGONAL), lambda z: CENTRE + z * np.array([0.8, 0.2, 1.1])
FULL, OTHER = gaussian(FACTOR), gaussian(OTHER_FACTOR)
STANDARD = np.array([0.5, 0.8, 0.3])
WHITEN = mf.Whiten(mf.Gaussian(MEAN, {"a": jnp.array([0.5, 0.8]), "b": jnp.array(0.3)}))
WHITEN_FULL = mf.Whiten(OTHER[0])

# name: (kernel, (measure, how it is drawn from noise), features in NumPy, profile)
CLOSED = {
    "SE, scalar Gaussian": (SE, SCALAR, lambda x: x, se),
    "SE, diagonal Gaussian": (SE, SPREAD, lambda x: x, se),
    "SE, full Gaussian": (SE, FULL, lambda x: x, se),
    "SE, Uniform": (SE, UNIFORM, lambda x: x, se),
    "sum, diagonal Gaussian": (MIXED, SPREAD, lambda x: x, mixed),
    "sum, Uniform": (MIXED, UNIFORM, lambda x: x, mixed),
    "affine features": (SE.on(affine), FULL, lambda x: x @ MATRIX.T + 1, se),
    "one entry": (SE.on(lambda theta: theta["a"]), SPREAD, lambda x: x[:, :2], se),
    "whitened": (SE.on(WHITEN), SPREAD, lambda x: (x - CENTRE) / STANDARD, se),
    "whitened, full": (
        MIXED.on(WHITEN_FULL),
        FULL,
        lambda x: np.linalg.solve(OTHER_FACTOR, (x - CENTRE).T).T,
        mixed,
    ),
    "SE + 2 whitened": (
        SE + 2.0 * SE.on(WHITEN),
        SPREAD,
        lambda x: np.concatenate([x, (x - CENTRE) / STANDARD], axis=1),
        None,
    ),
}


def noise(how, seed):
    rng = np.random.default_rng(seed)
    return rng.uniform(size=(DRAWS, 3)) if how is UNIFORM else rng.normal(size=(DRAWS, 3))


def kernel_of_rows(features, profile, x, y):
    difference = (features(x) - features(y)) ** 2
    if profile is None:
        return se(difference[:, :3].sum(axis=1)) + 2 * se(difference[:, 3:].sum(axis=1))
    return profile(difference.sum(axis=1))


@pytest.mark.few(5)
@pytest.mark.parametrize("name", CLOSED)
def test_embedding_against_monte_carlo(name):
    kernel, how, features, profile = CLOSED[name]
    x = how[1](noise(how, 1))
    embedding = jit(mf.kernel_mean_embedding(kernel, how[0]))
    for theta in (CENTRE, np.array([1.0, -0.3, 0.1]), np.array([-0.6, 0.2, 1.4])):
        values = kernel_of_rows(features, profile, x, theta[None])
        assert_within(embedding(tree(theta)), *monte_carlo(values))


@pytest.mark.parametrize("name", CLOSED)
def test_mean_kernel_of_the_reference(name):
    """∬κ dPdP, the constant of MMD²(·, P)."""
    kernel, how, features, profile = CLOSED[name]
    values = kernel_of_rows(features, profile, how[1](noise(how, 2)), how[1](noise(how, 3)))
    assert_within(mean_kernel(kernel, how[0], how[0]), *monte_carlo(values))


@pytest.mark.parametrize(
    ("kernel", "profile", "p", "q"),
    [(SE, se, SCALAR, SPREAD), (MIXED, mixed, FULL, SPREAD), (SE, se, OTHER, FULL)],
    ids=["scalar, diagonal", "full, diagonal", "full, full"],
)
def test_mean_kernel_of_two_gaussians(kernel, profile, p, q):
    shifted = mf.Gaussian(jax.tree.map(lambda m: m + 0.5, q[0].mean), q[0].scale)
    values = kernel_of_rows(lambda x: x, profile, p[1](noise(p, 4)), q[1](noise(q, 5)) + 0.5)
    for value in (mean_kernel(kernel, p[0], shifted), mean_kernel(kernel, shifted, p[0])):
        assert_within(value, *monte_carlo(values))


@pytest.mark.parametrize("how", [SPREAD, FULL, UNIFORM], ids=["diagonal", "full", "Uniform"])
def test_mean_kernel_of_atoms_and_a_measure(how):
    atoms = draw(SHAPES, 4, seed=6)
    x = how[1](noise(how, 7))
    values = np.mean([se(np.sum((x - atom) ** 2, axis=1)) for atom in rows(atoms)], axis=0)
    assert_within(jit(mean_kernel)(SE, mf.Empirical(atoms), how[0]), *monte_carlo(values))
    assert_within(jit(mean_kernel)(SE, how[0], mf.Empirical(atoms)), *monte_carlo(values))


def nonlinear(theta):
    return jnp.tanh(theta["matrix"] @ theta["vector"][:2])


@pytest.mark.few(4)
@pytest.mark.parametrize("name", [*RADIAL, "pull-back", "pull-back and radial"])
def test_embedding_of_atoms_is_their_mean(name):
    atoms, points = draw(SMALL, 300, seed=1), draw(SMALL, 4)
    s = distances(rows(points), rows(atoms))
    fx, fy = (
        np.tanh(np.einsum("nij,nj->ni", np.asarray(z["matrix"]), np.asarray(z["vector"])[:, :2]))
        for z in (points, atoms)
    )
    features = distances(fx, fy)
    if name in RADIAL:
        kernel, phi = RADIAL[name]
        exact = phi(np, s).mean(axis=1)
    elif name == "pull-back":
        kernel, exact = mf.SquaredExponential(0.9).on(nonlinear), se(features).mean(axis=1)
    else:
        kernel = 0.5 * mf.SquaredExponential(0.9).on(nonlinear) + 2.0 * mf.SquaredExponential(0.4)
        exact = (0.5 * se(features) + 2 * se(s, 0.4)).mean(axis=1)
    embedding = mf.kernel_mean_embedding(kernel, mf.Empirical(atoms))
    assert_close(jit(jax.vmap(embedding))(points), exact)
    value = jit(mean_kernel)(kernel, mf.Empirical(points), mf.Empirical(atoms))
    np.testing.assert_allclose(value, exact.mean(), rtol=1e-5)


@pytest.mark.parametrize("number", [5_000, 20_000])
def test_embedding_keeps_its_digits_in_high_dimension(number):
    """σ² = J, the scale of distances under a prior: |I + Σ/σ²|^-½ has J factors close to one."""
    kernel, prior = mf.SquaredExponential(np.sqrt(number)), mf.Gaussian(jnp.zeros(number), 0.5)
    exact = (1 + 0.25 / number) ** (-number / 2) * np.exp(-0.5 * number / (number + 0.25))
    embedding = mf.kernel_mean_embedding(kernel, prior)
    np.testing.assert_allclose(embedding(jnp.ones(number)), exact, rtol=1e-4)
    exact = (1 + 0.5 / number) ** (-number / 2)
    np.testing.assert_allclose(mean_kernel(kernel, prior, prior), exact, rtol=1e-4)


@pytest.mark.parametrize("kernel", [SE, mf.Matern(0.5, 1.0), SE + 2.0 * mf.Matern(2.5, 1.0)])
def test_flat_embedding_is_constant(kernel):
    assert mf.kernel_mean_embedding(kernel, mf.Flat()) is None


GAUSSIAN = mf.Gaussian(jnp.zeros(2), 1.0)


@pytest.mark.parametrize(
    ("kernel", "reference", "message"),
    [
        (mf.Matern(1.5, 1.0), GAUSSIAN, r"Matern and Gaussian.*mf\.Empirical\(prior\.sample\(key, 1000\)\)"),
        (
            mf.InverseMultiquadric(1.0),
            mf.Uniform(0.0, 1.0),
            r"InverseMultiquadric and Uniform.*mf\.Empirical",
        ),
        (SE + mf.Matern(0.5, 1.0), GAUSSIAN, r"Matern and Gaussian.*mf\.Empirical"),
        (SE.on(jnp.sin), GAUSSIAN, r"features under a Gaussian.*not affine.*mf\.Empirical"),
        (SE.on(lambda t: 2 * t), mf.Uniform(jnp.zeros(2), jnp.ones(2)), r"under a Uniform.*mf\.Empirical"),
        (mf.InverseMultiquadric(1.0), mf.Flat(), r"Flat.*InverseMultiquadric.*SquaredExponential or Matern"),
        (SE + mf.InverseMultiquadric(1.0), mf.Flat(), r"Flat.*SquaredExponential or Matern"),
        (SE.on(jnp.sin), mf.Flat(), r"Flat.*PullBack.*proper reference"),
    ],
    ids=["Matern", "IMQ", "sum", "sine", "affine of Uniform", "IMQ flat", "sum flat", "pull-back flat"],
)
def test_no_closed_form_names_the_remedy(kernel, reference, message):
    with pytest.raises(mf.NoClosedFormError, match=message):
        mf.kernel_mean_embedding(kernel, reference)
    # The remedy works.
    if "Empirical" in message:
        embedding = mf.kernel_mean_embedding(kernel, mf.Empirical(reference.sample(key(), 10)))
        assert np.isfinite(jit(embedding)(reference.template()))


def test_mean_kernel_without_closed_form():
    with pytest.raises(mf.NoClosedFormError, match=r"Matern over Gaussian and Gaussian.*mf\.Empirical"):
        mean_kernel(mf.Matern(0.5, 1.0), GAUSSIAN, GAUSSIAN)


@jax.custom_vjp
def opaque(x):
    return jnp.sin(x)


opaque.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x),))


AFFINE = {
    "2t + 1": lambda t: 2 * t["v"] + 1,
    "entry": lambda t: t["b"],
    "matrix": lambda t: jnp.ones((4, 3)) @ t["v"],
    "pytree": lambda t: {"first": t["v"][:2], "all": jnp.sum(t["v"]) - t["b"]},
    "fixed choice": jax.jit(lambda t: jnp.where(jnp.arange(3) > 1, t["v"], -t["v"])),
}
NOT_AFFINE = {
    "sine": lambda t: jnp.sin(t["v"]),
    "product": lambda t: t["v"] * t["b"],
    "square": lambda t: t["v"] @ t["v"],
    "absolute value": lambda t: jnp.abs(t["v"]),
    "relu": lambda t: jax.nn.relu(t["v"]),
    "sort": lambda t: jnp.sort(t["v"]),
    "cond": lambda t: jax.lax.cond(t["b"] > 0, lambda: t["v"], lambda: -t["v"]),
    "custom_vjp": lambda t: opaque(t["v"]),
    # Steps: their derivative is zero wherever it exists, but they are no constants.
    "sign": lambda t: jnp.sign(t["v"]),
    "floor": lambda t: jnp.floor(t["v"]) + t["v"],
    "step": lambda t: jnp.where(t["v"] > 0, 1.0, 0.0),
    "remainder": lambda t: jax.lax.rem(t["v"], jnp.ones(3)),
    "stop_gradient": lambda t: jax.lax.stop_gradient(t["v"]) ** 2,
}


@pytest.mark.parametrize("name", [*AFFINE, *NOT_AFFINE])
def test_is_affine(name):
    features = (AFFINE | NOT_AFFINE)[name]
    theta = {"v": jnp.array([0.4, -0.3, 1.0]), "b": jnp.array(0.2)}
    assert is_affine(features, theta) is (name in AFFINE)
