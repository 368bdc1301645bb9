"""What competitors predict, and how it is scored: in the target's units, in float64.

A law has a mean, a central interval, a CRPS, and a density, unless quantiles are all there is of it: then the
NLL is NaN.
"""

from typing import NamedTuple, Protocol

import numpy as np
from scipy.special import logsumexp
from scipy.stats import norm

from measureflow.prediction import metrics
from measureflow.prediction.ranked_probability import normal_mixture_crps

COVERAGE = 0.9
#: Quantile regression asks for these levels.
LEVELS = (0.01, *(percent / 100 for percent in range(5, 100, 5)), 0.99)
#: The integral over levels is a sum of so many.
_FINE = (np.arange(1000) + 0.5) / 1000


class Law(Protocol):
    """One law per test row."""

    def mean(self) -> np.ndarray: ...

    def interval(self, coverage: float) -> tuple[np.ndarray, np.ndarray]: ...

    def nll(self, y: np.ndarray) -> np.ndarray: ...

    def crps(self, y: np.ndarray) -> np.ndarray: ...


class Gaussian(NamedTuple):
    """N(location, scale²), with CRPS = σ(z(2Φ(z) − 1) + 2φ(z) − 1/√π), z = (y − μ)/σ."""

    location: np.ndarray
    scale: np.ndarray

    def mean(self) -> np.ndarray:
        return self.location

    def interval(self, coverage: float) -> tuple[np.ndarray, np.ndarray]:
        half = norm.ppf((1 + coverage) / 2) * self.scale
        return self.location - half, self.location + half

    def nll(self, y: np.ndarray) -> np.ndarray:
        return -norm.logpdf(y, self.location, self.scale)

    def crps(self, y: np.ndarray) -> np.ndarray:
        z = (y - self.location) / self.scale
        return self.scale * (z * (2 * norm.cdf(z) - 1) + 2 * norm.pdf(z) - 1 / np.sqrt(np.pi))


class LogNormal(NamedTuple):
    """exp N(location, scale²), with m its mean, ω = (log y − μ)/σ and

    CRPS = y(2Φ(ω) − 1) − 2m(Φ(ω − σ) + Φ(σ/√2) − 1).
    """

    location: np.ndarray
    scale: np.ndarray

    def mean(self) -> np.ndarray:
        return np.exp(self.location + self.scale**2 / 2)

    def interval(self, coverage: float) -> tuple[np.ndarray, np.ndarray]:
        low, high = Gaussian(self.location, self.scale).interval(coverage)
        return np.exp(low), np.exp(high)

    def nll(self, y: np.ndarray) -> np.ndarray:
        logarithm = np.log(np.where(y > 0, y, 1.0))
        density = -norm.logpdf(logarithm, self.location, self.scale) + logarithm
        return np.where(y > 0, density, np.inf)

    def crps(self, y: np.ndarray) -> np.ndarray:
        # No mass lies below 0: there ω is −∞.
        omega = np.where(y > 0, (np.log(np.where(y > 0, y, 1.0)) - self.location) / self.scale, -np.inf)
        inner = norm.cdf(omega - self.scale) + norm.cdf(self.scale / np.sqrt(2)) - 1
        return y * (2 * norm.cdf(omega) - 1) - 2 * self.mean() * inner


class GaussianMixture(NamedTuple):
    """Equal shares of N(locations[k], scales[k]²), components × rows."""

    locations: np.ndarray
    scales: np.ndarray

    def mean(self) -> np.ndarray:
        return self.locations.mean(axis=0)

    def interval(self, coverage: float) -> tuple[np.ndarray, np.ndarray]:
        return self._quantile((1 - coverage) / 2), self._quantile((1 + coverage) / 2)

    def nll(self, y: np.ndarray) -> np.ndarray:
        densities = norm.logpdf(y, self.locations, self.scales)
        return np.log(len(densities)) - logsumexp(densities, axis=0)

    def crps(self, y: np.ndarray) -> np.ndarray:
        shares = np.full(self.locations.T.shape, 1 / len(self.locations))
        return normal_mixture_crps(shares, self.locations.T, self.scales.T, y)

    def _quantile(self, level: float) -> np.ndarray:
        """By bisection between the least and the greatest of the components' own."""
        each = norm.ppf(level, self.locations, self.scales)
        low, high = each.min(axis=0), each.max(axis=0)
        for _ in range(60):
            middle = (low + high) / 2
            below = norm.cdf(middle, self.locations, self.scales).mean(axis=0) < level
            low, high = np.where(below, middle, low), np.where(below, high, middle)
        return (low + high) / 2


class Quantiles(NamedTuple):
    """The law whose quantile function is linear between the given ones, and constant beyond the outermost.

    CRPS = 2 ∫ (1{y ≤ Q(τ)} − τ)(Q(τ) − y) dτ, over a thousand levels. Crossing quantiles are sorted.
    """

    levels: tuple[float, ...]
    values: np.ndarray

    def at(self, levels: np.ndarray) -> np.ndarray:
        """Q at the levels, rows × levels."""
        known, ordered = np.asarray(self.levels), np.sort(self.values, axis=1)
        right = np.clip(np.searchsorted(known, levels), 1, len(known) - 1)
        share = np.clip((levels - known[right - 1]) / (known[right] - known[right - 1]), 0.0, 1.0)
        return ordered[:, right - 1] * (1 - share) + ordered[:, right] * share

    def mean(self) -> np.ndarray:
        return self.at(_FINE).mean(axis=1)

    def interval(self, coverage: float) -> tuple[np.ndarray, np.ndarray]:
        low, high = self.at(np.array([(1 - coverage) / 2, (1 + coverage) / 2])).T
        return low, high

    def nll(self, y: np.ndarray) -> np.ndarray:
        return np.full(len(y), np.nan)

    def crps(self, y: np.ndarray) -> np.ndarray:
        quantiles = self.at(_FINE)
        above = quantiles - y[:, None]
        return 2 * np.mean(((above >= 0) - _FINE) * above, axis=1)


def regression_scores(law: Law, y: np.ndarray) -> dict[str, float]:
    """Means over test rows, by the names that `cross_validate` gives them."""
    low, high = law.interval(COVERAGE)
    return {
        "negative_log_likelihood": float(np.mean(law.nll(y))),
        "crps": float(np.mean(law.crps(y))),
        "root_mean_square_error": float(np.sqrt(np.mean((law.mean() - y) ** 2))),
        "coverage": metrics.coverage(low, high, y),
        "width": metrics.width(low, high),
    }


def class_scores(probabilities: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Likewise of classes; the log loss is clipped at the machine epsilon."""
    return {
        "negative_log_likelihood": metrics.log_loss(probabilities, labels),
        "accuracy": metrics.accuracy(probabilities, labels),
        "brier_score": metrics.brier_score(probabilities, labels),
        "expected_calibration_error": metrics.expected_calibration_error(probabilities, labels),
    }
