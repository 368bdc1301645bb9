"""Predictions of a model that `export` wrote, with jax, numpy and flatbuffers, and without measureflow.

    from predictor import Predictor

    model = Predictor("folder")
    model.predict([{"area": 70.5, "district": "Mitte", "listed": "2024-12-31"}], quantiles=(0.05, 0.95))

A row is a dictionary with a value for each of `model.columns`, None where there is none; or, for a model that
was fitted to an array, a list of numbers. From a shell: `python predictor.py < rows.json`.
"""

import datetime
import json
import math
import re
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import jax
import numpy as np

# Every number of rows is a program of its own, so rows are filled up to one of these; more are cut in blocks.
_BLOCKS = (1, 16, 256)
_FARTHEST = 1e6
_DIGITS = re.compile(r"[+-]?(?:(?:0|[1-9]\d*)(?:\.\d*)?|\.\d+)", re.ASCII)
_NUMBER = re.compile(r"[+-]?(?:(?:0|[1-9]\d*)(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)
_TIME = r"\d\d:\d\d(?::\d\d(?:\.\d{1,9})?)?"
_DATE = re.compile(rf"\d{{4}}-\d\d-\d\d(?:[T ]{_TIME}(?:Z|[+-]\d\d:?\d\d)?)?|{_TIME}", re.ASCII)


class Predictor:
    """What `export` wrote to a folder: predict.bin, the networks and their law as jax.export has them, and
    model.json, which says how rows become numbers, and numbers become predictions."""

    def __init__(self, folder: Any):
        where = Path(folder)
        self.about = json.loads((where / "model.json").read_text(encoding="utf-8"))
        program = jax.export.deserialize(bytearray((where / "predict.bin").read_bytes()))
        self._call = jax.jit(program.call)

    @property
    def columns(self) -> list[str]:
        """The names of the columns that a row has, in their order."""
        return [column["name"] for column in self.about["columns"]]

    def predict(self, rows: Any, quantiles: Any = (0.05, 0.95), *, unseen: bool = False) -> dict[str, Any]:
        """Arrays with an entry for each row, by name. Of numbers: mean, standard_deviation, epistemic_share,
        and `quantiles` with a column for each level. Of classes: class, and probabilities with a column for
        each of `classes`.

        With `unseen`, categories pass that no row of training had."""
        levels = np.asarray(quantiles, np.float64).reshape(-1)
        if not np.all((levels >= 1e-4) & (levels <= 1 - 1e-4)):
            raise ValueError(f"quantiles must be between 0.0001 and 0.9999, got {levels.tolist()}.")
        # No axis of a program may be empty.
        asked = levels if levels.size else np.array([0.5])
        found = self._in_units(self.program(self.numbers(rows, unseen=unseen), asked))
        if "quantiles" in found:
            found["quantiles"] = found["quantiles"][..., : levels.size]
        return found

    def numbers(self, rows: Any, *, unseen: bool = False) -> np.ndarray:
        """Rows as the numbers of `model.json`, one for each of its `numbers`: float64, (rows, numbers)."""
        known = self.about["columns"]
        if isinstance(rows, list | tuple) and len(rows) and all(isinstance(row, dict) for row in rows):
            for place, row in enumerate(rows):
                _require_keys(place, row, self.columns)
            # What says that there is no value is one of these texts, or none.
            nothing = {"", *self.about["missing"]}
            made = [
                [part for one in known for part in _made(place, one, row[one["name"]], nothing, unseen)]
                for place, row in enumerate(rows)
            ]
            return np.array(made, np.float64).reshape(len(rows), -1)
        if not all(column["kind"] == "number" and column["parts"] == [""] for column in known):
            raise ValueError(
                "rows must be a list of dictionaries, one for each row, with at least one of them."
            )
        try:
            array = np.asarray(rows, np.float64)
        except (TypeError, ValueError, OverflowError):
            raise ValueError(f"rows must be numbers of shape (rows, {len(known)}).") from None
        if array.ndim != 2 or len(array) == 0 or array.shape[1] != len(known):
            raise ValueError(f"rows must be numbers of shape (rows, {len(known)}), got shape {array.shape}.")
        if not np.all(np.isfinite(array)):
            raise ValueError("rows must be finite numbers, and hold NaN or infinity.")
        return array

    def program(self, numbers: np.ndarray, levels: np.ndarray) -> list[np.ndarray]:
        """What predict.bin returns for numbers of rows, in blocks."""
        about, tails = self.about, (levels.astype(np.float32), (1 - levels).astype(np.float32))
        mean, scale = np.array(about["input_mean"]), np.array(about["input_scale"])
        with np.errstate(over="ignore"):
            inputs = np.clip((numbers - mean) / scale, -_FARTHEST, _FARTHEST).astype(np.float32)
        found = []
        for start in range(0, len(inputs), _BLOCKS[-1]):
            block = inputs[start : start + _BLOCKS[-1]]
            size = next(size for size in _BLOCKS if size >= len(block))
            filled = block[np.minimum(np.arange(size), len(block) - 1)]
            found.append([np.asarray(part, np.float64)[: len(block)] for part in self._call(filled, *tails)])
        return [np.concatenate(parts) for parts in zip(*found, strict=True)]

    def _in_units(self, found: list[np.ndarray]) -> dict[str, Any]:
        about = self.about
        if about["task"] == "classification":
            probabilities = found[0] / found[0].sum(axis=1, keepdims=True)
            best = np.argmax(probabilities, axis=1)
            labels = about["classes"]
            return {"class": [labels[i] for i in best], "classes": labels, "probabilities": probabilities}
        mean, deviation, share, quantiles = found
        location, scale = np.array(about["target_mean"]), np.array(about["target_scale"])
        if about["target_is_log"]:
            factor = np.exp(location)
            mean, deviation = factor * mean, factor * deviation
        else:
            mean, deviation = location + scale * mean, scale * deviation
        quantiles = _columns(location) + _columns(scale) * quantiles
        quantiles = np.exp(quantiles) if about["target_is_log"] else quantiles
        names = ("mean", "standard_deviation", "epistemic_share", "quantiles")
        return dict(zip(names, (mean, deviation, share, quantiles), strict=True))


def _columns(unit: np.ndarray) -> np.ndarray:
    """Units of targets, beside the axis of levels that quantiles have at the end."""
    return unit[..., None] if unit.ndim else unit


def _require_keys(place: int, row: dict, names: list[str]) -> None:
    if gone := [name for name in names if name not in row]:
        raise ValueError(f"row {place}: {gone[0]!r} is missing; where there is no value, pass None (null).")
    if more := [str(name) for name in row if name not in set(names)]:
        raise ValueError(f"row {place}: {more[0]!r:.80} is none of the columns {', '.join(names)!s:.500}.")


def _made(place: int, column: dict, value: Any, nothing: set[str], unseen: bool) -> list[float]:
    """The numbers that a value becomes: those of the column's parts."""
    where = f"row {place}, {column['name']!r}"
    text = value.strip()[:1000] if isinstance(value, str) else value
    is_nothing = isinstance(text, str) and text in nothing
    missing = text is None or is_nothing or (isinstance(text, float) and math.isnan(text))
    made = _KINDS[column["kind"]](where, column, None if missing else text, unseen)
    return [float(made[part]) for part in column["parts"]]


def _wrong(where: str, value: Any, wanted: str) -> ValueError:
    return ValueError(f"{where} must be {wanted}, got {value!r:.80}.")


def _filled(column: dict, value: float | None) -> dict[str, float]:
    """A number, and the median where there is none."""
    return {"": column["median"] if value is None else value, " is missing": float(value is None)}


def _number(where: str, column: dict, value: Any, unseen: bool) -> dict[str, float]:
    # A model of an array has seen no missing values, and knows nothing to put in their place.
    if value is None and column["median"] is not None:
        return _filled(column, None)
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        value = float(value)
    if not isinstance(value, bool | int | float):
        raise _wrong(where, value, "a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise _wrong(where, value, "a finite number")
    return _filled(column, number)


def _boolean(where: str, column: dict, value: Any, unseen: bool) -> dict[str, float]:
    if value is not None and (isinstance(value, str | list | dict) or value not in (0, 1)):
        raise _wrong(where, value, "true or false")
    return _filled(column, None if value is None else float(value))


def _ordered(where: str, column: dict, value: Any, unseen: bool) -> dict[str, float]:
    levels = column["levels"]
    value = _level(levels, value) if isinstance(value, str) else value
    if value is not None and (not isinstance(value, str) or (value not in levels and not unseen)):
        raise _wrong(where, value, f"one of {', '.join(levels)!s:.500}")
    return _filled(column, float(levels.index(value)) if value in levels else None)


def _level(levels: list[str], text: str) -> str:
    """The level that a text is, as it was written in training: "1.0" is also "1", if none of the levels is.
    Other texts as they are, and "1E3", which may be a code."""
    if text in levels or not _DIGITS.fullmatch(text):
        return text
    same = (level for level in levels if _DIGITS.fullmatch(level) and Decimal(level) == Decimal(text))
    return next(same, text)


def _category(where: str, column: dict, value: Any, unseen: bool) -> dict[str, float]:
    parts = column["parts"]
    levels = [part[1:] for part in parts if part.startswith("=")]
    if isinstance(value, bool | int | float) and all(
        _NUMBER.fullmatch(x) or x in ("True", "False") for x in levels
    ):
        whole = isinstance(value, float) and value.is_integer()
        value = str(int(value) if whole else value)
    if value is not None and not isinstance(value, str):
        raise _wrong(where, value, "a text")
    value = None if value is None else _level(levels, value)
    # Without rare levels in training, nothing like a new one was ever seen.
    if value is not None and value not in levels and " is other" not in parts and not unseen:
        raise _wrong(where, value, f"one of {', '.join(levels)!s:.500}")
    made = {f"={level}": float(level == value) for level in levels}
    is_missing = value is None and " is missing" in parts
    return made | {
        " is other": float(value not in levels and not is_missing),
        " is missing": float(value is None),
    }


def _date(where: str, column: dict, value: Any, unseen: bool) -> dict[str, float]:
    seconds = None if value is None else _seconds(where, column, value)
    filled = column["median"] if seconds is None else seconds
    day = math.floor(filled / 86_400)
    date = np.datetime64(day, "D")
    turns = {
        ": time of day": filled % 86_400 / 86_400,
        ": day of week": (day + 3) % 7 / 7,
        ": day of year": (date - date.astype("datetime64[Y]")).astype(np.float64) / 365.25,
    }
    made = {": time": filled, " is missing": float(seconds is None)}
    for name, turn in turns.items():
        made[f"{name}, sine"] = 0.0 if seconds is None else float(np.sin(2 * np.pi * turn))
        made[f"{name}, cosine"] = 0.0 if seconds is None else float(np.cos(2 * np.pi * turn))
    return made


def _seconds(where: str, column: dict, value: Any) -> float:
    """Since 1970, in UTC where there is a zone; a time of day is on the first day."""
    wanted = "a date such as 2024-12-31 or 2024-12-31T23:59:59" + ("+00:00" if column["zone"] else "")
    if not isinstance(value, str) or not _DATE.fullmatch(value):
        raise _wrong(where, value, wanted)
    try:
        if value[4] == "-":
            moment = datetime.datetime.fromisoformat(value)
        else:
            moment = datetime.datetime.combine(datetime.date(1970, 1, 1), datetime.time.fromisoformat(value))
        has_zone = moment.tzinfo is not None
        if has_zone:
            moment = moment.astimezone(datetime.UTC).replace(tzinfo=None)
    except (ValueError, OverflowError):
        raise _wrong(where, value, wanted) from None
    if has_zone != column["zone"]:
        raise _wrong(where, value, f"{wanted}, {'with' if column['zone'] else 'without'} a time zone")
    since = np.array(moment, "datetime64[us]") - np.datetime64(0, "us")
    return float(since / np.timedelta64(1, "s"))


def _nothing(where: str, column: dict, value: Any, unseen: bool) -> dict[str, float]:
    return {}


_KINDS = {
    "number": _number,
    "duration": _number,
    "boolean": _boolean,
    "ordered": _ordered,
    "category": _category,
    "date": _date,
    "left out": _nothing,
}


def main() -> None:
    """Rows of JSON on standard input; predictions on standard output."""
    found = Predictor(Path(__file__).parent).predict(json.load(sys.stdin))
    plain = {name: part.tolist() if isinstance(part, np.ndarray) else part for name, part in found.items()}
    sys.stdout.write(json.dumps(plain) + "\n")


if __name__ == "__main__":
    main()
