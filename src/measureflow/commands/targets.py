"""The target among the columns of a table: its values, and whether they are numbers or classes."""

import difflib
from typing import Any, NamedTuple

import numpy as np

from measureflow.commands.errors import InputError
from measureflow.commands.files import Source
from measureflow.commands.kinds import level_of, listed
from measureflow.tables.reading import Raw, column_of, numbers_in

TASKS = ("regression", "classification")
# More classes than this have too few rows each, or are numbers.
_MOST_CLASSES = 100


class Labelled(NamedTuple):
    """Inputs, a target for each row, what it is, why it is taken for that, and the numbers of the rows in the
    file, from 1 on."""

    inputs: Any
    targets: np.ndarray
    task: str
    reason: str
    numbers: np.ndarray


def labelled(source: Source, target: str, task: str | None = None, skip_missing: bool = False) -> Labelled:
    """A table cut into inputs and targets, none of which is missing."""
    frame, name = source
    require_target(source, target)
    raw = column_of(frame, list(frame.columns).index(target), target)
    if raw.kind == "empty":
        raise InputError(f"{name}: the target {target!r} has no value in any row; pass another --target.")
    if raw.missing.any() and not skip_missing:
        row = int(np.argmax(raw.missing)) + 1
        raise InputError(
            f"{name}: the target {target!r} is missing in {int(raw.missing.sum())} of {len(frame)} rows, the "
            f"first is row {row}; fill them, or leave these rows out with --skip-missing-targets."
        )
    if frame.shape[1] < 2:
        raise InputError(
            f"{name}: there is no column beside the target {target!r}; pass a table with inputs."
        )
    task, reason = (task, "as told") if task else _task_of(raw)
    known = ~raw.missing
    values = targets_as(raw, task, name)[known]
    _require_varied(values, task, target, name)
    inputs = frame.drop(columns=[target])[known].reset_index(drop=True)
    return Labelled(inputs, values, task, reason, np.flatnonzero(known) + 1)


def require_target(source: Source, target: str) -> None:
    """The column is there."""
    names = list(source.frame.columns)
    if target not in names:
        near = difflib.get_close_matches(target, names, 1)
        meant = f"did you mean {near[0]!r}? " if near else ""
        raise InputError(
            f"{source.name}: there is no column {target!r} to be the target; {meant}There are "
            f"{listed(names)}."
        )


def targets_as(raw: Raw, task: str, name: str) -> np.ndarray:
    """As a model of this task has them: float64, or texts; where they are missing, NaN or an empty text."""
    if task == "classification":
        labels = raw.values.tolist()
        if raw.kind == "boolean":
            labels = [bool(value) for value in labels]
        gone = raw.missing.tolist()
        return np.array(
            ["" if no else level_of(label) for label, no in zip(labels, gone, strict=True)], np.str_
        )
    numbers = (numbers_in(raw) if raw.kind == "text" else raw) if raw.kind in ("text", "number") else None
    if numbers is None:
        example = raw.values[~raw.missing][0]
        raise InputError(
            f"{name}: the target {raw.name!r} must hold numbers for a regression, and holds {example!r:.60}; "
            "write numbers as 1234.5, pass --missing for what stands for missing values, or pass "
            "--task classification."
        )
    return np.asarray(numbers.values, np.float64)


def _task_of(raw: Raw) -> tuple[str, str]:
    """Numbers are regressed, unless there are two of them; all else are classes."""
    numbers = (numbers_in(raw) or raw) if raw.kind == "text" else raw
    if numbers.kind != "number":
        return "classification", f"the target holds {numbers.kind}"
    if len(np.unique(numbers.values[~numbers.missing])) == 2:
        return "classification", "the target has two values"
    return "regression", "the target holds numbers"


def _require_varied(values: np.ndarray, task: str, target: str, name: str) -> None:
    distinct = np.unique(values)
    if len(distinct) < 2:
        raise InputError(
            f"{name}: the target {target!r} is {distinct[0]!s:.60} in every row, so that there is nothing to "
            "learn; pass another --target."
        )
    if task == "classification" and len(distinct) > _MOST_CLASSES:
        raise InputError(
            f"{name}: the target {target!r} has {len(distinct)} classes, and at most {_MOST_CLASSES} are "
            "learned; put rare ones together, or pass --task regression if they are numbers."
        )
