"""Tempering with resampling, from a Gaussian to the posterior: for the masses of separated modes."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from measureflow.sampling.phases import adapt, looked_at
from measureflow.sampling.trajectories import Reference, Target, Tuning

# Islands resample on their own, so that their disagreement is the error of the masses.
ISLANDS = 8
_MOST_LEVELS = 60
_TRAJECTORIES = 4
_WIDER = 1.5


class Tempered(NamedTuple):
    """Particles that came by tempering: rows, how many levels it took, leaps, and whether β came to 1."""

    rows: Float[Array, "n J"]
    levels: int
    leaps: int
    reached: bool


def islands_of(n: int) -> np.ndarray:
    """The island of each of n particles; islands are as large as each other, or one particle larger."""
    return np.arange(n) * ISLANDS // n


def temper(target: Target, rows: Float[Array, "n J"], tuning: Tuning, key: Key[Array, ""]) -> Tempered:
    """Annealed importance sampling with resampling, along q₀^{1−β} π^β (Neal, 2001; Del Moral et al., 2006).

    q₀ is a Gaussian one and a half times as wide as the particles, β grows so that half of the effective
    number of particles is left, and between levels particles move by Metropolised trajectories.
    """
    n, islands = rows.shape[0], islands_of(rows.shape[0])
    reference = _reference(np.asarray(rows, np.float64), rows.dtype)
    start_key, level_key = jax.random.split(key)
    noise = jax.random.normal(start_key, (n, rows.shape[1]), rows.dtype)
    rows = reference.mean[None] + noise @ reference.factor.T
    beta, levels, leaps = 0.0, 0, 0
    rng = np.random.default_rng(int(jax.random.randint(level_key, (), 0, 2**30)))
    while beta < 1 and levels < _MOST_LEVELS:
        posterior = np.asarray(looked_at(target, rows).values, np.float64)
        gap = np.asarray(reference.values_and_gradients(rows)[0], np.float64) - posterior
        gap = np.where(np.isfinite(gap), gap, -np.inf)
        grown = _next_level(gap, beta)
        rows = rows[jnp.asarray(_resampled((grown - beta) * gap, islands, rng))]
        beta, levels = grown, levels + 1
        between = Target(target.problem, target.one, target.batch, reference, jnp.asarray(beta, rows.dtype))
        count = jnp.asarray(_TRAJECTORIES, jnp.int32)
        moved, tuning, report = adapt(
            between, looked_at(between, rows), tuning, jax.random.fold_in(level_key, levels), count
        )
        rows, leaps = moved.rows, leaps + int(report.leaps)
    return Tempered(rows, levels, leaps, beta >= 1)


def _reference(rows: np.ndarray, dtype: np.dtype) -> Reference:
    covariance = _WIDER**2 * np.atleast_2d(np.cov(rows, rowvar=False))
    size = np.sqrt(np.diag(covariance)) + 1e-12
    ridge = 1e-6 * np.eye(len(size))
    factor = size[:, None] * np.linalg.cholesky(covariance / np.outer(size, size) + ridge)
    arrays = rows.mean(axis=0), factor, np.linalg.inv(factor)
    return Reference(*(jnp.asarray(x, dtype) for x in arrays))


def _next_level(gap: np.ndarray, beta: float) -> float:
    """The largest β at which half of the effective number of particles is left."""

    def share(step: float) -> float:
        weights = np.exp(step * gap - np.max(step * gap))
        return float(weights.sum() ** 2 / (weights**2).sum() / len(weights))

    low, high = 0.0, 1 - beta
    if share(high) >= 0.5:
        return 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if share(middle) >= 0.5 else (low, middle)
    return beta + max(low, 1e-12)


def _resampled(log_weights: np.ndarray, islands: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Systematic resampling within each island."""
    chosen = np.empty(len(islands), int)
    weights = np.exp(log_weights - log_weights.max())
    for island in range(ISLANDS):
        own = np.flatnonzero(islands == island)
        part = weights[own] + 1e-300
        points = (rng.random() + np.arange(len(own))) / len(own)
        chosen[own] = own[np.searchsorted(np.cumsum(part / part.sum()), points).clip(0, len(own) - 1)]
    return chosen
