"""Sums over all pairs in few dimensions on a GPU, by a kernel that keeps the pairs in registers.

XLA writes the differences of all pairs to memory, or sums them one at a time. Here every program of the grid
has some rows, walks along all columns, and adds up what each pair contributes where it was computed. It is
written in Pallas, for its Triton backend; elsewhere, and in a JAX without that backend, pairs are summed in
tiles.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, PyTree

from measureflow.kernels import AbstractKernel, AbstractRadialKernel
from measureflow.pytrees import (
    OtherParticles,
    Particles,
    as_matrix,
    like_rows,
    particle_count,
    sum_of_squares,
)

try:
    from jax.experimental.pallas import triton
except ImportError:
    triton = None

#: What sums over pairs: of a kernel, for every row, over all others.
Sum: TypeAlias = Callable[[Any, Particles, OtherParticles], PyTree]

_ROWS, _WARPS = 32, 4
# Columns that a program meets at once, by the number of dimensions: what it adds up is all in registers.
_COLUMNS = {1: 64, 2: 64, 3: 32, 4: 32, 5: 16, 6: 16, 7: 16, 8: 16}


def or_tiled(
    fused: Sum, tiled: Sum, kernel: AbstractKernel, rows: Particles, others: OtherParticles
) -> PyTree:
    """`fused` on a CUDA device, where it can be; `tiled` elsewhere. They are the same function."""
    if triton is None or not _fits(kernel, rows):
        return tiled(kernel, rows, others)
    return _either(fused, tiled, kernel, rows, others)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _either(
    fused: Sum, tiled: Sum, kernel: AbstractKernel, rows: Particles, others: OtherParticles
) -> PyTree:
    return jax.lax.platform_dependent(kernel, rows, others, cuda=fused, default=tiled)


@_either.defjvp
def _either_jvp(_: Sum, tiled: Sum, primals: tuple, tangents: tuple) -> tuple:
    return jax.jvp(tiled, primals, tangents)


def _fits(kernel: AbstractKernel, rows: Particles) -> bool:
    """A radial kernel with numbers for parameters, in few dimensions, all of single precision."""
    leaves = jax.tree.leaves((kernel, rows))
    return (
        isinstance(kernel, AbstractRadialKernel)
        and all(isinstance(leaf, jax.Array) and leaf.dtype == jnp.float32 for leaf in leaves)
        and all(leaf.ndim == 0 for leaf in jax.tree.leaves(kernel))
        and sum(leaf.size for leaf in jax.tree.leaves(rows)) // particle_count(rows) in _COLUMNS
    )


def gradient_sum(
    kernel: AbstractRadialKernel, rows: Particles, others: OtherParticles, *, interpret: bool = False
) -> Particles:
    """Σⱼ ∇₁κ(θᵢ, θ′ⱼ) = 2 Σⱼ φ′(‖θᵢ − θ′ⱼ‖²)(θᵢ − θ′ⱼ) for every row i."""

    def contributions(kernel: AbstractRadialKernel, differences: list[Array]) -> list[Array]:
        slope = kernel.slope(sum_of_squares(differences))
        return [slope * difference for difference in differences]

    dimensions = as_matrix(rows).shape[1]
    summed = _summed(contributions, dimensions, kernel, rows, others, interpret)
    return like_rows(2 * jnp.stack(summed, axis=1), rows)


def value_sum(
    kernel: AbstractRadialKernel, rows: Particles, others: OtherParticles, *, interpret: bool = False
) -> Float[Array, " n"]:
    """Σⱼ κ(θᵢ, θ′ⱼ) = Σⱼ φ(‖θᵢ − θ′ⱼ‖²) for every row i."""

    def contributions(kernel: AbstractRadialKernel, differences: list[Array]) -> list[Array]:
        return [kernel.profile(sum_of_squares(differences))]

    return _summed(contributions, 1, kernel, rows, others, interpret)[0]


def _summed(
    contributions: Callable[[AbstractRadialKernel, list[Array]], list[Array]],
    results: int,
    kernel: AbstractRadialKernel,
    rows: Particles,
    others: OtherParticles,
    interpret: bool,
) -> list[Float[Array, " n"]]:
    """Σⱼ of each of the contributions of pair (i, j), which are functions of θᵢ − θ′ⱼ alone."""
    n, m = particle_count(rows), particle_count(others)
    own, met = as_matrix(rows).T, as_matrix(others).T
    dimensions = len(own)
    width = _COLUMNS[dimensions]
    own, met = _padded(own, _ROWS), _padded(met, width)
    leaves, structure = jax.tree.flatten(kernel)
    parameters = jnp.stack(leaves)

    def program(*references: Any) -> None:
        numbers, mine, all_others = references[0], references[1], references[2]
        kernel = jax.tree.unflatten(structure, [numbers[k] for k in range(len(leaves))])
        row = [mine[c, :][:, None] for c in range(dimensions)]

        def block(first: Any) -> list[Array]:
            column = [all_others[c, pl.ds(first, width)][None, :] for c in range(dimensions)]
            return contributions(kernel, [x - y for x, y in zip(row, column, strict=True)])

        def add(index: Any, sums: list[Array]) -> list[Array]:
            return [x + y for x, y in zip(sums, block(index * width), strict=True)]

        sums = [jnp.zeros((_ROWS, width), jnp.float32)] * results
        sums = jax.lax.fori_loop(0, m // width, add, sums)
        if m % width:
            # The last block has columns that are nobody.
            is_somebody = jax.lax.broadcasted_iota(jnp.int32, (_ROWS, width), 1) < m % width
            last = block(m // width * width)
            sums = [x + jnp.where(is_somebody, y, 0.0) for x, y in zip(sums, last, strict=True)]
        for out, total in zip(references[3:], sums, strict=True):
            out[:] = jnp.sum(total, axis=1)

    shape = jax.ShapeDtypeStruct(
        (own.shape[1],), jnp.float32, manual_axis_type=jax.typeof(own).manual_axis_type
    )
    call = pl.pallas_call(
        program,
        out_shape=[shape] * results,
        grid=(own.shape[1] // _ROWS,),
        in_specs=[
            pl.BlockSpec(parameters.shape, lambda i: (0,)),
            pl.BlockSpec((dimensions, _ROWS), lambda i: (0, i)),
            pl.BlockSpec(met.shape, lambda i: (0, 0)),
        ],
        out_specs=[pl.BlockSpec((_ROWS,), lambda i: (i,))] * results,
        interpret=interpret,
        compiler_params=None if interpret or triton is None else triton.CompilerParams(num_warps=_WARPS),
    )
    return [total[:n] for total in call(parameters, own, met)]


def _padded(columns: Float[Array, "d k"], multiple: int) -> Float[Array, "d l"]:
    return jnp.pad(columns, ((0, 0), (0, -columns.shape[1] % multiple)))
