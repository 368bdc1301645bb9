"""How the networks of each table are trained, by rows that are held out: which trials share the ensemble, for
how long, and how wide their law is."""

import dataclasses

from jaxtyping import Array, Key

from measureflow.tables.choosing import (
    Choice,
    combined,
    combined_beside_smoothers,
    folds_of,
    parts_of,
    trials_beside_smoothers,
    trials_of,
)
from measureflow.tables.methods import Candidate
from measureflow.tables.models import Model
from measureflow.tables.on_folds import Drive, OnFolds, held_out_weights
from measureflow.tables.recipe import Recipe
from measureflow.tables.smoother import Smoothness
from measureflow.tables.smoothing import near
from measureflow.tables.table import Table
from measureflow.tables.trials import multiple_of_devices

# Trials have no more particles than these: enough to tell them apart.
FEWEST_PARTICLES, MOST_PARTICLES = 4, 6


def chosen_on_folds(
    models: list[tuple[Model, ...]], recipe: Recipe, tables: list[Table], key: Key[Array, ""], drive: Drive
) -> list[Choice]:
    """For each table, by folds that are held out: the trials that share its ensemble, how long these are
    trained, and its spread."""
    fewest = min(len(table.weights) for table in tables)
    candidates = recipe.candidates(fewest)
    trials = trials_of([model.tried for model in models[0]], candidates, fewest)
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
        again = Again(compared[number], tables, candidates, parts)
        for table, choice in again.settled(of_model).items():
            choices[table] = choice
    return choices


@dataclasses.dataclass(frozen=True)
class Again:
    """The second look at the tables whose trials chose one model: whether their networks see a smoother, for
    how long they are trained, and how wide their law is.

    Trials are short. Where there is little noise, their networks learn much more in all the steps of final
    training, some of it by heart, and the width that suited a trial does not suit the ensemble: there, the
    spread is that of networks which are trained on folds for all steps. Where a Gaussian process comes near,
    networks that see what it says are trained beside those that were chosen.
    """

    trials: OnFolds
    tables: list[Table]
    candidates: tuple[Candidate, ...]
    parts: int

    def settled(self, choices: dict[int, Choice]) -> dict[int, Choice]:
        """The choices of tables, by their numbers, with lengths and spreads."""
        model, found = self.trials.models[0], {}
        smooth = self._smooth(choices) if model.smoothed else {}
        longer = {table for table, choice in choices.items() if choice.learns_on and model.learns_on}
        at_once = {table: choice for table, choice in choices.items() if table not in smooth.keys() | longer}
        if at_once:
            found = self.trials.with_spreads(at_once)
        for all_steps in (False, True):
            group = {
                table: choice
                for table, choice in choices.items()
                if table not in at_once and (table in longer) == all_steps
            }
            if group:
                found |= self._trained(group, smooth, all_steps=all_steps)
        return {
            table: found[table].stretched(choice.length(*model.lengths)) for table, choice in choices.items()
        }

    def _smooth(self, choices: dict[int, Choice]) -> dict[int, Smoothness]:
        """Those of the tables where a process comes near."""
        found = {
            table: near(self.trials, self.tables[table], table, choice.score)
            for table, choice in choices.items()
        }
        return {table: smoothness for table, smoothness in found.items() if smoothness is not None}

    def _trained(
        self, choices: dict[int, Choice], smooth: dict[int, Smoothness], *, all_steps: bool
    ) -> dict[int, Choice]:
        """With spreads by networks that are trained once more; some of them beside a smoother, where that is
        clearly better."""
        tried = {table: list(dict.fromkeys(choice.parts)) for table, choice in choices.items()}
        for table in choices.keys() & smooth.keys():
            model, rows = choices[table].model, len(self.tables[table].weights)
            views = self.trials.models[table].tried
            tried[table] += trials_beside_smoothers(model, views, self.candidates, rows)
        what = "whether a smoother helps" if smooth else "the width of laws"
        again = self.trials.again(tried, what, all_steps=all_steps, smooth=smooth)
        densities, found = again.densities(), {}
        for table, choice in choices.items():
            if table in smooth:
                weights = held_out_weights(again.folds, table)
                choice = combined_beside_smoothers(densities[table], weights, choice, self.parts)
            if any(part.view.smoothed for part in choice.parts):
                choice = choice._replace(smoothness=smooth[table])
            found[table] = choice
        return again.with_spreads(found)
