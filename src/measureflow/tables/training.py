"""The final training of the ensembles of some tables: choosing before it, history and checkpoints along it,
and what ends it early."""

import dataclasses
import math
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key

from measureflow.core.pytrees import Particles
from measureflow.flows.flow import finite_particles
from measureflow.networks.losses import NegativeLogLikelihood
from measureflow.runs.checkpoint import Checkpoint, Saved, Store
from measureflow.runs.driver import Callback, drive
from measureflow.runs.duration import Announcement
from measureflow.runs.fingerprints import fingerprint
from measureflow.runs.history import History, Log
from measureflow.runs.solution import DivergenceError
from measureflow.spaces.measures import Gaussian
from measureflow.tables.choosing import (
    CHOOSING_PARTICLES,
    CHOOSING_STEPS,
    SPREADS,
    Choice,
    choices_of,
    folds_of,
)
from measureflow.tables.methods import Candidate
from measureflow.tables.recipe import Recipe
from measureflow.tables.stopping import Best
from measureflow.tables.table import Table
from measureflow.tables.trials import Plan, Trials, multiple_of_devices

# How many records history has, beside the first.
RECORDS = 48


class Ensembles(NamedTuple):
    """What `fit` finds: particles (table, particle, ...), what each table chose, the steps that its particles
    took, and those it was to take, its history, and the name of the signal that ended training before its
    time, if one did."""

    particles: Particles
    choices: list[Choice]
    steps: list[int]
    planned: list[int]
    histories: list[History]
    interrupted: str | None = None


@dataclasses.dataclass(frozen=True)
class Trainer:
    """Trains one ensemble for each of some tables. With `progress`, bars and expected times on stderr."""

    loss: NegativeLogLikelihood
    prior: Gaussian
    recipe: Recipe
    progress: bool = False

    def fit(
        self,
        tables: list[Table],
        key: Key[Array, ""],
        *,
        initial: Particles | None = None,
        validation: list[Table] | None = None,
        callbacks: Sequence[Callback] = (),
        checkpoint: Checkpoint | None = None,
    ) -> Ensembles:
        """Choose, on held-out rows, what there is to choose; then train on all rows, from `initial`
        (table, particle, ...) if it is given. With `validation` tables, each ensemble is the best seen on
        its own, and training stops once none improves."""
        if checkpoint is None:
            return self._fit(tables, key, initial, validation, callbacks, None)
        settings = dataclasses.asdict(self.recipe) | {"method": self.recipe.method, "mesh": None}
        made_of = fingerprint(
            loss=self.loss,
            prior=self.prior,
            settings=settings,
            key=key,
            data=[tuple(table) for table in tables],
            validation=None if validation is None else [tuple(table) for table in validation],
            initial=initial,
        )
        store = Store(checkpoint, made_of)
        try:
            return self._fit(tables, key, initial, validation, callbacks, store)
        finally:
            store.close()

    def _fit(
        self,
        tables: list[Table],
        key: Key[Array, ""],
        initial: Particles | None,
        validation: list[Table] | None,
        callbacks: Sequence[Callback],
        store: Store | None,
    ) -> Ensembles:
        choosing_key, training_key = jax.random.split(key)
        candidates = self.recipe.candidates(min(len(table.weights) for table in tables))
        choices = [Choice(candidates[0], 1.0, {})] * len(tables)

        def training() -> "Training":
            return Training(self, tables, choices, training_key, initial, validation, store)

        saved = None
        if store is not None:
            saved = store.latest(training().saved_state())
        if saved is not None:
            choices = [_choice_of(noted) for noted in saved.notes["choices"]]
        elif len(candidates) > 1:
            choices = self._choose(tables, candidates, choosing_key)
        run = training()
        if saved is not None:
            run.resume(saved)
        return run.trained(callbacks)

    def _choose(
        self, tables: list[Table], candidates: tuple[Candidate, ...], key: Key[Array, ""]
    ) -> list[Choice]:
        recipe, parts = self.recipe, folds_of(tables, key)
        steps = min(recipe.steps, CHOOSING_STEPS)
        smaller = dataclasses.replace(recipe, particles=multiple_of_devices(CHOOSING_PARTICLES, recipe.mesh))
        trained = [part.trained for part in parts]
        plan = Plan.of(self.loss, self.prior, smaller, max(len(table.weights) for table in trained))
        trials = Trials(plan, trained, [list(candidates)] * len(parts), steps, key)
        signal = self.drive(trials, steps, "choosing the prior's weight")
        if signal is not None:
            raise KeyboardInterrupt(
                f"{signal} at step {trials.step} of {steps} of choosing the prior's weight: nothing was "
                "trained yet; with prior_weight=1.0 there is nothing to choose."
            )
        spreads = jnp.asarray(SPREADS, jnp.float32) if recipe.calibrate else None
        held_out = [part.held_out for part in parts]
        return choices_of(parts, trials.log_densities(trials.members(), held_out, spreads), candidates)

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
        recipe = trainer.recipe
        chosen = [choice.candidate for choice in choices]
        plan = Plan.of(trainer.loss, trainer.prior, recipe, max(len(table.weights) for table in tables))
        super().__init__(plan, tables, [[candidate] for candidate in chosen], recipe.steps, key, initial)
        self.trainer, self.choices, self.store = trainer, choices, store
        # Where the step size has come to 0 for all tables, nothing moves.
        self.end = max(math.ceil(candidate.steps * recipe.steps) for candidate in chosen)
        self.ends = [round(candidate.steps * recipe.steps) for candidate in chosen]
        self.log = Log(max(self.end // RECORDS, 1))
        self.best = None if validation is None else Best(self, validation, self.end)
        self.pauses = [self.log.record_every]
        if self.best is not None:
            self.pauses.append(self.best.interval)
        if store is not None:
            self.pauses.append(store.checkpoint.every)

    def trained(self, callbacks: Sequence[Callback]) -> Ensembles:
        """From where it is to the end, or to where a callback or a signal ends it."""
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
        particles = jax.tree.map(lambda leaf: leaf[:, 0], members)
        return Ensembles(particles, self.choices, taken, self.ends, self._histories(), signal)

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
        found = {name: value[:, 0] for name, value in self.observed().items()}
        self.log.rows.append({"step": np.asarray(self.step)} | found)
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
        return lambda step, record, state: callback(step, record, _of_table(state, 0))

    def _raise_diverged(self, first: int, before: Any) -> None:
        step_size, table = float(self.plan.step_size), int(np.argmin(self.finite[:, 0]))
        # All of them, where a square of the drift overflowed: then none moves any more.
        finite = np.asarray(finite_particles(_of_table(self.members(), table)))
        lost = np.flatnonzero(~finite) if not finite.all() else np.arange(len(finite))
        raise DivergenceError(
            f"particles became NaN or infinite between steps {first} and {self.step} with "
            f"step_size={step_size:g}; try a smaller one, such as step_size={step_size / 10:g}, and look for "
            "outliers in X and y. The exception's `state` is that of the earlier step.",
            _of_table(before, table),
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


def _of_table(states: Any, index: int) -> Any:
    """The state of the one candidate of a table."""
    return jax.tree.map(lambda leaf: leaf[index, 0], states)


def _noted(choice: Choice) -> dict[str, Any]:
    """As JSON, whose numbers are as exact as ours."""
    scores = [[*candidate, score] for candidate, score in choice.scores.items()]
    return {"candidate": list(choice.candidate), "spread": choice.spread, "scores": scores}


def _choice_of(noted: dict[str, Any]) -> Choice:
    scores = {Candidate(weight, steps): score for weight, steps, score in noted["scores"]}
    return Choice(Candidate(*noted["candidate"]), noted["spread"], scores)
