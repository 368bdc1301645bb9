"""Arithmetic on particles: a pytree θ, or a pytree whose leaves share a leading axis n."""

import functools
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, PyTree

from measureflow.core import platforms
from measureflow.core.products import row_products

#: A point θ of parameter space.
Parameters: TypeAlias = PyTree[Float[Array, "..."]]
#: N points: the same pytree with a leading axis.
Particles: TypeAlias = PyTree[Float[Array, "n ..."]]
#: M other points.
OtherParticles: TypeAlias = PyTree[Float[Array, "m ..."]]

# Up to this many dimensions, pairwise differences are formed one coordinate at a time: as fast as
# a matrix product there, and free of its cancellation.
_DIRECT_DIMENSIONS = 8
# Up to so many numbers, a GPU sums all leaves by one kernel, where more would wait for one another.
_ONE_KERNEL = 2**16


def is_concrete(value: Any) -> bool:
    """Whether `value` can be looked at now: checks of values are skipped while tracing."""
    return not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(value))


def is_key(value: Any) -> bool:
    """Whether it holds typed random keys."""
    return isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def numbers_of(array: Any) -> Any:
    """Random keys as the numbers that they are made of; other arrays as they are."""
    return jax.random.key_data(array) if is_key(array) else array


def strong(value: Any) -> Array:
    """`value` as a strongly typed floating-point array.

    Python scalars and weak types would make a later call with an array of the same value trace
    again.
    """
    dtype = jnp.result_type(value)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        raise TypeError(
            f"numbers must be real, got {dtype} of shape {jnp.shape(value)}; pass real and imaginary parts "
            "as two numbers, jnp.stack([z.real, z.imag], axis=-1)."
        )
    if not jnp.issubdtype(dtype, jnp.floating) or isinstance(value, float):
        dtype = jnp.result_type(float)
    # At once: an integer of NumPy has 64 bits, of which JAX would first drop half.
    return jax.lax.convert_element_type(jnp.asarray(value, dtype), dtype)


def strong_tree(tree: PyTree) -> Parameters:
    """`strong` on every leaf."""
    return jax.tree.map(strong, tree)


def shapes_of(tree: PyTree) -> tuple[Any, list[tuple[int, ...]]]:
    """Structure and shapes, to be compared."""
    return jax.tree.structure(tree), [jnp.shape(leaf) for leaf in jax.tree.leaves(tree)]


def shown_shapes(tree: PyTree) -> Any:
    """Shapes by path, to be read."""
    paths = jax.tree_util.tree_leaves_with_path(tree)
    if len(paths) == 1 and not paths[0][0]:
        return jnp.shape(paths[0][1])
    return {jax.tree_util.keystr(path): jnp.shape(leaf) for path, leaf in paths}


def particle_count(particles: Particles) -> int:
    """N."""
    return jax.tree.leaves(particles)[0].shape[0]


def particle_dimension(particles: Particles) -> int:
    """J, the number of coordinates of each particle."""
    return dimension(particles) // particle_count(particles)


def dimension(theta: Parameters) -> int:
    """J, the number of coordinates of θ."""
    return sum(leaf.size for leaf in jax.tree.leaves(theta))


def add(x: PyTree, y: PyTree) -> PyTree:
    """x + y."""
    return jax.tree.map(jnp.add, x, y)


def subtract(x: PyTree, y: PyTree) -> PyTree:
    """x − y."""
    return jax.tree.map(jnp.subtract, x, y)


def scale(factor: Float[Array, ""], x: PyTree) -> PyTree:
    """factor · x, in the precision of x."""
    return jax.tree.map(lambda leaf: factor.astype(leaf.dtype) * leaf, x)


def total(x: PyTree) -> Float[Array, ""]:
    """The sum of all entries of all leaves."""
    if _are_one_kernel(x):
        return jnp.sum(_row(x))
    return sum((jnp.sum(leaf) for leaf in jax.tree.leaves(x)), start=jnp.zeros(()))


def _are_one_kernel(x: PyTree) -> bool:
    """Whether a GPU sums all leaves by one kernel."""
    leaves = jax.tree.leaves(x)
    are_alike = len({leaf.dtype for leaf in leaves}) == 1
    few = len(leaves) > 1 and are_alike and dimension(x) <= _ONE_KERNEL
    return few and platforms.compute_capability() >= platforms.AMPERE


def _row(x: PyTree) -> Float[Array, " k"]:
    """All entries of all leaves."""
    return jnp.concatenate([leaf.reshape(-1) for leaf in jax.tree.leaves(x)])


def weighted_mean(values: Float[Array, " n"], weights: Float[Array, " n"] | None) -> Float[Array, ""]:
    """(1/n) Σᵢ wᵢ vᵢ: divided by n, so that batches are unbiased."""
    return jnp.mean(values if weights is None else weights.astype(values.dtype) * values)


def squared_norm(x: Parameters) -> Float[Array, ""]:
    """‖x‖²."""
    return total(jax.tree.map(jnp.square, x))


def root_mean_square_norm(x: Particles) -> Float[Array, ""]:
    """√(1/N Σᵢ ‖xᵢ‖²): the L²(Q_N) norm of a vector field on the particles."""
    return jnp.sqrt(squared_norm(x) / particle_count(x))


def root_mean_square_norms(*fields: Particles) -> list[Float[Array, ""]]:
    """That of several vector fields on the same particles."""
    if not all(_are_one_kernel(field) for field in fields):
        return [root_mean_square_norm(field) for field in fields]
    # Rows of a matrix in memory: a compiler would make each norm together with whatever else reads its field,
    # a step of all particles among it, and sums are slow kernels.
    rows = jax.lax.optimization_barrier(jnp.stack([_row(field) for field in fields]))
    return list(jnp.sqrt(jnp.sum(jnp.square(rows), axis=1) / particle_count(fields[0])))


def as_matrix(particles: Particles) -> Float[Array, "n J"]:
    """Every particle ravelled to a row, leaves in order."""
    rows = [leaf.reshape(leaf.shape[0], -1) for leaf in jax.tree.leaves(particles)]
    return jnp.concatenate(rows, axis=1)


def like_rows(matrix: Float[Array, "n J"], particles: OtherParticles) -> Particles:
    """The rows of a matrix as particles with these shapes: what `as_matrix` takes apart."""
    leaves, structure = jax.tree.flatten(particles)
    ends = np.cumsum([leaf[0].size for leaf in leaves])
    parts = jnp.split(matrix, ends[:-1], axis=1)
    rows = [part.reshape(len(matrix), *leaf.shape[1:]) for part, leaf in zip(parts, leaves, strict=True)]
    return jax.tree.unflatten(structure, rows)


def split_in_half(batch: PyTree) -> tuple[PyTree, PyTree] | None:
    """Two halves of a batch (an odd case is left out), or None if it is not made of two cases or more."""
    lengths = {leaf.shape[:1] for leaf in jax.tree.leaves(batch)}
    if len(lengths) != 1 or next(iter(lengths)) in ((), (0,), (1,)):
        return None
    half = next(iter(lengths))[0] // 2
    return (
        jax.tree.map(lambda leaf: leaf[:half], batch),
        jax.tree.map(lambda leaf: leaf[half : 2 * half], batch),
    )


def inner_products(x: Particles, y: OtherParticles) -> Float[Array, "n m"]:
    """⟨xᵢ, yⱼ⟩, summed over leaves: no flattening, no n×m×J array."""
    products = jax.tree.map(
        lambda a, b: row_products(a.reshape(a.shape[0], -1), b.reshape(b.shape[0], -1)), x, y
    )
    return functools.reduce(jnp.add, jax.tree.leaves(products))


def centred(particles: Particles) -> Particles:
    """θᵢ − the mean of all."""
    return jax.tree.map(lambda leaf: leaf - jnp.mean(leaf, axis=0, keepdims=True), particles)


def from_first(particles: Particles) -> Particles:
    """θᵢ − θ₁: the same differences, near the origin."""
    return jax.tree.map(lambda leaf: leaf - leaf[:1], particles)


def sum_of_squares(columns: Sequence[Array]) -> Array:
    """Σ_c x_c²."""
    return functools.reduce(jnp.add, [jnp.square(column) for column in columns])


def squared_distances(x: Particles, y: OtherParticles) -> Float[Array, "n m"]:
    """‖xᵢ − yⱼ‖². Coincident points have distance exactly zero."""
    centre = jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0, keepdims=True), y)
    return near_squared_distances(subtract(x, centre), subtract(y, centre))


def near_squared_distances(x: Particles, y: OtherParticles) -> Float[Array, "n m"]:
    """‖xᵢ − yⱼ‖² of particles about the origin.

    In many dimensions distances come from inner products; far from the origin, close particles would lose
    them to cancellation. What is left below the resolution of that subtraction counts as coincident.
    """
    if particle_dimension(x) <= _DIRECT_DIMENSIONS:
        columns = zip(as_matrix(x).T, as_matrix(y).T, strict=True)
        return sum_of_squares([a[:, None] - b[None, :] for a, b in columns])
    products = inner_products(x, y)
    # Of the same particles, the products have their sizes.
    return distances_of_products(products) if x is y else _distances(products, *map(squared_sizes, (x, y)))


def distances_of_products(products: Float[Array, "n n"]) -> Float[Array, "n n"]:
    """‖xᵢ − xⱼ‖², of ⟨xᵢ, xⱼ⟩."""
    return _distances(products, jnp.diag(products), jnp.diag(products))


def _distances(products: Array, x_sizes: Array, y_sizes: Array) -> Float[Array, "n m"]:
    size = x_sizes[:, None] + y_sizes[None, :]
    distance = size - 2 * products
    resolution = 8 * jnp.finfo(distance.dtype).eps
    return jnp.where(distance <= resolution * size, 0.0, distance)


def squared_sizes(x: Particles) -> Float[Array, " n"]:
    """‖xᵢ‖²."""
    sizes = [jnp.sum(jnp.square(leaf.reshape(leaf.shape[0], -1)), axis=1) for leaf in jax.tree.leaves(x)]
    return functools.reduce(jnp.add, sizes)
