"""The GPU's way to sum over pairs: interpreted, and lowered for a GPU, anywhere; run, where there is one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import LARGE, RADIAL, SMALL, assert_close, draw, jit, key, rows, squared_distances
from jax.sharding import PartitionSpec

import measureflow as mf
from measureflow import fused, pair_sums, products
from measureflow.interactions import interaction_gradient

ON_GPU = products.compute_capability() >= 9
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="there is no GPU for it here")
SHAPES = {1: {"x": ()}, 2: {"x": (2,)}, 3: {"scalar": (), "x": (2,)}, 8: SMALL}


@pytest.fixture
def gpu_or_interpreter(monkeypatch):
    """Without a GPU, Mosaic's interpreter, which knows no layouts: there the kernel reads what it loads."""
    if ON_GPU:
        return
    params = pytest.importorskip("jax._src.pallas.mosaic_gpu.interpret.params", reason="JAX moved it")
    mosaic = fused.mosaic
    interpreted = functools.partial(mosaic.kernel, interpret=params.InterpretGPUParams())
    monkeypatch.setattr(mosaic, "kernel", interpreted)
    monkeypatch.setattr(mosaic, "load", lambda reference, *_, **__: reference[...])
    monkeypatch.setattr(mosaic, "layout_cast", lambda array, _: array)


def lowered_for_cuda(function, *arguments):
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.skipif(ON_GPU, reason="where there is a GPU, the kernel is run")
@pytest.mark.parametrize("name", RADIAL)
@pytest.mark.parametrize("dimensions", [1, 8])
def test_every_kernel_is_known_to_mosaic(name, dimensions):
    kernel, x = RADIAL[name][0], draw(SHAPES[dimensions], 300)
    assert fused._fits(kernel, x)
    for summed in (fused.gradient_sum, fused.value_sum):
        assert "mosaic" in lowered_for_cuda(summed, kernel, x, x)


def test_what_does_not_fit_is_summed_in_tiles():
    class MyKernel(mf.SquaredExponential):
        pass

    x, kernel = jnp.zeros((4, 2)), mf.SquaredExponential(1.0)
    either = functools.partial(fused.or_tiled, lambda *_: "fused", lambda *_: "tiled")
    others = [
        (kernel, draw(LARGE, 4)),
        (kernel, x.astype(jnp.float16)),
        (kernel.on(jnp.sin), x),
        (MyKernel(1.0), x),
        (kernel + MyKernel(1.0), x),
    ]
    for other, particles in others:
        assert either(other, particles, particles) == "tiled"


def test_the_platform_decides(monkeypatch):
    monkeypatch.setattr(products, "compute_capability", lambda: 9.0)
    x, kernel = jax.random.normal(key(0), (20, 2)), mf.SquaredExponential(1.0)
    assert "mosaic" in lowered_for_cuda(pair_sums.gradient_sum, kernel, x, x)
    on_cpu = jax.devices("cpu")[0]
    with jax.default_device(on_cpu):
        found = jax.jit(pair_sums.gradient_sum)(kernel, x, x)
        assert_close(found, jit(pair_sums._tiled_gradients)(kernel, x, x))


def test_derivatives_are_those_of_the_tiles(monkeypatch):
    monkeypatch.setattr(products, "compute_capability", lambda: 9.0)
    x, kernel = jax.random.normal(key(0), (20, 2)), mf.SquaredExponential(1.0)

    def size(x, summed):
        return jnp.sum(summed(kernel, x, x) ** 2)

    found = jax.jit(jax.grad(size), static_argnums=1)(x, pair_sums.gradient_sum)
    assert_close(found, jax.jit(jax.grad(size), static_argnums=1)(x, pair_sums._tiled_gradients))


def test_gpus_of_other_makers_have_no_compute_capability():
    class Device:
        def __init__(self, named):
            self.compute_capability = named

    assert [products._capability(Device(named)) for named in ("9.0", "gfx942", None)] == [9.0, 0.0, 0.0]
    assert products._capability(jax.devices("cpu")[0]) == 0


def test_long_products_in_parts(monkeypatch):
    monkeypatch.setattr(products, "_THREEFOLD", jax.lax.Precision.HIGHEST)
    for length in (3, 256, 1_024, 1_031):
        x, y = jax.random.normal(key(0), (5, length)), jax.random.normal(key(1), (7, length))
        assert_close(jit(products._in_parts)(x, y), np.asarray(x, np.float64) @ np.asarray(y, np.float64).T)


@pytest.mark.parametrize(
    ("name", "dimensions"),
    [
        ("SE", 1),
        ("Matern-0.5", 2),
        ("IMQ", 3),
        ("sum", 2),
        pytest.param("Matern-1.5", 2, marks=pytest.mark.slow),
        pytest.param("SE", 8, marks=pytest.mark.slow),
    ],
)
def test_it_is_the_sum_over_all_pairs(name, dimensions, gpu_or_interpreter, monkeypatch):
    kernel, phi = RADIAL[name]
    # Neither fills what it is cut into, nor do three programs share the columns evenly; some rows meet
    # themselves.
    monkeypatch.setattr(fused, "_PROGRAMS", 3)
    x = draw(SHAPES[dimensions], 37)
    y = jax.tree.map(lambda a, b: jnp.concatenate([a, b[:5]]), draw(SHAPES[dimensions], 590, seed=1), x)
    expected = phi(np, squared_distances(rows(x), rows(y))).sum(axis=1)
    assert_close(jax.jit(fused.value_sum)(kernel, x, y), expected)
    tiled = jit(pair_sums._tiled_gradients)(kernel, x, y)
    assert_close(rows(jax.jit(fused.gradient_sum)(kernel, x, y)), rows(tiled))


def test_particles_far_away_and_close_together(gpu_or_interpreter):
    """Their differences are exact, so nothing cancels; and long sums are sums of sums."""
    n = 20_000 if ON_GPU else 1_500
    x = 1_000 + 1e-2 * jax.random.normal(key(0), (n, 2))
    exact = np.asarray(x, np.float64)
    differences = exact[:50, None] - exact[None]
    slopes = -np.exp(-np.sum(differences**2, axis=2) / (2 * 0.01**2)) / 0.01**2
    expected = np.sum(slopes[..., None] * differences, axis=1)
    found = jax.jit(fused.gradient_sum)(mf.SquaredExponential(0.01), x[:50], x)
    # Float32 sums of 256 terms err by some 10 units in the last place; one long sum would by 1,000.
    assert np.max(np.abs(found - expected)) < 3e-6 * np.max(np.abs(expected))


@needs_gpu
def test_many_problems_at_once():
    x, scales = jax.random.normal(key(0), (3, 40, 2)), jnp.array([0.5, 1.0, 2.0])

    def summed(scale, x):
        return pair_sums.gradient_sum(mf.SquaredExponential(scale), x, x)

    together = jax.jit(jax.vmap(summed))(scales, x)
    for index in range(3):
        assert_close(together[index], jax.jit(summed)(scales[index], x[index]))


@needs_gpu
def test_inside_a_ring_of_devices():
    mesh = jax.make_mesh((1,), ("particles",), axis_types=(jax.sharding.AxisType.Auto,))
    x, kernel = jax.random.normal(key(0), (40, 2)), mf.SquaredExponential(1.0)
    each = PartitionSpec("particles")

    def summed(x):
        return pair_sums.gradient_sum(kernel, x, x)

    cut = jax.shard_map(summed, mesh=mesh, in_specs=each, out_specs=each)
    assert_close(jax.jit(cut)(x), jax.jit(summed)(x))


@needs_gpu
def test_on_a_gpu_products_are_as_precise_as_on_a_cpu():
    for length in (20, 1_024, 401_408):
        x, y = jax.random.normal(key(0), (20, length)), jax.random.normal(key(1), (20, length))
        exact = np.asarray(x, np.float64) @ np.asarray(y, np.float64).T
        for found in (jax.jit(products.row_products)(x, y), jax.jit(products.matmul)(x, y.T)):
            # Some ten units in the last place of terms whose sum is of size √length; TF32 errs by 1e-3.
            assert np.max(np.abs(found - exact)) < 6e-6 * np.sqrt(length)


@needs_gpu
def test_many_dimensions_and_particles_close_together():
    """A thousand coordinates, a spread of a thousandth of the mean: as in float64."""
    x = 1.0 + 1e-3 * jax.random.normal(key(0), (20, 1_000))
    exact = np.asarray(x, np.float64)
    differences, scale = exact[:, None] - exact[None], 0.03
    slopes = -np.exp(-np.sum(differences**2, axis=2) / (2 * scale**2)) / scale**2
    expected = np.mean(slopes[..., None] * differences, axis=1)
    found = jax.jit(lambda x: interaction_gradient(mf.SquaredExponential(scale), x))(x)
    # The data are rounded to 6e-8 of the mean, 6e-5 of their spread.
    assert np.max(np.abs(found - expected)) < 1e-4 * np.max(np.abs(expected))
