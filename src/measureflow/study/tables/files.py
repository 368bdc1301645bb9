"""The files of the study's tables: read, checked, and never downloaded.

The environment variable MEASUREFLOW_TABLES names their folder: `NAME/data.csv.gz` and `NAME/test_mask.csv.gz`
of numeric tables (no header, the last column is the target; column k of the mask marks the test rows of split
k), and `mixed/NAME.csv` with a header. Every file has a known SHA256 sum.
"""

import csv
import gzip
import hashlib
import io
import os
from collections.abc import Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path

import numpy as np

from measureflow.study.datasets import DataError

#: The environment variable that names the folder of tables.
FOLDER = "MEASUREFLOW_TABLES"
NUMERIC = (
    "autompg",
    "autos",
    "concreteslump",
    "elevators",
    "kin40k",
    "machine",
    "parkinsons",
    "pendulum",
    "pol",
    "servo",
    "skillcraft",
    "stock",
    "tamielectric",
)
#: What the files must be: lines of "<SHA256>  <file>".
SUMS = Path(__file__).parents[1] / "tables_sha256sums.txt"
MISSING = ("", "NA", "NaN", "nan")
_LAYOUT = (
    "a folder that holds <table>/data.csv.gz and <table>/test_mask.csv.gz for each numeric table (autompg, "
    "autos, …; the files of the GitHub repository treforevans/uci_datasets) and mixed/ames.csv, taxis.csv, "
    "titanic.csv and penguins.csv"
)


def read_numeric(name: str) -> tuple[np.ndarray, np.ndarray, list[tuple[np.ndarray, np.ndarray]]]:
    """Inputs, targets and splits of a numeric table."""
    table, mask = (_numbers(f"{name}/{file}.csv.gz") for file in ("data", "test_mask"))
    if len(mask) != len(table):
        raise DataError(
            f"{name}/test_mask.csv.gz has {len(mask)} rows, and {name}/data.csv.gz has {len(table)}; they "
            "must have the same."
        )
    if not np.isin(mask, (0.0, 1.0)).all():
        raise DataError(f"{name}/test_mask.csv.gz must hold 0 and 1 alone.")
    tested = mask.T == 1
    if not (tested.any(axis=1) & ~tested.all(axis=1)).all():
        raise DataError(f"{name}/test_mask.csv.gz has a split without rows to train or to test on.")
    splits = [(np.flatnonzero(~column), np.flatnonzero(column)) for column in tested]
    return table[:, :-1], table[:, -1], splits


def read_mixed(name: str, needed: Sequence[str] = ()) -> dict[str, np.ndarray]:
    """The columns of a table with a header: numbers where all that is there are numbers, dates where all are
    dates, else text."""
    file = f"mixed/{name}.csv"
    rows = list(csv.reader(io.StringIO(_content(file).decode("utf-8-sig"))))
    head, body = rows[0], [row for row in rows[1:] if row]
    if ragged := [number for number, row in enumerate(body) if len(row) != len(head)]:
        raise DataError(f"{file} has {len(head)} columns, but not in row {ragged[0]} (from 0).")
    if absent := [column for column in needed if column not in head]:
        raise DataError(f"{file} has no column {absent[0]!r}; it has {', '.join(head)}.")
    return {column: _column([row[i].strip() for row in body]) for i, column in enumerate(head)}


def _column(cells: list[str]) -> np.ndarray:
    try:
        return np.array([np.nan if cell in MISSING else float(cell) for cell in cells], np.float64)
    except ValueError:
        pass
    try:
        moments = [None if cell in MISSING else datetime.fromisoformat(cell) for cell in cells]
        return np.array(moments, "datetime64[s]")
    except ValueError:
        return np.array([None if cell in MISSING else cell for cell in cells], object)


def _numbers(file: str) -> np.ndarray:
    """A table of finite numbers, separated by commas."""
    try:
        lines = gzip.decompress(_content(file)).decode("utf-8").splitlines()
        table = np.loadtxt(lines, np.float64, delimiter=",", ndmin=2)
    except (OSError, ValueError) as error:
        if isinstance(error, FileNotFoundError | DataError):
            raise
        raise DataError(f"{file} is not a table of numbers: {error}") from error
    if not np.isfinite(table).all():
        row, column = np.argwhere(~np.isfinite(table))[0]
        raise DataError(f"{file} holds {table[row, column]} in row {row}, column {column} (from 0).")
    return table


def _content(file: str) -> bytes:
    """Of a file whose sum is the known one."""
    named = os.environ.get(FOLDER)
    if not named:
        raise FileNotFoundError(
            f"the tables of the study were not found: set the environment variable {FOLDER} to {_LAYOUT}."
        )
    path = Path(named) / file
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise FileNotFoundError(
            f"the tables of the study were not found: {FOLDER}={named} has no {file}; it should name "
            f"{_LAYOUT}."
        ) from None
    if hashlib.sha256(content).hexdigest() != _sums()[file]:
        raise DataError(
            f"{path} is not the file that the study is about: its SHA256 sum is not that of {SUMS.name}; get "
            "it again."
        )
    return content


@lru_cache(maxsize=1)
def _sums() -> dict[str, str]:
    lines = (line.split() for line in SUMS.read_text(encoding="utf-8").splitlines())
    return {file: known for known, file in lines}
