"""Labels of classes, by number or by name."""

import warnings
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
from jaxtyping import Float, Int, Shaped

from measureflow.core.warned import at_the_users_line

# A warning where labels fit so many times better by another reading, all rows together.
_MUCH_MORE_PROBABLE = 1e6


def class_numbers(labels: Any, shape: tuple[int, int], classes: Any = None) -> Int[np.ndarray, " rows"]:
    """The column of each row's class, in a table of probabilities of that shape.

    Labels are numbers of columns, unless `classes` names the columns. Strings are names, too: without
    `classes` they stand for the columns in their sorted order, as in `classes_`, if all are there.
    """
    rows, columns = shape
    remedy = (
        f"pass the number of each row's class, 0 to {columns - 1}, or its name and classes=model.classes_."
    )
    values = plain(labels)
    if values.shape != (rows,):
        fix = "drop the last axis with labels[..., 0]." if values.shape == (rows, 1) else remedy
        raise ValueError(f"labels has shape {values.shape}, but one class per row is ({rows},); {fix}")
    if classes is not None:
        return _by_name(values, _names(classes, columns))
    if values.dtype.kind == "U":
        names = np.unique(values)
        if len(names) != columns:
            raise ValueError(
                f"labels name {len(names)} classes, got {names}, but probabilities have {columns} columns; "
                "pass classes=model.classes_, which says which column is whose."
            )
        return _by_name(values, names.tolist())
    if values.dtype.kind not in "iub":
        raise TypeError(f"labels must be integers or strings, got {values.dtype}; {remedy}")
    unknown = (values < 0) | (values >= columns)
    if np.any(unknown):
        row = int(np.argmax(unknown))
        raise ValueError(f"labels must be classes, got {values[row]} in row {row}; {remedy}")
    return values.astype(np.int64)


def warn_of_names(numbers: Int[np.ndarray, " rows"], table: Float[np.ndarray, "rows classes"]) -> None:
    """Labels 1 to K are names, and as numbers of columns they are wrong; which shows only where one is K. So
    a warning where none is 0, and probabilities are much higher for the columns before: by more than a few
    rows say, each of which counts for log 100 at most."""
    rows, logarithms = np.arange(len(numbers)), np.log(np.maximum(table, 0.01))
    fits = [logarithms[rows, numbers - shift].sum() for shift in range(int(numbers.min()) + 1)]
    best = int(np.argmax(fits))
    if fits[best] - fits[0] > np.log(_MUCH_MORE_PROBABLE):
        warnings.warn(
            f"labels are taken for numbers of columns, 0 to {table.shape[1] - 1}, and none of them is 0; "
            f"less {best}, they would be more probable by {(fits[best] - fits[0]) / len(rows):.2g} nats a "
            "row. If they are names of classes, pass classes=model.classes_, or "
            "np.searchsorted(model.classes_, y).",
            stacklevel=at_the_users_line(),
        )


def plain(values: Any) -> Shaped[np.ndarray, "..."]:
    """As an array of NumPy, by the kind of what is in it: columns of a table may hold objects."""
    array = np.asarray(values)
    if array.dtype.kind in "OT":
        if array.size and all(isinstance(value, Decimal | Fraction) for value in array.ravel()):
            return array.astype(np.float64)
        inferred = np.array(array.tolist())
        # Of text and numbers NumPy makes text.
        mixed = inferred.dtype.kind == "U" and not all(isinstance(value, str) for value in array.ravel())
        return array if mixed or inferred.shape != array.shape else inferred
    return array


def _names(classes: Any, columns: int) -> list[Any]:
    names = plain(classes).tolist()
    if not isinstance(names, list) or len(names) != columns or len(set(names)) != columns:
        raise ValueError(
            f"classes must name each of the {columns} columns of the probabilities once, got {classes!r}; "
            "pass model.classes_."
        )
    return names


def _by_name(values: np.ndarray, names: list[Any]) -> Int[np.ndarray, " rows"]:
    numbers = {name: number for number, name in enumerate(names)}
    given = values.tolist()
    found = [numbers.get(value, -1) for value in given]
    if -1 in found:
        row = found.index(-1)
        raise ValueError(
            f"labels must be among classes {names}, got {given[row]!r} in row {row}; drop such rows, or fit "
            "with them."
        )
    return np.array(found, np.int64)
