"""The study's tables: what their files must be, and which rows each split has."""

import gzip
import hashlib
import os

import numpy as np
import pytest

from measureflow.study.datasets import DataError, RegressionSet
from measureflow.study.tables import files, tasks
from measureflow.study.tables.tasks import load_task, seeded_splits, shifted_splits

DATA = "1,2,30\n4,5,60\n7,8,90\n"
MASK = "1,0\n0,1\n0,0\n"
CSV = "﻿when,size,colour,price\n2019-03-23 20:21:09,1.5,red,7\n,NA,,5\n2019-03-04 16:00:00,2,blue,6\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Writes files, and makes them the known ones."""

    def write(known=True, **texts):
        for name, text in texts.items():
            place = {"data": "autompg/data.csv.gz", "mask": "autompg/test_mask.csv.gz"}
            path = tmp_path / place.get(name, f"mixed/{name}.csv")
            path.parent.mkdir(exist_ok=True)
            content = text.encode()
            path.write_bytes(gzip.compress(content) if name in place else content)
        if known:
            found = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "sums"]
            lines = [
                f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(tmp_path).as_posix()}\n"
                for path in found
            ]
            (tmp_path / "sums").write_text("".join(lines), encoding="utf-8")
            files._sums.cache_clear()
        return tmp_path

    monkeypatch.setattr(files, "SUMS", tmp_path / "sums")
    monkeypatch.setenv(files.FOLDER, str(tmp_path))
    yield write
    files._sums.cache_clear()
    load_task.cache_clear()


def test_numeric_tables_have_their_splits(folder):
    folder(data=DATA, mask=MASK)
    inputs, targets, splits = files.read_numeric("autompg")
    np.testing.assert_array_equal(inputs, [[1, 2], [4, 5], [7, 8]])
    np.testing.assert_array_equal(targets, [30, 60, 90])
    assert [[part.tolist() for part in split] for split in splits] == [[[1, 2], [0]], [[0, 2], [1]]]


@pytest.mark.parametrize(
    ("data", "mask", "match"),
    [
        (DATA, "1\n0\n", "2 rows, and autompg/data.csv.gz has 3"),
        (DATA, "2\n0\n1\n", "0 and 1 alone"),
        (DATA, "0\n0\n0\n", "without rows to train or to test on"),
        (DATA, "1\n1\n1\n", "without rows to train or to test on"),
        ("1,2\nnan,3\n4,5\n", MASK, "holds nan in row 1, column 0"),
        ("1,2\nx,3\n4,5\n", MASK, "not a table of numbers"),
    ],
)
def test_wrong_numeric_tables_are_refused(folder, data, mask, match):
    folder(data=data, mask=mask)
    with pytest.raises(DataError, match=match):
        files.read_numeric("autompg")


def test_other_files_than_the_studys_are_refused(folder):
    folder(data=DATA, mask=MASK)
    folder(known=False, data=DATA + "1,2,3\n")
    with pytest.raises(DataError, match="SHA256"):
        files.read_numeric("autompg")


def test_missing_tables_name_the_variable(folder, monkeypatch):
    folder(mask=MASK)
    with pytest.raises(FileNotFoundError, match=r"MEASUREFLOW_TABLES=.* has no autompg/data.csv.gz"):
        files.read_numeric("autompg")
    monkeypatch.delenv(files.FOLDER)
    with pytest.raises(FileNotFoundError, match="set the environment variable MEASUREFLOW_TABLES"):
        files.read_numeric("autompg")


def test_mixed_columns_are_numbers_dates_or_text(folder):
    folder(taxis=CSV)
    columns = files.read_mixed("taxis")
    assert list(columns) == ["when", "size", "colour", "price"]
    assert columns["when"].dtype.kind == "M"
    assert np.isnat(columns["when"][1])
    np.testing.assert_array_equal(columns["size"], [1.5, np.nan, 2])
    assert columns["colour"].tolist() == ["red", None, "blue"]
    assert columns["price"].dtype == np.float64
    with pytest.raises(DataError, match="no column 'fare'"):
        files.read_mixed("taxis", ("fare",))
    folder(taxis="a,b\n1,2\n3\n")
    with pytest.raises(DataError, match="2 columns, but not in row 1"):
        files.read_mixed("taxis")


def test_what_contains_the_target_is_no_input(folder):
    folder(titanic="survived,age,alive\n0,20,no\n1,,yes\n1,30,yes\n0,2,no\n1,50,yes\n")
    task = load_task("titanic")
    assert list(task.columns) == ["age"]
    assert task.kind == "classes"
    assert not task.is_numeric
    assert task.targets.tolist() == [0, 1, 1, 0, 1]


def test_seeded_splits_are_of_80_and_20_percent():
    splits = seeded_splits(50)
    assert [len(test) for _, test in splits] == [10] * 5
    assert all(sorted([*train, *test]) == list(range(50)) for train, test in splits)
    assert len({tuple(test) for _, test in splits}) == 5
    np.testing.assert_array_equal(splits[3][1], seeded_splits(50)[3][1])


def test_gap_and_tail_are_those_of_each_input():
    inputs = np.stack([np.arange(13.0), -(np.arange(13.0) ** 3), np.ones(13)], axis=1)
    gap, tail = shifted_splits(inputs, "gap"), shifted_splits(inputs, "tail")
    assert len(gap) == len(tail) == 2, "a constant input has no order"
    # ⌊13/3⌋ = 4 to ⌊26/3⌋ = 8; of the second input the order is reversed.
    assert gap[0][1].tolist() == [4, 5, 6, 7]
    assert gap[1][1].tolist() == [5, 6, 7, 8]
    # The first ⌈13/6⌉ = 3, and from ⌊65/6⌋ = 10 on.
    assert tail[0][1].tolist() == [0, 1, 2, 10, 11, 12]
    for train, test in (*gap, *tail):
        assert sorted([*train, *test]) == list(range(13))


def test_shifted_tables_are_uci_sets(monkeypatch):
    rng = np.random.default_rng(0)
    data = RegressionSet(rng.normal(size=(12, 2)), rng.normal(size=12), [])
    monkeypatch.setattr(tasks, "load_uci", lambda name: data if name == "yacht" else None)
    load_task.cache_clear()
    task = load_task("yacht-tail")
    load_task.cache_clear()
    assert (task.collection, len(task.splits), task.is_numeric) == ("tail", 2, True)
    np.testing.assert_array_equal(task.matrix(), data.inputs)


def test_unknown_tables_are_refused():
    with pytest.raises(ValueError, match="unknown table 'autmpg'"):
        load_task("autmpg")


ROWS = {
    "autompg": (392, 7),
    "machine": (209, 7),
    "ames": (2930, 79),
    "taxis": (6433, 12),
    "penguins": (344, 6),
}


@pytest.mark.skipif(not os.environ.get(files.FOLDER), reason=f"{files.FOLDER} names no folder of tables")
@pytest.mark.parametrize("name", ROWS)
def test_the_real_tables(name):
    task = load_task(name)
    assert (len(task.targets), len(task.columns)) == ROWS[name]
    assert len(task.splits) == (5 if task.collection == "mixed" else 10)
    if task.collection == "numeric":
        tested = np.concatenate([test for _, test in task.splits])
        assert sorted(tested) == list(range(len(task.targets))), "ten folds"
