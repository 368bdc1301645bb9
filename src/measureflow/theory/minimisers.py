"""Exact minimisers q* of a problem on a grid, each with a residual that says how exact."""

import warnings
from typing import Any

import numpy as np
from jaxtyping import PyTree
from scipy.special import logsumexp, xlogy

from measureflow.spaces.embeddings import mean_kernel
from measureflow.statement.divergences import SquaredMMD
from measureflow.statement.problem import Problem
from measureflow.theory.grids import GridEnergy

_TOLERANCE = 1e-10
_ITERATIONS = 100_000


def minimiser(problem: Problem, grid: Any, *, batch: PyTree = None) -> np.ndarray:
    """The density of q* = argmin L on a uniform grid of shape (..., J), or (G,) in one dimension.

    τ > 0: the Gibbs measure q* ∝ exp(−V/τ) (DLE), or with an interaction the *normalised* fixed point
    log q* = −(V + ∫W(·,θ′) dq*(θ′))/τ + const (DRLE). τ = 0: the convex quadratic programme over
    probability vectors (DRE; for DE, all mass on the global minimum). Sums to 1 over the grid's cells.
    """
    energy = GridEnergy(problem, grid, batch)
    mass = _fixed_point(energy) if energy.temperature > 0 else _quadratic_programme(energy)
    density = (mass / energy.grid.cell).reshape(energy.grid.shape)
    if energy.temperature > 0:
        _warn_of_a_cut(density)
    return density


def _warn_of_a_cut(density: np.ndarray) -> None:
    border = density.copy()
    border[tuple(slice(1, -1) for _ in density.shape)] = 0.0
    if border.max() > 1e-3 * density.max():
        warnings.warn(
            f"the minimiser's density on the border of the grid is {border.max() / density.max():.2g} of its "
            "largest: what lies outside is cut off; widen the grid.",
            stacklevel=3,
        )


def stationarity_residual(problem: Problem, grid: Any, density: np.ndarray, *, batch: PyTree = None) -> float:
    """How far a density on the grid is from the minimiser; 0 is exact.

    τ > 0: total variation between q and exp(−(V + ∫W dq)/τ)/Z. τ = 0: the Frank–Wolfe gap
    ∫u dq − min u with u = V + ∫W dq, which bounds L(q) − L(q*) from above.
    """
    energy = GridEnergy(problem, grid, batch)
    mass = np.asarray(density, dtype=np.float64).reshape(-1) * energy.grid.cell
    if energy.temperature == 0:
        variation = energy.first_variation(mass)
        return float(mass @ variation - variation.min())
    return float(0.5 * np.abs(mass - np.exp(_gibbs(energy, mass))).sum())


def value(problem: Problem, grid: Any, density: np.ndarray, *, batch: PyTree = None) -> float:
    """L(q) of a density on the grid, with the constants of `Problem.value`."""
    energy = GridEnergy(problem, grid, batch)
    mass = np.asarray(density, dtype=np.float64).reshape(-1) * energy.grid.cell
    free = mass @ energy.potential + 0.5 * mass @ energy.interaction(mass)
    # With τ = 0 the entropy is absent, and atoms must not make it infinite.
    if energy.temperature > 0:
        free += energy.temperature * np.sum(xlogy(mass, mass / energy.grid.cell))
    constants = [
        float(weight) * float(mean_kernel(d.kernel, d.reference, d.reference))
        for weight, d in problem.terms()
        if isinstance(d, SquaredMMD) and d.embedding is not None
    ]
    return float(free + sum(constants))


def _gibbs(energy: GridEnergy, mass: np.ndarray) -> np.ndarray:
    """log of the normalised exp(−(V + ∫W dQ)/τ)."""
    exponent = -energy.first_variation(mass) / energy.temperature
    return exponent - logsumexp(exponent)


def _fixed_point(energy: GridEnergy) -> np.ndarray:
    """Mirror descent on the free energy: log q ← (1 − α) log q + α log Gibbs(q), normalised.

    The interaction is smooth relative to the entropy with constant sup|W|/τ (Pinsker), so that
    α = 1/(1 + sup|W|/τ) descends and converges linearly; without interaction it is one step.
    """
    log_mass = _gibbs(energy, np.full(len(energy.potential), 1 / len(energy.potential)))
    strongest = np.abs(energy.column(0)).max() / energy.temperature
    damping = 1 / (1 + strongest)
    for _ in range(_ITERATIONS):
        target = _gibbs(energy, np.exp(log_mass))
        if 0.5 * np.abs(np.exp(target) - np.exp(log_mass)).sum() < _TOLERANCE:
            return np.exp(log_mass)
        log_mass = (1 - damping) * log_mass + damping * target
        log_mass -= logsumexp(log_mass)
    raise RuntimeError(
        f"the fixed point was not reached in {_ITERATIONS} iterations; the interaction is {strongest:.3g} "
        "times the temperature: raise the KL weight, or leave KL out for the quadratic programme."
    )


def _quadratic_programme(energy: GridEnergy) -> np.ndarray:
    """min V·p + ½ p·Wp over probability vectors, by fully corrective Frank–Wolfe.

    The point of steepest descent joins the support, then the weights on the support are solved for,
    dropping points whose weight would be negative, until the Frank–Wolfe gap closes.
    """
    best = int(np.argmin(energy.potential))
    support, weights = [best], np.ones(1)
    columns = [energy.column(best)]
    scale = np.ptp(energy.potential) + np.abs(columns[0]).max()
    for _ in range(10 * len(energy.potential)):
        variation = energy.potential + np.column_stack(columns) @ weights
        best = int(np.argmin(variation))
        gap = weights @ variation[support] - variation[best]
        # Below this, a gap is rounding.
        if gap <= 1e-9 * scale or best in support:
            break
        support, columns, weights = [*support, best], [*columns, energy.column(best)], np.append(weights, 0.0)
        support, columns, weights = _corrected(energy, support, columns, weights)
    mass = np.zeros_like(energy.potential)
    mass[support] = weights
    return mass / mass.sum()


def _corrected(
    energy: GridEnergy, support: list[int], columns: list[np.ndarray], weights: np.ndarray
) -> tuple[list[int], list[np.ndarray], np.ndarray]:
    """The optimal weights on the support, in the manner of Lawson and Hanson."""
    while True:
        matrix = np.column_stack(columns)[support]
        size = len(support)
        system = np.block([[matrix, np.ones((size, 1))], [np.ones((1, size)), np.zeros((1, 1))]])
        solved = np.linalg.lstsq(system, np.append(-energy.potential[support], 1.0), rcond=1e-12)[0][:-1]
        if np.all(solved > 0):
            return support, columns, solved
        falling = solved <= 0
        ratio = np.min(weights[falling] / (weights[falling] - solved[falling]))
        moved = weights + min(ratio, 1.0) * (solved - weights)
        keep = moved > 1e-14
        support = [s for s, k in zip(support, keep, strict=True) if k]
        columns = [c for c, k in zip(columns, keep, strict=True) if k]
        weights = moved[keep] / moved[keep].sum()
