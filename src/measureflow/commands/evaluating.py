"""`measureflow evaluate`: cross-validated scores of every method and of baselines, paired row by row."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from sklearn.model_selection import KFold, StratifiedKFold

from measureflow.commands import baselines
from measureflow.commands.errors import InputError
from measureflow.commands.fitting import Task, noted, told_as_input_errors
from measureflow.commands.predicting import blocks
from measureflow.prediction.rowwise import (
    brier_scores,
    negative_log_likelihoods,
    ranked_probability_scores,
)
from measureflow.tables.crossvalidation import cross_validate

COVERAGE = 0.9
# Of a probability that is 0: as metrics.log_loss has it in float32.
_LEAST = float(np.finfo(np.float32).eps)

Splits = list[tuple[np.ndarray, np.ndarray]]
Rows = dict[str, np.ndarray]


class Entry(NamedTuple):
    """One competitor: scores of every row, how long all folds took, and what was warned of."""

    name: str
    rows: Rows
    seconds: float
    notes: list[str]


def splits_of(task: Task, folds: int, seed: int) -> Splits:
    """Shuffled folds; of classes in the same shares."""
    targets = task.rows.targets
    if folds < 2 or folds > len(targets):
        raise InputError(f"--folds must be from 2 to the number of rows, {len(targets)}, got {folds}.")
    if task.rows.task == "regression":
        return list(KFold(folds, shuffle=True, random_state=seed).split(targets))
    labels, counts = np.unique(targets, return_counts=True)
    if counts.min() < folds:
        raise InputError(
            f"{task.name}: class {labels[np.argmin(counts)]!s:.60} of {task.target!r} has {counts.min()} "
            f"rows, and --folds {folds} needs one in each; take fewer folds, or leave out rare classes."
        )
    return list(StratifiedKFold(folds, shuffle=True, random_state=seed).split(targets, targets))


def evaluated(
    task: Task,
    methods: Sequence[str],
    settings: Mapping[str, Any],
    splits: Splits,
    seed: int,
    progress: bool = False,
) -> Iterator[Entry]:
    """One competitor after the other, baselines first: they are quick."""
    for name in baselines.NAMES:
        yield baseline_entry(task, name, splits, seed)
    for method in methods:
        began = time.perf_counter()
        given = {**settings, "method": method, "random_state": seed, "verbose": int(progress)}
        estimator = task.estimator(given)
        with told_as_input_errors(task.name), noted() as notes:
            found = cross_validate(
                estimator, task.rows.inputs, task.rows.targets, cv=splits, return_estimator=True
            )
        rows = rows_by(found["estimator"], task, splits)
        yield Entry(method, rows, time.perf_counter() - began, notes)


def baseline_entry(task: Task, name: str, splits: Splits, seed: int) -> Entry:
    """A baseline, fitted to each split."""
    began, parts = time.perf_counter(), []
    inputs, y = task.rows.inputs, task.rows.targets
    classes = np.unique(y) if task.rows.task == "classification" else None
    with noted() as notes:
        for train, test in splits:
            law = baselines.predicted(name, inputs.iloc[train], y[train], inputs.iloc[test], classes, seed)
            parts.append(_of_classes(law, y[test], classes) if classes is not None else _of_law(law, y[test]))
    # What the library says of columns, it has said before.
    del notes[:]
    return Entry(name, _joined(parts, splits, len(y)), time.perf_counter() - began, notes)


def rows_by(estimators: Sequence[Any], task: Task, splits: Splits) -> Rows:
    """Scores of every row, by the estimator that has not seen it."""
    parts = [
        row_scores(one, task.rows.inputs.iloc[test], task.rows.targets[test])
        for one, (_, test) in zip(estimators, splits, strict=True)
    ]
    return _joined(parts, splits, len(task.rows.targets))


def _joined(parts: list[Rows], splits: Splits, rows: int) -> Rows:
    found = {name: np.full(rows, np.nan) for name in parts[0]}
    for part, (_, test) in zip(parts, splits, strict=True):
        for name, values in part.items():
            found[name][test] = values
    return found


def log_scores(estimator: Any, frame: Any, targets: np.ndarray) -> np.ndarray:
    """The log score of every row alone, as `row_scores` has it: much quicker."""
    if hasattr(estimator, "classes_"):
        return row_scores(estimator, frame, targets)["nll"]
    return np.concatenate(
        [negative_log_likelihoods(law, targets[rows]) for rows, law in blocks(estimator, frame)]
    )


def row_scores(estimator: Any, frame: Any, targets: np.ndarray) -> Rows:
    """Of a fitted estimator: log score, and CRPS, squared error, interval; or Brier score, and what is
    right."""
    parts: list[Rows] = []
    for rows, law in blocks(estimator, frame):
        y = targets[rows]
        if hasattr(estimator, "classes_"):
            parts.append(_of_classes(np.asarray(law.probs, np.float64), y, estimator.classes_))
            continue
        low, high = (np.asarray(end, np.float64) for end in law.interval(COVERAGE))
        parts.append(
            {
                "nll": negative_log_likelihoods(law, y),
                "crps": ranked_probability_scores(law, y),
                "squared error": np.square(y - np.asarray(law.mean, np.float64)),
                "inside": ((low <= y) & (y <= high)).astype(np.float64),
                "width": high - low,
            }
        )
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _of_law(law: Any, y: np.ndarray) -> Rows:
    low, high = law.interval(COVERAGE)
    return {
        "nll": law.nll(y),
        "crps": law.crps(y),
        "squared error": np.square(y - law.mean()),
        "inside": ((low <= y) & (y <= high)).astype(np.float64),
        "width": high - low,
    }


def _of_classes(table: np.ndarray, y: np.ndarray, classes: Any) -> Rows:
    labels = np.searchsorted(classes, y)
    table = table / table.sum(axis=1, keepdims=True)
    own = table[np.arange(len(y)), labels]
    return {
        "nll": -np.log(np.maximum(own, _LEAST)),
        "brier": brier_scores(table, labels),
        "right": (table.argmax(axis=1) == labels).astype(np.float64),
        "confidence": table.max(axis=1),
    }


def mean_and_error(values: np.ndarray) -> tuple[float, float]:
    """The mean over rows, and its standard error."""
    return float(np.mean(values)), float(np.std(values, ddof=1) / np.sqrt(len(values)))


def leaderboard(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """One line for each, the best log score first. Differences are to the first, paired by row, with their
    standard errors: these know that rows are few, but not that training rows could have been others."""
    ranked = sorted(entries, key=lambda entry: float(np.mean(entry.rows["nll"])))
    best, lines = ranked[0], []
    for entry in ranked:
        rows, (nll, error) = entry.rows, mean_and_error(entry.rows["nll"])
        behind, of_behind = mean_and_error(rows["nll"] - best.rows["nll"])
        line: dict[str, Any] = {
            "model": entry.name,
            "nll": nll,
            "nll_error": error,
            "behind": behind,
            "behind_error": of_behind,
        }
        if "crps" in rows:
            line["crps"], line["crps_error"] = mean_and_error(rows["crps"])
            line["rmse"] = float(np.sqrt(np.mean(rows["squared error"])))
            line["coverage_90"], line["width_90"] = (float(np.mean(rows[n])) for n in ("inside", "width"))
        else:
            line["brier"], line["brier_error"] = mean_and_error(rows["brier"])
            line["accuracy"], line["accuracy_error"] = mean_and_error(rows["right"])
        lines.append(line | {"seconds": entry.seconds})
    return lines
