"""Exact laws in one dimension: how far particles are from one, and how far chance alone would put them."""

import abc
from typing import Any

import numpy as np
from jaxtyping import PyTree

from measureflow.core.pytrees import as_matrix
from measureflow.core.validation import require_particles


class AbstractLaw(abc.ABC):
    """A law on the line, known through its quantiles."""

    @abc.abstractmethod
    def quantile(self, probability: np.ndarray) -> np.ndarray:
        """F⁻¹(u)."""

    @abc.abstractmethod
    def mass_below(self, point: Any) -> np.ndarray:
        """F(θ), at one point or at many."""

    def sample(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Independent draws, by inversion."""
        return self.quantile(rng.uniform(size=shape))

    def wasserstein_1(self, particles: PyTree) -> float:
        """W₁(Q_N, law) = ∫ |F_N⁻¹(u) − F⁻¹(u)| du."""
        points = np.asarray(as_matrix(require_particles("particles", particles)), dtype=np.float64)
        if points.shape[1] != 1:
            raise ValueError(f"particles have {points.shape[1]} dimensions; this distance is for one.")
        return float(self._distances(points.T)[0])

    def expected_wasserstein_1(
        self, rng: np.random.Generator, n: int, replications: int = 200
    ) -> tuple[float, float]:
        """Mean and standard deviation of W₁ for n independent draws from the law itself, simulated: a
        distance is positive even where the law is exact."""
        distances = self._distances(self.sample(rng, (replications, n)))
        return float(distances.mean()), float(distances.std(ddof=1))

    def _distances(self, draws: np.ndarray) -> np.ndarray:
        """W₁ of each row, by the midpoint rule in u, fine enough to resolve the law's own quantiles."""
        n = draws.shape[1]
        per_particle = max(1, -(-2_000 // n))
        u = (np.arange(n * per_particle) + 0.5) / (n * per_particle)
        ours = np.repeat(np.sort(draws, axis=1), per_particle, axis=1)
        return np.abs(ours - self.quantile(u)).mean(axis=1)


class GridLaw(AbstractLaw):
    """A density on a uniform grid of shape (G,), as `minimiser` returns: constant on each cell.

    Parameters
    ----------
    grid
        Uniform, shape (G,).
    density
        q at the points of the grid, shape (G,).
    """

    def __init__(self, grid: Any, density: Any):
        grid, density = np.asarray(grid, dtype=np.float64), np.asarray(density, dtype=np.float64)
        if grid.ndim != 1 or density.shape != grid.shape:
            raise ValueError(
                f"grid and density must have the same shape (G,), got {grid.shape} and {density.shape}; "
                "laws are in one dimension."
            )
        spacing = grid[1] - grid[0]
        self.edges = np.append(grid - spacing / 2, grid[-1] + spacing / 2)
        self.cumulative = np.concatenate([[0.0], np.cumsum(density) / density.sum()])

    def quantile(self, probability: np.ndarray) -> np.ndarray:
        return np.interp(probability, self.cumulative, self.edges)

    def mass_below(self, point: Any) -> np.ndarray:
        return np.asarray(np.interp(point, self.edges, self.cumulative))


class AtomicLaw(AbstractLaw):
    """Σᵢ wᵢ δ(mᵢ), as `deep_ensemble_limit` returns.

    Parameters
    ----------
    atoms
        mᵢ, on the line.
    weights
        wᵢ; they are divided by their sum.
    """

    def __init__(self, atoms: Any, weights: Any):
        atoms, weights = (
            np.asarray(atoms, dtype=np.float64).reshape(-1),
            np.asarray(weights, dtype=np.float64),
        )
        if atoms.shape != weights.shape:
            raise ValueError(
                f"atoms and weights must pair up, got {atoms.shape} and {weights.shape}; "
                "laws are in one dimension."
            )
        order = np.argsort(atoms)
        self.atoms, self.cumulative = atoms[order], np.cumsum(weights[order]) / weights.sum()

    @classmethod
    def on_grid(cls, grid: Any, density: Any) -> "AtomicLaw":
        """The atoms of a density that `minimiser` found without temperature. An atom that lies between grid
        points is spread over neighbours, which are one atom again here."""
        grid, density = np.asarray(grid, dtype=np.float64), np.asarray(density, dtype=np.float64)
        support = np.flatnonzero(density)
        runs = np.split(support, np.flatnonzero(np.diff(support) > 1) + 1)
        weights = np.array([density[run].sum() for run in runs])
        return cls([np.average(grid[run], weights=density[run]) for run in runs], weights)

    def quantile(self, probability: np.ndarray) -> np.ndarray:
        index = np.searchsorted(self.cumulative, probability)
        return self.atoms[np.minimum(index, len(self.atoms) - 1)]

    def mass_below(self, point: Any) -> np.ndarray:
        below = np.searchsorted(self.atoms, point, side="right")
        return np.asarray(np.concatenate([[0.0], self.cumulative])[below])
