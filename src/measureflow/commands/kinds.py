"""What the columns of a table are: found, overruled by the user, and shown."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from measureflow.commands.errors import InputError
from measureflow.tables.columns import MISSING, Category
from measureflow.tables.frames import Columns
from measureflow.tables.reading import (
    Raw,
    column_of,
    numbers_in,
    written_dates,
    written_numbers,
)

#: What `--type COLUMN=KIND` takes.
KINDS = ("number", "category", "date", "drop")


def overrules(given: Sequence[str], drop: Sequence[str]) -> dict[str, str]:
    """`COLUMN=KIND` of the command line, and columns to leave out, as one table."""
    kinds = {}
    for one in given:
        column, equals, kind = one.rpartition("=")
        if not equals or not column or kind not in KINDS:
            raise InputError(f"--type must be COLUMN=KIND with a kind of {', '.join(KINDS)}, got {one!r}.")
        kinds[column] = kind
    return kinds | dict.fromkeys(drop, "drop")


def overruled(frame: Any, kinds: Mapping[str, str], name: str) -> Any:
    """A frame whose columns are what the user says they are."""
    if unknown := [column for column in kinds if column not in frame.columns]:
        raise InputError(
            f"{name}: there is no column {unknown[0]!r}, which --type or --drop names; there are "
            f"{listed(frame.columns)}."
        )
    kept = frame.drop(columns=[column for column, kind in kinds.items() if kind == "drop"])
    for column, kind in kinds.items():
        raw = column_of(frame, list(frame.columns).index(column), column)
        if kind != "drop" and raw.kind not in (kind, "empty"):
            kept[column] = _as(kind, raw, name)
        if kind == "category":
            # Else texts that are all numbers would count as numbers.
            kept[column] = kept[column].astype("category")
    return kept


def _as(kind: str, raw: Raw, name: str) -> np.ndarray:
    if kind == "category":
        return np.array([None if gone else level_of(value) for value, gone in _pairs(raw)], object)
    if raw.kind != "text":
        raise InputError(f"{name}: column {raw.name!r} holds a {raw.kind}, which is no {kind}; mend --type.")
    texts = [None if gone else value for value, gone in _pairs(raw)]
    known = [text for text in texts if text is not None]
    wrong = [math.isnan(number) for number in written_numbers(known)]
    if kind == "date":
        wrong = [date is None for date in written_dates(known)]
    if any(wrong):
        text = known[wrong.index(True)]
        remedy = "write dates as 2024-12-31" if kind == "date" else "write numbers as 1234.5"
        raise InputError(
            f"{name}: column {raw.name!r} holds {text!r:.60}, which is no {kind}; {remedy}, declare what "
            f"stands for missing values with --missing {text!r:.20}, or mend --type."
        )
    if kind == "date":
        return np.array(texts, object)
    return np.array([math.nan if text is None else written_numbers([text])[0] for text in texts])


def _pairs(raw: Raw) -> zip:
    return zip(raw.values.tolist(), raw.missing.tolist(), strict=True)


def level_of(value: Any) -> str:
    """The text of a level: 1 and 1.0 are one."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def with_numbers(frame: Any) -> Any:
    """Columns of text that are all numbers, as numbers: once, and not in every fold again."""
    found = {}
    for position, column in enumerate(frame.columns):
        raw = column_of(frame, position, column)
        numbers = numbers_in(raw) if raw.kind == "text" else None
        if numbers is not None:
            found[column] = numbers.values
    return frame.assign(**found) if found else frame


def require_values(frame: Any, name: str, known: Columns | None = None) -> None:
    """No column is without any value: such a file was cut off, or joined with nothing. One that may be empty
    is one of a model that has seen missing values in it."""
    learned = {} if known is None else {column.name: column for column in known.columns}
    for column in frame.columns:
        parts = learned[column].parts if column in learned else ()
        if (known is not None and (not parts or MISSING in parts)) or not frame[column].isna().all():
            continue
        remedy = f"leave it out with --drop {column!r}, or fill it"
        if known is not None:
            remedy = "fill it, or pass --unseen to let the training median stand for it"
        raise InputError(f"{name}: column {column!r} has no value in any row; {remedy}.")


def listed(names: Any, most: int = 8) -> str:
    """Some names, for a message."""
    texts = [repr(str(name)) for name in names]
    return ", ".join(texts[:most]) + (f", … ({len(texts)} in all)" if len(texts) > most else "")


def found_kinds(columns: Columns, frame: Any, kinds: Mapping[str, str]) -> list[tuple[str, list[str]]]:
    """(kind, what is said of each of its columns)."""
    groups: dict[str, list[str]] = {}
    for column in columns.columns:
        said = []
        if isinstance(column, Category):
            said.append(f"{len(column.levels)} levels")
        if gone := int(frame[column.name].isna().sum()):
            said.append(f"{gone} missing")
        if column.name in kinds:
            said.append("as told")
        groups.setdefault(column.kind, []).append(column.name + (f" ({', '.join(said)})" if said else ""))
    if dropped := [column for column, kind in kinds.items() if kind == "drop"]:
        groups["dropped"] = [f"{column} (as told)" for column in dropped]
    return list(groups.items())
