"""Trials of one model on the folds of their tables: trained side by side, scored on the rows that were held
out."""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from measureflow.core.pytrees import Particles
from measureflow.tables.choosing import FEW, Choice, Densities, Fold, Trial, spread_for
from measureflow.tables.models import Model
from measureflow.tables.recipe import Recipe
from measureflow.tables.smoothness import Smoothness
from measureflow.tables.trials import Plan, Trials

#: Takes trials to a step, with a name for progress; gives the name of a signal that ended it before.
Drive: TypeAlias = Callable[[Trials, int, str], str | None]


def held_out_weights(folds: list[Fold], table: int) -> Float[np.ndarray, " rows"]:
    """Of all rows of a table, fold by fold."""
    return np.concatenate([fold.held_out.counts for fold in folds if fold.table == table])


class OnFolds:
    """Trials of one model, trained on the folds of some tables: for each fold `tried` has as many. Where its
    networks see what a smoother says, `smooth` has that of each fold."""

    def __init__(
        self,
        models: list[Model],
        tried: list[list[Trial]],
        recipe: Recipe,
        folds: list[Fold],
        steps: int,
        key: Key[Array, ""],
        drive: Drive,
        what: str,
        smooth: Sequence[Smoothness | None] = (),
    ):
        self.models, self.tried, self.folds, shared = models, tried, folds, models[0]
        self.recipe, self.key, self.drive = recipe, key, drive
        seen = [
            models[fold.table].seen(fold.trained, [fold.held_out], smoothness)
            for fold, smoothness in zip(folds, smooth or [None] * len(folds), strict=True)
        ]
        trained, self.held_out = [pair[0] for pair in seen], [pair[1] for pair in seen]
        rows = max(len(table.weights) for table in trained)
        plan = Plan.of(shared.loss, shared.prior, shared.views, recipe, rows)
        # As many as final training will have, which then shares the program.
        whole = max(len(fold.trained.weights) + len(fold.held_out.weights) for fold in folds)
        self.trials = Trials(plan, trained, tried, steps, key, rows=whole)
        end = math.ceil(steps * max(trial.candidate.steps for of_fold in tried for trial in of_fold))
        signal = drive(self.trials, end, f"choosing {what}")
        if signal is not None:
            raise KeyboardInterrupt(
                f"{signal} at step {self.trials.step} of {end} of choosing {what}: nothing was trained "
                "yet; with encoding, likelihood and prior_weight there is nothing to choose."
            )
        self.members = self.trials.members()

    def again(
        self,
        tried: Mapping[int, list[Trial]],
        what: str,
        *,
        length: float | None = None,
        smooth: Sequence[Smoothness | None] = (),
    ) -> "OnFolds":
        """Trials of some tables once more, or others of them; with a `length` for so many times all steps,
        on all folds of few rows, and on the first of many. Where networks see what a smoother says, `smooth`
        has that of each fold here."""
        places = [
            place
            for place, fold in enumerate(self.folds)
            if fold.table in tried and (length is None or self._counts(place))
        ]
        folds = [self.folds[place] for place in places]
        # Side by side, tables with fewer of them train one more than once.
        most = max(map(len, tried.values()))
        of_folds = [tried[fold.table] for fold in folds]
        of_folds = [of_fold + of_fold[-1:] * (most - len(of_fold)) for of_fold in of_folds]
        most_steps = max(model.trial_steps if length is None else model.steps for model in self.models)
        steps = most_steps if length is None else math.ceil(length * most_steps)
        seen = [smooth[place] for place in places] if smooth else ()
        return OnFolds(self.models, of_folds, self.recipe, folds, steps, self.key, self.drive, what, seen)

    def _counts(self, place: int) -> bool:
        """Whether trials that take as many steps as the ensemble are trained on this fold, too."""
        fold = self.folds[place]
        few = len(fold.trained.weights) + len(fold.held_out.weights) < FEW
        return few or all(known.table != fold.table for known in self.folds[:place])

    def beside(self, others: "OnFolds") -> "OnFolds":
        """These trials and `others`, which were trained as long, on some of these folds."""
        places = np.array([place for place, fold in enumerate(self.folds) if _is_among(fold, others.folds)])
        both = copy.copy(others)
        both.tried = [self.tried[place] + new for place, new in zip(places, others.tried, strict=True)]
        both.members = jax.tree.map(
            lambda old, new: jnp.concatenate([old[places], new], axis=1), self.members, others.members
        )
        return both

    def densities(self) -> list[Densities]:
        """For every table, of every trial: the log densities of held-out rows, in units that all models
        share, for every spread."""
        found: list[dict[Trial, Any]] = [{} for _ in self.models]
        scored = self._scored(self.members)
        for fold, tried, (densities, _) in zip(self.folds, self.tried, scored, strict=True):
            # One that is trained more than once counts once.
            for trial, rows in dict(zip(tried, densities, strict=True)).items():
                found[fold.table].setdefault(trial, []).append(rows)
        return [{trial: np.concatenate(rows, axis=-1) for trial, rows in one.items()} for one in found]

    def with_spreads(self, choices: dict[int, Choice]) -> dict[int, Choice]:
        """With the spread of the ensemble of their parts: an ensemble is less sure than its parts, and needs
        to be widened less."""
        number = len(next(iter(choices.values())).parts)
        places = [
            # Other tables are not looked at.
            [tried.index(part) for part in choices[fold.table].parts]
            if fold.table in choices
            else [0] * number
            for fold, tried in zip(self.folds, self.tried, strict=True)
        ]
        scored, found = self._scored(_joined(self.members, np.array(places))), {}
        for table, choice in choices.items():
            of_table = [one for fold, one in zip(self.folds, scored, strict=True) if fold.table == table]
            densities = np.concatenate([densities[0] for densities, _ in of_table], axis=-1)
            spread = spread_for(densities, held_out_weights(self.folds, table))
            typical = float(np.exp(np.mean([np.log(widths[0]) for _, widths in of_table])))
            found[table] = choice._replace(spread=spread, typical=typical)
        return found

    def _scored(
        self, members: Particles
    ) -> list[tuple[Float[np.ndarray, "c s rows"], Float[np.ndarray, " c"]]]:
        """Of every fold: the log densities of its rows for every trial and spread, and how wide laws are."""
        spreads = self.models[0].spreads
        factors = jnp.asarray(spreads, jnp.float32) if len(spreads) > 1 else None
        scored = self.trials.scored(members, self.held_out, factors)
        return [
            (self.models[fold.table].comparable(rows, fold.held_out), widths)
            for fold, (rows, widths) in zip(self.folds, scored, strict=True)
        ]


@jax.jit
def _joined(members: Any, places: Array) -> Any:
    """(fold, trial, particle, ...) as (fold, 1, particle, ...): those of some trials as one ensemble."""

    def one(leaf: Array) -> Array:
        chosen = leaf[jnp.arange(len(places))[:, None], places]
        return chosen.reshape(len(places), 1, -1, *leaf.shape[3:])

    return jax.tree.map(one, members)


def _is_among(fold: Fold, folds: list[Fold]) -> bool:
    return any(fold is one for one in folds)
