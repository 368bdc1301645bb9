"""The particles' own covariance as preconditioner."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import measureflow as mf
from measureflow.flows.ensembles import ensemble_covariance, near_others

KEY = jax.random.key(0)
NUMBER = 4


def posterior(root, mean):
    """N(mean, root rootᵀ)."""
    precision = jnp.asarray(np.linalg.inv(root @ root.T), jnp.float32)
    mean = jnp.asarray(mean, jnp.float32)

    def potential(theta):
        return 0.5 * (theta - mean) @ jnp.matmul(precision, theta - mean, precision="highest")

    return mf.Problem(potential, mf.KL(mf.Flat()))


@pytest.mark.parametrize(
    "flow",
    [
        mf.WassersteinFlow,
        pytest.param(lambda eta, g: mf.KineticFlow(eta, 1.0, mass=g), marks=pytest.mark.slow),
    ],
)
def test_the_path_on_an_affine_image_is_the_image_of_the_path(flow):
    rng = np.random.default_rng(0)
    matrix = np.linalg.qr(rng.normal(size=(NUMBER, NUMBER)))[0] * [3.0, 1.0, 0.3, 0.1]
    shift = rng.normal(size=NUMBER)
    start = rng.normal(size=(200, NUMBER)).astype(np.float32)
    image = jnp.asarray(start @ matrix.T + shift, jnp.float32)
    flow = flow(0.3, mf.EnsemblePreconditioner(20))
    ends = [
        mf.solve(problem, flow, particles, 40, KEY).measure.particles
        for problem, particles in (
            (posterior(np.eye(NUMBER), np.ones(NUMBER)), jnp.asarray(start)),
            (posterior(matrix, matrix @ np.ones(NUMBER) + shift), image),
        )
    ]
    np.testing.assert_allclose(np.asarray(ends[0]) @ matrix.T + shift, ends[1], atol=5e-3)
    # A preconditioner that sees coordinates only takes another path.
    other = mf.WassersteinFlow(0.3, mf.RMSPreconditioner(20))
    assert not np.allclose(
        mf.solve(posterior(np.eye(NUMBER), np.ones(NUMBER)), other, start, 40, KEY).measure.particles
        @ matrix.T.astype(np.float32),
        mf.solve(
            posterior(matrix, matrix @ np.ones(NUMBER) + shift), other, image, 40, KEY
        ).measure.particles,
        atol=0.05,
    )


@pytest.mark.slow
def test_an_ill_conditioned_posterior_is_met_in_few_steps():
    """Condition 10⁶: two hundred steps of size ¼ in the particles' own coordinates."""
    rng, number, n = np.random.default_rng(1), 10, 1_000
    root = np.linalg.qr(rng.normal(size=(number, number)))[0] * np.logspace(0, -3, number)
    problem = posterior(root, np.zeros(number))
    start = jnp.asarray(2 * rng.normal(size=(n, number)) @ root.T + 0.5 * root.sum(axis=1), jnp.float32)
    flow = mf.WassersteinFlow(0.25, mf.EnsemblePreconditioner(100))
    ends = np.asarray(mf.solve(problem, flow, start, 200, KEY).measure.particles, np.float64)
    z = ends @ np.linalg.inv(root).T
    assert np.all(np.abs(z.mean(axis=0)) < 4 / np.sqrt(n))
    assert np.all(np.abs(z.var(axis=0) - 1) < 4 * np.sqrt(2 / n))
    assert problem.certify(jnp.asarray(ends, jnp.float32))


def test_it_freezes():
    problem = posterior(np.eye(3), np.zeros(3))
    flow = mf.WassersteinFlow(0.2, mf.EnsemblePreconditioner(10, every=5))
    start = jax.random.normal(KEY, (60, 3)) * jnp.array([[1.0, 3.0, 0.2]])
    states = [mf.solve(problem, flow, start, steps, KEY).state for steps in (4, 10, 30)]
    factors = [np.asarray(state.memory.factor) for state in states]
    assert not np.array_equal(factors[0], factors[1])
    assert np.array_equal(factors[1], factors[2])


@pytest.mark.few(1)
@pytest.mark.parametrize(("n", "number"), [(400, 5), (40, 20), (30, 700)])
def test_the_root_is_a_root_of_the_covariance(n, number):
    rng = np.random.default_rng(2)
    mixing = np.eye(number) + 3 * np.outer(np.ones(number), rng.normal(size=number)) / np.sqrt(number)
    rows = jnp.asarray(rng.normal(size=(n, number)) @ mixing, jnp.float32)
    scaling = ensemble_covariance(rows).scaling()
    vectors = jnp.asarray(rng.normal(size=(3, number)), jnp.float32)
    products = np.asarray(scaling.root(scaling.root_transposed(vectors)))
    np.testing.assert_allclose(scaling.times(vectors), products, rtol=1e-4, atol=1e-3)
    # ⟨Lᵀx, y⟩ = ⟨x, Ly⟩.
    left = np.sum(np.asarray(scaling.root_transposed(vectors[:1])) * np.asarray(vectors[1:2]))
    right = np.sum(np.asarray(vectors[:1]) * np.asarray(scaling.root(vectors[1:2])))
    assert left == pytest.approx(right, rel=1e-3, abs=1e-3 * number)
    covariance = np.cov(np.asarray(rows), rowvar=False, bias=True)
    if n >= 5 * number:
        np.testing.assert_allclose(products, np.asarray(vectors) @ covariance, rtol=2e-3, atol=2e-2)
    else:
        # The one direction that stands out is found.
        top = np.linalg.eigh(covariance)[1][:, -1].astype(np.float32)
        found = float(np.sum(np.asarray(scaling.times(jnp.asarray(top)[None])) * top))
        assert found == pytest.approx(top @ covariance @ top, rel=0.5)


def test_hopeless_particles_do_not_count():
    rng = np.random.default_rng(3)
    rows = rng.normal(size=(300, 3))
    clean = ensemble_covariance(jnp.asarray(rows, jnp.float32)).scaling()
    rows[:5] = 1e4 * rng.normal(size=(5, 3))
    rows[5] = np.nan
    kept = near_others(jnp.asarray(rows, jnp.float32))
    assert np.array_equal(np.flatnonzero(~np.asarray(kept)), np.arange(6))
    dirty = ensemble_covariance(jnp.asarray(rows, jnp.float32)).scaling()
    one = jnp.ones((1, 3))
    np.testing.assert_allclose(clean.times(one), dirty.times(one), rtol=0.3)


def test_bad_input():
    with pytest.raises(ValueError, match="EnsemblePreconditioner adapt_steps must be at least 1, got 0"):
        mf.EnsemblePreconditioner(0)
    flow = mf.WassersteinFlow(0.1, mf.EnsemblePreconditioner(5))
    with pytest.raises(ValueError, match="an ensemble of one particle has no covariance"):
        flow.init(posterior(np.eye(3), np.zeros(3)), jnp.zeros((1, 3)))
