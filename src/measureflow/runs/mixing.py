"""How well particles mix: nested R̂, and the effective number of draws, from many short chains."""

import numpy as np

_GROUPS = 8


def nested_r_hat(start: np.ndarray, draws: np.ndarray, groups: np.ndarray | None = None) -> np.ndarray:
    """√(1 + B/W) for every coordinate (Margossian et al., 2024), of draws (particle, draw, J).

    Superchains are particles that were neighbours in that coordinate when sampling began, or the given
    groups: B is the variance of their means, W the variance within them. It is 1 where particles have
    forgotten where they came from, however short the chains. What chance makes of B is taken off.
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
        chance = np.mean(spread) / (n / count)
        between = max(of_groups.var(ddof=1) - chance, 0.0)
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
