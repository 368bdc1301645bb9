"""What a table decides for itself, by the log predictive density of held-out rows.

The law of its targets. How its networks are trained, where several ways share the ensemble: some tables need
the Bayes posterior, others are predicted far better by a colder one, some by bins, some by columns, some by
linear functions of these, and most by all of them together. And the spread of the predictive law about its
median, or the temperature of classes: the middle of an ensemble errs less than its members, whose noise is
fitted to their own errors.
"""

import itertools
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import jax
import numpy as np
from jaxtyping import Array, Float, Key

from measureflow.tables.methods import Candidate
from measureflow.tables.smoothness import Smoothness
from measureflow.tables.table import Table
from measureflow.tables.views import View

# Below this many rows, held-out rows cannot tell candidates apart; below that many, networks are small, and
# a cold prior lets them learn rows by heart.
FEWEST_TO_CHOOSE, FEW = 50, 300
# From this many rows on, one held-out tenth (of at most so many rows) says as much as three folds.
MANY, MOST_HELD_OUT, FOLDS = 5_000, 5_000, 3
# (factor, power) for the spread of the predictive law: see `Spread`. The first one changes nothing, and the
# next have power 1: these alone are for classes, whose temperature is the factor.
FACTORS, POWERS = np.exp(np.linspace(-2.4, 2.4, 61)), (1.0, 0.5, 0.0)
SPREADS = np.array([(1.0, 1.0), *((factor, power) for power in POWERS for factor in FACTORS)])
TEMPERATURES, NO_SPREADS = SPREADS[: 1 + len(FACTORS)], SPREADS[:1]
NO_SPREAD = (1.0, 1.0)
# Below this, a prior weight is cold; below so many rows, none that sees bins is.
_WARM, _FEW_FOR_BINS = 0.3, 1_000
# An ensemble has at most so many parts, of at least so many networks, from so many trials.
_MOST_PARTS, _FEWEST_NETWORKS, _MOST_SHARING = 4, 4, 8
# Spreads, by their places, at which ways to share an ensemble are compared: none, and some factors.
_COMMON = np.array([0, *range(1, 1 + len(FACTORS), 3)])
# The noise of targets, by the mean log density of held-out rows for targets of variance 1; that of a constant
# is −1.42. Below the first, they are mostly noise, and little of them can be learned but by heart. Above the
# second, networks learn much after a trial's end, and laws get narrower; above the third, there is more to
# learn than in the usual steps.
MUCH_NOISE, _SOME_NOISE, _LITTLE_NOISE = -0.9, 0.0, 1.0
# In nats a row: by so much must an ensemble with networks that see a smoother be ahead. Of few rows processes
# know more than networks do, which gain more by the rows that were held out.
_CLEARLY = 0.1
# The spread is shrunk towards none as if there were so many rows more, for which none is right.
_BELIEVED = 50


class Trial(NamedTuple):
    """A model, by its number, with what the method may choose for it, and what its networks make of a row."""

    model: int
    candidate: Candidate
    view: View = View()

    def stretched(self, length: float) -> "Trial":
        """With so many times the steps."""
        return self._replace(candidate=self.candidate._replace(steps=length * self.candidate.steps))


# Of every trial: the log densities of held-out rows, for every spread.
Densities: TypeAlias = Mapping[Trial, Float[np.ndarray, "s rows"]]


class Choice(NamedTuple):
    """What held-out rows choose: the trials that the parts of an ensemble come from, all of one model; the
    factor and the power of its spread, and the typical deviation that these refer to; the mean log predictive
    density of held-out rows for every trial at its best, and its share of the ensemble (empty where there was
    nothing to choose); and where networks see what a smoother says, how smooth that is."""

    parts: tuple[Trial, ...]
    spread: tuple[float, float] = NO_SPREAD
    typical: float = 1.0
    scores: Mapping[Trial, float] = MappingProxyType({})
    shares: Mapping[Trial, float] = MappingProxyType({})
    smoothness: Smoothness | None = None

    @property
    def model(self) -> int:
        """The number of the model."""
        return self.parts[0].model

    @property
    def score(self) -> float:
        """That of the best of its parts, by which the noise of targets is known."""
        return max(self.scores[part] for part in self.parts)

    @property
    def is_smoothed(self) -> bool:
        """Whether some networks see a smoother."""
        return any(part.view.smoothed for part in self.parts)

    @property
    def learns_on(self) -> bool:
        """Whether networks learn much after the end of a trial."""
        return self.score > _SOME_NOISE

    def length(self, shortest: float, longest: float) -> float:
        """The share of all steps to take."""
        return shortest if self.score < MUCH_NOISE else longest if self.score > _LITTLE_NOISE else 1.0

    def taking(self, parts: tuple[Trial, ...], scores: Mapping[Trial, float]) -> "Choice":
        """With other parts, of more trials."""
        shares = {trial: parts.count(trial) / len(parts) for trial in scores}
        return self._replace(parts=parts, scores=scores, shares=shares)

    def stretched(self, length: float) -> "Choice":
        """With parts that take so many times the steps."""
        return self._replace(parts=tuple(part.stretched(length) for part in self.parts))


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


def trials_of(views: list[tuple[View, ...]], candidates: tuple[Candidate, ...], rows: int) -> list[Trial]:
    """What is tried on a table of so many rows: every model, with each of its views and candidates."""
    if rows < FEWEST_TO_CHOOSE:
        return [Trial(0, candidates[0], views[0][0])]
    return [
        Trial(model, candidate, view)
        for model, of_model in enumerate(views)
        for view in of_model
        for candidate in _candidates_for(view, candidates, rows)
    ]


def trials_beside_smoothers(
    model: int, views: tuple[View, ...], candidates: tuple[Candidate, ...], rows: int
) -> list[Trial]:
    """What networks with some of these views are tried with, that see a smoother beside the columns. What it
    says is soon learned: the coldest candidates are left out."""
    linear = sorted({bool(view.linear) for view in views})
    return [
        Trial(model, candidate, view)
        for view in (View(linear=flag, smoothed=True) for flag in linear)
        for candidate in _candidates_for(view, candidates, rows)[:2]
    ]


def _candidates_for(view: View, candidates: tuple[Candidate, ...], rows: int) -> tuple[Candidate, ...]:
    """Linear networks learn few rows by heart: one candidate is enough, and not the most cautious. Those that
    see bins learn more than others."""
    warm = tuple(candidate for candidate in candidates if candidate.prior_weight >= _WARM) or candidates
    some = candidates if rows >= (_FEW_FOR_BINS if view.binned else FEW) else warm
    return some[:2][-1:] if view.linear else some


def combined(densities: Densities, weights: Float[np.ndarray, " rows"], parts: int) -> Choice:
    """The model whose trials predict held-out rows best when they share an ensemble of so many equal parts,
    and the trials that these come from: of all ways to share it, the one with the highest log score,

        Σᵢ wᵢ log (1/parts) Σₚ p_{trial of part p}(yᵢ),

    that of `LogScore` on a weighted `Empirical` whose particles are the trials, at the best spread that all
    have in common. (Yao et al., 2018, "Using stacking to average Bayesian predictive distributions".)
    """
    scores = {trial: _scored(rows, weights).score for trial, rows in densities.items()}
    models: dict[int, list[Trial]] = {}
    for trial in sorted(scores, key=lambda trial: -scores[trial]):
        models.setdefault(trial.model, []).append(trial)
    found = [_shared(trials, densities, weights, parts) for trials in models.values()]
    places = {trial: place for place, trial in enumerate(densities)}
    chosen = tuple(sorted(max(found, key=lambda one: one.score).trials, key=places.__getitem__))
    return Choice(chosen).taking(chosen, scores)


def combined_beside_smoothers(
    densities: Densities, weights: Float[np.ndarray, " rows"], before: Choice, parts: int
) -> Choice:
    """What shares an ensemble with networks that see a smoother, where that is clearly better than without
    them; else what was chosen before. The scores are those of all that was ever tried, when it was first."""
    plain = {trial: rows for trial, rows in densities.items() if not trial.view.smoothed}
    chosen = combined(densities, weights, parts)
    ahead = _best_score(densities, weights, parts) - _best_score(plain, weights, parts)
    taken = chosen if ahead > _CLEARLY else before
    return before.taking(taken.parts, {**chosen.scores, **before.scores})


def _best_score(densities: Densities, weights: Float[np.ndarray, " rows"], parts: int) -> float:
    """Of the best way in which trials of one model share an ensemble."""
    trials = sorted(densities, key=lambda trial: -_scored(densities[trial], weights).score)
    return _shared(trials, densities, weights, parts).score


class _Shared(NamedTuple):
    """The log score of an ensemble, less the doubts about its spread, and the trials of its parts."""

    score: float
    trials: tuple[Trial, ...]


def _shared(
    trials: list[Trial], densities: Densities, weights: Float[np.ndarray, " rows"], parts: int
) -> _Shared:
    """The best way in which these trials, the best first, share an ensemble."""
    trials = trials[:_MOST_SHARING]
    ways = list(itertools.combinations_with_replacement(range(len(trials)), parts))
    shares = np.array([np.bincount(way, minlength=len(trials)) for way in ways]) / parts
    stacked = np.stack([densities[trial] for trial in trials])
    doubts, best = _doubts(stacked.shape[1], len(weights)), (-np.inf, ways[0])
    for place in _COMMON[stacked.shape[1] > _COMMON]:
        rows = stacked[:, place]
        # A run that diverged has no density for some rows: then it is not believed for any.
        rows = np.where(np.isfinite(rows).all(axis=1, keepdims=True), rows, -np.inf)
        largest = np.max(rows, axis=0)
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = np.log(shares @ np.exp(rows - largest)) + largest
        means = np.where(np.isnan(logs), -np.inf, logs) @ (weights / weights.sum()) - doubts[place]
        way = int(np.argmax(means))
        best = max(best, (float(means[way]), ways[way]), key=lambda one: one[0])
    return _Shared(best[0], tuple(trials[place] for place in best[1]))


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
    means = np.where(np.isfinite(densities), densities, -np.inf) @ (weights / weights.sum())
    best = int(np.argmax(means - _doubts(len(densities), len(weights))))
    return _Scored(float(means[best]), best)


def _doubts(spreads: int, rows: int) -> Float[np.ndarray, " s"]:
    """What the first spreads lose for being others than none."""
    factors, powers = SPREADS[:spreads].T
    return _BELIEVED / rows * (np.log(factors) ** 2 + (1 - powers) ** 2)
