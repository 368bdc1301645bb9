"""How the networks of each table are trained, by rows that are held out: which trials share the ensemble, for
how long, and how wide their law is."""

import dataclasses

from jaxtyping import Array, Key

from measureflow.tables.choosing import (
    MANY,
    Choice,
    combined,
    combined_beside_smoothers,
    folds_of,
    parts_of,
    trials_beside_smoothers,
    trials_of,
)
from measureflow.tables.methods import Candidate
from measureflow.tables.models import Model, require_smoothness
from measureflow.tables.on_folds import Drive, OnFolds, held_out_weights
from measureflow.tables.recipe import Recipe
from measureflow.tables.smoothing import near
from measureflow.tables.smoothness import Smoothness
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

    Where a Gaussian process comes near, networks that see what it says are tried beside the others. Trials
    are short: where there is little noise, networks learn much more in all the steps of final training, some
    of it by heart, and neither what a smoother adds to a trial nor the width that suits it need suit the
    ensemble. There, those that were chosen are trained on folds for all steps, and decide.
    """

    trials: OnFolds
    tables: list[Table]
    candidates: tuple[Candidate, ...]
    parts: int

    def settled(self, choices: dict[int, Choice]) -> dict[int, Choice]:
        """The choices of tables, by their numbers, with lengths and spreads."""
        model, found = self.trials.models[0], {}
        smooth = self._near(choices) if model.smoothed else {}
        beside, seeing = self._beside_smoothers(choices, smooth), {}
        if beside is not None:
            looked_at = self._combined(beside, {table: choices[table] for table in smooth})
            seeing = {table: choice for table, choice in looked_at.items() if choice.is_smoothed}
            # What else was tried is told.
            told = {
                table: choices[table].taking(choices[table].parts, looked_at[table].scores)
                for table in smooth
            }
            choices = choices | told
        longer = {table: choice for table, choice in choices.items() if self._learns_on(choice)}
        lengths = {table: self._length_on_folds(table, choice) for table, choice in longer.items()}
        for length in sorted(set(lengths.values())):
            of_length = {table: choice for table, choice in longer.items() if lengths[table] == length}
            found |= self._trained(of_length, length, seeing, smooth)
        settled = {table: seeing[table] for table in seeing.keys() - longer.keys()}
        if settled and beside is not None:
            found |= beside.with_spreads(settled)
        rest = {table: choices[table] for table in choices.keys() - found.keys()}
        if rest:
            found |= self.trials.with_spreads(rest)
        return {table: self._finished(table, choice, found[table]) for table, choice in choices.items()}

    def _learns_on(self, choice: Choice) -> bool:
        return choice.learns_on and self.trials.models[0].learns_on

    def _near(self, choices: dict[int, Choice]) -> dict[int, list[Smoothness]]:
        """For the tables where processes come near: those of its folds."""
        found = {}
        for table, choice in choices.items():
            folds = [fold for fold in self.trials.folds if fold.table == table]
            found[table] = near(self.trials.models[table], folds, choice.score)
        return {table: of_folds for table, of_folds in found.items() if of_folds is not None}

    def _beside_smoothers(
        self, choices: dict[int, Choice], smooth: dict[int, list[Smoothness]]
    ) -> OnFolds | None:
        """All trials of these tables, and those of networks that see a smoother."""
        if not smooth:
            return None
        tried = {
            table: trials_beside_smoothers(
                choices[table].model,
                self.trials.models[table].tried,
                self.candidates,
                len(self.tables[table].weights),
            )
            for table in smooth
        }
        what = "whether a smoother helps"
        new = self.trials.again(tried, what, smooth=self._of_folds(smooth))
        return self.trials.beside(new)

    def _length(self, table: int, choice: Choice) -> float:
        """The share of all steps that the table's ensemble will take."""
        return choice.length(*self.trials.models[table].lengths)

    def _length_on_folds(self, table: int, choice: Choice) -> float:
        """That of the second look."""
        return self._length(table, choice) if len(self.tables[table].weights) >= MANY else 1.0

    def _trained(
        self,
        choices: dict[int, Choice],
        length: float,
        seeing: dict[int, Choice],
        smooth: dict[int, list[Smoothness]],
    ) -> dict[int, Choice]:
        """With spreads by networks that are trained for so many times all steps; where trials were better
        beside a smoother, with it and without."""
        parts = {table: choice.parts + seeing.get(table, choice).parts for table, choice in choices.items()}
        tried = {table: list(dict.fromkeys(of_table)) for table, of_table in parts.items()}
        again = self.trials.again(tried, "the width of laws", length=length, smooth=self._of_folds(smooth))
        undecided = {table: choice for table, choice in choices.items() if table in seeing}
        return again.with_spreads(choices | self._combined(again, undecided))

    def _combined(self, trials: OnFolds, choices: dict[int, Choice]) -> dict[int, Choice]:
        """Some of whose networks see a smoother, where that is clearly better."""
        if not choices:
            return {}
        densities, found = trials.densities(), {}
        for table, choice in choices.items():
            weights = held_out_weights(trials.folds, table)
            found[table] = combined_beside_smoothers(densities[table], weights, choice, self.parts)
        return found

    def _of_folds(self, smooth: dict[int, list[Smoothness]]) -> list[Smoothness | None]:
        """As the folds lie, None for those of other tables."""
        left = {table: iter(of_table) for table, of_table in smooth.items()}
        return [next(left[fold.table]) if fold.table in left else None for fold in self.trials.folds]

    def _finished(self, table: int, before: Choice, choice: Choice) -> Choice:
        """With its length; and where networks see a smoother, that of all rows."""
        model = self.trials.models[table]
        if choice.is_smoothed:
            choice = choice._replace(smoothness=require_smoothness(self.tables[table], model))
        return choice.stretched(self._length(table, before))
