"""How well particles mix: nested R̂, and the effective number of draws, from many short chains."""

import numpy as np
import scipy

_GROUPS = 8


def nested_r_hat(start: np.ndarray, draws: np.ndarray, groups: np.ndarray | None = None) -> np.ndarray:
    """√(1 + B/W) for every coordinate (Margossian et al., 2024), of draws (particle, draw, J).

    Superchains are particles that were neighbours in that coordinate when sampling began, or the given
    groups: B is the variance of their means, W the variance within them. It is 1 where particles have
    forgotten where they came from, however short the chains. What chance makes of B once in a
    thousand times is taken off.
    """
    later = draws[:, draws.shape[1] // 2 :].astype(np.float64)
    n, _, number = later.shape
    count = min(_GROUPS, n // 4) if groups is None else int(groups.max()) + 1
    found = np.ones(number)
    means, within = later.mean(axis=1), later.var(axis=1)
    for j in range(number):
        order = np.argsort(np.argsort(start[:, j], kind="stable"), kind="stable")
        label = order * count // n if groups is None else groups
        of_groups = np.array([means[label == k, j].mean() for k in range(count)])
        spread = np.array([means[label == k, j].var(ddof=1) for k in range(count)])
        inside = np.mean(spread) + within[:, j].mean()
        chance = np.mean(spread / np.bincount(label))
        allowed = chance * scipy.stats.chi2.isf(1e-3, count - 1) / (count - 1)
        between = max(of_groups.var(ddof=1) - allowed, 0.0)
        found[j] = np.sqrt(1 + between / inside) if inside > 0 else np.inf
    return found


def effective_draws(draws: np.ndarray) -> np.ndarray:
    """N·M/(1 + 2 Σₖ ρₖ) for every coordinate, of draws (particle, draw, J). The correlation ρₖ of draws k
    apart is over all particles about the mean of all: particles which do not mix count against it."""
    n, m, number = draws.shape
    centred = draws.astype(np.float64) - draws.astype(np.float64).mean(axis=(0, 1))
    variance = (centred**2).mean(axis=(0, 1))
    total = np.zeros(number)
    alive = np.ones(number, bool)
    for k in range(1, m):
        rho = (centred[:, k:] * centred[:, :-k]).mean(axis=(0, 1)) / np.where(variance > 0, variance, 1.0)
        alive &= rho > 2 / np.sqrt(n * (m - k))
        total += np.where(alive, rho, 0.0)
    # What is still correlated at the end would have gone on.
    stuck = alive & (m > 1)
    found = n * m / (1 + 2 * total)
    return np.where(stuck, np.minimum(found, n), found)


def drifting(draws: np.ndarray) -> float:
    """How many standard errors the means of the later half of the draws (particle, draw, J) are from those of
    the earlier half, at most over coordinates, less what chance makes of so many once in a thousand times.
    Particles are independent, so that the error is that of their differences."""
    n, m, number = draws.shape
    later, earlier = draws[:, m // 2 :].mean(axis=1), draws[:, : m // 2].mean(axis=1)
    moved = (later - earlier).astype(np.float64)
    error = moved.std(axis=0, ddof=1) / np.sqrt(n)
    t = np.abs(moved.mean(axis=0)) / np.where(error > 0, error, np.inf)
    return float(t.max() - scipy.stats.t.isf(1e-3 / (2 * number), n - 1))


def staying(start: np.ndarray, draws: np.ndarray) -> float:
    """How many standard errors the later draws (particle, draw, J) of those that began furthest out, one in a
    hundred to each side, are from the mean of all, at most over coordinates, less what chance makes of so
    many once in a thousand times. R̂ does not notice a few particles that stay in a small mode."""
    n, m, number = draws.shape
    few = max(5, n // 100)
    means = draws[:, m // 2 :].mean(axis=1).astype(np.float64)
    order = np.argsort(start, axis=0, kind="stable")
    low, high = (np.take_along_axis(means, rows, axis=0) for rows in (order[:few], order[-few:]))
    # Of the others, or those few would make their own error.
    rest = np.take_along_axis(means, order[few:-few], axis=0)
    error = np.maximum(rest.std(axis=0, ddof=1), 1e-30) / np.sqrt(few)
    t = np.maximum(*(np.abs(part.mean(axis=0) - rest.mean(axis=0)) / error for part in (low, high)))
    return float(t.max() - scipy.stats.t.isf(1e-3 / (4 * number), few - 1))


def hopeless(values: np.ndarray) -> np.ndarray:
    """Which U are so far above all others that no mass is there."""
    middle = np.median(values)
    spread = 1.4826 * np.median(np.abs(values - middle))
    return values > middle + 10 * spread + 20


class Watched:
    """What is asked of particles before they are trusted: their coordinates, the squares of these, since
    particles can forget where they were and not how far out, and U. In units of the draws."""

    def __init__(self, rows: np.ndarray, values: np.ndarray):
        self.centre, self.scale = rows.mean(axis=(0, 1)), np.maximum(rows.std(axis=(0, 1)), 1e-30)
        self.number = rows.shape[-1]
        self.draws = self.of(rows, values)

    def of(self, rows: np.ndarray, values: np.ndarray) -> np.ndarray:
        """(..., J) and (...) to (..., 2J + 1)."""
        away = (rows - self.centre) / self.scale
        return np.concatenate([away, away**2, values[..., None]], axis=-1)

    def by_coordinate(self, found: np.ndarray, worse: np.ufunc) -> np.ndarray:
        """The worse of a coordinate and its square; for U, all of them."""
        both = worse(found[: self.number], found[self.number : 2 * self.number])
        return worse(both, found[-1])

    def r_hat(self, rows: np.ndarray, values: np.ndarray, groups: np.ndarray | None = None) -> np.ndarray:
        """Nested R̂ of every coordinate for particles that began there."""
        return self.by_coordinate(nested_r_hat(self.of(rows, values), self.draws, groups), np.maximum)

    def staying(self, rows: np.ndarray, values: np.ndarray) -> float:
        """`staying` of coordinates and U, for particles that began there."""
        kept = np.r_[0 : self.number, 2 * self.number]
        return staying(self.of(rows, values)[:, kept], self.draws[..., kept])

    def effective(self) -> np.ndarray:
        """The effective number of draws of every coordinate."""
        return self.by_coordinate(effective_draws(self.draws), np.minimum)
