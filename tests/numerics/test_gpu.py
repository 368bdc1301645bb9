"""The GPU's way to sum over pairs: interpreted, and lowered for a GPU, anywhere; run, where there is one."""

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import LARGE, RADIAL, SMALL, assert_close, draw, jit, key, rows, squared_distances
from jax.sharding import PartitionSpec

import measureflow as mf
from measureflow.core import platforms, products
from measureflow.core.pytrees import root_mean_square_norm, root_mean_square_norms, squared_norm
from measureflow.numerics import pair_sums
from measureflow.numerics.gpu import few_dimensions, lanes, many_dimensions
from measureflow.numerics.interactions import EXACT

ON_GPU = platforms.compute_capability() >= platforms.HOPPER
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="there is no GPU for it here")
# Threads that wait for each other each hold one of XLA's pool, which has as many as this variable says.
POOL = int(os.environ.get("NPROC", os.cpu_count() or 1))
needs_threads = pytest.mark.skipif(not ON_GPU and POOL < 4, reason="the interpreter would wait for ever")
SHAPES = {1: {"x": ()}, 2: {"x": (2,)}, 3: {"scalar": (), "x": (2,)}, 8: SMALL}


@pytest.fixture
def gpu_or_interpreter(monkeypatch):
    """Without a GPU, Mosaic's interpreter, which knows no layouts."""
    if ON_GPU:
        return
    params = pytest.importorskip("jax._src.pallas.mosaic_gpu.interpret.params", reason="JAX moved it")
    interpreted = functools.partial(lanes.mosaic.kernel, interpret=params.InterpretGPUParams())
    monkeypatch.setattr(lanes.mosaic, "kernel", interpreted)
    monkeypatch.setattr(lanes, "load", lambda reference: reference[...])
    monkeypatch.setattr(lanes, "zeros", jnp.zeros)


def lowered_for_cuda(function, *arguments):
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.skipif(ON_GPU, reason="where there is a GPU, the kernel is run")
@pytest.mark.parametrize("name", RADIAL)
@pytest.mark.parametrize("dimensions", [1, 8])
def test_every_kernel_is_known_to_mosaic(name, dimensions):
    kernel, x = RADIAL[name][0], draw(SHAPES[dimensions], 300)
    assert few_dimensions.fits(kernel, x)
    for summed in (few_dimensions.gradient_sum, few_dimensions.value_sum):
        assert "mosaic" in lowered_for_cuda(summed, kernel, x, x)


@pytest.mark.parametrize("name", ["SE", "Matern-0.5"])
def test_few_particles_are_summed_directly(name, monkeypatch):
    """A GPU sums small ensembles by all differences: the same sums, also of particles that coincide."""
    kernel, x = RADIAL[name][0], draw(SMALL, 6)
    x = jax.tree.map(lambda leaf: leaf.at[1].set(leaf[0]), x)
    expected = EXACT.gradient(kernel, x), EXACT.mean(kernel, x)
    monkeypatch.setattr(platforms, "compute_capability", lambda: platforms.AMPERE)
    used = []
    monkeypatch.setattr(
        pair_sums, "_ravelled", lambda *of, found=pair_sums._ravelled: used.append(of) or found(*of)
    )
    assert_close(rows(EXACT.gradient(kernel, x)), rows(expected[0]))
    assert_close(EXACT.mean(kernel, x), expected[1])
    assert len(used) == 2


def test_norms_of_fields_are_rows_of_one_sum(monkeypatch):
    """A GPU makes the norms of a record by one kernel: the same numbers."""
    fields = [jax.tree.map(lambda leaf, power=power: leaf**power, draw(SMALL, 7)) for power in (1, 2, 3)]
    expected = [root_mean_square_norm(field) for field in fields]
    assert_close(jnp.stack(root_mean_square_norms(*fields)), jnp.stack(expected))
    monkeypatch.setattr(platforms, "compute_capability", lambda: platforms.AMPERE)
    assert_close(jnp.stack(jax.jit(root_mean_square_norms)(*fields)), jnp.stack(expected))


def test_gradients_of_a_sum_are_summed(monkeypatch):
    """A GPU takes the potential's gradient term by term: the same forces."""
    prior = mf.Gaussian(jax.tree.map(lambda leaf: leaf[0], draw(SMALL, 10)), 2.0)
    energy = mf.deep_repulsive_langevin_ensemble(squared_norm, prior, KERNEL, mmd=0.5, kl=0.3).free_energy()
    x = draw(SMALL, 11)
    expected = rows(energy.potential_gradient(x))
    assert np.ptp(expected) > 0.1
    monkeypatch.setattr(platforms, "compute_capability", lambda: platforms.AMPERE)
    assert_close(rows(energy.potential_gradient(x)), expected)


def test_what_fits():
    class MyKernel(mf.SquaredExponential):
        pass

    class MyOtherKernel(mf.SquaredExponential):
        power: float = 2.0

    few, many, kernel = jnp.zeros((4, 2)), jnp.zeros((4, 2**16)), mf.SquaredExponential(1.0)
    assert few_dimensions.fits(kernel, few)
    assert many_dimensions.fits(kernel, many)
    assert many_dimensions.fits(MyKernel(1.0), many)
    for other, particles in [
        (kernel, draw(LARGE, 4)),
        (kernel, few.astype(jnp.float16)),
        (kernel.on(jnp.sin), few),
        (MyKernel(1.0), few),
        (kernel + MyKernel(1.0), few),
    ]:
        assert not few_dimensions.fits(other, particles)
    for other, particles in [
        (kernel, few),
        (kernel, many.astype(jnp.float16)),
        (kernel.on(jnp.sin), many),
        (kernel, many[:1]),
        (MyOtherKernel(1.0), many),
        (kernel, jnp.zeros((21, 2**16))),
    ]:
        assert not many_dimensions.fits(other, particles)


KERNEL = mf.SquaredExponential(1.0)


def tiled(x, kernel=KERNEL):
    return pair_sums._tiled_gradients(kernel, x, x)


def among(x, kernel=KERNEL):
    return pair_sums.gradient_sum(kernel, x, x)


def own(x, kernel=KERNEL):
    return pair_sums.own_gradient_sum(kernel, x)


def exactly(x, lengthscale=1.0):
    """Σⱼ ∇₁κ(xᵢ, xⱼ) of the squared exponential kernel, in float64."""
    exact = np.asarray(x, np.float64)
    differences = exact[:, None] - exact[None]
    slopes = -np.exp(-np.sum(differences**2, axis=2) / (2 * lengthscale**2)) / lengthscale**2
    return np.sum(slopes[..., None] * differences, axis=1)


@pytest.fixture(params=[(among, (20, 2)), (own, (4, 2**14))], ids=["few dimensions", "few particles"])
def fitting(request, monkeypatch):
    """A sum that has a kernel for GPUs, and particles that fit it; as if there were one."""
    monkeypatch.setattr(platforms, "compute_capability", lambda: 9.0)
    summed, shape = request.param
    return summed, jax.random.normal(key(0), shape) / np.sqrt(shape[1])


def test_the_platform_decides(fitting):
    summed, x = fitting
    assert "mosaic" in lowered_for_cuda(summed, x)
    with jax.default_device(jax.devices("cpu")[0]):
        assert_close(jax.jit(summed)(x), jit(tiled)(x))


def test_derivatives_are_those_of_the_tiles(fitting):
    summed, x = fitting
    found, expected = (jax.grad(lambda x, f=f: jnp.sum(f(x) ** 2)) for f in (summed, tiled))
    assert_close(jax.jit(found)(x), jax.jit(expected)(x))


def test_gpus_of_other_makers_have_no_compute_capability():
    class Device:
        def __init__(self, named):
            self.compute_capability = named

    assert [platforms._capability(Device(named)) for named in ("9.0", "gfx942", None)] == [9.0, 0.0, 0.0]
    assert platforms._capability(jax.devices("cpu")[0]) == 0


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
        pytest.param("IMQ", 3, marks=pytest.mark.slow),
        pytest.param("sum", 2, marks=pytest.mark.slow),
        pytest.param("Matern-1.5", 2, marks=pytest.mark.slow),
        pytest.param("SE", 8, marks=pytest.mark.slow),
    ],
)
def test_it_is_the_sum_over_all_pairs(name, dimensions, gpu_or_interpreter, monkeypatch):
    kernel, phi = RADIAL[name]
    # Neither fills what it is cut into, nor do three programs share the columns evenly; some rows meet
    # themselves.
    monkeypatch.setattr(few_dimensions, "_PROGRAMS", 3)
    x = draw(SHAPES[dimensions], 37)
    y = jax.tree.map(lambda a, b: jnp.concatenate([a, b[:5]]), draw(SHAPES[dimensions], 590, seed=1), x)
    expected = phi(np, squared_distances(rows(x), rows(y))).sum(axis=1)
    assert_close(jax.jit(few_dimensions.value_sum)(kernel, x, y), expected)
    tiled = jit(pair_sums._tiled_gradients)(kernel, x, y)
    assert_close(rows(jax.jit(few_dimensions.gradient_sum)(kernel, x, y)), rows(tiled))


def test_particles_far_away_and_close_together(gpu_or_interpreter):
    """Their differences are exact, so nothing cancels; and long sums are sums of sums."""
    n = 20_000 if ON_GPU else 1_500
    x = 1_000 + 1e-2 * jax.random.normal(key(0), (n, 2))
    exact = np.asarray(x, np.float64)
    differences = exact[:50, None] - exact[None]
    slopes = -np.exp(-np.sum(differences**2, axis=2) / (2 * 0.01**2)) / 0.01**2
    expected = np.sum(slopes[..., None] * differences, axis=1)
    found = jax.jit(few_dimensions.gradient_sum)(mf.SquaredExponential(0.01), x[:50], x)
    # Float32 sums of 256 terms err by some 10 units in the last place; one long sum would by 1,000.
    assert np.max(np.abs(found - expected)) < 3e-6 * np.max(np.abs(expected))


def test_many_problems_at_once(fitting):
    summed, x = fitting
    problems, scales = jnp.stack([x, 2 * x, x - x[:1]]), jnp.array([0.5, 1.0, 2.0])
    together = jax.jit(jax.vmap(lambda x, scale: summed(x, mf.SquaredExponential(scale))))(problems, scales)
    for found, problem, scale in zip(together, problems, scales.tolist(), strict=True):
        assert_close(found, exactly(problem, scale))


def test_inside_shard_map(fitting):
    summed, x = fitting
    mesh = jax.make_mesh((1,), ("particles",), axis_types=(jax.sharding.AxisType.Auto,))
    each = PartitionSpec("particles")
    cut = jax.shard_map(summed, mesh=mesh, in_specs=each, out_specs=each)
    assert_close(jax.jit(cut)(x), exactly(x))


@needs_gpu
def test_on_a_gpu_products_are_as_precise_as_on_a_cpu():
    for length in (20, 1_024, 401_408):
        x, y = jax.random.normal(key(0), (20, length)), jax.random.normal(key(1), (20, length))
        exact = np.asarray(x, np.float64) @ np.asarray(y, np.float64).T
        for found in (jax.jit(products.row_products)(x, y), jax.jit(products.matmul)(x, y.T)):
            # Some ten units in the last place of terms whose sum is of size √length; TF32 errs by 1e-3.
            assert np.max(np.abs(found - exact)) < 6e-6 * np.sqrt(length)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("n", "stages", "most"),
    [
        (2, 2, 1),
        (7, 8, 16),
        pytest.param(11, 2, 16, marks=needs_threads),
        pytest.param(20, 4, 16, marks=[needs_threads, pytest.mark.slow]),
    ],
)
def test_few_particles_far_away_and_close_together(n, stages, most, gpu_or_interpreter, monkeypatch):
    """Some leaves are whole chunks, others are not; nothing is cut into what fits evenly."""
    for name, value in {"_PROGRAMS": 3, "_STAGES": stages, "_LARGE": 512, "_MOST_MATRICES": most}.items():
        monkeypatch.setattr(many_dimensions, name, value)
    shapes = {"long": (3, 512), "odd": (7, 70), "scalar": (), "short": (256,), "wide": (512,)}
    x = jax.tree.map(lambda leaf: 1 + leaf, draw(shapes, n))
    found = jax.jit(many_dimensions.gradient_sum)(KERNEL, x)
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, x)
    # Differences are exact, and sums of a thousand terms err by some ten units in the last place.
    assert_close(rows(found), exactly(rows(x)), relative=2e-6)


@pytest.mark.slow
@pytest.mark.skipif(ON_GPU or POOL >= 4, reason="here it runs in this process")
def test_blocks_of_pairs_with_a_larger_pool():
    one = f"{__file__}::test_few_particles_far_away_and_close_together[11-2-16]"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", one]
    done = subprocess.run(
        command, env=os.environ | {"NPROC": "8"}, capture_output=True, text=True, timeout=300, check=False
    )
    assert "1 passed" in done.stdout, done.stdout


def test_leaves_in_chunks_and_out_of_them(monkeypatch):
    monkeypatch.setattr(many_dimensions, "_LARGE", 512)
    for shapes in ({"a": (512,), "empty": (0,)}, {"a": (3,), "b": (2, 512), "c": (5,)}, {"a": (700,)}):
        x = draw(shapes, 3)
        matrices = many_dimensions._in_chunks(x)
        assert all(matrix.shape[1] and matrix.shape[1] % 256 == 0 for matrix in matrices)
        found = many_dimensions._out_of_chunks(matrices, x)
        assert all(np.array_equal(found[name], x[name]) for name in shapes)


@pytest.mark.skipif(ON_GPU, reason="where there is a GPU, the kernel is run")
@pytest.mark.parametrize("n", [2, 20])
@pytest.mark.parametrize("double", [False, True])
def test_few_particles_are_known_to_mosaic(n, double):
    with jax.enable_x64(double):
        x = {
            name: jnp.zeros((n, *shape), jnp.float32) for name, shape in {"a": (300, 256), "b": (9,)}.items()
        }
        assert many_dimensions.fits(KERNEL, x)
        assert "mosaic" in lowered_for_cuda(many_dimensions.gradient_sum, KERNEL, x)


@needs_gpu
@pytest.mark.parametrize("dimensions", [1_000, 300_000])
def test_many_dimensions_and_particles_close_together(dimensions):
    """A spread of a thousandth of the mean: as in float64."""
    x = 1.0 + 1e-3 * jax.random.normal(key(0), (20, dimensions))
    scale = 1e-3 * np.sqrt(dimensions)
    expected = exactly(x, scale) / 20
    found = jax.jit(lambda x: EXACT.gradient(mf.SquaredExponential(scale), x))(x)
    # The data are rounded to 6e-8 of the mean, 6e-5 of their spread.
    assert np.max(np.abs(found - expected)) < 1e-4 * np.max(np.abs(expected))
