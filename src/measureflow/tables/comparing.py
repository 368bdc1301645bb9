"""Trials on the folds of their tables: trained side by side, scored on the rows that were held out."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from measureflow.core.pytrees import Particles
from measureflow.tables.choosing import (
    FEW,
    Choice,
    Densities,
    Fold,
    Trial,
    combined,
    folds_of,
    parts_of,
    spread_for,
    trials_of,
)
from measureflow.tables.models import Model
from measureflow.tables.recipe import Recipe
from measureflow.tables.table import Table
from measureflow.tables.trials import Plan, Trials, multiple_of_devices

# Trials have no more particles than these: enough to tell them apart.
FEWEST_PARTICLES, MOST_PARTICLES = 4, 6


#: Takes trials to a step, with a name for progress; gives the name of a signal that ended it before.
Drive: TypeAlias = Callable[[Trials, int, str], str | None]


def chosen_on_folds(
    models: list[tuple[Model, ...]], recipe: Recipe, tables: list[Table], key: Key[Array, ""], drive: Drive
) -> list[Choice]:
    """For each table, by folds that are held out: the trials that share its ensemble, how long these are
    trained, and its spread."""
    fewest = min(len(table.weights) for table in tables)
    trials = trials_of([model.tried for model in models[0]], recipe.candidates(fewest), fewest)
    if len(trials) == 1:
        return [Choice((trials[0],))] * len(tables)
    parts = parts_of(recipe.particles, multiple_of_devices(1, recipe.mesh))
    few = min(max(recipe.particles // parts, FEWEST_PARTICLES), MOST_PARTICLES)
    smaller = dataclasses.replace(recipe, particles=multiple_of_devices(few, recipe.mesh))
    folds = folds_of(tables, key)
    compared = []
    for number in range(len(models[0])):
        of_tables = [of_table[number] for of_table in models]
        tried = [[trial for trial in trials if trial.model == number]] * len(folds)
        steps = max(model.trial_steps for model in of_tables)
        what = "how to train" if len(models[0]) == 1 else f"between laws: {of_tables[0].shape.name}"
        compared.append(OnFolds(of_tables, tried, smaller, folds, steps, key, drive, what))
    of_models = [one.densities() for one in compared]
    choices = []
    for table in range(len(tables)):
        densities = {trial: rows for found in of_models for trial, rows in found[table].items()}
        choices.append(combined(densities, held_out_weights(folds, table), parts))
    for number in sorted({choice.model for choice in choices}):
        of_model = {table: choice for table, choice in enumerate(choices) if choice.model == number}
        for table, choice in with_lengths_and_spreads(compared[number], of_model).items():
            choices[table] = choice
    return choices


def held_out_weights(folds: list[Fold], table: int) -> Float[np.ndarray, " rows"]:
    """Of all rows of a table, fold by fold."""
    return np.concatenate([fold.held_out.counts for fold in folds if fold.table == table])


def with_lengths_and_spreads(trials: "OnFolds", choices: dict[int, Choice]) -> dict[int, Choice]:
    """The choices of tables, by their numbers, with the steps to take, and the spread of their ensembles.

    Trials are short. Where there is little noise, their networks learn much more in all the steps of final
    training, some of it by heart, and the width that suited a trial does not suit the ensemble: there, the
    spread is that of networks which are trained on folds for all steps.
    """
    model = trials.models[0]
    longer = {
        table: choice
        for table, choice in choices.items()
        if choice.learns_on and model.trial_steps < model.steps and not model.shape.simple
    }
    others = {table: choice for table, choice in choices.items() if table not in longer}
    found = trials.with_spreads(others) if others else {}
    if longer:
        found |= trials.of_all_steps(longer).with_spreads(longer)
    return {table: found[table].stretched(choice.length(*model.lengths)) for table, choice in choices.items()}


class OnFolds:
    """Trials of one model, trained on the folds of some tables: for each fold `tried` has as many."""

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
    ):
        self.models, self.tried, self.folds, shared = models, tried, folds, models[0]
        self.recipe, self.key, self.drive = recipe, key, drive
        trained = [models[fold.table].view(fold.trained) for fold in folds]
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

    def of_all_steps(self, choices: dict[int, Choice]) -> "OnFolds":
        """Those that some tables chose, trained for all steps: on all folds of few rows, on the first of
        many."""
        folds: list[Fold] = []
        for fold in self.folds:
            few = len(fold.trained.weights) + len(fold.held_out.weights) < FEW
            if fold.table in choices and (few or all(known.table != fold.table for known in folds)):
                folds.append(fold)
        tried = [list(dict.fromkeys(choices[fold.table].parts)) for fold in folds]
        # Side by side, tables with fewer of them train one more than once.
        most = max(map(len, tried))
        tried = [of_fold + of_fold[-1:] * (most - len(of_fold)) for of_fold in tried]
        steps = max(model.steps for model in self.models)
        settings = (self.recipe, folds, steps, self.key, self.drive, "the width of laws")
        return OnFolds(self.models, tried, *settings)

    def densities(self) -> list[Densities]:
        """For every table, of every trial: the log densities of held-out rows, in units that all models
        share, for every spread."""
        found: list[dict[Trial, Any]] = [{} for _ in self.models]
        scored = self._scored(self.members)
        for fold, tried, (densities, _) in zip(self.folds, self.tried, scored, strict=True):
            for trial, rows in zip(tried, densities, strict=True):
                found[fold.table].setdefault(trial, []).append(rows)
        return [{trial: np.concatenate(rows, axis=-1) for trial, rows in one.items()} for one in found]

    def with_spreads(self, choices: dict[int, Choice]) -> dict[int, Choice]:
        """With the spread of the ensemble of their parts: an ensemble is less sure than its parts, and needs
        to be widened less."""
        # Tables with another model are not looked at.
        some = next(iter(choices.values()))
        parts = [choices.get(fold.table, some).parts for fold in self.folds]
        places = [
            [tried.index(part) for part in of_fold] for tried, of_fold in zip(self.tried, parts, strict=True)
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
        held_out = [self.models[fold.table].view(fold.held_out) for fold in self.folds]
        scored = self.trials.scored(members, held_out, factors)
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
