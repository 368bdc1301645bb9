"""A target among the inputs: what looks like a very good fit, and is none."""

import warnings

import numpy as np

from measureflow.core.warned import at_the_users_line
from measureflow.tables.frames import Columns

# By chance, a column of few rows may well be the target.
_FEWEST_ROWS, _ROUNDING = 10, 1e-9
# And so may a sum of columns, where there are not so many rows for each.
_ROWS_A_COLUMN, _MOST_COLUMNS = 3, 1_000
# Of the target's deviation, what a sum may leave: it may have been rounded.
_LEFT = 1e-6
# Of the largest share in such a sum, what is named; and so many columns are.
_SMALLEST_SHARE, _MOST_NAMED = 1e-3, 5


def warn_of_the_target(columns: Columns, rows: np.ndarray, y: np.ndarray, are_labels: bool) -> None:
    """Where a column of a frame is the target under another name: on a line with it, or, for labels, their
    names changed one by one; and where several together are."""
    if len(y) < _FEWEST_ROWS or np.all(y == y[0]):
        return
    told = False
    for column, place in zip(columns.columns, columns.places, strict=True):
        tells = _renames if are_labels else _is_a_line_through
        if column.parts and tells(rows[:, place], y):
            told = True
            warnings.warn(
                f"column {column.name!r} of X tells the target exactly: is it y under another name? Then "
                "drop it, or new rows will be predicted far worse than these.",
                stacklevel=at_the_users_line(),
            )
    shares = np.zeros(0) if told or are_labels or y.ndim > 1 else _shares_of_a_sum(rows, y)
    if len(shares):
        of_columns = [np.max(shares[place], initial=0.0) for place in columns.places]
        order = np.argsort(of_columns)[::-1][:_MOST_NAMED]
        named = [columns.columns[i].name for i in order if of_columns[i] > _SMALLEST_SHARE * max(of_columns)]
        warnings.warn(
            "columns of X tell the target exactly: y is a linear function of them, mostly of "
            f"{', '.join(map(repr, named))}. If some are parts of y, or known only with it, drop them, or "
            "new rows will be predicted far worse than these. If not, use "
            "sklearn.linear_model.LinearRegression, which is exact here; networks are not.",
            stacklevel=at_the_users_line(),
        )


def _shares_of_a_sum(rows: np.ndarray, y: np.ndarray) -> np.ndarray:
    """How much each number of a row adds to the variation of a target that is a linear function of them; none
    where it is not one."""
    if rows.shape[1] > min(_MOST_COLUMNS, len(rows) // _ROWS_A_COLUMN - 1):
        return np.zeros(0)
    # A sum that is wrong of some rows is none, and of these few it is soon found.
    few = max(_ROWS_A_COLUMN * (rows.shape[1] + 1), _FEWEST_ROWS)
    if len(rows) > 2 * few and not len(_shares_of_a_sum(*(part[:: len(rows) // few] for part in (rows, y)))):
        return np.zeros(0)
    scale = np.maximum(np.abs(rows - rows.mean(axis=0)).max(axis=0), 1e-300)
    inputs, target = (rows - rows.mean(axis=0)) / scale, y - y.mean()
    coefficients = np.linalg.lstsq(inputs, target, rcond=1e-9)[0]
    left = target - inputs @ coefficients
    if np.linalg.norm(left) > _LEFT * np.linalg.norm(target):
        return np.zeros(0)
    return np.abs(coefficients) * inputs.std(axis=0)


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
