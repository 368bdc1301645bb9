"""What is known of one column of a frame, by its kind: how it becomes numbers.

Each column makes some *parts*, of which those stay that vary in training, and each part is a number:

    numbers     x, and whether it is missing, for which the median stands
    booleans    0 and 1, likewise
    order       the place of a level among the levels
    dates       seconds since 1970; sine and cosine of time of day, day of week and day of year
    categories  1 for the level of the row, 0 for all others; missing is a level
"""

import abc
import dataclasses
import decimal
import math
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from measureflow.saving.registry import require
from measureflow.tables.reading import (
    LONGEST,
    Raw,
    dates_in,
    factorised,
    numbers_in,
    written_dates,
    written_numbers,
)

MOST_LEVELS, MOST_ORDERED = 64, 10_000
MISSING, OTHER = " is missing", " is other"
_DAY, _WEEK, _YEAR = 86_400.0, 7.0, 365.25


@dataclasses.dataclass(frozen=True)
class AbstractColumn(abc.ABC):
    """What is known of one column. Its numbers are named name + part."""

    #: In files.
    kind: ClassVar[str]
    name: str
    parts: tuple[str, ...] = ()

    @abc.abstractmethod
    def made(self, raw: Raw) -> dict[str, np.ndarray]:
        """By part: at least those of `parts`."""

    @property
    def indicators(self) -> tuple[bool, ...]:
        """Which parts are 0 or 1."""
        return tuple(part == MISSING for part in self.parts)

    def unseen(self, raw: Raw) -> np.ndarray:
        """Which rows have a level that nothing in training was like."""
        return np.zeros(len(raw.values), bool)

    def require_sound(self) -> None:
        """Raises where a file says what `learn` would not."""
        require(_is_text(self.name), "a column's name is no text")
        texts = type(self.parts) is tuple and all(map(_is_text, self.parts))
        once = texts and len(set(self.parts)) == len(self.parts) <= MOST_LEVELS + 2
        require(once, f"parts of {self.name!r:.80} are not so many texts")
        nothing = Raw(self.name, "empty", np.full(1, np.nan), np.ones(1, bool))
        known = set(self.parts) <= set(self.made(nothing))
        require(known, f"parts of {self.name!r:.80} are not those of a {self.kind}")


def _is_text(value: Any) -> bool:
    return type(value) is str and len(value) <= LONGEST + len("=")


def _is_number(value: Any) -> bool:
    return type(value) is float and math.isfinite(value)


def _held(raw: Raw, what: str) -> TypeError:
    example = raw.values[~raw.missing][0]
    return TypeError(
        f"column {raw.name!r} of X held {what} in fit, and now holds a {raw.kind}, such as {example!r:.80}; "
        "convert it to the type that it had."
    )


@dataclasses.dataclass(frozen=True)
class LeftOut(AbstractColumn):
    """A column that says nothing of new rows: constant, empty, or another value in every row."""

    kind = "left out"

    def made(self, raw: Raw) -> dict[str, np.ndarray]:
        return {}


@dataclasses.dataclass(frozen=True)
class Number(AbstractColumn):
    """x, or the median where it is missing; and 1 where it is missing."""

    kind = "number"
    median: float = 0.0

    def made(self, raw: Raw) -> dict[str, np.ndarray]:
        values = self.values(raw)
        missing = np.isnan(values)
        return {"": np.where(missing, self.median, values), MISSING: missing.astype(np.float64)}

    def values(self, raw: Raw) -> np.ndarray:
        """Numbers, NaN where they are missing."""
        if raw.kind == "text":
            found = numbers_in(raw)
            if found is None:
                text = _first(raw, lambda text: math.isnan(written_numbers([text])[0]))
                raise ValueError(
                    f"column {raw.name!r} of X held numbers in fit, and now {text!r:.80}; write numbers as "
                    "1234.5, and leave out what is missing."
                )
            raw = found
        if raw.kind not in ("number", "boolean", "empty"):
            raise _held(raw, "numbers")
        return np.where(raw.missing, np.nan, raw.values)

    def require_sound(self) -> None:
        require(_is_number(self.median), f"the median of {self.name!r:.80} is no finite number")
        super().require_sound()


@dataclasses.dataclass(frozen=True)
class Duration(Number):
    """Seconds."""

    kind = "duration"

    def values(self, raw: Raw) -> np.ndarray:
        if raw.kind not in ("duration", "empty"):
            raise _held(raw, "durations")
        return np.where(raw.missing, np.nan, raw.values)


@dataclasses.dataclass(frozen=True)
class Boolean(Number):
    """0 for False, 1 for True."""

    kind = "boolean"

    @property
    def indicators(self) -> tuple[bool, ...]:
        return (True,) * len(self.parts)

    def values(self, raw: Raw) -> np.ndarray:
        known = raw.kind in ("boolean", "empty") or (
            raw.kind == "number" and np.isin(raw.values[~raw.missing], (0, 1)).all()
        )
        if not known:
            raise _held(raw, "True and False")
        return np.where(raw.missing, np.nan, raw.values)


@dataclasses.dataclass(frozen=True)
class Ordered(Number):
    """The place of a level among the levels: 0, 1, 2, …"""

    kind = "ordered"
    levels: tuple[str, ...] = ()

    def values(self, raw: Raw) -> np.ndarray:
        places = self._places(raw)
        return np.where(places == -1, np.nan, places)

    def unseen(self, raw: Raw) -> np.ndarray:
        return (self._places(raw) == -1) & ~raw.missing

    def _places(self, raw: Raw) -> np.ndarray:
        if raw.kind not in ("category", "text", "empty"):
            raise _held(raw, "levels in an order")
        return _places(raw, self.levels)

    def require_sound(self) -> None:
        texts = type(self.levels) is tuple and all(map(_is_text, self.levels))
        once = texts and len(set(self.levels)) == len(self.levels) <= MOST_ORDERED
        require(once, f"the levels of {self.name!r:.80} are not so many texts")
        super().require_sound()


@dataclasses.dataclass(frozen=True)
class Date(AbstractColumn):
    """Seconds s since 1970, and sine and cosine of 2π·s/day, 2π·day of week/7 and 2π·day of year/365.25.
    Where a date is missing, the median stands for s, and the centre of the circle for the angles."""

    kind = "date"
    median: float = 0.0
    zone: bool = False

    def made(self, raw: Raw) -> dict[str, np.ndarray]:
        seconds = self.values(raw)
        missing = np.isnan(seconds)
        filled = np.where(missing, self.median, seconds)
        days = np.floor(filled / _DAY)
        dates = days.astype("datetime64[D]")
        of_year = (dates - dates.astype("datetime64[Y]")).astype(np.float64)
        # The first of January 1970 was a Thursday.
        turns = {
            ": time of day": filled % _DAY / _DAY,
            ": day of week": (days + 3) % _WEEK / _WEEK,
            ": day of year": of_year / _YEAR,
        }
        made = {": time": filled}
        for name, turn in turns.items():
            made[f"{name}, sine"] = np.where(missing, 0.0, np.sin(2 * np.pi * turn))
            made[f"{name}, cosine"] = np.where(missing, 0.0, np.cos(2 * np.pi * turn))
        return made | {MISSING: missing.astype(np.float64)}

    def values(self, raw: Raw) -> np.ndarray:
        """Seconds, NaN where they are missing."""
        if raw.kind == "text":
            found = dates_in(raw)
            if found is None:
                text = _first(raw, lambda text: written_dates([text])[0] is None)
                raise ValueError(
                    f"column {raw.name!r} of X held dates in fit, and now {text!r:.80}; write all of them as "
                    "2024-12-31 23:59:59, and leave out what is missing."
                )
            raw = found
        if raw.kind not in ("date", "empty"):
            raise _held(raw, "dates")
        if raw.kind == "date" and raw.zone != self.zone:
            now = "has no time zone, and had one" if self.zone else "has a time zone, and had none"
            raise ValueError(
                f"column {raw.name!r} of X {now} in fit; give both the same, with dt.tz_localize of pandas "
                "or dt.replace_time_zone of polars."
            )
        return np.where(raw.missing, np.nan, raw.values)

    def require_sound(self) -> None:
        # The years 1 to 9999, and somewhat more.
        sound = _is_number(self.median) and abs(self.median) < 1e12 and type(self.zone) is bool
        require(sound, f"the median or the zone of {self.name!r:.80} is not that of dates")
        super().require_sound()


@dataclasses.dataclass(frozen=True)
class Category(AbstractColumn):
    """1 for the level of the row, 0 for all others: the parts "=level", in the order of their frequency.
    Levels that were rare in training, or are new, are "other", all of them together, if some were rare."""

    kind = "category"

    @property
    def levels(self) -> tuple[str, ...]:
        """Those that have a part of their own."""
        return tuple(part[1:] for part in self.parts if part.startswith("="))

    @property
    def indicators(self) -> tuple[bool, ...]:
        return (True,) * len(self.parts)

    def made(self, raw: Raw) -> dict[str, np.ndarray]:
        places = self._places(raw)
        made = {f"={level}": places == place for place, level in enumerate(self.levels)}
        made[OTHER] = (places == -1) & ~(raw.missing & (MISSING in self.parts))
        made[MISSING] = raw.missing
        return {part: found.astype(np.float64) for part, found in made.items()}

    def unseen(self, raw: Raw) -> np.ndarray:
        if OTHER in self.parts:
            return super().unseen(raw)
        return (self._places(raw) == -1) & ~raw.missing

    def _places(self, raw: Raw) -> np.ndarray:
        if raw.kind in ("number", "boolean") and self._are_numbers():
            values = raw.values if raw.kind == "number" else raw.values == 1
            raw = raw._replace(values=np.array([_level(value) for value in values.tolist()], object))
        elif raw.kind not in ("category", "text", "empty"):
            raise _held(raw, "categories")
        return _places(raw, self.levels)

    def _are_numbers(self) -> bool:
        levels = [level for level in self.levels if level not in ("True", "False")]
        return not any(map(math.isnan, written_numbers(levels)))


def _places(raw: Raw, levels: tuple[str, ...]) -> np.ndarray:
    """Of the values among the levels, −1 where they are none of them, or missing. "1.0" is also "1", if none
    of the levels is."""
    places = {_as_number(level): place for place, level in reversed([*enumerate(levels)])}
    places |= {level: place for place, level in enumerate(levels)}
    found = np.full(len(raw.values), -1.0)
    texts, codes = factorised(raw.values[~raw.missing])
    of_texts = [places.get(text, places.get(_as_number(text), -1)) for text in texts]
    found[~raw.missing] = np.array(of_texts, np.float64)[codes]
    return found


def _as_number(text: str) -> str:
    """The same for all ways to write one number by its digits; other texts as they are. "1E3" may be a code,
    and of numbers that are codes no digit may be rounded."""
    if "e" in text.lower() or math.isnan(written_numbers([text])[0]):
        return text
    number = decimal.Decimal(text)
    whole = number.to_integral_value()
    return f"{int(whole)}" if number == whole else f"{number:f}".rstrip("0")


def _first(raw: Raw, is_wrong: Callable[[str], bool]) -> str:
    """The first text that is wrong, or that differs in kind from the others."""
    texts, _ = factorised(raw.values[~raw.missing])
    return next((text for text in texts if is_wrong(text)), texts[-1])


def _level(value: float | bool) -> str:
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
