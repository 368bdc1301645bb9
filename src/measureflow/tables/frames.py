"""From the columns of a frame to the numbers that a network reads: learned by `fit`, then applied."""

import collections
import dataclasses
import itertools
import math
import warnings
from typing import Any

import numpy as np

from measureflow.core.warned import at_the_users_line
from measureflow.saving.registry import require, saved
from measureflow.tables.columns import (
    MISSING,
    MOST_LEVELS,
    MOST_ORDERED,
    OTHER,
    AbstractColumn,
    Boolean,
    Category,
    Date,
    Duration,
    LeftOut,
    Number,
    Ordered,
)
from measureflow.tables.reading import (
    Raw,
    column_of,
    dates_in,
    names_of,
    numbers_in,
    written_dates,
    written_numbers,
)

#: A level is one of its own where it is seen so often: in rows, and as a share of them.
FEWEST, SMALLEST_SHARE = 5, 0.002
# The deviation of a level with share p is about √p, and a row of that level would be 1/√p of them away: 30,
# where one in a thousand has it. Networks that have hardly seen a level should not be moved by it most. At
# 0.2, the deviation of a level that one row of 24 has, such a row is at most 5 away.
_SMALLEST_DEVIATION = 0.2
# Of a column of text: from so many different numbers on, it is one of numbers.
_FEWEST_NUMBERS = 10


def _learned(raw: Raw) -> AbstractColumn:
    if raw.kind == "text":
        raw = numbers_in(raw) or dates_in(raw) or raw
    if raw.kind in ("text", "category") and raw.order is None:
        return _learned_category(raw)
    if raw.kind == "empty":
        return LeftOut(raw.name)
    column = _with_all_parts(raw)
    varying = tuple(part for part, found in column.made(raw).items() if _varies(part, found, raw.missing))
    return dataclasses.replace(column, parts=varying) if varying else LeftOut(raw.name)


def _varies(part: str, found: np.ndarray, missing: np.ndarray) -> bool:
    """Where there are values: what stands for missing ones says nothing that MISSING does not."""
    values = found if part == MISSING else found[~missing]
    return bool(np.any(values != values[0]))


def _with_all_parts(raw: Raw) -> Any:
    if raw.kind == "date":
        return Date(raw.name, (), _middle(raw.values[~raw.missing]), raw.zone)
    if raw.kind == "category":
        levels = raw.order or ()
        if len(levels) > MOST_ORDERED or len(set(levels)) < len(levels):
            raise ValueError(
                f"column {raw.name!r} of X has {len(levels)} levels in an order, and {len(set(levels))} "
                f"texts for them; there may be {MOST_ORDERED}, with texts of their own: pass its codes as "
                "numbers, with cat.codes."
            )
        places = Ordered(raw.name, (), 0.0, levels).values(raw)
        return Ordered(raw.name, (), _middle(places[~raw.missing]), levels)
    of_kind = {"number": Number, "duration": Duration, "boolean": Boolean}[raw.kind]
    return of_kind(raw.name, (), _middle(raw.values[~raw.missing]))


def _middle(values: np.ndarray) -> float:
    """The median, and the lower one of two: a boolean for booleans, a level for levels."""
    return float(np.quantile(values, 0.5, method="lower"))


def _learned_category(raw: Raw) -> AbstractColumn:
    counts = collections.Counter(raw.values[~raw.missing].tolist())
    fewest = max(FEWEST, SMALLEST_SHARE * len(raw.values))
    often = [level for level, count in counts.items() if count >= fewest]
    levels = tuple(sorted(often, key=lambda level: (-counts[level], level))[:MOST_LEVELS])
    parts = [f"={level}" for level in levels]
    parts += [OTHER] * (len(levels) < len(counts)) + [MISSING] * bool(raw.missing.any())
    told, spoilt = None, _spoilt(raw, counts)
    if len(parts) > 1:
        told = spoilt and f"taken for categories: {spoilt}"
    elif len(counts) > 1:
        told = "left out: " + (
            spoilt
            or f"each of its {len(counts)} values is seen in fewer than {math.ceil(fewest)} of "
            f"{len(raw.values)} rows, which tells nothing of new rows; drop it, or make a column of what in "
            "it does."
        )
    if told:
        warnings.warn(f"column {raw.name!r} of X is {told}", stacklevel=at_the_users_line())
    return Category(raw.name, tuple(parts)) if len(parts) > 1 else LeftOut(raw.name)


def _warn_of_unseen(column: AbstractColumn, raw: Raw) -> None:
    """What training had nothing like is taken for something else, of which a law does not know."""
    unseen, told = column.unseen(raw), None
    if isinstance(column, Category | Ordered) and unseen.any():
        instead = "it counts as missing" if isinstance(column, Ordered) else "it counts as none of them"
        known = ", ".join(map(repr, column.levels[:5])) + ", …" * (len(column.levels) > 5)
        told = (
            f"holds {raw.values[unseen][0]!r:.80}, which is none of the levels that it had in fit, {known}; "
            f"{instead}, so that predictions for such rows may be far off. Check how levels are written, or "
            "fit with rows that have them."
        )
    elif raw.missing.any() and MISSING not in column.parts:
        told = (
            f"has no value in {int(raw.missing.sum())} of {len(raw.values)} rows, and had one in every row "
            "in fit: predictions for these rows are those for a usual value, and their intervals are too "
            "narrow. Fill it, or fit with such rows."
        )
    if told:
        warnings.warn(f"column {raw.name!r} of X {told}", stacklevel=at_the_users_line())


def _spoilt(raw: Raw, counts: collections.Counter) -> str | None:
    """Numbers or dates in most rows, and text in the others: missing values that were written down. A text
    of a few levels, such as 1, 2 and 3+, is meant so, and so is what its owner calls categories."""
    if len(counts) <= (_FEWEST_NUMBERS if raw.kind == "text" else MOST_LEVELS):
        return None
    texts = list(counts)
    for what, bad in (
        ("numbers", np.isnan(written_numbers(texts))),
        ("dates", np.array([date is None for date in written_dates(texts)])),
    ):
        rows = sum(counts[texts[i]] for i in np.flatnonzero(bad))
        if rows <= 0.5 * counts.total():
            text = texts[int(np.argmax(bad))]
            return (
                f"it holds {what}, but for {rows} row{'s' * (rows > 1)} with text such as {text!r:.80}; put "
                f"missing values in its place, and it counts as {what}."
            )
    return None


def _described(columns: "Columns") -> dict[str, Any]:
    return {"columns": [{"kind": column.kind} | dataclasses.asdict(column) for column in columns.columns]}


def _built(columns: list[dict[str, Any]]) -> "Columns":
    kinds = {kind.kind: kind for kind in (LeftOut, Number, Duration, Boolean, Ordered, Date, Category)}
    return Columns(tuple(kinds[fields["kind"]](**_without_kind(fields)) for fields in columns))


def _without_kind(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name != "kind"}


@saved(build=_built, describe=_described, check=lambda columns: columns.require_sound())
@dataclasses.dataclass(frozen=True)
class Columns:
    """What `fit` learned of the columns of a frame: how each becomes numbers."""

    columns: tuple[AbstractColumn, ...]

    @classmethod
    def learn(cls, frame: Any) -> "Columns":
        """From the rows of training alone."""
        names = names_of(frame)
        learned = cls(tuple(_learned(column_of(frame, i, name)) for i, name in enumerate(names)))
        if learned.width == 0:
            raise ValueError(
                f"X has no column to learn from: {', '.join(map(repr, names[:5]))}{', …' * (len(names) > 5)} "
                "are constant, empty, or have another value in every row; pass other columns."
            )
        return learned

    @property
    def width(self) -> int:
        """How many numbers a row becomes."""
        return sum(len(column.parts) for column in self.columns)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the numbers, in their order."""
        return tuple(f"{column.name}{part}" for column in self.columns for part in column.parts)

    @property
    def places(self) -> list[slice]:
        """Where the numbers of each column are."""
        ends = np.cumsum([0, *(len(column.parts) for column in self.columns)]).tolist()
        return [slice(*pair) for pair in itertools.pairwise(ends)]

    def numbers(self, frame: Any) -> np.ndarray:
        """The rows of a frame, or of an array with its columns, as (rows, width)."""
        if frame.shape[0] == 0:
            raise ValueError(f"Found array with 0 sample(s) (shape={frame.shape}); pass at least one row.")
        rows = np.empty((frame.shape[0], self.width))
        for position, (column, place) in enumerate(zip(self.columns, self.places, strict=True)):
            if column.parts:
                raw = column_of(frame, position, column.name)
                made = column.made(raw)
                _warn_of_unseen(column, raw)
                for i, part in enumerate(column.parts):
                    rows[:, place.start + i] = made[part]
        return rows

    def scale(self, deviation: np.ndarray) -> np.ndarray:
        """By which the numbers are divided: their standard deviation, but for levels not less than 0.2."""
        indicators = np.array([is_one for column in self.columns for is_one in column.indicators], bool)
        return np.where(indicators, np.maximum(deviation, _SMALLEST_DEVIATION), deviation)

    def require_sound(self) -> None:
        """Raises where a file says what `learn` would not."""
        for column in self.columns:
            column.require_sound()
        require(self.width > 0, "no column is left")
