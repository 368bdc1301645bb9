"""Who may judge a model: rows that it has not seen.

Rows of the report's table that were not in training are judged by the model itself. Where there are too few
of them, as in a report on the training table, every row is judged by a model that was trained on the other
folds, with the same network, law and prior weights.
"""

from typing import Any, NamedTuple

import numpy as np
from sklearn.base import clone
from sklearn.model_selection import KFold

from measureflow.commands import baselines
from measureflow.commands.evaluating import Entry, Rows, Splits, baseline_entry, row_scores, splits_of
from measureflow.commands.fitting import Task, noted
from measureflow.commands.model import TableModel
from measureflow.tables.crossvalidation import cross_validate
from measureflow.tables.members import of_all_steps
from measureflow.tables.posterior import is_sampled

# With fewer new rows than this, nothing could be said; baselines are trained on so many at least.
FEWEST, FEWEST_TO_TRAIN = 30, 50


class Part(NamedTuple):
    """Rows, by their places in the table, and the estimator that judges them."""

    estimator: Any
    rows: np.ndarray


class Judgement(NamedTuple):
    """Parts that hold each judged row once, the entries of a leaderboard, and how it came about: `new rows`,
    `folds` or `training rows`."""

    parts: list[Part]
    entries: list[Entry]
    how: str
    known: int
    notes: list[str]

    @property
    def rows(self) -> np.ndarray:
        """Places of all judged rows, in the order of the parts."""
        return np.concatenate([part.rows for part in self.parts])


def judged(model: TableModel, task: Task, folds: int, seed: int, progress: bool = False) -> Judgement:
    """Parts and scores, for a table with targets."""
    inputs, y = task.rows.inputs, task.rows.targets
    known = model.knows(inputs, y)
    fresh = np.flatnonzero(~known)
    notes: list[str] = []
    splits: Splits = []
    if len(fresh) >= FEWEST:
        parts, how = [Part(model.estimator, fresh)], "new rows"
    elif folds:
        splits = splits_of(task, folds, seed)
        estimators, notes = _of_folds(model, task, splits, progress)
        pairs = zip(estimators, splits, strict=True)
        parts, how = [Part(one, test) for one, (_, test) in pairs], "folds"
    else:
        parts, how = [Part(model.estimator, np.arange(len(y)))], "training rows"
    ours = Entry(_name(model), _scores(parts, task), float(model.about.get("seconds", np.nan)), [])
    if how == "new rows" and known.sum() >= FEWEST_TO_TRAIN:
        splits = [(np.flatnonzero(known), fresh)]
    rows = np.concatenate([part.rows for part in parts])
    if not splits:
        # Of these rows alone, whose classes may be rare.
        cut = KFold(max(folds, 2), shuffle=True, random_state=seed).split(rows)
        splits = [(rows[train], rows[test]) for train, test in cut]
    rivals = [_only(baseline_entry(task, name, splits, seed), rows) for name in baselines.NAMES]
    return Judgement(parts, [ours, *rivals], how, int(known.sum()), notes)


def _name(model: TableModel) -> str:
    method = model.estimator.method
    return f"this model ({method if isinstance(method, str) else method.name})"


def _only(entry: Entry, rows: np.ndarray) -> Entry:
    return entry._replace(rows={name: values[rows] for name, values in entry.rows.items()})


def _scores(parts: list[Part], task: Task) -> Rows:
    found = [
        row_scores(part.estimator, task.rows.inputs.iloc[part.rows], task.rows.targets[part.rows])
        for part in parts
    ]
    return {name: np.concatenate([one[name] for one in found]) for name in found[0]}


def _of_folds(model: TableModel, task: Task, splits: Splits, progress: bool) -> tuple[list[Any], list[str]]:
    """Estimators of the folds, with what was chosen for the model itself: choosing again for each fold would
    take as long as all else together."""
    fitted = model.estimator
    shape = fitted.shape_
    given = {"hidden": shape.hidden, "encoding": shape.encoding, "verbose": int(progress)}
    if not is_sampled(fitted.method):
        # The steps taken are those of the longest.
        given |= {"members": of_all_steps(fitted.members_), "steps": max(fitted.n_iter_, 1)}
        given |= {"warm_start": False, "early_stopping": False}
    if not model.is_classifier:
        given["likelihood"] = shape.likelihood
    estimator: Any = clone(fitted)
    estimator.set_params(**given)
    with noted() as notes:
        found = cross_validate(
            estimator, task.rows.inputs, task.rows.targets, cv=splits, return_estimator=True
        )
    for one in found["estimator"]:
        one.spread_, one.spread_power_ = fitted.spread_, fitted.spread_power_
        one.typical_deviation_ = fitted.typical_deviation_
    return found["estimator"], notes
