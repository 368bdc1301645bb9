"""Tables with their splits: what every competitor is given.

Four collections: `uci` (the nine sets on their canonical splits), `numeric` (thirteen regression tables with
ten canonical splits), `mixed` (four tables with text, dates and missing values, on five seeded splits of 80%
and 20%), and the shifted splits `gap` and `tail` of UCI sets.
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from measureflow.study.datasets import NAMES, load_uci
from measureflow.study.tables.files import NUMERIC, read_mixed, read_numeric

Split = tuple[np.ndarray, np.ndarray]
#: Those of the nnuncert collection, whose published scores can be compared.
SHIFTED = ("boston", "concrete", "energy", "kin8nm", "power", "wine", "yacht")
SHARE, SEEDED = 0.2, 5


class Mixed(NamedTuple):
    """A table as people have it: its target, and columns that must not be inputs."""

    target: str
    leave_out: tuple[str, ...]
    kind: str


MIXED = {
    "ames": Mixed("SalePrice", ("Order", "PID"), "regression"),
    "taxis": Mixed("fare", ("total",), "regression"),
    "titanic": Mixed("survived", ("alive",), "classes"),
    "penguins": Mixed("species", (), "classes"),
}
COLLECTIONS: dict[str, tuple[str, ...]] = {
    "uci": tuple(NAMES),
    "numeric": NUMERIC,
    "mixed": tuple(MIXED),
    "gap": tuple(f"{name}-gap" for name in SHIFTED),
    "tail": tuple(f"{name}-tail" for name in SHIFTED),
}
TABLES = tuple(name for names in COLLECTIONS.values() for name in names)


class Task(NamedTuple):
    """A table and its splits. Columns are float64 (NaN where a number is missing), datetime64 (NaT), or
    objects that are str (None). Targets are floats, or for classes the numbers of the sorted labels."""

    name: str
    collection: str
    kind: str
    columns: dict[str, np.ndarray]
    targets: np.ndarray
    splits: list[Split]

    @property
    def is_numeric(self) -> bool:
        """Whether every input is a number, and there."""
        return all(
            column.dtype == np.float64 and np.isfinite(column).all() for column in self.columns.values()
        )

    def matrix(self) -> np.ndarray:
        """The inputs of a numeric table, one row per case."""
        return np.stack(list(self.columns.values()), axis=1)


@cache
def load_task(name: str) -> Task:
    """The table `name`, from the folder of UCI sets (MEASUREFLOW_DATA) or of tables (MEASUREFLOW_TABLES)."""
    collection = collection_of(name)
    if collection == "uci":
        data = load_uci(name)
        return _numeric(name, collection, data.inputs, data.targets, data.splits)
    if collection in ("gap", "tail"):
        data = load_uci(name.rpartition("-")[0])
        splits = shifted_splits(data.inputs, collection)
        return _numeric(name, collection, data.inputs, data.targets, splits)
    if collection == "numeric":
        return _numeric(name, collection, *read_numeric(name))
    return _mixed(name)


def collection_of(name: str) -> str:
    """Where the table `name` belongs."""
    for collection, names in COLLECTIONS.items():
        if name in names:
            return collection
    raise ValueError(f"unknown table {name!r}; known are {', '.join(TABLES)}.")


def shifted_splits(inputs: np.ndarray, which: str) -> list[Split]:
    """For each input that is not constant, a split that its order makes (Foong et al., 2019, and the nnuncert
    collection): the rows are sorted by it, equals in the order of the table, and tested are

        gap     the middle third, from ⌊n/3⌋ to ⌊2n/3⌋
        tail    the two outer sixths, the first ⌈n/6⌉ and those from ⌊5n/6⌋ on
    """
    rows = len(inputs)
    place = np.arange(rows)
    if which == "gap":
        tested = (place >= rows // 3) & (place < 2 * rows // 3)
    else:
        tested = (place < -(-rows // 6)) | (place >= 5 * rows // 6)
    orders = [np.argsort(column, kind="stable") for column in inputs.T if np.ptp(column) > 0]
    return [(np.sort(order[~tested]), np.sort(order[tested])) for order in orders]


def seeded_splits(rows: int) -> list[Split]:
    """Five random splits of 80% and 20%; that of number i has seed i."""
    splits = []
    for seed in range(SEEDED):
        order = np.random.default_rng(seed).permutation(rows)
        tested = round(SHARE * rows)
        splits.append((np.sort(order[tested:]), np.sort(order[:tested])))
    return splits


def _numeric(name: str, collection: str, inputs: np.ndarray, targets: np.ndarray, splits: Any) -> Task:
    columns = {f"x{i}": np.ascontiguousarray(column) for i, column in enumerate(inputs.T)}
    return Task(name, collection, "regression", columns, targets, list(splits))


def _mixed(name: str) -> Task:
    what = MIXED[name]
    columns = read_mixed(name, (what.target, *what.leave_out))
    target = columns.pop(what.target)
    for column in what.leave_out:
        del columns[column]
    if what.kind == "classes":
        target = np.unique(target.astype(str), return_inverse=True)[1].astype(np.int64)
    return Task(name, "mixed", what.kind, columns, target, seeded_splits(len(target)))
