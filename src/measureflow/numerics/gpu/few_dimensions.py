"""Many particles in few dimensions: every pair is computed, and added up, in registers.

XLA writes the differences of all pairs to memory, or sums them one at a time. Here every lane of the GPU has
a few rows, walks along all columns, and adds up what each pair contributes where it was computed.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as mosaic
from jaxtyping import Array, Float

from measureflow.core.pytrees import (
    OtherParticles,
    Particles,
    as_matrix,
    like_rows,
    particle_count,
    particle_dimension,
    sum_of_squares,
)
from measureflow.numerics.gpu import lanes
from measureflow.spaces.kernels import (
    AbstractKernel,
    AbstractRadialKernel,
    InverseMultiquadric,
    Matern,
    RadialCombination,
    SquaredExponential,
)

#: What a pair adds to each of the sums, from its difference, coordinate by coordinate.
Contributions: TypeAlias = Callable[[AbstractRadialKernel, list[Array]], list[Array]]

_MOST_DIMENSIONS = 8
# Other formulas may have functions that Mosaic does not know.
_KERNELS = (SquaredExponential, Matern, InverseMultiquadric)
# Rows of a program; columns come in chunks, and are met a few in a row.
_ROWS, _CHUNK, _IN_A_ROW = 256, 256, 16
# Enough programs to fill a GPU.
_PROGRAMS = 1024


def fits(kernel: AbstractKernel, rows: Particles) -> bool:
    """A known kernel in few dimensions, all of single precision."""
    terms = kernel.kernels if isinstance(kernel, RadialCombination) else (kernel,)
    return (
        all(type(term) in _KERNELS for term in terms)
        and all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves((kernel, rows)))
        and particle_dimension(rows) <= _MOST_DIMENSIONS
    )


def gradient_sum(kernel: AbstractRadialKernel, rows: Particles, others: OtherParticles) -> Particles:
    """Σⱼ ∇₁κ(θᵢ, θ′ⱼ) = 2 Σⱼ φ′(‖θᵢ − θ′ⱼ‖²)(θᵢ − θ′ⱼ) for every row i."""

    def contributions(kernel: AbstractRadialKernel, differences: list[Array]) -> list[Array]:
        slope = kernel.slope(sum_of_squares(differences))
        return [slope * difference for difference in differences]

    summed = _summed(contributions, particle_dimension(rows), kernel, rows, others)
    return like_rows(2 * summed.T, rows)


def value_sum(kernel: AbstractRadialKernel, rows: Particles, others: OtherParticles) -> Float[Array, " n"]:
    """Σⱼ κ(θᵢ, θ′ⱼ) = Σⱼ φ(‖θᵢ − θ′ⱼ‖²) for every row i."""

    def contributions(kernel: AbstractRadialKernel, differences: list[Array]) -> list[Array]:
        return [kernel.profile(sum_of_squares(differences))]

    return _summed(contributions, 1, kernel, rows, others)[0]


def _summed(
    contributions: Contributions,
    results: int,
    kernel: AbstractRadialKernel,
    rows: Particles,
    others: OtherParticles,
) -> Float[Array, "r n"]:
    """Σⱼ of each of the contributions of pair (i, j), which are functions of θᵢ − θ′ⱼ alone."""
    n, m = particle_count(rows), particle_count(others)
    own, met = lanes.filled_up(as_matrix(rows).T, _ROWS), lanes.filled_up(as_matrix(others).T, _CHUNK)
    row_blocks, chunks = own.shape[1] // _ROWS, met.shape[1] // _CHUNK
    # Few rows would leave most of the GPU idle: then some programs share them, and each meets some chunks.
    chunks_each = -(-chunks // -(-_PROGRAMS // row_blocks))
    shares = -(-chunks // chunks_each)
    leaves, structure = jax.tree.flatten(kernel)
    summed = mosaic.kernel(
        functools.partial(_program, contributions, structure, m, chunks_each),
        out_type=jax.ShapeDtypeStruct((shares, results, own.shape[1]), jnp.float32),
        grid=(row_blocks, shares),
        grid_names=("rows", "shares"),
        scratch_types=[mosaic.SMEM((len(own), _CHUNK), jnp.float32), mosaic.Barrier()],
        compiler_params=lanes.PARAMETERS,
    )(jnp.stack(leaves), own, met)
    return lanes.on_mesh_as(jnp.sum(summed, axis=0)[:, :n], own)


def _program(
    contributions: Contributions,
    structure: Any,
    count: int,
    chunks_each: int,
    parameters: Any,
    own: Any,
    met: Any,
    out: Any,
    chunk: Any,
    arrived: Any,
) -> None:
    """What one block of lanes does: its rows meet its share of the `count` columns, a chunk at a time."""
    here, share = pl.ds(jax.lax.axis_index("rows") * _ROWS, _ROWS), jax.lax.axis_index("shares")
    dimensions = own.shape[0]
    row = [lanes.load(own.at[c, here]) for c in range(dimensions)]
    kernel = jax.tree.unflatten(structure, [parameters[k] for k in range(parameters.shape[0])])
    nothing = [lanes.zeros(_ROWS)] * out.shape[1]

    def meet(column: Any, sums: list[Array]) -> list[Array]:
        differences = [row[c] - chunk[c, column] for c in range(dimensions)]
        return lanes.added(sums, contributions(kernel, differences))

    def meet_in_a_row(first: Any, sums: list[Array]) -> list[Array]:
        for k in range(_IN_A_ROW):
            sums = meet(first * _IN_A_ROW + k, sums)
        return sums

    def meet_chunk(index: Any, sums: list[Array]) -> list[Array]:
        mosaic.copy_gmem_to_smem(met.at[:, pl.ds(index * _CHUNK, _CHUNK)], chunk, arrived)
        mosaic.barrier_wait(arrived)
        columns = jnp.minimum(count - index * _CHUNK, _CHUNK)
        in_a_row = columns // _IN_A_ROW
        # From nothing: a long sum is precise as a sum of sums.
        of_chunk = jax.lax.fori_loop(0, in_a_row, meet_in_a_row, nothing)
        of_chunk = jax.lax.fori_loop(in_a_row * _IN_A_ROW, columns, meet, of_chunk)
        return lanes.added(sums, of_chunk)

    end = jnp.minimum((share + 1) * chunks_each, met.shape[1] // _CHUNK)
    sums = jax.lax.fori_loop(share * chunks_each, end, meet_chunk, nothing)
    for k, total in enumerate(sums):
        out[share, k, here] = total
