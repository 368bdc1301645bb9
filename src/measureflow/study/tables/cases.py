"""One fit: a table, a split, a seed; and how its columns become what a competitor takes.

All that is learned of a column (medians, categories) is learned from the training rows.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from measureflow.study.tables.laws import Law
from measureflow.study.tables.tasks import Task

#: The share of training rows on which early stopping and constant deviations are decided.
HELD_OUT = 0.2
#: What a competitor's fit gives: a function that predicts the test rows. For classes, probabilities.
Prediction = Callable[[], "Law | np.ndarray"]


class UnsuitedError(Exception):
    """A competitor that cannot be fitted to this table; the message says why."""


@dataclass(frozen=True)
class Case:
    """Split `split` of a task; `threads` is what a fit may use."""

    task: Task
    split: int
    seed: int = 0
    threads: int = 1

    @property
    def train(self) -> np.ndarray:
        return self.task.splits[self.split][0]

    @property
    def test(self) -> np.ndarray:
        return self.task.splits[self.split][1]

    @property
    def classes(self) -> int:
        """How many; 0 for regression."""
        return int(self.task.targets.max()) + 1 if self.task.kind == "classes" else 0

    @property
    def y(self) -> np.ndarray:
        return self.task.targets[self.train]

    def held_out(self) -> tuple[np.ndarray, np.ndarray]:
        """Numbers of training rows to learn from, and to hold out."""
        order = np.random.default_rng(self.seed).permutation(len(self.train))
        held = max(1, round(HELD_OUT * len(order)))
        return np.sort(order[held:]), np.sort(order[:held])

    def one_hot(self) -> tuple[np.ndarray, np.ndarray]:
        """Training and test rows as numbers: dates in parts, medians for missing numbers, a column for each
        category, and one for missing text."""
        matrix = one_hot(self.task, self.train)
        return matrix[self.train], matrix[self.test]

    def standardised(self) -> tuple[np.ndarray, np.ndarray]:
        """The same in standard units."""
        train, test = self.one_hot()
        mean, scale = train.mean(axis=0), train.std(axis=0)
        scale = np.where(scale > 0, scale, 1.0)
        return (train - mean) / scale, (test - mean) / scale

    def natively(self) -> tuple[list[np.ndarray], tuple[int, ...]]:
        """Columns of all rows for those who take categories, and which of them are: text stays text, with
        "missing" for what is, numbers stay NaN."""
        columns = expanded(self.task.columns)
        text = tuple(i for i, column in enumerate(columns.values()) if column.dtype == object)
        return [_filled(column) for column in columns.values()], text


def one_hot(task: Task, train: np.ndarray) -> np.ndarray:
    """All rows, by the medians and categories of the training rows."""
    parts: list[np.ndarray] = []
    for column in expanded(task.columns).values():
        if column.dtype == object:
            text = _filled(column)
            parts.append((text[:, None] == np.unique(text[train])).astype(np.float64))
        else:
            there = column[train][np.isfinite(column[train])]
            median = float(np.median(there)) if there.size else 0.0
            parts.append(np.where(np.isfinite(column), column, median)[:, None])
    matrix = np.concatenate(parts, axis=1)
    # A column that is constant where it is learned from says nothing.
    return matrix[:, np.ptp(matrix[train], axis=0) > 0]


def expanded(columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Dates as numbers: seconds, day of the year, day of the week, and hour with its parts."""
    found: dict[str, np.ndarray] = {}
    for name, column in columns.items():
        if column.dtype.kind != "M":
            found[name] = column
            continue
        days = column.astype("datetime64[D]")
        seconds = (column - days).astype(np.float64)
        since = _since(column, "s")
        found[f"{name} seconds"] = since
        found[f"{name} day of year"] = _since(days, "D") - _since(column.astype("datetime64[Y]"), "D")
        found[f"{name} weekday"] = (_since(days, "D") + 3) % 7
        found[f"{name} hour"] = np.where(np.isnat(column), np.nan, seconds / 3600)
    return found


def _since(column: np.ndarray, unit: str) -> np.ndarray:
    """Since 1970, NaN where there is no date."""
    number = column.astype(f"datetime64[{unit}]").astype(np.int64).astype(np.float64)
    return np.where(np.isnat(column), np.nan, number)


def _filled(column: np.ndarray) -> np.ndarray:
    if column.dtype != object:
        return column
    return np.array(["missing" if cell is None else cell for cell in column], object)
