"""What a table decides for itself, by the log predictive density of held-out rows.

The model: which encoding, network and law. The weight of the prior: some tables need the Bayes posterior,
others are predicted far better by a colder one. And the spread of the predictive law about its mean, or the
temperature of classes: the mean of an ensemble errs less than its members, whose noise is fitted to their own
errors.
"""

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

import jax
import numpy as np
from jaxtyping import Array, Float, Key

from measureflow.tables.methods import Candidate
from measureflow.tables.table import Table

# Below this many rows, held-out rows cannot tell candidates apart.
FEWEST_TO_CHOOSE = 50
# From this many rows on, one held-out tenth (of at most so many rows) says as much as three folds.
MANY, MOST_HELD_OUT, FOLDS = 5_000, 5_000, 3
# (factor, power) for the spread of the predictive law: see `Spread`. The first one changes nothing, and the
# next have power 1: these alone are for classes, whose temperature is the factor.
FACTORS, POWERS = np.exp(np.linspace(-1.2, 2.4, 61)), (1.0, 0.5, 0.0)
SPREADS = np.array([(1.0, 1.0), *((factor, power) for power in POWERS for factor in FACTORS)])
TEMPERATURES, NO_SPREADS = SPREADS[: 1 + len(FACTORS)], SPREADS[:1]
NO_SPREAD = (1.0, 1.0)
# Below this, a prior weight is cold.
_WARM = 0.3
# The spread is shrunk towards none as if there were so many rows more, for which none is right.
_BELIEVED = 50


class Trial(NamedTuple):
    """A model, by its number, with what the method may choose for it."""

    model: int
    candidate: Candidate


# Of every trial: the log densities of held-out rows, for every spread.
Densities: TypeAlias = Mapping[Trial, Float[np.ndarray, "s rows"]]


class Choice(NamedTuple):
    """What held-out rows choose: a trial, the factor and the power of its spread, their mean log predictive
    density for every trial at its best (empty where there was nothing to choose), and the typical deviation
    that the spread refers to."""

    trial: Trial
    spread: tuple[float, float]
    scores: dict[Trial, float]
    typical: float = 1.0


class Fold(NamedTuple):
    """Of table number `table`: the rows to train on, and those held out."""

    table: int
    trained: Table
    held_out: Table


def folds(rows: int, rng: np.random.Generator) -> list[tuple[np.ndarray, np.ndarray]]:
    """(rows to train on, rows held out): three folds, or one held-out tenth of many rows."""
    order = rng.permutation(rows)
    number, size = (FOLDS, rows // FOLDS) if rows < MANY else (1, min(rows // 10, MOST_HELD_OUT))
    parts = [order[part * size : (part + 1) * size] for part in range(number)]
    return [(np.setdiff1d(order, part), part) for part in parts]


def folds_of(tables: list[Table], key: Key[Array, ""]) -> list[Fold]:
    """The folds of every table, one table after the other."""
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key)).tolist())
    return [
        Fold(index, table.rows(train), table.rows(out))
        for index, table in enumerate(tables)
        for train, out in folds(len(table.weights), rng)
    ]


def trials_of(models: int, candidates: tuple[Candidate, ...], rows: int) -> list[Trial]:
    """What is tried on a table of so many rows. The simplest model has all candidates; where rows are few, a
    cold prior lets others, which bend more, learn the rows by heart."""
    warm = tuple(candidate for candidate in candidates if candidate.prior_weight >= _WARM) or candidates
    return [
        Trial(model, candidate)
        for model in range(models if rows >= FEWEST_TO_CHOOSE else 1)
        for candidate in (candidates if model == 0 or rows >= MANY else warm)
    ]


def choose(densities: Densities, weights: Float[np.ndarray, " rows"]) -> Choice:
    """The trial with the best mean log density, at the spread that suits it best.

    Where rows are few, the best spread is chance. So its numbers have normal laws about those of no spread to
    begin with, as if there were 50 rows more for which that is right: about its best factor f, the log
    density of a row falls as (log f)². A run that diverged has no density, and is never taken while another
    has one.
    """
    found = {trial: _scored(rows, weights) for trial, rows in densities.items()}
    chosen = max(found, key=lambda trial: found[trial][0])
    return Choice(chosen, found[chosen][1], {trial: score for trial, (score, _) in found.items()})


def _scored(
    densities: Float[np.ndarray, "s rows"], weights: Float[np.ndarray, " rows"]
) -> tuple[float, tuple[float, float]]:
    """The mean log density at the best spread, and that spread."""
    factors, powers = SPREADS[: len(densities)].T
    means = np.where(np.isfinite(densities), densities, -np.inf) @ (weights / weights.sum())
    doubts = _BELIEVED / len(weights) * (np.log(factors) ** 2 + (1 - powers) ** 2)
    best = int(np.argmax(means - doubts))
    return float(means[best]), (float(factors[best]), float(powers[best]))
