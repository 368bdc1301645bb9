"""Trials on the folds of their tables: trained side by side, scored on the rows that were held out."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from measureflow.core.pytrees import Particles
from measureflow.tables.choosing import (
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
    """For each table, by folds that are held out: the trials that share its ensemble, and its spread."""
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
        tried = [trial for trial in trials if trial.model == number]
        of_tables = [of_table[number] for of_table in models]
        compared.append(OnFolds(of_tables, tried, smaller, folds, key, drive, alone=len(models[0]) == 1))
    of_models = [one.densities() for one in compared]
    choices = []
    for table in range(len(tables)):
        densities = {trial: rows for found in of_models for trial, rows in found[table].items()}
        choices.append(combined(densities, held_out_weights(folds, table), parts))
    for number in sorted({choice.model for choice in choices}):
        choices = compared[number].with_spreads(choices)
    return [choice.longer(models[0][choice.model].longest) for choice in choices]


def held_out_weights(folds: Sequence[Fold], table: int) -> Float[np.ndarray, " rows"]:
    """Of all rows of a table, fold by fold."""
    return np.concatenate([fold.held_out.counts for fold in folds if fold.table == table])


class OnFolds:
    """Trials of one model, trained on the folds of all tables."""

    def __init__(
        self,
        models: list[Model],
        tried: list[Trial],
        recipe: Recipe,
        folds: list[Fold],
        key: Key[Array, ""],
        drive: Drive,
        alone: bool,
    ):
        self.models, self.tried, self.folds, shared = models, tried, folds, models[0]
        trained = [models[fold.table].view(fold.trained) for fold in folds]
        self.held_out = [models[fold.table].view(fold.held_out) for fold in folds]
        rows = max(len(table.weights) for table in trained)
        plan = Plan.of(shared.loss, shared.prior, shared.views, recipe, rows)
        # Of all tables the most, side by side.
        steps = max(model.trial_steps for model in models)
        # As many as final training will have, which then shares the program.
        whole = max(len(fold.trained.weights) + len(fold.held_out.weights) for fold in folds)
        self.trials = Trials(plan, trained, [tried] * len(folds), steps, key, rows=whole)
        what = "how to train" if alone else f"between laws: {shared.shape.name}"
        signal = drive(self.trials, steps, f"choosing {what}")
        if signal is not None:
            raise KeyboardInterrupt(
                f"{signal} at step {self.trials.step} of {steps} of choosing {what}: nothing was trained "
                "yet; with encoding, likelihood and prior_weight there is nothing to choose."
            )
        self.members = self.trials.members()

    def densities(self) -> list[Densities]:
        """For every table, of every trial: the log densities of held-out rows, in units that all models
        share, for every spread."""
        found: list[dict[Trial, Any]] = [{} for _ in self.models]
        for fold, (densities, _) in zip(self.folds, self._scored(self.members), strict=True):
            for trial, rows in zip(self.tried, densities, strict=True):
                found[fold.table].setdefault(trial, []).append(rows)
        return [{trial: np.concatenate(rows, axis=-1) for trial, rows in one.items()} for one in found]

    def with_spreads(self, choices: list[Choice]) -> list[Choice]:
        """Those that chose this model with the spread of the ensemble of their parts: an ensemble is less
        sure than its parts, and needs to be widened less."""
        mine = {i: choice for i, choice in enumerate(choices) if choice.model == self.tried[0].model}
        # Tables with another model are there to keep the program's shape: what is found for them is not used.
        some = next(iter(mine.values()))
        parts = [mine.get(fold.table, some).parts for fold in self.folds]
        places = np.array([[self.tried.index(trial) for trial in of_fold] for of_fold in parts])
        scored, found = self._scored(_joined(self.members, places)), list(choices)
        for table, choice in mine.items():
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
        return [
            (self.models[fold.table].comparable(rows, fold.held_out), widths)
            for fold, (rows, widths) in zip(
                self.folds, self.trials.scored(members, self.held_out, factors), strict=True
            )
        ]


@jax.jit
def _joined(members: Any, places: Array) -> Any:
    """(table, trial, particle, ...) as (table, 1, particle, ...): those of some trials as one ensemble."""

    def one(leaf: Array) -> Array:
        chosen = leaf[jnp.arange(len(places))[:, None], places]
        return chosen.reshape(len(places), 1, -1, *leaf.shape[3:])

    return jax.tree.map(one, members)
