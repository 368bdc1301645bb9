"""Few particles in many dimensions, an ensemble of networks: distances are one pass over them, and forces
another.

The distances of N particles are N² sums over all J coordinates, the forces J sums over N particles: little
arithmetic for what is read. XLA's matrix products are slow for such thin matrices, and would have to find the
differences from the first particle, without which close particles cancel, in memory. Here they are made in
registers.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as mosaic
from jaxtyping import Array, Float

from measureflow.core.pytrees import (
    Particles,
    as_matrix,
    distances_of_products,
    like_rows,
    particle_count,
    particle_dimension,
)
from measureflow.numerics.gpu import lanes
from measureflow.spaces.kernels import AbstractKernel, AbstractRadialKernel

# Fewer dimensions are as quickly done by XLA, and so are more particles, since their pairs do not fit into
# registers: a thread, which is 128 lanes, has room for 10 × 10 of them, and a program for three threads.
_LEAST_DIMENSIONS, _MOST_PARTICLES, _BLOCK_ROWS = 2**14, 20, 10
# Columns that one copy brings, and how many of them are worth a kernel of their own.
_CHUNK, _LARGE = 256, 2**14
# A program for every multiprocessor of an H100 sums products, with some chunks on their way meanwhile.
_PROGRAMS, _STAGES = 132, 4
# Matrices of one kernel: each takes 128 bytes of its arguments, which are 4,096 at most.
_MOST_MATRICES = 16


def fits(kernel: AbstractKernel, particles: Particles) -> bool:
    """A radial kernel, single precision, few particles, many dimensions."""
    return (
        isinstance(kernel, AbstractRadialKernel)
        # Kernels that a user wrote may hold anything.
        and all(getattr(leaf, "dtype", None) == jnp.float32 for leaf in jax.tree.leaves((kernel, particles)))
        and 2 <= particle_count(particles) <= _MOST_PARTICLES
        and particle_dimension(particles) >= _LEAST_DIMENSIONS
    )


def gradient_sum(kernel: AbstractRadialKernel, particles: Particles) -> Particles:
    """Σⱼ ∇₁κ(θᵢ, θⱼ) = Σⱼ 2φ′ᵢⱼ(θᵢ − θⱼ) for every i: the differences, mixed by diag(rowsum 2φ′) − 2φ′."""
    matrices = _in_chunks(particles)
    several = [matrices[k : k + _MOST_MATRICES] for k in range(0, len(matrices), _MOST_MATRICES)]
    products = functools.reduce(jnp.add, map(_products_from_first, several))
    slopes = 2 * kernel.slope(distances_of_products(products))
    weights = jnp.diag(jnp.sum(slopes, axis=1)) - slopes
    return _out_of_chunks([_mixed_from_first(weights, matrix) for matrix in matrices], particles)


def _is_whole(leaf: Array) -> bool:
    return leaf[0].size >= _LARGE and leaf[0].size % _CHUNK == 0


def _in_chunks(particles: Particles) -> list[Float[Array, "n _"]]:
    """Large leaves of a number of whole chunks as they are, then a copy of all others together, filled up."""
    leaves = jax.tree.leaves(particles)
    whole, rest = ([leaf for leaf in leaves if _is_whole(leaf) is kind] for kind in (True, False))
    together = [lanes.filled_up(as_matrix(rest), _CHUNK)] if sum(leaf.size for leaf in rest) else []
    return [*(leaf.reshape(len(leaf), -1) for leaf in whole), *together]


def _out_of_chunks(matrices: list[Float[Array, "n _"]], particles: Particles) -> Particles:
    """What `_in_chunks` takes apart."""
    leaves, structure = jax.tree.flatten(particles)
    rest = [leaf for leaf in leaves if not _is_whole(leaf)]
    together = like_rows(matrices[-1][:, : particle_dimension(rest)], rest) if rest else []
    wholes, rests = iter(matrices), iter(together)
    found = [next(wholes if _is_whole(leaf) else rests).reshape(leaf.shape) for leaf in leaves]
    return jax.tree.unflatten(structure, found)


def _products_from_first(matrices: list[Float[Array, "n _"]]) -> Float[Array, "n n"]:
    """⟨xᵢ − x₁, xⱼ − x₁⟩, summed over matrices."""
    n, chunks = len(matrices[0]), sum(matrix.shape[1] // _CHUNK for matrix in matrices)
    # Rows in one or two sets, and a thread for every block of pairs: of a set with itself, or with the other.
    sets = -(-n // _BLOCK_ROWS)
    rows = -(-n // sets)
    blocks = list(itertools.combinations_with_replacement(range(sets), 2))
    programs = min(_PROGRAMS, chunks)
    summed = mosaic.kernel(
        functools.partial(_sum_products, rows, blocks, programs),
        out_type=jax.ShapeDtypeStruct((programs, len(blocks), rows, rows, lanes.LANES), jnp.float32),
        grid=(programs,),
        grid_names=("programs",),
        num_threads=len(blocks),
        thread_name="blocks",
        scratch_types=[
            mosaic.SMEM((_STAGES, n, _CHUNK), jnp.float32),
            mosaic.Barrier(num_barriers=_STAGES),
            mosaic.Barrier(num_arrivals=len(blocks), num_barriers=_STAGES),
        ],
        compiler_params=lanes.PARAMETERS,
    )(*matrices)
    products = lanes.on_mesh_as(jnp.sum(summed, axis=(0, 4)), matrices[0])
    number = np.zeros((sets, sets), int)
    number[tuple(np.array(blocks).T)] = np.arange(len(blocks))
    i, j = np.sort(np.indices((n, n)), axis=0)
    return products[number[i // rows, j // rows], i % rows, j % rows]


def _sum_products(rows: int, blocks: list[tuple[int, int]], programs: int, *references: Any) -> None:
    """One program: a chunk at a time, every thread adds up the products of its block."""
    *matrices, out, chunks, arrived, left = references
    n, ends = matrices[0].shape[0], np.cumsum([matrix.shape[1] // _CHUNK for matrix in matrices])
    program, block = jax.lax.axis_index("programs"), jax.lax.axis_index("blocks")
    sets = [_looked_up([pair[side] for pair in blocks], block) for side in (0, 1)]
    # What fills up the last set is its last row again; its products are not used.
    own = [[jnp.minimum(s * rows + k, n - 1) for k in range(rows)] for s in sets]
    count = (int(ends[-1]) - program + programs - 1) // programs

    def slot_of(turn: Any) -> Any:
        return jax.lax.rem(jnp.int32(turn), jnp.int32(_STAGES))

    def fetch(turn: Any) -> None:
        chunk, slot = program + turn * programs, slot_of(turn)
        for matrix, end in zip(matrices, ends.tolist(), strict=True):
            start = end - matrix.shape[1] // _CHUNK

            @pl.when((start <= chunk) & (chunk < end))
            def _(matrix: Any = matrix, start: int = start) -> None:
                columns = pl.ds((chunk - start) * _CHUNK, _CHUNK)
                mosaic.copy_gmem_to_smem(matrix.at[:, columns], chunks.at[slot], arrived.at[slot])

    for turn in range(_STAGES):
        pl.when((block == 0) & (turn < count))(functools.partial(fetch, turn))

    def add_chunk(turn: Any, sums: list[Array]) -> list[Array]:
        slot = slot_of(turn)
        mosaic.barrier_wait(arrived.at[slot])
        for first in range(0, _CHUNK, lanes.LANES):
            columns = pl.ds(first, lanes.LANES)
            origin = lanes.load(chunks.at[slot, 0, columns])
            x, y = ([lanes.load(chunks.at[slot, row, columns]) - origin for row in s] for s in own)
            sums = lanes.added(sums, [a * b for a, b in itertools.product(x, y)])
        mosaic.barrier_arrive(left.at[slot])

        # In the last turns, too: every copy that was started must be waited for.
        @pl.when(block == 0)
        def _() -> None:
            mosaic.barrier_wait(left.at[slot])
            pl.when(turn + _STAGES < count)(lambda: fetch(turn + _STAGES))

        return sums

    sums = jax.lax.fori_loop(0, count, add_chunk, [lanes.zeros(lanes.LANES)] * rows**2)
    for (i, j), total in zip(itertools.product(range(rows), repeat=2), sums, strict=True):
        out[program, block, i, j, :] = total


def _looked_up(values: list[int], index: Any) -> Any:
    """values[index], by steps: a program has no tables."""
    steps = [jnp.where(index >= k, values[k] - values[k - 1], 0) for k in range(1, len(values))]
    return functools.reduce(jnp.add, steps, jnp.int32(values[0]))


def _mixed_from_first(weights: Float[Array, "n n"], matrix: Float[Array, "n k"]) -> Float[Array, "n k"]:
    """Σⱼ wᵢⱼ (xⱼ − x₁)."""
    # A copy brings a multiple of 128 bytes, 32 numbers.
    padded = jnp.pad(weights, ((0, 0), (0, 32 - len(weights))))
    mixed = mosaic.kernel(
        _mix,
        out_type=jax.ShapeDtypeStruct(matrix.shape, jnp.float32),
        grid=(matrix.shape[1] // _CHUNK,),
        grid_names=("chunks",),
        scratch_types=[mosaic.SMEM(padded.shape, jnp.float32), mosaic.Barrier()],
        compiler_params=lanes.PARAMETERS,
    )(padded, matrix)
    return lanes.on_mesh_as(mixed, matrix)


def _mix(weights: Any, matrix: Any, out: Any, mixing: Any, arrived: Any) -> None:
    """One program: all rows of a chunk are in registers, and are mixed."""
    n, columns = matrix.shape[0], pl.ds(jax.lax.axis_index("chunks") * _CHUNK, _CHUNK)
    mosaic.copy_gmem_to_smem(weights, mixing, arrived)
    origin, *others = (lanes.load(matrix.at[row, columns]) for row in range(n))
    differences = [other - origin for other in others]
    mosaic.barrier_wait(arrived)

    def mix_row(row: Any, _: None) -> None:
        terms = [mixing[row, k] * difference for k, difference in enumerate(differences, start=1)]
        out[row, columns] = functools.reduce(jnp.add, terms)

    jax.lax.fori_loop(0, n, mix_row, None)
