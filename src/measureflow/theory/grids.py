"""Uniform grids: points of parameter space, and free energies evaluated on them in double precision."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jax.flatten_util import ravel_pytree
from jaxtyping import PyTree

from measureflow.core.pytrees import Particles
from measureflow.spaces.empirical import Empirical
from measureflow.spaces.kernels import AbstractKernel, AbstractRadialKernel
from measureflow.statement.free_energy import FreeEnergy, Rest
from measureflow.statement.problem import Problem

_LARGEST_DENSE = 6_000


class Grid:
    """A uniform grid of shape (..., J), one axis per coordinate, or (G,) for one dimension."""

    def __init__(self, grid: Any, template: PyTree | None):
        points = np.asarray(grid, dtype=np.float64)
        points = points[:, None] if points.ndim == 1 else points
        self.shape, self.dimension = points.shape[:-1], points.shape[-1]
        if len(self.shape) != self.dimension or min(self.shape) < 3:
            raise ValueError(
                f"grid must have shape (..., J) with one axis per dimension and at least 3 points on each, "
                f"or (G,) in one dimension, got {np.shape(grid)}; see numpy.meshgrid and numpy.stack."
            )
        self.spacing = np.array([_spacing(points, axis) for axis in range(self.dimension)])
        self.cell = float(np.prod(self.spacing))
        self.flat = points.reshape(-1, self.dimension)
        self.template = jnp.zeros(self.dimension) if template is None else template
        ravelled, _ = ravel_pytree(self.template)
        if ravelled.size != self.dimension:
            raise ValueError(
                f"grid has {self.dimension} dimensions, the problem's reference {ravelled.size}; "
                "give both the same."
            )

    def evaluate(self, function: Any) -> np.ndarray:
        """A function of θ at every grid point, in double precision whatever the problem's own."""
        with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
            return np.asarray(_on_particles(in_double(function), self.particles(self.flat)))

    def particles(self, points: np.ndarray) -> Particles:
        """Rows of coordinates as particles; double precision where that is enabled."""
        _, unravel = ravel_pytree(in_double(self.template))
        return jax.vmap(unravel)(jnp.asarray(points))


def in_double(tree: PyTree) -> PyTree:
    """Floating-point arrays as float64, where that is enabled: 1/τ amplifies the rounding of V."""
    return jax.tree.map(
        lambda leaf: leaf.astype(jnp.result_type(float)) if eqx.is_inexact_array(leaf) else leaf, tree
    )


@eqx.filter_jit
def _on_particles(function: Any, particles: Particles) -> jax.Array:
    return jax.lax.map(function, particles, batch_size=4096)


def _spacing(points: np.ndarray, axis: int) -> float:
    steps = np.diff(points, axis=axis)
    first = steps.reshape(-1, steps.shape[-1])[0]
    size = float(np.linalg.norm(first))
    if not size > 0 or not np.allclose(steps, first, atol=1e-3 * size):
        raise ValueError(f"grid is not uniform along axis {axis}; use numpy.linspace and numpy.meshgrid.")
    return size


class GridEnergy:
    """V, W, τ and the rest of a problem on a grid, for probability vectors (mass per cell)."""

    def __init__(self, problem: Problem, grid: Any, batch: PyTree = None):
        self.grid = Grid(grid, problem.template())
        self.energy: FreeEnergy = problem.free_energy(batch)
        self.potential = np.zeros(len(self.grid.flat))
        if self.energy.potential is not None:
            self.potential = self.grid.evaluate(self.energy.potential)
        if not np.all(np.isfinite(self.potential)):
            raise ValueError(
                "the potential V is not finite on all of the grid; narrow the grid or check the loss."
            )
        self.temperature = 0.0 if self.energy.temperature is None else float(self.energy.temperature)
        self.kernel: AbstractKernel | None = self.energy.interaction
        self._dense: np.ndarray | None = None
        self._stencil: np.ndarray | None = None

    def column(self, index: int) -> np.ndarray:
        """W(·, θ_index)."""
        if self.kernel is None:
            return np.zeros(len(self.potential))
        point = self.grid.particles(self.grid.flat[index : index + 1])
        return self.grid.evaluate(eqx.Partial(self.kernel, jax.tree.map(lambda leaf: leaf[0], point)))

    def interaction(self, mass: np.ndarray) -> np.ndarray:
        """∫ W(·, θ′) dQ(θ′) on the grid: a convolution for radial kernels, else a matrix."""
        if self.kernel is None:
            return np.zeros_like(mass)
        if isinstance(self.kernel, AbstractRadialKernel):
            stencil = self._radial_stencil(self.kernel)
            full = scipy.signal.fftconvolve(mass.reshape(self.grid.shape), stencil, mode="same")
            return full.reshape(-1)
        if self._dense is None:
            if len(mass) > _LARGEST_DENSE:
                raise ValueError(
                    f"a grid of {len(mass)} points is too large for a kernel that is not radial; use at most "
                    f"{_LARGEST_DENSE} points."
                )
            self._dense = np.stack([self.column(i) for i in range(len(mass))])
        return self._dense @ mass

    def _radial_stencil(self, kernel: AbstractRadialKernel) -> np.ndarray:
        if self._stencil is None:
            offsets = [
                np.arange(-(n - 1), n) * h for n, h in zip(self.grid.shape, self.grid.spacing, strict=True)
            ]
            squares = sum(o**2 for o in np.meshgrid(*offsets, indexing="ij"))
            with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
                self._stencil = np.asarray(in_double(kernel).profile(jnp.asarray(squares)))
        return self._stencil

    def rest(self, mass: np.ndarray) -> tuple[float, np.ndarray]:
        """R(Q), and its first variation ∂R/∂wᵢ."""
        if self.energy.rest is None:
            return 0.0, np.zeros_like(mass)
        with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
            points = self.grid.particles(self.grid.flat)
            value, variation = _rest_of(in_double(self.energy.rest), points, jnp.asarray(mass))
        return float(value), np.asarray(variation)

    def first_variation(self, mass: np.ndarray) -> np.ndarray:
        """V + ∫ W(·, θ′) dQ(θ′) + δR/δQ."""
        return self.potential + self.interaction(mass) + self.rest(mass)[1]

    def value(self, mass: np.ndarray) -> float:
        """F(Q), the density q constant on every cell."""
        free = mass @ self.potential + 0.5 * mass @ self.interaction(mass) + self.rest(mass)[0]
        # With τ = 0 the entropy is absent, and atoms must not make it infinite.
        if self.temperature > 0:
            free += self.temperature * np.sum(scipy.special.xlogy(mass, mass / self.grid.cell))
        return float(free)


@eqx.filter_jit
def _rest_of(rest: Rest, points: Particles, mass: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jax.value_and_grad(lambda weights: rest(Empirical(points, weights)))(mass)
