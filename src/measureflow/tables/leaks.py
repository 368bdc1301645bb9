"""A target among the inputs: what looks like a very good fit, and is none."""

import warnings

import numpy as np

from measureflow.core.warned import at_the_users_line
from measureflow.tables.frames import Columns

# By chance, a column of few rows may well be the target.
_FEWEST_ROWS, _ROUNDING = 10, 1e-9


def warn_of_the_target(columns: Columns, rows: np.ndarray, y: np.ndarray, are_labels: bool) -> None:
    """Where a column of a frame is the target under another name: on a line with it, or, for labels, their
    names changed one by one."""
    if len(y) < _FEWEST_ROWS:
        return
    for column, place in zip(columns.columns, columns.places, strict=True):
        tells = _renames if are_labels else _is_a_line_through
        if column.parts and tells(rows[:, place], y):
            warnings.warn(
                f"column {column.name!r} of X tells the target exactly: is it y under another name? Then "
                "drop it, or new rows will be predicted far worse than these.",
                stacklevel=at_the_users_line(),
            )


def _is_a_line_through(rows: np.ndarray, y: np.ndarray) -> bool:
    targets = y.reshape(len(y), -1)
    inputs = _unit_columns(rows)
    return bool(np.any(np.abs(inputs.T @ _unit_columns(targets)) > 1 - _ROUNDING))


def _unit_columns(values: np.ndarray) -> np.ndarray:
    """Without their means, and of length 1; a constant is 0."""
    centred = values - values.mean(axis=0)
    centred = centred / np.maximum(np.abs(centred).max(axis=0), np.finfo(np.float64).tiny)
    return centred / np.maximum(np.linalg.norm(centred, axis=0), 1e-300)


def _renames(rows: np.ndarray, y: np.ndarray) -> bool:
    labels, codes = np.unique(y, return_inverse=True)

    def values(some: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        # One number for each row: parts of a column are levels, or a few numbers.
        return np.unique(np.sum(some * np.sqrt(np.arange(some.shape[1]) + 2.0), axis=1), return_inverse=True)

    if len(values(rows[:1000])[0]) > len(labels):
        return False
    found, theirs = values(rows)
    return len(found) == len(labels) == len(set(zip(theirs.tolist(), codes.tolist(), strict=True)))
