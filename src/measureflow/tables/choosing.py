"""What a table decides for itself, by the log predictive density of held-out rows.

The law of its targets. How its networks are trained, where several ways share the ensemble: some tables need
the Bayes posterior, others are predicted far better by a colder one, some by bins, some by columns, and most
by all of them together. And the spread of the predictive law about its mean, or the temperature of classes:
the mean of an ensemble errs less than its members, whose noise is fitted to their own errors.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import jax
import numpy as np
from jaxtyping import Array, Float, Key

from measureflow.tables.methods import Candidate
from measureflow.tables.table import Table

# Below this many rows, held-out rows cannot tell candidates apart; below that many, networks are small, and
# a cold prior lets them learn rows by heart.
FEWEST_TO_CHOOSE, FEW = 50, 300
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
# An ensemble has at most so many parts, of at least so many networks.
_MOST_PARTS, _FEWEST_NETWORKS = 4, 4
# The spread is shrunk towards none as if there were so many rows more, for which none is right.
_BELIEVED = 50


class Trial(NamedTuple):
    """A model, by its number, with what the method may choose for it, and whether its networks see bins."""

    model: int
    candidate: Candidate
    binned: bool = False


# Of every trial: the log densities of held-out rows, for every spread.
Densities: TypeAlias = Mapping[Trial, Float[np.ndarray, "s rows"]]


class Choice(NamedTuple):
    """What held-out rows choose: the trials that the parts of an ensemble come from, all of one model; the
    factor and the power of its spread, and the typical deviation that these refer to; the mean log predictive
    density of held-out rows for every trial at its best, and the share of the ensemble that it should have
    (empty where there was nothing to choose)."""

    parts: tuple[Trial, ...]
    spread: tuple[float, float] = NO_SPREAD
    typical: float = 1.0
    scores: Mapping[Trial, float] = MappingProxyType({})
    shares: Mapping[Trial, float] = MappingProxyType({})

    @property
    def model(self) -> int:
        """The number of the model."""
        return self.parts[0].model


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


def parts_of(particles: int, devices: int = 1) -> int:
    """How many equal parts, trained differently, an ensemble of so many particles may have."""
    sizes = {parts: particles // parts for parts in range(1, _MOST_PARTS + 1) if particles % parts == 0}
    fit = [n for n, size in sizes.items() if size >= _FEWEST_NETWORKS and size % devices == 0]
    return max(fit, default=1)


def trials_of(views: list[tuple[bool, ...]], candidates: tuple[Candidate, ...], rows: int) -> list[Trial]:
    """What is tried on a table of so many rows: every model, with each of its views and candidates."""
    if rows < FEWEST_TO_CHOOSE:
        return [Trial(0, candidates[0], views[0][0])]
    warm = tuple(candidate for candidate in candidates if candidate.prior_weight >= _WARM) or candidates
    return [
        Trial(model, candidate, binned)
        for model, of_model in enumerate(views)
        for binned in of_model
        for candidate in (candidates if rows >= FEW else warm)
    ]


def combined(densities: Densities, weights: Float[np.ndarray, " rows"], parts: int) -> Choice:
    """The model whose trials predict held-out rows best when they share an ensemble of so many equal parts,
    and the trials that these come from; its spread is still to be chosen.

    A trial has the spread that suits it best. Where one is to be taken, that is the best one.
    """
    scored = {trial: _scored(rows, weights) for trial, rows in densities.items()}
    rows_of = {trial: densities[trial][scored[trial].place] for trial in densities}
    models: dict[int, list[Trial]] = {}
    for trial in densities:
        models.setdefault(trial.model, []).append(trial)
    best: tuple[float, tuple[Trial, ...]] | None = None
    shares: dict[Trial, float] = {}
    for trials in models.values():
        rows = np.stack([np.where(np.isfinite(rows_of[trial]), rows_of[trial], -np.inf) for trial in trials])
        if parts == 1:
            found = np.eye(len(trials))[int(np.argmax([scored[trial].score for trial in trials]))]
        else:
            found = log_score_shares(rows, weights)
        shares |= dict(zip(trials, found.tolist(), strict=True))
        chosen = _in_parts(found, parts)
        score = float(np.average(_log_mixture(rows[chosen], np.full(parts, 1 / parts)), weights=weights))
        if best is None or score > best[0]:
            best = score, tuple(trials[place] for place in chosen)
    assert best is not None
    return Choice(best[1], scores={t: found.score for t, found in scored.items()}, shares=shares)


def spread_for(
    densities: Float[np.ndarray, "s rows"], weights: Float[np.ndarray, " rows"]
) -> tuple[float, float]:
    """The factor and the power of the spread that suit held-out rows best, shrunk towards none.

    Where rows are few, the best spread is chance. So its numbers have normal laws about those of no spread to
    begin with, as if there were 50 rows more for which that is right: about its best factor f, the log
    density of a row falls as (log f)².
    """
    factor, power = SPREADS[_scored(densities, weights).place]
    return float(factor), float(power)


class _Scored(NamedTuple):
    """The mean log density at the best spread, and the place of that spread."""

    score: float
    place: int


def _scored(densities: Float[np.ndarray, "s rows"], weights: Float[np.ndarray, " rows"]) -> _Scored:
    """A run that diverged has no density."""
    factors, powers = SPREADS[: len(densities)].T
    means = np.where(np.isfinite(densities), densities, -np.inf) @ (weights / weights.sum())
    doubts = _BELIEVED / len(weights) * (np.log(factors) ** 2 + (1 - powers) ** 2)
    best = int(np.argmax(means - doubts))
    return _Scored(float(means[best]), best)


def log_score_shares(
    densities: Float[np.ndarray, "m rows"], weights: Float[np.ndarray, " rows"], iterations: int = 300
) -> Float[np.ndarray, " m"]:
    """The shares s ≥ 0, Σ s = 1, that maximise the log score of the mixture of m laws,

        Σᵢ wᵢ log Σₘ sₘ pₘ(yᵢ),

    a concave problem: that of `LogScore` on a weighted `Empirical` whose particles are the laws. Each
    iteration multiplies a share by the first variation, s ← s · Σᵢ wᵢ p(yᵢ)/Σ s p(yᵢ) (Cover, 1984), and
    never lowers the score. (Yao et al., 2018, "Using stacking to average Bayesian predictive distributions".)
    """
    weights = weights / weights.sum()
    # Rows for which no law has a density say nothing.
    told = np.isfinite(densities).any(axis=0)
    densities, weights = densities[:, told], weights[told]
    shares = np.full(len(densities), 1 / len(densities))
    if not told.any():
        return shares
    ratios = np.exp(densities - densities.max(axis=0))
    for _ in range(iterations):
        shares = shares * ((ratios / (shares @ ratios)) @ weights)
        shares = shares / shares.sum()
    return shares


def _log_mixture(
    densities: Float[np.ndarray, "m rows"], shares: Float[np.ndarray, " m"]
) -> Float[np.ndarray, " rows"]:
    with np.errstate(divide="ignore"):
        return np.logaddexp.reduce(densities + np.log(shares)[:, None], axis=0)


def _in_parts(shares: Float[np.ndarray, " m"], parts: int) -> list[int]:
    """Which law each of so many equal parts is given: each time the one that is farthest behind."""
    given = np.zeros(len(shares))
    chosen = []
    for _ in range(parts):
        place = int(np.argmax(shares * parts - given))
        given[place] += 1
        chosen.append(place)
    return sorted(chosen)
