"""Whether a Gaussian process by itself predicts the held-out rows of a table about as well as the networks
that were tried."""

import numpy as np
import scipy.stats
from jaxtyping import Float

from measureflow.tables.choosing import MUCH_NOISE, Fold
from measureflow.tables.models import Model
from measureflow.tables.smoothness import Smoothness

# In nats a row: processes that are farther behind than this say little that networks have not learned; and
# where they are so far behind on their first folds, no more are learned.
_NEAR, _FAR = 0.1, 0.3


def near(model: Model, folds: list[Fold], score: float) -> list[Smoothness] | None:
    """For every fold of a table, that of the rows to train on, if such processes come near to a mean log
    density of held-out rows, and targets are more than noise to them. What is held out is unknown to them:
    of few rows and many columns lengthscales would know them by heart."""
    found: list[Smoothness] = []
    densities, weights = np.zeros(0), np.zeros(0)
    for fold in folds:
        smoothness = Smoothness.learn(model.in_units(fold.trained))
        if smoothness is None:
            return None
        found.append(smoothness)
        densities = np.append(densities, _densities(model, smoothness, fold))
        weights = np.append(weights, fold.held_out.counts)
        behind = _NEAR if fold is folds[-1] else _FAR
        if densities @ (weights / weights.sum()) <= max(score - behind, MUCH_NOISE):
            return None
    return found


def _densities(model: Model, smoothness: Smoothness, fold: Fold) -> Float[np.ndarray, " rows"]:
    """Log densities of held-out rows under a process that has seen the others."""
    smoother, _ = model.smoother(fold.trained, smoothness)
    mean, log_deviation = smoother(fold.held_out.inputs).astype(np.float64).T
    targets = model.in_units(fold.held_out).targets.reshape(-1)
    return model.comparable(scipy.stats.norm.logpdf(targets, mean, np.exp(log_deviation)), fold.held_out)
