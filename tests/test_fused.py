"""The GPU's way to sum over pairs, interpreted on a CPU, and as it is where there is a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import LARGE, RADIAL, SMALL, assert_close, draw, jit, key, rows, squared_distances
from jax.sharding import PartitionSpec

import measureflow as mf
from measureflow import fused, pair_sums, products

ON_GPU = jax.default_backend() == "gpu"
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="there is no GPU here")
gradients = functools.partial(fused.gradient_sum, interpret=not ON_GPU)
values = functools.partial(fused.value_sum, interpret=not ON_GPU)
SHAPES = {1: {"x": ()}, 2: {"x": (2,)}, 3: {"scalar": (), "x": (2,)}, 5: {"x": (5,)}, 8: SMALL}


@pytest.mark.parametrize("name", RADIAL)
@pytest.mark.parametrize("dimensions", SHAPES)
def test_it_is_the_sum_over_all_pairs(name, dimensions):
    kernel, phi = RADIAL[name]
    # Neither fills the blocks that it is cut into; some rows are met by themselves.
    x = draw(SHAPES[dimensions], 37)
    y = jax.tree.map(lambda a, b: jnp.concatenate([a, b[:5]]), draw(SHAPES[dimensions], 70, seed=1), x)
    expected = phi(np, squared_distances(rows(x), rows(y))).sum(axis=1)
    assert_close(jit(values)(kernel, x, y), expected)
    assert_close(rows(jit(gradients)(kernel, x, y)), rows(jit(pair_sums._tiled_gradients)(kernel, x, y)))


def test_particles_far_away_and_close_together():
    """Their differences are exact, so nothing cancels."""
    x = 1_000 + 1e-2 * jax.random.normal(key(0), (50, 2))
    exact = np.asarray(x, np.float64)
    differences = exact[:, None] - exact[None]
    slopes = -np.exp(-np.sum(differences**2, axis=2) / (2 * 0.01**2)) / 0.01**2
    expected = np.sum(slopes[..., None] * differences, axis=1)
    found = jit(gradients)(mf.SquaredExponential(0.01), x, x)
    assert_close(found, expected)


def test_many_problems_at_once():
    x = jax.random.normal(key(0), (3, 40, 2))
    kernels = jax.vmap(mf.SquaredExponential)(jnp.array([0.5, 1.0, 2.0]))
    together = jit(jax.vmap(gradients))(kernels, x, x)
    for index, scale in enumerate((0.5, 1.0, 2.0)):
        alone = jit(gradients)(mf.SquaredExponential(scale), x[index], x[index])
        assert_close(together[index], alone)


@needs_gpu  # Pallas' interpreter does not know which axes of a mesh its arguments vary over.
def test_inside_a_ring_of_devices():
    mesh = jax.make_mesh((1,), ("particles",), axis_types=(jax.sharding.AxisType.Auto,))
    x, kernel = jax.random.normal(key(0), (40, 2)), mf.SquaredExponential(1.0)
    each = PartitionSpec("particles")
    cut = jax.shard_map(lambda x: gradients(kernel, x, x), mesh=mesh, in_specs=each, out_specs=each)
    assert_close(jit(cut)(x), jit(gradients)(kernel, x, x))


def test_what_does_not_fit_is_summed_in_tiles():
    either = functools.partial(fused.or_tiled, lambda *_: "fused", lambda *_: "tiled")
    x, kernel = jnp.zeros((4, 2)), mf.SquaredExponential(1.0)
    many = jax.tree.map(jnp.asarray, draw(LARGE, 4))
    for other in ((kernel, many), (kernel, x.astype(jnp.float16)), (kernel.on(jnp.sin), x)):
        assert either(other[0], other[1], other[1]) == "tiled"


def test_derivatives_are_those_of_the_tiles():
    x, kernel = jax.random.normal(key(0), (20, 2)), mf.SquaredExponential(1.0)

    def size(x, summed):
        return jnp.sum(summed(kernel, x, x) ** 2)

    found = jax.jit(jax.grad(size), static_argnums=1)(x, pair_sums.gradient_sum)
    assert_close(found, jax.jit(jax.grad(size), static_argnums=1)(x, pair_sums._tiled_gradients))


def test_long_products_in_parts(monkeypatch):
    monkeypatch.setattr(products, "_THREEFOLD", jax.lax.Precision.HIGHEST)
    for length in (3, 256, 1_024, 1_031):
        x, y = jax.random.normal(key(0), (5, length)), jax.random.normal(key(1), (7, length))
        assert_close(jit(products._in_parts)(x, y), np.asarray(x, np.float64) @ np.asarray(y, np.float64).T)


@needs_gpu
def test_on_a_gpu_products_are_as_precise_as_on_a_cpu():
    for length in (20, 1_024, 401_408):
        x, y = jax.random.normal(key(0), (20, length)), jax.random.normal(key(1), (20, length))
        exact = np.asarray(x, np.float64) @ np.asarray(y, np.float64).T
        scale = np.sqrt(length)
        assert np.max(np.abs(jax.jit(products.row_products)(x, y) - exact)) < 1e-5 * scale
        assert np.max(np.abs(jax.jit(products.matmul)(x, y.T) - exact)) < 1e-5 * scale
