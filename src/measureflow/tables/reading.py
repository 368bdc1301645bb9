"""Columns of frames as NumPy has them, whichever library made the frame; none of them is imported."""

import datetime
import decimal
import math
import numbers
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse

from measureflow.runs.draws import free_memory

#: Longer texts and names are cut off here: what a file may hold is bounded.
LONGEST = 1_000
# "1,234" is a matter of taste, and "007" a code.
_NUMBER = re.compile(r"[+-]?(?:(?:0|[1-9]\d*)(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)
_TIME = r"\d\d:\d\d(?::\d\d(?:\.\d{1,9})?)?"
_DATE = re.compile(rf"\d{{4}}-\d\d-\d\d(?:[T ]{_TIME}(?:Z|[+-]\d\d:?\d\d)?)?|{_TIME}", re.ASCII)
_SECOND = np.timedelta64(1, "s")


class Raw(NamedTuple):
    """One column. Its `values` are, by `kind`: float64 of a "number", of a "boolean" (0 and 1) and of a
    "duration" (seconds); seconds since 1970 of a "date"; texts of a "text", and of a "category", for which
    `order` has all levels where they have one; "empty" is a column without any value. `zone` is whether dates
    know their time zone: they are then in UTC."""

    name: str
    kind: str
    values: np.ndarray
    missing: np.ndarray
    order: tuple[str, ...] | None = None
    zone: bool = False


def is_frame(table: Any) -> bool:
    """Whether it is a data frame of pandas or polars."""
    libraries = {base.__module__.partition(".")[0] for base in type(table).__mro__}
    if not libraries & {"pandas", "polars"}:
        return False
    if type(table).__name__ == "LazyFrame":
        raise TypeError("X is a LazyFrame, which holds no rows yet; call X.collect() first.")
    return len(getattr(table, "shape", ())) == 2


def names_of(frame: Any) -> tuple[str, ...]:
    """Of the columns of a frame; of an array, their numbers."""
    given = list(frame.columns) if is_frame(frame) else range(frame.shape[1])
    names = [str(name)[:LONGEST] for name in given]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise ValueError(
            f"X has more than one column named {', '.join(map(repr, twice[:5]))}; rename them, or drop all "
            "but one."
        )
    return tuple(names)


def column_of(frame: Any, position: int, name: str) -> Raw:
    """One column of a frame, or of an array."""
    if not is_frame(frame):
        return _of_array(name, frame[:, position])
    if hasattr(frame, "iloc"):
        return _of_pandas(name, frame.iloc[:, position])
    series = frame.to_series(position)
    if series.dtype.is_nested():
        _refuse(name, series.drop_nulls().to_list())
    of_dates = getattr(series.dtype, "time_zone", None) is not None
    missing = series.is_null().to_numpy()
    raw = _of_array(name, series.to_numpy(), missing, zone=of_dates)
    is_category = str(series.dtype).partition("(")[0] in ("Categorical", "Enum")
    return raw._replace(kind="category") if is_category and raw.kind == "text" else raw


def _of_pandas(name: str, series: Any) -> Raw:
    dtype, missing = series.dtype, series.isna().to_numpy(dtype=bool)
    if dtype.name == "category":
        return _of_categories(name, series.cat, missing)
    if dtype.name.startswith("period"):
        series = series.dt.to_timestamp()
    kind = series.dtype.kind
    if kind in "iuf":
        return _of_array(name, series.to_numpy(dtype=np.float64, na_value=np.nan), missing)
    if kind == "b" and not missing.any():
        return _of_array(name, series.to_numpy(dtype=bool), missing)
    if kind in "Mm":
        # In UTC, where there is a zone.
        known = getattr(dtype, "tz", None) or getattr(getattr(dtype, "pyarrow_dtype", None), "tz", None)
        unit = "datetime64[us]" if kind == "M" else "timedelta64[us]"
        return _of_array(name, series.to_numpy(dtype=unit), missing, zone=known is not None)
    return _of_array(name, series.to_numpy() if kind == "c" else series.to_numpy(dtype=object), missing)


def _of_categories(name: str, categories: Any, missing: np.ndarray) -> Raw:
    levels = np.array([*map(_text, categories.categories), ""], object)
    order = tuple(levels[:-1]) if categories.ordered else None
    kind = "empty" if missing.all() else "category"
    return Raw(name, kind, levels[categories.codes.to_numpy()], missing, order)


def _of_array(name: str, array: np.ndarray, missing: np.ndarray | None = None, zone: bool = False) -> Raw:
    kind = array.dtype.kind
    if kind == "U":
        kind, array = "O", array.astype(object)
    if missing is None:
        missing = np.array([_is_missing(value) for value in array], bool) if kind == "O" else None
    if kind in "fMm":
        unknown = np.isnan(array) if kind == "f" else np.isnat(array)
        missing = unknown if missing is None else missing | unknown
    if missing is None:
        missing = np.zeros(len(array), bool)
    if missing.all():
        return Raw(name, "empty", np.full(len(array), np.nan), missing)
    if kind in "iuf":
        return Raw(name, "number", _finite(name, array.astype(np.float64), missing), missing)
    if kind == "b":
        return Raw(name, "boolean", array.astype(np.float64), missing)
    if kind in "Mm":
        return Raw(name, "date" if kind == "M" else "duration", _seconds(array), missing, zone=zone)
    if kind == "O":
        return _of_objects(name, array, missing)
    raise TypeError(f"column {name!r} of X holds {array.dtype}; pass numbers, text, dates or booleans.")


def _of_objects(name: str, array: np.ndarray, missing: np.ndarray) -> Raw:
    values = array[~missing]
    kinds = set(map(type, values))

    def all_are(*classes: type) -> bool:
        return all(issubclass(kind, classes) for kind in kinds)

    def filled(found: Any, dtype: Any, nothing: Any) -> np.ndarray:
        whole = np.full(len(array), nothing, dtype)
        whole[~missing] = found
        return whole

    if all_are(str):
        texts = filled([text.strip()[:LONGEST] for text in values], object, "")
        missing = missing | (texts == "")
        return Raw(name, "empty" if missing.all() else "text", texts, missing)
    if all_are(bool, np.bool_):
        return Raw(name, "boolean", filled(values.astype(np.float64), np.float64, np.nan), missing)
    if all_are(numbers.Real, np.bool_, decimal.Decimal):
        found = filled([float(value) for value in values], np.float64, np.nan)
        return Raw(name, "number", _finite(name, found, missing), missing)
    if all_are(datetime.timedelta, np.timedelta64):
        found = _seconds(np.array(values.tolist(), "timedelta64[us]"))
        return Raw(name, "duration", filled(found, np.float64, np.nan), missing)
    if all_are(datetime.date, datetime.time, np.datetime64):
        found, zone = _moments_of(name, values.tolist())
        return Raw(name, "date", filled(found, np.float64, np.nan), missing, zone=zone)
    return _refuse(name, values.tolist())


def _refuse(name: str, values: list[Any]) -> Any:
    known = (str, numbers.Real, np.bool_, decimal.Decimal, datetime.date, datetime.time, datetime.timedelta)
    strange = [value for value in values if not isinstance(value, known)]
    if strange or not values:
        first = f"{strange[0]!r:.80}" if strange else "nested values"
        raise TypeError(
            f"column {name!r} of X holds {first}, which is neither a number, a text, a date nor a boolean; "
            "drop it, or make columns of what is in it."
        )
    kinds = {type(value).__name__: value for value in reversed(values)}
    examples = " and ".join(f"{value!r:.80} ({kind})" for kind, value in list(kinds.items())[:2])
    raise TypeError(
        f"column {name!r} of X mixes types, such as {examples}; convert it to one, with astype(str) for "
        "example."
    )


def _is_missing(value: Any) -> bool:
    """None, NaN, and what pandas calls NA and NaT."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    return isinstance(value, float | np.floating) and math.isnan(value)


def _text(value: Any) -> str:
    """Of a level: 1 and 1.0 are one."""
    if isinstance(value, numbers.Real) and not isinstance(value, bool) and float(value).is_integer():
        value = math.trunc(value)
    return str(value).strip()[:LONGEST]


def _finite(name: str, values: np.ndarray, missing: np.ndarray) -> np.ndarray:
    infinite = np.isinf(values) & ~missing
    if infinite.any():
        raise ValueError(
            f"X contains infinity in column {name!r}, row {int(np.argmax(infinite))}; put a number in its "
            "place, or a missing value."
        )
    return values


def _seconds(moments: np.ndarray) -> np.ndarray:
    """Of dates since 1970, and of durations; NaN where there is none."""
    kind = "datetime64[us]" if moments.dtype.kind == "M" else "timedelta64[us]"
    since = moments.astype(kind)
    return (since - np.datetime64(0, "us") if kind[0] == "d" else since) / _SECOND


def _moments_of(name: str, values: Sequence[Any]) -> tuple[np.ndarray, bool]:
    """Seconds since 1970, and whether time zones are known; a time of day is on the first day."""
    zones = {getattr(value, "tzinfo", None) is not None for value in values}
    if len(zones) > 1:
        raise TypeError(
            f"column {name!r} of X mixes dates with and without a time zone; give all of them one."
        )
    plain = []
    for value in values:
        if isinstance(value, datetime.time):
            value = datetime.datetime.combine(datetime.date(1970, 1, 1), value)
        if getattr(value, "tzinfo", None) is not None:
            value = value.astimezone(datetime.UTC).replace(tzinfo=None)
        plain.append(value)
    return _seconds(np.array(plain, "datetime64[us]")), True in zones


# Texts that are something else.


def factorised(texts: np.ndarray) -> tuple[list[str], np.ndarray]:
    """The texts that there are, and which of them stands where."""
    known: dict[str, int] = {}
    codes = np.array([known.setdefault(text, len(known)) for text in texts], np.int64)
    return list(known), codes


def written_numbers(texts: list[str]) -> list[float]:
    """What the texts say, NaN where that is no number."""
    return [float(text) if _NUMBER.fullmatch(text) else math.nan for text in texts]


def written_dates(texts: list[str]) -> list[Any]:
    """As Python has them, None where a text is no date or time of ISO 8601."""
    return [_written_date(text) for text in texts]


def _written_date(text: str) -> Any:
    if not _DATE.fullmatch(text):
        return None
    kind = datetime.datetime if text[4] == "-" else datetime.time
    try:
        return kind.fromisoformat(text)
    except ValueError:
        # The 30th of February looks like a date.
        return None


def numbers_in(raw: Raw) -> Raw | None:
    """A column of text whose texts are all numbers, as numbers."""
    texts, codes = factorised(raw.values[~raw.missing])
    found = np.array(written_numbers(texts))
    if np.isnan(found).any():
        return None
    values = np.full(len(raw.values), np.nan)
    values[~raw.missing] = found[codes]
    return Raw(raw.name, "number", _finite(raw.name, values, raw.missing), raw.missing)


def dates_in(raw: Raw) -> Raw | None:
    """A column of text whose texts are all dates, or all times, as dates."""
    texts, codes = factorised(raw.values[~raw.missing])
    found = written_dates(texts)
    zones = {getattr(value, "tzinfo", None) is not None for value in found}
    if len({type(value) for value in found}) > 1 or None in found or len(zones) > 1:
        return None
    seconds, zone = _moments_of(raw.name, found)
    values = np.full(len(raw.values), np.nan)
    values[~raw.missing] = seconds[codes]
    return Raw(raw.name, "date", values, raw.missing, zone=zone)


# Targets, and sparse matrices.


def targets_of(y: Any) -> Any:
    """Targets of any library, none of which is missing."""
    libraries = {base.__module__.partition(".")[0] for base in type(y).__mro__}
    missing = None
    if "polars" in libraries:
        frame = y.to_frame() if hasattr(y, "to_frame") else y
        columns = [column_of(frame, position, "y") for position in range(frame.shape[1])]
        missing = np.stack([column.missing for column in columns], axis=1)
        y = y.to_numpy()
    elif "pandas" in libraries and hasattr(y, "isna"):
        missing = np.asarray(y.isna())
    elif isinstance(y, np.ndarray) and y.dtype.kind == "f":
        missing = np.isnan(y)
    if missing is not None and missing.any():
        rows = int(missing.reshape(len(missing), -1).any(axis=1).sum())
        raise ValueError(
            f"Input y contains NaN: {rows} of {len(missing)} rows have no target; drop these rows of X and y."
        )
    return y


def dense(table: Any) -> Any:
    """A sparse matrix as an array, if there is room for it."""
    if not scipy.sparse.issparse(table):
        return table
    needed, free = 8.0 * math.prod(table.shape), free_memory()
    # Once more for the standardised copy.
    if 2 * needed > free:
        raise MemoryError(
            f"X is a sparse matrix of {table.shape[0]:,} × {table.shape[1]:,}, which takes "
            f"{2 * needed / 2**30:.1f} GiB as the arrays that networks read, and {free / 2**30:.1f} are "
            "free; take fewer rows at a time, or fewer columns, with sklearn.decomposition.TruncatedSVD."
        )
    return table.toarray()
