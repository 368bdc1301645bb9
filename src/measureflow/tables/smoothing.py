"""Whether a Gaussian process by itself predicts the held-out rows of a table about as well as the networks
that were tried."""

import numpy as np
import scipy.stats
from jaxtyping import Float

from measureflow.tables.choosing import MUCH_NOISE, Fold
from measureflow.tables.models import Model
from measureflow.tables.on_folds import OnFolds, held_out_weights
from measureflow.tables.smoother import Smoothness
from measureflow.tables.table import Table

# In nats a row: processes that are farther behind than this say little that networks have not learned.
_NEAR = 0.1


def near(trials: OnFolds, table: Table, number: int, score: float) -> Smoothness | None:
    """That of table `number`, if a process comes near to a mean log density of held-out rows, and targets are
    more than noise to it."""
    model, folds = trials.models[number], [fold for fold in trials.folds if fold.table == number]
    smoothness = Smoothness.learn(model.in_units(table))
    if smoothness is None:
        return None
    weights = held_out_weights(folds, number)
    densities = np.concatenate([_densities(model, smoothness, fold) for fold in folds])
    reached = float(densities @ (weights / weights.sum()))
    return smoothness if reached > max(score - _NEAR, MUCH_NOISE) else None


def _densities(model: Model, smoothness: Smoothness, fold: Fold) -> Float[np.ndarray, " rows"]:
    """Log densities of held-out rows under a process that has seen the others."""
    smoother, _ = model.smoother(fold.trained, smoothness)
    mean, log_deviation = smoother(fold.held_out.inputs).astype(np.float64).T
    targets = model.in_units(fold.held_out).targets.reshape(-1)
    return model.comparable(scipy.stats.norm.logpdf(targets, mean, np.exp(log_deviation)), fold.held_out)
