"""Sums over pairs that are estimated: right on average, exact where nothing is left to chance."""

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
    assert_within,
    draw,
    jit,
    key,
    monte_carlo,
    rows,
)

import measureflow as mf
from measureflow.numerics import pair_sums
from measureflow.numerics.interactions import EXACT

N = 12
DRAWS = 2_000
SMOOTH = {name: kernel for name, (kernel, _) in RADIAL.items() if name not in ("Matern-0.5", "sum")}
SMOOTH["sum"] = 0.7 * SMOOTH["SE"] + 2.0 * (SMOOTH["IMQ"] + 0.5 * SMOOTH["Matern-2.5"])
FEATURES = {
    **SMOOTH,
    "pull-back": mf.SquaredExponential(1.1).on(lambda theta: {"x": jnp.tanh(theta["vector"])}),
}
PULL_AND_RADIAL = FEATURES["pull-back"] + 0.5 * FEATURES["IMQ"]


class Product(mf.AbstractKernel):
    """exp(⟨x, y⟩/2) on one leaf: not radial, so that a particle has a force on itself."""

    def __call__(self, x, y):
        return jnp.exp(0.5 * jnp.sum(x["vector"] * y["vector"]))


gradient, mean = jit(EXACT.gradient), jit(EXACT.mean)


def estimates(function, kernel, particles):
    found = jit(jax.vmap(lambda k: function(kernel, particles, k)))(jax.random.split(key(7), DRAWS))
    return np.asarray(found, np.float64) if hasattr(found, "shape") else found


def assert_unbiased(kernel, particles, way):
    exact = gradient(kernel, particles)
    found = estimates(way.gradient, kernel, particles)
    for leaf, drawn in zip(jax.tree.leaves(exact), jax.tree.leaves(found), strict=True):
        average, error = monte_carlo(drawn)
        assert_within(average, np.asarray(leaf, np.float64), error + 1e-7)
    average, error = monte_carlo(estimates(way.mean, kernel, particles))
    assert_within(average, float(mean(kernel, particles)), error)
    assert error > 0


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["SE", "Matern-1.5", "sum", "pull-back"])
def test_random_features_are_right_on_average(name):
    assert_unbiased(FEATURES[name], draw(SMALL, N), mf.RandomFeatures(8))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "size"),
    [("SE", 2), ("sum", 4), ("pull-back and radial", 4), ("not radial", 2), ("not radial", 4)],
)
def test_random_batches_are_right_on_average(name, size):
    kernel = {**FEATURES, "pull-back and radial": PULL_AND_RADIAL, "not radial": Product()}[name]
    assert_unbiased(kernel, draw(SMALL, N), mf.RandomBatches(size))


@pytest.mark.parametrize("kernel", [FEATURES["sum"], Product()], ids=["radial", "not radial"])
def test_one_batch_of_all_is_exact(kernel):
    particles, way = draw(LARGE, N), mf.RandomBatches(N)
    assert_close(rows(jit(way.gradient)(kernel, particles, key(1))), rows(gradient(kernel, particles)))
    assert_close(jit(way.mean)(kernel, particles, key(1)), mean(kernel, particles))


def test_errors_fall_as_the_square_root_of_the_work():
    particles, kernel = draw(SMALL, 64), mf.SquaredExponential(1.0)
    exact = rows(gradient(kernel, particles))

    def error(way):
        found = estimates(way.gradient, kernel, particles)
        found = np.concatenate([np.asarray(x).reshape(DRAWS, 64, -1) for x in jax.tree.leaves(found)], axis=2)
        return np.sqrt(np.mean((found - exact) ** 2))

    ratio = error(mf.RandomFeatures(16)) / error(mf.RandomFeatures(64))
    assert abs(ratio - 2) < 0.1
    # Without replacement: the variance of a mean over p − 1 of the N − 1 others.
    expected = np.sqrt((1 / 3 - 1 / 63) / (1 / 15 - 1 / 63))
    assert abs(error(mf.RandomBatches(4)) / error(mf.RandomBatches(16)) - expected) < 0.05 * expected


@pytest.mark.parametrize("name", SMOOTH)
def test_kernels_are_mixtures_of_squared_exponentials(name):
    """φ(s) = φ(0) E exp(−ts/2), and κ is the characteristic function of the frequencies."""
    kernel = SMOOTH[name]
    precisions = np.asarray(kernel.precisions(key(4), 200_000), np.float64)
    for s in (0.1, 1.0, 4.0):
        average, error = monte_carlo(np.exp(-precisions * s / 2))
        at_zero = float(kernel.profile(jnp.zeros(())))
        assert_within(at_zero * average, float(kernel.profile(jnp.asarray(s))), at_zero * error + 1e-7)


@pytest.mark.parametrize("n", [8, 13])
def test_tiles_and_blocks_of_any_size_are_the_whole(n, monkeypatch):
    particles = draw(LARGE, n)
    for kernel in (RADIAL["sum"][0], Product()):
        whole = rows(gradient(kernel, particles)), mean(kernel, particles)
        with monkeypatch.context() as patch:
            patch.setattr(pair_sums, "_ROWS", 4)
            patch.setattr(pair_sums, "_COLUMNS", 4)
            assert_close(rows(jit(EXACT.gradient)(kernel, particles)), whole[0])
            assert_close(jit(EXACT.mean)(kernel, particles), whole[1])


def test_each_step_has_fresh_batches_and_features():
    """The drift of two steps from the same place differs; of the same step it does not."""
    prior = mf.Gaussian(jnp.zeros(3), 1.0)
    problem = mf.Problem(lambda theta: 0.0 * jnp.sum(theta), mf.SquaredMMD(prior, mf.SquaredExponential(1.0)))
    start = prior.sample(key(0), N)
    for way in (mf.RandomBatches(4), mf.RandomFeatures(10)):
        flow = mf.WassersteinFlow(0.1, interactions=way)
        state = flow.init(problem, start)
        again = mf.ParticleState(start, state.step + 1)
        step = jit(flow.step)
        first, second = (step(problem, s, None, key(1)).particles for s in (state, again))
        assert not np.allclose(first, second)
        assert np.array_equal(first, step(problem, state, None, key(1)).particles)


def test_bad_input():
    particles = draw(SMALL, N)
    with pytest.raises(ValueError, match=r"must divide .* size=5 for 12 particles; .* divides 12"):
        mf.RandomBatches(5).gradient(RADIAL["SE"][0], particles, key(0))
    with pytest.raises(ValueError, match="RandomBatches size must be at least 2, got 1"):
        mf.RandomBatches(1)
    with pytest.raises(ValueError, match="RandomFeatures count must be at least 1, got 0"):
        mf.RandomFeatures(0)
    with pytest.raises(TypeError, match="radial kernel, got Inner; use"):
        mf.RandomFeatures(3).gradient(Inner(), particles["vector"], key(0))
    with pytest.raises(ValueError, match="random interactions need a key, got None"):
        mf.RandomFeatures(3).gradient(RADIAL["SE"][0], particles)

    with pytest.raises(ValueError, match=r"Matern\(nu=0.5\) have infinite variance.*RandomBatches"):
        mf.RandomFeatures(3).gradient(mf.Matern(0.5, 1.0), particles, key(0))

    class Plain(mf.AbstractRadialKernel):
        def profile(self, squared_distance):
            return jnp.exp(-squared_distance)

        def slope(self, squared_distance):
            return -jnp.exp(-squared_distance)

    with pytest.raises(NotImplementedError, match="Plain has no `precisions`"):
        mf.RandomFeatures(3).gradient(Plain(), particles, key(0))
