"""Where deep ensembles end: Theorem 1."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array

from measureflow.core.pytrees import Parameters, Particles, as_matrix, particle_count, squared_norm
from measureflow.spaces.measures import AbstractMeasure
from measureflow.theory.grids import Grid

_ITERATIONS = 200_000


def deep_ensemble_limit(loss: Callable, initial: AbstractMeasure, grid: Any) -> tuple[np.ndarray, np.ndarray]:
    """Q_∞ = Σᵢ Q₀(Θᵢ) δ(mᵢ): the atoms mᵢ, shape (K, J), and the Q₀-mass of their basins (Theorem 1).

    The gradient flow is followed from every grid point. A point that lies on the border between basins
    would stay there, so each is moved a little to both sides, and counts half on each.

    Parameters
    ----------
    loss
        ℓ(θ).
    initial
        Q₀, a measure with a density.
    grid
        A uniform grid that reaches as far as Q₀ has mass.
    """
    lattice = Grid(grid, initial.template())
    density = np.exp(lattice.evaluate(initial.log_density))
    cell = lattice.spacing.min()
    starts = np.concatenate([lattice.flat + 1e-3 * cell, lattice.flat - 1e-3 * cell])
    # The steepest curvature on the grid gives a step with which descent follows the flow into its basin; a
    # loss without curvature has no such limit, and moves are bounded by the cells anyway.
    step_size = 0.5 / max(np.abs(lattice.evaluate(eqx.Partial(_curvatures, loss))).max(), 1e-6)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        ends, moving = _descend(loss, lattice.particles(starts), jnp.asarray(cell), jnp.asarray(step_size))
        curvatures = np.asarray(jax.vmap(eqx.Partial(_curvatures, loss))(ends))
    mass = np.tile(density / density.sum(), 2) / 2
    lost = mass[np.asarray(moving) | (curvatures.min(axis=1) < 0)].sum()
    if lost > 1e-3:
        raise RuntimeError(
            f"{lost:.1%} of Q₀ had not reached a minimum after {_ITERATIONS} steps; ℓ may have none inside "
            "the reach of this grid: widen or refine it, or check that ℓ grows at infinity."
        )
    return _atoms(np.asarray(as_matrix(ends)), mass, cell)


def _curvatures(loss: Callable, theta: Parameters) -> Array:
    """The eigenvalues of ∇²ℓ."""
    flat, unravel = ravel_pytree(theta)
    return jnp.linalg.eigvalsh(jax.hessian(lambda x: loss(unravel(x)))(flat))


@eqx.filter_jit
def _descend(loss: Callable, particles: Particles, cell: Array, step_size: Array) -> tuple[Particles, Array]:
    """Gradient descent, in moves of at most a quarter of a cell, until moves are below 1e-8 of one; and
    which points still move more."""

    def advance(theta: Parameters) -> tuple[Parameters, Array]:
        gradient = jax.grad(loss)(theta)
        length = step_size * jnp.sqrt(squared_norm(gradient))
        shrink = jnp.minimum(1.0, 0.25 * cell / jnp.where(length > 0, length, 1.0))
        moved = jax.tree.map(lambda x, g: x - shrink * step_size * g, theta, gradient)
        return moved, length > 1e-8 * cell

    def going(carry: tuple) -> Array:
        return jnp.any(carry[1]) & (carry[2] < _ITERATIONS)

    def body(carry: tuple) -> tuple:
        return *jax.vmap(advance)(carry[0]), carry[2] + 1

    everywhere = jnp.ones((particle_count(particles),), bool)
    ends, moving, _ = jax.lax.while_loop(going, body, (particles, everywhere, jnp.zeros((), jnp.int32)))
    return ends, moving


def _atoms(ends: np.ndarray, mass: np.ndarray, cell: float) -> tuple[np.ndarray, np.ndarray]:
    """End points within half a cell of each other are one atom, heaviest first."""
    atoms, weights = [], []
    left = np.ones(len(ends), bool)
    while left.any():
        centre = ends[np.argmax(np.where(left, mass, -1.0))]
        near = left & (np.linalg.norm(ends - centre, axis=1) < 0.5 * cell)
        atoms.append(np.median(ends[near], axis=0))
        weights.append(mass[near].sum())
        left &= ~near
    order = np.argsort(weights)[::-1]
    return np.array(atoms)[order], np.array(weights)[order]
