"""Standard normal particles: JAX's generator to the bit, the normal law, nothing but (key, i, c) and J."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats as st
from helpers import assert_close, assert_within, key
from jax.extend.random import threefry_2x32

import measureflow as mf
from measureflow.core import noise
from measureflow.core.noise import standard_normal

LIKE = {"a": jnp.zeros((3, 2)), "b": jnp.zeros(()), "c": jnp.zeros(4)}


def rows(particles):
    return np.concatenate([np.asarray(leaf).reshape(len(leaf), -1) for leaf in jax.tree.leaves(particles)], 1)


def test_the_words_are_those_of_jax():
    counters = jax.random.bits(key(0), (2, 1000), jnp.uint32)
    words = jnp.array([0x13198A2E, 0x03707344], jnp.uint32)
    high, low = noise.threefry((words[0], words[1]), *counters)
    assert np.array_equal(jnp.concatenate([high, low]), threefry_2x32(words, counters.reshape(-1)))


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_the_words_of_a_step_are_those_of_its_key(impl):
    made, steps = jax.random.key(3, impl=impl), jnp.array([0, 1, 77, 2**31 - 1])
    folded = [jax.random.bits(jax.random.fold_in(made, step), (2,), jnp.uint32) for step in steps]
    words = jax.jit(noise.words_of_steps)(made, steps)
    assert np.array_equal(words, folded)
    drawn = standard_normal(jax.random.fold_in(made, 77), 5, LIKE)
    assert np.array_equal(rows(noise.mean_normal_of_words(words[2:3], 5, LIKE)), rows(drawn))


def test_a_coordinate_depends_on_key_particle_and_coordinate_alone():
    compiled = jax.jit(standard_normal, static_argnums=1)
    matrix = rows(compiled(key(1), 50, LIKE))
    assert_close(rows(compiled(key(1), 20, LIKE)), matrix[:20])
    assert_close(compiled(key(1), 50, jnp.zeros(11)), matrix)
    assert_close(rows(standard_normal(key(1), 50, LIKE)), matrix)
    keys = jax.random.split(key(2), 3)
    together = jax.jit(jax.vmap(lambda k: standard_normal(k, 5, LIKE)))(keys)
    for index, k in enumerate(keys):
        apart = compiled(k, 5, LIKE)
        assert_close(rows(jax.tree.map(lambda leaf, i=index: leaf[i], together)), rows(apart))


def test_other_keys_are_other_draws():
    first, second = (standard_normal(key(k), 1000, jnp.zeros(1000)) for k in (1, 2))
    product = np.asarray(first * second, np.float64)
    assert_within(product.mean(), 0.0, 1 / np.sqrt(product.size))


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_any_kind_of_key(impl):
    drawn = np.asarray(standard_normal(jax.random.key(0, impl=impl), 1000, jnp.zeros(100)), np.float64)
    assert_within(drawn.mean(), 0.0, 1 / np.sqrt(drawn.size))
    assert_within(np.mean(drawn**2), 1.0, np.sqrt(2 / drawn.size))


def test_the_law_is_normal():
    """Moments to the eighth, all quantiles, and both tails, of 10⁶ numbers."""
    drawn = np.asarray(standard_normal(key(3), 1000, jnp.zeros(1000)), np.float64).ravel()
    for power in range(1, 9):
        moment, square = st.norm.moment(power), st.norm.moment(2 * power)
        assert_within(np.mean(drawn**power), moment, np.sqrt((square - moment**2) / drawn.size))
    assert st.kstest(drawn, "norm").pvalue > 1e-3
    for tail in (drawn > 4, drawn < -4):
        expected = st.norm.sf(4)
        assert_within(tail.mean(), expected, np.sqrt(expected / drawn.size))


def test_particles_coordinates_and_steps_are_independent():
    """Neighbours in every direction, and their squares, have no correlation."""
    steps = jax.vmap(lambda k: standard_normal(k, 100, jnp.zeros(100)))(jax.random.split(key(4), 100))
    steps = np.asarray(steps, np.float64)
    for axis in range(3):
        first, second = np.take(steps, range(99), axis), np.take(steps, range(1, 100), axis)
        assert_within(np.mean(first * second), 0.0, 1 / np.sqrt(first.size))
        assert_within(np.mean((first**2 - 1) * (second**2 - 1)), 0.0, 2 / np.sqrt(first.size))


def test_the_ends_are_finite_and_symmetric():
    ends = jnp.array([0, 2**32 - 1], jnp.uint32)
    single = np.asarray(jax.lax.erf_inv(noise._from_32_bits(ends)))
    assert np.isfinite(single).all()
    assert single[0] == -single[1]
    # Every one of 2²³ parts, of which the middle two are nearest to 0.
    middle = noise._from_32_bits(jnp.array([2**31 - 1, 2**31], jnp.uint32))
    assert_close(middle, jnp.array([-(2.0**-23), 2.0**-23]))


def test_precisions():
    with jax.enable_x64(True):
        double = np.asarray(standard_normal(key(5), 1000, jnp.zeros(100, jnp.float64)))
        assert double.dtype == np.float64
        assert st.kstest(double.ravel(), "norm").pvalue > 1e-3
        # More than float32 can tell apart.
        assert len(np.unique(double.astype(np.float32))) < len(np.unique(double)) == double.size
    half = standard_normal(key(5), 1000, jnp.zeros(100, jnp.bfloat16))
    assert half.dtype == jnp.bfloat16
    assert_close(half, standard_normal(key(5), 1000, jnp.zeros(100)).astype(jnp.bfloat16))


def test_gaussians_are_sampled_with_it():
    gaussian = mf.Gaussian(jnp.array([1.0, -2.0]), jnp.array([3.0, 0.5]))
    drawn = gaussian.sample(key(6), 10)
    assert_close(
        drawn, gaussian.mean[None] + gaussian.scale[None] * standard_normal(key(6), 10, gaussian.mean)
    )


def test_cpus_and_accelerators_make_the_same_numbers():
    words, shapes = (jnp.uint32(1), jnp.uint32(2)), ((3, 5), (), (7,))
    for whole, each in zip(
        noise._half_by_half(words, 4, shapes), noise._leaf_by_leaf(words, 4, shapes), strict=True
    ):
        assert whole.shape == each.shape
        assert_close(whole, each)


@pytest.mark.parametrize(
    "shapes", [((3, 5), (), (7,)), ((4,),), ((3, 4), (2, 6)), ((1,),), ((3,), (0,), (4,))]
)
def test_a_kernel_of_its_own_makes_the_same_means(shapes):
    """Of leaves in the first half, in the second, and across."""
    words = jnp.arange(4, dtype=jnp.uint32).reshape(2, 2)
    each = [noise._leaf_by_leaf((two[0], two[1]), 4, shapes) for two in words]
    found = noise._in_a_kernel(words, 4, shapes)
    for mean, shape, first, second in zip(found, shapes, *each, strict=True):
        assert mean.shape == (4, *shape)
        np.testing.assert_array_equal(mean, (first + second) / 2)


def test_the_two_halves_are_independent():
    """Coordinate c of each has words of the same counter."""
    drawn = np.asarray(standard_normal(key(7), 1000, jnp.zeros(1000)), np.float64)
    first, second = drawn[:, :500], drawn[:, 500:]
    assert_within(np.mean(first * second), 0.0, 1 / np.sqrt(first.size))
    assert_within(np.mean((first**2 - 1) * (second**2 - 1)), 0.0, 2 / np.sqrt(first.size))
