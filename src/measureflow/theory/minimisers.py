"""Exact minimisers q* of a problem on a grid, each with a residual that says how exact."""

import warnings
from typing import Any

import numpy as np
from jaxtyping import PyTree
from scipy.special import logsumexp

from measureflow.statement.problem import Problem
from measureflow.statement.scores import LogScore
from measureflow.theory.grids import GridEnergy

_TOLERANCE = 1e-10
_ITERATIONS = 5_000
# How many points an extrapolation looks back on; what counts as rounding of a value; the Frank–Wolfe gap at
# which a programme without temperature ends; and the damping below which a step is taken as it is.
_MEMORY, _ROUNDING, _GAP, _SMALLEST_DAMPING = 12, 1e-13, 1e-5, 1e-12


def minimiser(problem: Problem, grid: Any, *, batch: PyTree = None) -> np.ndarray:
    """The density of q* = argmin L on a uniform grid of shape (..., J), or (G,) in one dimension.

    τ > 0: the *normalised* fixed point log q* = −δ/τ + const, δ = V + ∫W(·,θ′) dq*(θ′) + δR/δQ: the Gibbs
    measure q* ∝ exp(−V/τ) for DLE, in one step. τ = 0: the convex quadratic programme over probability
    vectors (DRE; for DE, all mass on the global minimum), or with a nonlinear functional exponentiated
    gradients. Sums to 1 over the grid's cells. `stationarity_residual` says how exact it is.

    Parameters
    ----------
    problem
        A problem in few dimensions whose functionals are convex.
    grid
        A uniform grid.
    batch
        The data that the loss sees.
    """
    energy = GridEnergy(problem, grid, batch)
    if energy.temperature > 0:
        mass = _fixed_point(energy)
    elif energy.energy.rest is None:
        mass = _quadratic_programme(energy)
    else:
        mass = _exponentiated_gradients(energy)
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

    Parameters
    ----------
    problem
        What is minimised.
    grid
        A uniform grid of shape (..., J), or (G,) in one dimension.
    density
        q at the points of the grid.
    batch
        The data that the objective sees.
    """
    energy = GridEnergy(problem, grid, batch)
    mass = np.asarray(density, dtype=np.float64).reshape(-1) * energy.grid.cell
    if energy.temperature == 0:
        variation = energy.first_variation(mass)
        return float(mass @ variation - variation.min())
    return float(0.5 * np.abs(mass - np.exp(_gibbs(energy, mass))).sum())


def value(problem: Problem, grid: Any, density: np.ndarray, *, batch: PyTree = None) -> float:
    """L(q) of a density on the grid, with the constants of `Problem.value`.

    Parameters
    ----------
    problem
        What is minimised.
    grid
        A uniform grid of shape (..., J), or (G,) in one dimension.
    density
        q at the points of the grid.
    batch
        The data that the objective sees.
    """
    energy = GridEnergy(problem, grid, batch)
    mass = np.asarray(density, dtype=np.float64).reshape(-1) * energy.grid.cell
    constants = [float(weight) * float(term.constant(batch)) for weight, term in problem.terms()]
    # Of a term that has no fast path the rest is all.
    fast = [
        c for c, (_, term) in zip(constants, problem.terms(), strict=True) if term.free_energy().rest is None
    ]
    return energy.value(mass) + sum(fast)


def log_score_certificate(problem: Problem, grid: Any, density: np.ndarray, *, batch: PyTree = None) -> float:
    """sup_θ (1/n) Σᵢ p(yᵢ | xᵢ, θ)/∫ p(yᵢ | xᵢ, ·) dq − 1, for the log score alone: 0 exactly where q
    minimises it.

    By concavity it bounds the log score of q minus the least from above; at the minimiser with τ·KL added it
    is O(τ) (the general equivalence theorem of mixtures: Lindsay, 1983).

    Parameters
    ----------
    problem
        What is minimised.
    grid
        A uniform grid of shape (..., J), or (G,) in one dimension.
    density
        q at the points of the grid.
    batch
        The data that the objective sees.
    """
    scores = [term for _, term in problem.objective.terms() if isinstance(term, LogScore)]
    if len(scores) != 1:
        raise TypeError(
            f"log_score_certificate needs a problem whose objective is a LogScore, got "
            f"{problem.objective.name}; see stationarity_residual for others."
        )
    energy = GridEnergy(Problem(scores[0]), grid, batch)
    mass = np.asarray(density, dtype=np.float64).reshape(-1) * energy.grid.cell
    variation = energy.first_variation(mass)
    # ∂/∂wᵢ at normalised weights is −(1/n) Σ p/∫p dq + 1.
    return float(mass @ variation - variation.min())


def _gibbs(energy: GridEnergy, mass: np.ndarray) -> np.ndarray:
    """log of the normalised exp(−(V + ∫W dQ)/τ)."""
    exponent = -energy.first_variation(mass) / energy.temperature
    return _normalised(exponent)


def _fixed_point(energy: GridEnergy) -> np.ndarray:
    """log q = log Gibbs(q), normalised, by mirror descent on the free energy with Anderson's acceleration.

    A mirror step is log q ← (1 − α) log q + α log Gibbs(q). With α = 1/(1 + sup|W|/τ) it descends where the
    interaction is smooth relative to the entropy (Pinsker); without interaction and rest it is one step. That
    is where α begins; it is halved until the free energy descends, and doubled after. Both alone converge
    linearly, at a rate of τ; the last residuals, extrapolated (Anderson, 1965), do much better where τ is
    small, and are taken only where they descend.
    """
    log_mass = _gibbs(energy, np.full(len(energy.potential), 1 / len(energy.potential)))
    damping, history = _first_damping(energy), []
    value = energy.value(np.exp(log_mass))
    for _ in range(_ITERATIONS):
        target = _gibbs(energy, np.exp(log_mass))
        if 0.5 * np.abs(np.exp(target) - np.exp(log_mass)).sum() < _TOLERANCE:
            return np.exp(log_mass)
        history = [*history, (log_mass, target - log_mass)][-_MEMORY:]
        tried = _extrapolated(history, damping)
        gained = energy.value(np.exp(tried))
        if not gained <= value + _ROUNDING * abs(value):
            history = history[-1:]
            damping, tried, gained = _mirror_step(energy, log_mass, target, damping, value)
            # What was too bold far away need not be too bold nearby.
            damping = min(1.0, 2 * damping)
        log_mass, value = tried, gained
    raise RuntimeError(
        f"the fixed point was not reached in {_ITERATIONS} iterations at temperature "
        f"{energy.temperature:.3g}: raise the KL weight, refine the grid, or check that every "
        "functional is convex."
    )


def _first_damping(energy: GridEnergy) -> float:
    return 1 / (1 + np.abs(energy.column(0)).max() / energy.temperature)


def _mirror_step(
    energy: GridEnergy, log_mass: np.ndarray, target: np.ndarray, damping: float, value: float
) -> tuple[float, np.ndarray, float]:
    """The largest α of damping, damping/2, … with which the free energy does not rise."""
    while True:
        tried = _normalised((1 - damping) * log_mass + damping * target)
        gained = energy.value(np.exp(tried))
        if gained <= value + _ROUNDING * abs(value) or damping < _SMALLEST_DAMPING:
            return damping, tried, gained
        damping /= 2


def _extrapolated(history: list[tuple[np.ndarray, np.ndarray]], damping: float) -> np.ndarray:
    """Anderson's step: the combination of the last points whose residuals cancel best, where there is
    mass."""
    points, residuals = (np.array(part) for part in zip(*history, strict=True))
    if len(history) == 1:
        return _normalised(points[-1] + damping * residuals[-1])
    weight = np.exp(0.5 * points[-1])
    differences = (np.diff(residuals, axis=0) * weight).T
    shares = np.linalg.lstsq(differences, residuals[-1] * weight, rcond=1e-10)[0]
    moved = points[-1] + residuals[-1] - (np.diff(points, axis=0) + np.diff(residuals, axis=0)).T @ shares
    return _normalised(moved)


def _normalised(log_mass: np.ndarray) -> np.ndarray:
    return log_mass - np.asarray(logsumexp(log_mass))


def _exponentiated_gradients(energy: GridEnergy) -> np.ndarray:
    """Mirror descent without an entropy in the functional, q ← q exp(−s δ[q]), s adapted so that it descends,
    until the Frank–Wolfe gap, which bounds L(q) − L(q*), is closed."""
    log_mass = np.full(len(energy.potential), -np.log(len(energy.potential)))
    value, step = energy.value(np.exp(log_mass)), 1.0
    for _ in range(_ITERATIONS):
        mass = np.exp(log_mass)
        variation = energy.first_variation(mass)
        if mass @ variation - variation.min() <= _GAP * (1 + abs(value)):
            break
        tried = _normalised(log_mass - step * variation)
        gained = energy.value(np.exp(tried))
        if gained <= value + _ROUNDING * abs(value):
            log_mass, value, step = tried, gained, 1.2 * step
        else:
            step /= 2
    else:
        warnings.warn(
            f"the minimum was not reached in {_ITERATIONS} iterations; stationarity_residual says how far "
            "it is.",
            stacklevel=3,
        )
    return np.exp(log_mass)


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
