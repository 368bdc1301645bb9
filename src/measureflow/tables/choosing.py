"""What a table decides for itself, by the log predictive density of held-out rows.

The weight of the prior: some tables need the Bayes posterior, others are predicted far better by a colder
one. And the spread of the predictive law about its mean: the mean of an ensemble errs less than its members,
whose noise is fitted to their own errors.
"""

import math
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Key

from measureflow.tables.methods import Candidate
from measureflow.tables.table import Table

# Below this many rows, held-out rows cannot tell candidates apart.
FEWEST_TO_CHOOSE = 50
# From this many rows on, one held-out tenth (of at most so many rows) says as much as three folds.
MANY, MOST_HELD_OUT, FOLDS = 5_000, 5_000, 3
# Choosing is done with fewer particles, and in long runs with fewer steps.
CHOOSING_PARTICLES, CHOOSING_STEPS = 8, 20_000
# Factors for the spread of the predictive law, the middle one 1.
SPREADS = np.exp(np.linspace(-1.2, 1.2, 41))


class Choice(NamedTuple):
    """What held-out rows choose, and their mean log predictive density for every candidate at its best;
    empty where there was nothing to choose."""

    candidate: Candidate
    spread: float
    scores: dict[Candidate, float]


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


def choices_of(
    parts: list[Fold], densities: list[Float[np.ndarray, "c s rows"]], candidates: tuple[Candidate, ...]
) -> list[Choice]:
    """What each table chooses, from the log densities of the rows that its folds hold out."""
    choices = []
    for index in range(parts[-1].table + 1):
        mine = [number for number, part in enumerate(parts) if part.table == index]
        weights = np.concatenate([parts[number].held_out.weights for number in mine])
        choices.append(
            choose(np.concatenate([densities[number] for number in mine], axis=-1), weights, candidates)
        )
    return choices


def choose(
    densities: Float[np.ndarray, "c s rows"],
    weights: Float[np.ndarray, " rows"],
    candidates: tuple[Candidate, ...],
) -> Choice:
    """Every candidate with the spread that suits it best; of these, the first that held-out rows cannot tell
    from the best; of its spreads, the narrowest that they cannot tell from the best one, since the ensemble
    trained on all rows will have more rows, and more members, than those that were scored."""
    densities = np.where(np.isfinite(densities), densities, -np.inf)
    spreads = SPREADS if densities.shape[1] > 1 else np.ones(1)
    suited = np.argmax(densities @ weights, axis=1)
    at_best = densities[np.arange(len(candidates)), suited]
    scores = dict(zip(candidates, (at_best @ weights / weights.sum()).tolist(), strict=True))
    chosen = first_as_good_as_the_best(at_best, weights)
    spread = first_as_good_as_the_best(densities[chosen], weights)
    return Choice(candidates[chosen], float(spreads[spread]), scores)


def first_as_good_as_the_best(
    densities: Float[np.ndarray, "m rows"], weights: Float[np.ndarray, " rows"]
) -> int:
    """The first whose mean is within one standard error, of the paired difference, of the best mean. A run
    that diverged has no density, and is never taken while another has one."""
    best = densities[np.argmax(densities @ weights)]
    for index, mine in enumerate(densities):
        if np.isfinite(mine).all() and np.isfinite(best).all():
            lost = best - mine
            mean = np.average(lost, weights=weights)
            if mean <= math.sqrt(np.average((lost - mean) ** 2, weights=weights) / len(lost)):
                return index
    return int(np.argmax(densities @ weights))
