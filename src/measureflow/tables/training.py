"""The final training of the ensembles of some tables: choosing before it, history and checkpoints along it,
and what ends it early."""

import dataclasses
import math
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Int, Key

from measureflow.core.pytrees import Particles
from measureflow.flows.flow import finite_particles
from measureflow.runs.checkpoint import Checkpoint, Saved, Store
from measureflow.runs.driver import Callback, drive
from measureflow.runs.duration import Announcement
from measureflow.runs.fingerprints import fingerprint
from measureflow.runs.history import History, Log
from measureflow.runs.solution import DivergenceError
from measureflow.tables.choosing import Choice, Trial
from measureflow.tables.comparing import chosen_on_folds
from measureflow.tables.methods import Candidate
from measureflow.tables.models import Model
from measureflow.tables.recipe import Recipe
from measureflow.tables.smoothness import Smoothness
from measureflow.tables.stopping import Best
from measureflow.tables.table import Table
from measureflow.tables.trials import Plan, Trials
from measureflow.tables.views import View

# How many records history has, beside the first.
RECORDS = 48


class Ensemble(NamedTuple):
    """What `fit` finds for one table: its choice, particles, the steps that they took and those they were to
    take, and history."""

    choice: Choice
    particles: Particles
    steps: int
    planned: int
    history: History


class Ensembles(NamedTuple):
    """What `fit` finds: one ensemble for each table, and the name of the signal that ended training before
    its time, if one did."""

    of_tables: list[Ensemble]
    interrupted: str | None = None


@dataclasses.dataclass(frozen=True)
class Trainer:
    """Trains one ensemble for each of some tables, by the one of its models that its held-out rows choose.
    Models with the same number are one program: tables differ in what they make of their own numbers. An
    ensemble has parts, which may be trained differently: each has particles of its own. With `progress`, bars
    and expected times on stderr."""

    models: list[tuple[Model, ...]]
    recipe: Recipe
    progress: bool = False

    def steps(self, model: int) -> int:
        """Of all tables the most, side by side."""
        return max(of_table[model].steps for of_table in self.models)

    def fit(
        self,
        tables: list[Table],
        key: Key[Array, ""],
        *,
        given: list[Choice] | None = None,
        initial: Particles | None = None,
        validation: list[Table] | None = None,
        callbacks: Sequence[Callback] = (),
        checkpoint: Checkpoint | None = None,
    ) -> Ensembles:
        """Choose, on held-out rows, what there is to choose and not `given`; then train on all rows, from
        `initial` (table, particle, ...) if it is given. With `validation` tables, each ensemble is the best
        seen on its own, and training stops once none improves."""
        if checkpoint is None:
            return self._fit(tables, key, given, initial, validation, callbacks, None)
        settings = dataclasses.asdict(self.recipe) | {"method": self.recipe.method, "mesh": None}
        made_of = fingerprint(
            models=[
                [(*model[:6], model.encoding, model.smoothed) for model in of_table]
                for of_table in self.models
            ],
            settings=settings,
            key=key,
            data=[tuple(table) for table in tables],
            validation=None if validation is None else [tuple(table) for table in validation],
            initial=initial,
            given=None if given is None else [_noted(choice) for choice in given],
        )
        store = Store(checkpoint, made_of)
        try:
            return self._fit(tables, key, given, initial, validation, callbacks, store)
        finally:
            store.close()

    def _fit(
        self,
        tables: list[Table],
        key: Key[Array, ""],
        given: list[Choice] | None,
        initial: Particles | None,
        validation: list[Table] | None,
        callbacks: Sequence[Callback],
        store: Store | None,
    ) -> Ensembles:
        choosing_key, training_key = jax.random.split(key)

        def training(choices: dict[int, Choice]) -> "Training":
            """Of the tables with these numbers, all of which chose the same model."""
            model = next(iter(choices.values())).model
            mine, held_out = [], None if validation is None else []
            for index, choice in choices.items():
                others = [] if validation is None else [validation[index]]
                table, *others = self.models[index][model].seen(tables[index], others, choice.smoothness)
                mine.append(table)
                if held_out is not None:
                    held_out += others
            begun = None
            if initial is not None:
                begun = jax.tree.map(lambda leaf: leaf[np.array(list(choices))], initial)
            return Training(self, mine, list(choices.values()), training_key, begun, held_out, store)

        saved = None
        if store is not None:
            saved = store.latest(lambda notes: training(_numbered(_choices_of(notes))).saved_state())
        if saved is not None:
            choices = _choices_of(saved.notes)
        elif given is not None:
            choices = given
        else:
            choices = chosen_on_folds(self.models, self.recipe, tables, choosing_key, self.drive)
        found: dict[int, Ensemble] = {}
        for model in sorted({choice.model for choice in choices}):
            run = training({i: choice for i, choice in enumerate(choices) if choice.model == model})
            if saved is not None:
                run.resume(saved)
            ensembles, signal = run.trained(callbacks)
            numbers = [i for i, choice in enumerate(choices) if choice.model == model]
            found |= dict(zip(numbers, ensembles, strict=True))
            if signal is not None:
                return Ensembles(list(found.values()), signal)
        return Ensembles([found[index] for index in range(len(tables))])

    def drive(self, trials: Trials, end: int, name: str, callbacks: Sequence[Callback] = ()) -> str | None:
        """To step `end`; the name of a signal that ended it before."""
        if not self.progress:
            return drive(trials, end, callbacks=callbacks)
        announced = (Announcement(name, trials.step, end), *callbacks)
        return drive(trials, end, progress=name, callbacks=announced)


class Training(Trials):
    """Every table with the candidate that it chose, to the end, with history."""

    def __init__(
        self,
        trainer: Trainer,
        tables: list[Table],
        choices: list[Choice],
        key: Key[Array, ""],
        initial: Particles | None,
        validation: list[Table] | None,
        store: Store | None,
    ):
        model, steps = trainer.models[0][choices[0].model], trainer.steps(choices[0].model)
        parts = len(choices[0].parts)
        recipe = dataclasses.replace(trainer.recipe, particles=trainer.recipe.particles // parts)
        rows = max(len(table.weights) for table in tables)
        plan = Plan.of(model.loss, model.prior, model.views, recipe, rows)
        if initial is not None:
            initial = jax.tree.map(lambda leaf: leaf.reshape(len(leaf), parts, -1, *leaf.shape[2:]), initial)
        super().__init__(plan, tables, [list(choice.parts) for choice in choices], steps, key, initial)
        self.trainer, self.choices, self.store = trainer, choices, store
        # Where the step size has come to 0 for all tables, nothing moves.
        shares = [max(trial.candidate.steps for trial in choice.parts) for choice in choices]
        self.end = max(math.ceil(share * steps) for share in shares)
        self.ends = [round(share * steps) for share in shares]
        self.log = Log(max(self.end // RECORDS, 1))
        self.best = None if validation is None else Best(self, validation, self.end)
        self.pauses = [self.log.record_every]
        if self.best is not None:
            self.pauses.append(self.best.interval)
        if store is not None:
            self.pauses.append(store.checkpoint.every)

    def trained(self, callbacks: Sequence[Callback]) -> tuple[list[Ensemble], str | None]:
        """From where it is to the end, or to where a callback or a signal ends it: the ensembles, and the
        signal."""
        signal = None
        if self.step == 0:
            self._record()
            self._save(0)
        if self.best is None or not self.best.is_over(self.step):
            ours = () if self.best is None else (self.best,)
            saving = () if self.store is None else (self._save_when_due,)
            watched = [self._for_one_table(callback) for callback in callbacks]
            name = f"training {self.plan.method.name}"
            signal = self.trainer.drive(self, self.end, name, (*ours, *saving, *watched))
        members, taken = self.members(), [min(self.step, end) for end in self.ends]
        if self.best is not None and self.best.members is not None:
            members, taken = self.best.members, self.best.steps
        columns = zip(self.choices, taken, self.ends, self._histories(), strict=True)
        ensembles = [
            Ensemble(choice, _of_table(members, index), steps, planned, history)
            for index, (choice, steps, planned, history) in enumerate(columns)
        ]
        return ensembles, signal

    def members(self) -> Particles:
        """The particles (table, 1, particle, ...): all parts of a table are one ensemble."""
        return _as_one(super().members())

    def advance(self, budget: int, end: int) -> None:
        first, before = self.step, self.state
        super().advance(budget, min(end, *((first // every + 1) * every for every in self.pauses)))
        if not self.finite.all():
            self._raise_diverged(first, before)
        if self.step % self.log.record_every == 0:
            self._record()

    def finish(self, end: int) -> None:
        if not self.log.reaches(self.step):
            self._record()
        self._save(self.step)

    def _record(self) -> None:
        """Of every table, at this step."""
        self.log.rows.append({"step": np.asarray(self.step)} | self.observed())
        self._renew_record()

    def _renew_record(self) -> None:
        self.record = {name: float(np.mean(value)) for name, value in self.log.rows[-1].items()}

    def _histories(self) -> list[History]:
        columns = self.log.history()
        norms = columns["gradient_norm"]
        # Of the drift before the first step nothing is known: what follows it takes its place.
        norms[0] = np.where(np.isnan(norms[0]), norms[min(1, len(norms) - 1)], norms[0])
        return [
            History({name: column if name == "step" else column[:, i] for name, column in columns.items()})
            for i in range(len(self.choices))
        ]

    def _for_one_table(self, callback: Callback) -> Callback:
        """A user's callback sees the state of the one table that there is."""
        return lambda step, record, state: callback(step, record, _state_of(state, 0))

    def _raise_diverged(self, first: int, before: Any) -> None:
        step_size, table = float(self.plan.step_size), int(np.argmin(self.finite.all(axis=1)))
        # All of them, where a square of the drift overflowed: then none moves any more.
        finite = np.asarray(finite_particles(_of_table(self.members(), table)))
        lost = np.flatnonzero(~finite) if not finite.all() else np.arange(len(finite))
        raise DivergenceError(
            f"particles became NaN or infinite between steps {first} and {self.step} with "
            f"step_size={step_size:g}; try a smaller one, such as step_size={step_size / 10:g}, and look for "
            "outliers in X and y. The exception's `state` is that of the earlier step.",
            _state_of(before, table),
            self._histories()[table],
            self.step,
            lost,
        )

    # Checkpoints.

    def saved_state(self) -> Any:
        """What changes along the way."""
        return self.state if self.best is None else (self.state, self.best.members_or(self.members))

    def _save_when_due(self, step: int, record: dict[str, Any], state: Any) -> None:
        if self.store is not None and self.store.is_due(step):
            self._save(step)

    def _save(self, step: int) -> None:
        if self.store is None:
            return
        notes: dict[str, Any] = {"step": step, "choices": [_noted(choice) for choice in self.choices]}
        if self.best is not None:
            notes["best"] = self.best.notes()
        self.store.save(step, Saved(self.saved_state(), dict(self.log.history()), notes))

    def resume(self, saved: Saved) -> None:
        """Go on from a checkpoint."""
        self.state, self.step = saved.state, saved.notes["step"]
        if self.best is not None:
            self.state, members = saved.state
            self.best.resume(members, saved.notes["best"])
        self.log.resume(saved.history, self.step, goes_on=False)
        self._renew_record()
        folder = self.store.checkpoint.folder if self.store else None
        done = "finished" if self.step == self.end else f"resuming at step {self.step} of {self.end}"
        sys.stderr.write(f"measureflow: {folder}: {done}\n")


@jax.jit
def _as_one(members: Any) -> Any:
    """(table, trial, particle, ...) as (table, 1, particle, ...)."""
    return jax.tree.map(lambda leaf: leaf.reshape(len(leaf), 1, -1, *leaf.shape[3:]), members)


@jax.jit
def _of_table(members: Any, index: int | Int[Array, ""]) -> Any:
    """The ensemble of a table."""
    return jax.tree.map(lambda leaf: leaf[index, 0], members)


def _state_of(states: Any, index: int) -> Any:
    """The state of a table's flow, or those of its parts, where there are several."""
    return jax.tree.map(lambda leaf: leaf[index] if leaf.shape[1] > 1 else leaf[index, 0], states)


def _noted(choice: Choice) -> dict[str, Any]:
    """As JSON, whose numbers are as exact as ours."""
    return {
        "parts": [_flat(trial) for trial in choice.parts],
        "spread": [*choice.spread, choice.typical],
        "scores": [[*_flat(trial), score, choice.shares[trial]] for trial, score in choice.scores.items()],
        "smoothness": choice.smoothness,
    }


def _flat(trial: Trial) -> list[Any]:
    return [trial.model, *trial.candidate, *trial.view]


def _choices_of(notes: dict[str, Any]) -> list[Choice]:
    def trial(model: int, weight: float, steps: float, *view: bool) -> Trial:
        return Trial(model, Candidate(weight, steps), View(*view))

    def choice(noted: dict[str, Any]) -> Choice:
        scores, shares = ({trial(*row[:-2]): row[place] for row in noted["scores"]} for place in (-2, -1))
        factor, power, typical = noted["spread"]
        parts = tuple(trial(*part) for part in noted["parts"])
        smoothness = noted["smoothness"] and Smoothness(
            tuple(noted["smoothness"][0]), *noted["smoothness"][1:]
        )
        return Choice(parts, (factor, power), typical, scores, shares, smoothness)

    return [choice(noted) for noted in notes["choices"]]


def _numbered(choices: list[Choice]) -> dict[int, Choice]:
    return dict(enumerate(choices))
