"""Frames as they are: what each kind of column becomes, what is refused, and what files may say of it."""

import datetime
import os
import pickle
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
import pytest
import scipy.sparse
from benchmarks.fuzz_files import fitted, parts, sealed
from helpers import assert_close
from quick import quickly_compiled  # noqa: F401
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import measureflow as mf
from measureflow.saving.container import FileFormatError
from measureflow.tables import reading
from measureflow.tables.columns import MOST_LEVELS, LeftOut
from measureflow.tables.crossvalidation import cross_validate
from measureflow.tables.frames import Columns

pytestmark = [
    pytest.mark.standard_promotion,
    pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning"),
]

SETTINGS = {
    "method": "DE",
    "hidden": (),
    "encoding": 0,
    "particles": 2,
    "steps": 50,
    "prior_weight": 1.0,
    "random_state": 0,
}
ROWS = 60
RNG = np.random.default_rng(0)
NOISE = RNG.normal(size=ROWS)
DAYS = pd.date_range("2024-02-27", periods=ROWS, freq="7h").to_series(index=range(ROWS))


def regressor(**settings):
    return mf.EnsembleRegressor(**({"likelihood": "heteroscedastic"} | SETTINGS | settings))


def classifier(**settings):
    return mf.EnsembleClassifier(**(SETTINGS | settings))


def cycled(*values, rows=ROWS):
    return [values[i % len(values)] for i in range(rows)]


def mixed():
    """One column of each kind."""
    return pd.DataFrame(
        {
            "area": RNG.normal(size=ROWS),
            "rooms": pd.array(cycled(1, 2, 3, None), dtype="Int64"),
            "town": cycled("Ames", "Boone", "Ames", None),
            "zone": pd.Categorical(cycled("b", "a", "c", "b")),
            "size": pd.Categorical(cycled("S", "L", "M", "S"), categories=["S", "M", "L"], ordered=True),
            "sold": DAYS,
            "when": DAYS.dt.strftime("%Y-%m-%d"),
            "took": pd.to_timedelta(np.arange(ROWS), unit="h"),
            "new": cycled(True, False, True),
            "old": pd.array(cycled(True, None, False), dtype="boolean"),
            "price": cycled("12.5", "7", "1e3"),
            "one": 1.0,
            "none": None,
        }
    )


FRAME = mixed()
TARGET = FRAME["area"].to_numpy() + 0.5 * NOISE


def learned(values, **more):
    """What one column becomes, as a dictionary by the names of its numbers."""
    frame = pd.DataFrame({"x": values} | more)
    columns = Columns.learn(frame)
    return columns, dict(zip(columns.names, columns.numbers(frame).T, strict=True))


# What columns become


def test_numbers_and_their_missing_values():
    columns, found = learned([1.0, 2.0, 40.0, np.nan])
    assert_close(found["x"], [1, 2, 40, 2], 0)
    assert_close(found["x is missing"], [0, 0, 0, 1], 0)
    new = columns.numbers(pd.DataFrame({"x": [np.nan, 7.0]}))
    assert_close(new, [[2, 1], [7, 0]], 0)
    whole, found = learned([1, 2, 40])
    assert list(found) == ["x"], "an indicator only where some were missing in training"
    with pytest.warns(UserWarning, match="has no value in 1 of 2 rows"):
        assert_close(whole.numbers(pd.DataFrame({"x": [None, 3.0]})), [[2], [3]], 0)


@pytest.mark.parametrize(
    "values",
    [
        pd.array([1, 2, None, 4], dtype="Int64"),
        pd.array([1, 2, None, 4], dtype="Float32"),
        np.array([1, 2, None, 4], object),
        ["1", " 2.0", None, "4e0"],
        ["1", "2", "", "4"],
        pd.array(["1", "2", pd.NA, "4"], dtype="string"),
        pd.arrays.SparseArray([1.0, 2.0, np.nan, 4.0]),
    ],
)
def test_numbers_in_all_their_clothes(values):
    _, found = learned(values)
    assert_close(found["x"], [1, 2, 2, 4], 0)
    assert_close(found["x is missing"], [0, 0, 1, 0], 0)


def test_text_that_is_no_number_is_a_category():
    for texts in (["1,234", "2"], ["007", "008"], ["1", "nan"], ["0x10", "1_0"]):
        columns, _ = learned(cycled(*texts, rows=10))
        assert set(columns.names) == {f"x={text}" for text in texts}


@pytest.mark.parametrize("different", [11, 60, 200])
def test_numbers_that_somebody_spoilt_are_told(different):
    values = [*cycled(*map(str, range(different)), rows=240), "?"]
    with pytest.warns(UserWarning, match=r"column 'x' of X is .*: it holds numbers, but for 1 row with"):
        learned(values, y=np.arange(241))


def test_a_few_numbers_beside_text_and_declared_categories_are_meant_so():
    learned(cycled("1", "2", "3+", rows=60))
    learned(pd.Categorical(cycled(*map(str, range(20)), "none", rows=210)))


def test_categories_are_in_the_order_of_their_frequency():
    columns, found = learned(["b"] * 7 + ["a"] * 5 + ["rare"] * 4 + ["rarer"] * 3 + [None])
    assert list(found) == ["x=b", "x=a", "x is other", "x is missing"]
    assert_close(sum(found.values()), np.ones(20), 0)
    assert found["x is other"].sum() == 7
    new = columns.numbers(pd.DataFrame({"x": ["a", "unseen", None, "rare"]}))
    assert_close(new, np.eye(4)[[1, 2, 3, 2]], 0)


def test_unseen_levels_are_none_of_those_known_where_none_were_rare():
    columns, found = learned(["b"] * 7 + ["a"] * 5)
    assert list(found) == ["x=b", "x=a"]
    with pytest.warns(UserWarning, match=r"'x' of X holds 'c', which is none of the levels .* 'b', 'a';"):
        rows = columns.numbers(pd.DataFrame({"x": ["c", None, "b"]}))
    assert_close(rows, [[0, 0], [0, 0], [1, 0]], 0)


@pytest.mark.parametrize("values", [cycled("a", "b", rows=12), list(range(12)), list(DAYS)])
def test_values_that_are_missing_for_the_first_time_are_told(values):
    columns, _ = learned(values)
    with pytest.warns(UserWarning, match=r"'x' of X has no value in 1 of 2 rows, and had one in every"):
        columns.numbers(pd.DataFrame({"x": [None, values[0]]}))
    columns, _ = learned([*values, None])
    columns.numbers(pd.DataFrame({"x": [None, values[0]]}))


@pytest.mark.parametrize("levels", [["1.0", "2.0", "3.5"], ["1", "2", "3.5"], ["1.00", "+2", "3.500"]])
def test_levels_that_are_numbers_may_be_written_in_other_ways(levels):
    """Fitted with the texts of a data base, asked with what a file has: all rows were of no level."""
    columns, found = learned(pd.Categorical(cycled(*levels, rows=15)))
    assert set(found) == {f"x={level}" for level in levels}
    rows = columns.numbers(pd.DataFrame({"x": pd.Categorical(levels)}))
    assert_close(rows.sum(axis=1), np.ones(3), 0)
    for other in ([1.0, 2.0, 3.5], ["1", "2", "3.5"], ["1.0", "2.00", "3.50"]):
        assert np.array_equal(columns.numbers(pd.DataFrame({"x": other})), rows), other


def test_levels_that_are_one_number_stay_apart():
    columns, _ = learned(pd.Categorical(["1"] * 6 + ["1.0"] * 5))
    rows = columns.numbers(pd.DataFrame({"x": pd.Categorical(["1.0", "1", "1.00"])}))
    assert_close(rows, [[0, 1], [1, 0], [1, 0]], 0)


def test_no_digit_of_a_code_is_rounded():
    """As numbers of double precision the first two are one; and a code may look like a power of ten."""
    columns, _ = learned(pd.Categorical(cycled("123456789012345678", "7", "1E3", rows=18)))
    for other in ("123456789012345679", "1000", "1e3"):
        with pytest.warns(UserWarning, match=f"holds '{other}', which is none of the levels"):
            assert not columns.numbers(pd.DataFrame({"x": pd.Categorical([other])})).any()
    assert columns.numbers(pd.DataFrame({"x": pd.Categorical(["123456789012345678.0"])})).any()
    learned_too, found = learned(
        pd.Categorical(["9007199254740993"] * 8 + ["a"] * 8 + ["9007199254740992"] * 2)
    )
    assert "x is other" in found
    rows = learned_too.numbers(pd.DataFrame({"x": pd.Categorical(["9007199254740992"])}))
    assert dict(zip(found, rows[0], strict=True))["x is other"] == 1


def test_levels_are_few():
    _, found = learned([f"level {i}" for i in range(100) for _ in range(6)])
    assert len(found) == MOST_LEVELS + 1
    assert found["x is other"].sum() == 6 * (100 - MOST_LEVELS)
    # A level of 0.2% of the rows is one; the share counts where there are many rows.
    _, found = learned(["a"] * 4985 + ["b"] * 9 + ["c"] * 10)
    assert list(found) == ["x=a", "x is other"]


def test_levels_that_are_numbers():
    columns, found = learned(pd.Categorical(cycled(1.0, 2.0)))
    assert list(found) == ["x=1", "x=2"]
    assert_close(columns.numbers(pd.DataFrame({"x": [2, 1]})), [[0, 1], [1, 0]], 0)
    text, _ = learned(cycled("a", "b"))
    with pytest.raises(TypeError, match="column 'x' of X held categories in fit, and now holds a number"):
        text.numbers(pd.DataFrame({"x": [2, 1]}))


def test_levels_with_an_order():
    values = pd.Categorical(["S", "L", None, "M", "S"], categories=["S", "M", "L"], ordered=True)
    columns, found = learned(values)
    assert_close(found["x"], [0, 2, 0, 1, 0], 0)
    assert_close(found["x is missing"], [0, 0, 1, 0, 0], 0)
    assert_close(columns.numbers(pd.DataFrame({"x": ["L", "M"]})), [[2, 0], [1, 0]], 0)
    with pytest.warns(UserWarning, match=r"holds 'XL', which is none of the levels .* 'S', 'M', 'L'"):
        assert_close(columns.numbers(pd.DataFrame({"x": ["XL"]})), [[0, 1]], 0)


def test_dates():
    """Against the calendar of pandas; the 29th of February is in it."""
    days = DAYS.copy()
    days[3] = pd.NaT
    _, found = learned(days)
    known = days.notna()
    turns = {
        "time of day": days.dt.hour / 24,
        "day of week": days.dt.day_of_week / 7,
        "day of year": (days.dt.day_of_year - 1) / 365.25,
    }
    for name, turn in turns.items():
        assert_close(found[f"x: {name}, sine"][known], np.sin(2 * np.pi * turn[known]), 1e-9)
        assert_close(found[f"x: {name}, cosine"][known], np.cos(2 * np.pi * turn[known]), 1e-9)
        assert found[f"x: {name}, sine"][3] == found[f"x: {name}, cosine"][3] == 0
    assert_close(found["x: time"][known], (days[known] - pd.Timestamp(0)) / pd.Timedelta("1s"), 1e-9)
    assert found["x: time"][3] in found["x: time"][known]
    assert len(found) == 8
    assert found["x is missing"].sum() == 1


def test_dates_have_what_varies():
    _, found = learned(pd.date_range("2024-01-01", periods=30, freq="D"))
    assert not [name for name in found if "time of day" in name]
    _, found = learned(["2024-01-01T10:00:00", "2024-01-01T11:30:00.250", "2024-01-01T12:00:00"])
    assert list(found) == ["x: time", "x: time of day, sine", "x: time of day, cosine"]
    _, found = learned(["10:00", None, "11:30:30", "10:00"])
    assert_close(found["x: time"], [36_000, 36_000, 41_430, 36_000], 0)
    assert list(found)[-1] == "x is missing"
    # What stands for a missing date is no other time of day.
    _, found = learned(["2024-01-01", None, "2024-01-08"])
    assert not [name for name in found if "of day" in name or "of week" in name]


@pytest.mark.parametrize(
    "values",
    [
        lambda days: days.dt.strftime("%Y-%m-%d %H:%M"),
        lambda days: days.dt.strftime("%Y-%m-%dT%H:%M:%S.000"),
        lambda days: days.astype(object),
        lambda days: [day.to_pydatetime() for day in days],
        lambda days: days.to_numpy("datetime64[s]"),
        lambda days: days.dt.to_period("min"),
    ],
)
def test_dates_in_all_their_clothes(values):
    columns, expected = learned(DAYS)
    _, found = learned(values(DAYS))
    assert list(found) == list(expected)
    for name in found:
        assert_close(found[name], expected[name], 1e-12)
    again = columns.numbers(pd.DataFrame({"x": values(DAYS)}))
    assert_close(again, np.stack(list(expected.values()), axis=1), 1e-12)


def test_time_zones():
    zoned = DAYS.dt.tz_localize("Asia/Tokyo")
    columns, found = learned(zoned)
    _, plain = learned(DAYS)
    assert_close(found["x: time"], plain["x: time"] - 9 * 3600, 0)
    text = [moment.isoformat() for moment in zoned]
    for same in (zoned.dt.tz_convert("UTC"), text, [moment.to_pydatetime() for moment in zoned]):
        assert_close(columns.numbers(pd.DataFrame({"x": same}))[:, 0], found["x: time"], 0)
    with pytest.raises(ValueError, match="column 'x' of X has no time zone, and had one in fit"):
        columns.numbers(pd.DataFrame({"x": DAYS}))
    with pytest.raises(TypeError, match="column 'x' of X mixes dates with and without a time zone"):
        learned([zoned[0].to_pydatetime(), DAYS[0].to_pydatetime()])


def test_booleans():
    columns, found = learned(np.array([True, False, None, True], object))
    assert_close(found["x"], [1, 0, 1, 1], 0)
    assert_close(found["x is missing"], [0, 0, 1, 0], 0)
    assert_close(columns.numbers(pd.DataFrame({"x": [0, 1]})), [[0, 0], [1, 0]], 0)
    with pytest.raises(TypeError, match="held True and False in fit, and now holds a number"):
        columns.numbers(pd.DataFrame({"x": [0, 2]}))


def test_durations():
    columns, found = learned(pd.to_timedelta([1, None, 3], unit="min"))
    assert_close(found["x"], [60, 60, 180], 0)
    assert_close(columns.numbers(pd.DataFrame({"x": [datetime.timedelta(hours=1)]})), [[3600, 0]], 0)
    with pytest.raises(TypeError, match="held durations in fit, and now holds a number"):
        columns.numbers(pd.DataFrame({"x": [60.0]}))


@pytest.mark.parametrize("values", [1.0, "a", None, np.nan, pd.NaT, True, [pd.Timestamp("2024")] * 4])
def test_columns_that_do_not_vary_are_left_out(values):
    columns, found = learned(values, y=[1.0, 2.0, 3.0, 4.0])
    assert list(found) == ["y"]
    assert columns.columns[0] == LeftOut("x")
    # Whatever it is later.
    assert columns.numbers(pd.DataFrame({"x": [object()], "y": [2.0]})).tolist() == [[2.0]]


def test_a_constant_with_missing_values_says_whether_they_are():
    for value in (3.0, "yes", True):
        _, found = learned([value, None, value, value, value, value])
        assert_close(found["x is missing"], [0, 1, 0, 0, 0, 0], 0)
        assert set(found) <= {"x is missing", "x=yes"}


def test_ids_are_left_out_with_a_warning():
    with pytest.warns(UserWarning, match=r"column 'x' of X is left out: each of its 60 values .* 5 of 60"):
        columns, _ = learned([f"id {i}" for i in range(ROWS)], y=np.arange(ROWS))
    assert columns.names == ("y",)
    with pytest.warns(UserWarning, match="column 'name' of X is left out") as caught:
        regressor().fit(
            pd.DataFrame({"area": TARGET + NOISE, "name": [f"n{i}" for i in range(ROWS)]}), TARGET
        )
    assert {Path(warning.filename).name for warning in caught} == {"test_frames.py"}


# What is refused


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ([[1], [2]], TypeError, r"column 'x' of X holds \[1\], which is neither a number"),
        ([{"a": 1}, {}], TypeError, r"column 'x' of X holds \{'a': 1\}"),
        ([1, "a"], TypeError, r"column 'x' of X mixes types, such as .*'a' \(str\).*astype\(str\)"),
        ([b"a", b"b"], TypeError, "column 'x' of X holds b'a'"),
        ([1 + 1j, 2], TypeError, "column 'x' of X holds complex128"),
        ([1.0, np.inf], ValueError, "X contains infinity in column 'x', row 1"),
        (["1", "1e999"], ValueError, "X contains infinity in column 'x', row 1"),
        (pd.interval_range(0, 2), TypeError, r"column 'x' of X holds Interval"),
    ],
)
def test_strange_columns_are_refused(values, error, message):
    with pytest.raises(error, match=message):
        learned(values)


def test_duplicated_names_are_refused():
    frame = pd.DataFrame(np.arange(12.0).reshape(4, 3), columns=["a", "b", "a"])
    with pytest.raises(ValueError, match="X has more than one column named 'a'"):
        regressor().fit(frame, np.arange(4))


def test_a_frame_without_anything_to_learn_is_refused():
    with pytest.raises(ValueError, match=r"X has no column to learn from: 'a', 'b' are constant"):
        regressor().fit(pd.DataFrame({"a": [1, 1, 1], "b": [None] * 3}), [1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match="0 sample"):
        regressor().fit(FRAME[:0], [])
    with pytest.raises(TypeError, match="LazyFrame"):
        regressor().fit(pl.LazyFrame({"a": [1, 2]}), [1, 2])


def test_text_in_the_place_of_numbers_and_dates_is_refused():
    number, _ = learned([1.0, 2.0])
    with pytest.raises(ValueError, match=r"column 'x' of X held numbers in fit, and now '1,5'; write"):
        number.numbers(pd.DataFrame({"x": ["1.5", "1,5"]}))
    with pytest.raises(TypeError, match="held numbers in fit, and now holds a date"):
        number.numbers(pd.DataFrame({"x": DAYS}))
    date, _ = learned(DAYS)
    with pytest.raises(ValueError, match=r"column 'x' of X held dates in fit, and now '2024-02-30'"):
        date.numbers(pd.DataFrame({"x": ["2024-02-28", "2024-02-30"]}))
    with pytest.raises(TypeError, match="held dates in fit, and now holds a number"):
        date.numbers(pd.DataFrame({"x": [1.0]}))


# Fits


@pytest.fixture(scope="module")
def model():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import jax

        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return regressor().fit(FRAME, TARGET)


def test_a_frame_as_it_is(model):
    assert model.n_features_in_ == FRAME.shape[1]
    assert model.feature_names_in_.tolist() == list(FRAME.columns)
    assert model.columns_.width == len(model.columns_.names) == len(model.input_mean_)
    assert {"area", "town=Ames", "rooms is missing", "size", "sold: day of week, sine"} <= set(
        model.columns_.names
    )
    new = FRAME.assign(town="Cairo", zone=pd.Categorical(["z"] * ROWS), area=np.nan)
    with pytest.warns(UserWarning, match="of X h") as told:
        of_new = model.predict_interval(new)
    assert [str(one.message).split("'")[1] for one in told] == ["area", "town", "zone"]
    for rows in (FRAME, FRAME[:1], FRAME.assign(town=None)):
        low, high = model.predict_interval(rows)
        assert np.all(np.isfinite(low) & (low < high))
    assert np.all(np.isfinite(of_new[0]) & (of_new[0] < of_new[1]))
    assert np.array_equal(model.predict(FRAME[:1]), model.predict(FRAME)[:1])


def test_names_and_their_order_are_checked(model):
    with pytest.raises(ValueError, match=r"(?s)feature names should match.*same order"):
        model.predict(FRAME[FRAME.columns[::-1]])
    with pytest.raises(ValueError, match=r"(?s)feature names should match.*now missing:\n- town"):
        model.predict(FRAME.drop(columns="town"))
    with pytest.raises(ValueError, match=r"(?s)feature names should match.*unseen at fit time:\n- more"):
        model.predict(FRAME.assign(more=1))
    with pytest.warns(UserWarning, match="does not have valid feature names"):
        found = model.predict(FRAME.to_numpy(object))
    assert_close(found, model.predict(FRAME), 1e-12)


def test_names_that_are_numbers_are_checked_too():
    frame = pd.DataFrame(RNG.normal(size=(ROWS, 3)))
    model = regressor().fit(frame, TARGET)
    model.predict(frame[:2])
    for wrong in (frame[[2, 1, 0]], frame.rename(columns={2: 7})):
        with pytest.raises(ValueError, match=r"(?s)feature names should match.*They were 0, 1, 2, and are"):
            model.predict(wrong)


def test_numbers_in_a_frame_are_those_of_an_array():
    rows = RNG.normal(size=(ROWS, 3))
    frame = pd.DataFrame(rows, columns=["a", "b", "c"])
    expected = regressor().fit(rows, TARGET)
    assert expected.columns_ is None
    for kind in (frame, pl.from_pandas(frame), pd.DataFrame(rows)):
        assert np.array_equal(regressor().fit(kind, TARGET).predict(kind), expected.predict(rows))
    # An array is refused as ever.
    rows[0, 0] = np.nan
    with pytest.raises(ValueError, match="Input X contains NaN"):
        regressor().fit(rows, TARGET)


def test_pandas_and_polars_say_the_same(model):
    other = pl.DataFrame(
        {
            "area": FRAME["area"].to_numpy(),
            "rooms": cycled(1, 2, 3, None),
            "town": cycled("Ames", "Boone", "Ames", None),
            "zone": pl.Series(cycled("b", "a", "c", "b"), dtype=pl.Categorical),
            "size": cycled(0, 2, 1, 0),
            "sold": [day.to_pydatetime() for day in DAYS],
            "when": [day.date() for day in DAYS],
            "took": [datetime.timedelta(hours=i) for i in range(ROWS)],
            "new": cycled(True, False, True),
            "old": cycled(True, None, False),
            "price": cycled("12.5", "7", "1e3"),
            "one": [1.0] * ROWS,
            "none": [None] * ROWS,
        }
    )
    columns = Columns.learn(other)
    assert columns.names == model.columns_.names
    assert np.array_equal(columns.numbers(other), model.columns_.numbers(FRAME))
    found = regressor().fit(other, pl.Series(TARGET))
    assert found.feature_names_in_.tolist() == list(FRAME.columns)
    assert np.array_equal(found.predict(other), model.predict(FRAME))
    for wrong in (other[other.columns[::-1]], other.rename({"town": "city"})):
        with pytest.raises(ValueError, match="feature names should match"):
            found.predict(wrong)
    codes = FRAME.assign(size=FRAME["size"].cat.codes)
    assert np.array_equal(found.predict(codes), found.predict(other)), (
        "learned from one, asked with the other"
    )


def test_kinds_of_polars():
    frame = pl.DataFrame(
        {
            "enum": pl.Series(cycled("a", "b"), dtype=pl.Enum(["b", "a"])),
            "clock": cycled(datetime.time(3), None, datetime.time(9, 30)),
            "money": pl.Series(cycled("1.5", "2.25")).cast(pl.Decimal(10, 2)),
            "nan": cycled(1.0, float("nan"), 3.0),
            "zoned": pl.Series([d.to_pydatetime() for d in DAYS]).dt.replace_time_zone("Asia/Tokyo"),
        }
    )
    columns = Columns.learn(frame)
    found = dict(zip(columns.names, columns.numbers(frame).T, strict=True))
    assert {"enum=a", "enum=b", "clock is missing", "nan is missing"} <= set(found)
    assert_close(found["clock: time"][[0, 2]], [10_800, 34_200], 0)
    assert_close(found["money"][:2], [1.5, 2.25], 0)
    assert found["zoned: time"][0] == DAYS[0].timestamp() - 9 * 3600
    for strange in (pl.DataFrame({"x": [[1], [2]]}), pl.DataFrame({"x": [{"a": 1}, {"a": 2}]})):
        with pytest.raises(TypeError, match="column 'x' of X holds"):
            Columns.learn(strange)


def test_rows_of_weight_zero_teach_no_levels():
    spoilt = pd.concat([FRAME, FRAME.assign(town="Nowhere", area=1e9)], ignore_index=True)
    weights, targets = np.repeat([1.0, 0.0], ROWS), np.concatenate([TARGET, TARGET])
    with_them = regressor()
    table = with_them._prepare(spoilt, targets, weights).table
    assert table.inputs.shape == (ROWS, with_them.columns_.width)
    assert with_them.columns_ == Columns.learn(FRAME)


def test_a_rare_level_is_no_outlier():
    """Standardised by its deviation, a level of 10 rows in 4,000 would be 20 away from all others."""
    rows = 4_000
    frame = pd.DataFrame({"x": ["a"] * (rows - 10) + ["b"] * 10, "z": np.sin(np.arange(rows))})
    estimator = regressor()
    inputs = estimator._prepare(frame, np.cos(np.arange(rows)), None).table.inputs
    assert estimator.columns_.names == ("x=a", "x=b", "z")
    assert_close(np.abs(inputs[-1, :2]), [4.9875, 4.9875], 1e-4)
    assert np.all(np.abs(inputs.mean(axis=0)) < 1e-4)
    assert_close(inputs[:, 2].std(), 1.0, 1e-4)
    half = regressor()._prepare(pd.DataFrame({"x": cycled("a", "b")}), NOISE, None).table.inputs
    assert_close(np.abs(half), np.ones((ROWS, 2)), 1e-6)


def test_warm_starts_keep_the_columns(model):
    estimator = pickle.loads(pickle.dumps(model)).set_params(warm_start=True)
    with pytest.warns(UserWarning, match="holds 'Cairo', which is none of the levels"):
        estimator.fit(FRAME.assign(town="Cairo"), TARGET)
    assert estimator.columns_ == model.columns_
    with pytest.raises(ValueError, match="feature names should match"):
        estimator.fit(FRAME.drop(columns="town"), TARGET)


def test_labels_of_any_library():
    labels = np.where(TARGET > 0, "up", "down")
    expected = classifier()._prepare(FRAME, labels, None).table
    for same in (
        pd.Series(labels),
        pd.Series(labels, dtype="category"),
        pl.Series(labels),
        pl.Series(labels, dtype=pl.Categorical),
    ):
        estimator = classifier()
        found = estimator._prepare(FRAME, same, None).table
        assert estimator.classes_.tolist() == ["down", "up"]
        assert np.array_equal(found.targets, expected.targets)
    assert np.array_equal(expected.targets, labels == "up")


def test_missing_targets_are_counted():
    holes = TARGET.copy()
    holes[[3, 5]] = np.nan
    labels = [None if np.isnan(hole) else "up" if hole > 0 else "down" for hole in holes]
    for attempt in (
        lambda: regressor().fit(FRAME, holes),
        lambda: regressor().fit(RNG.normal(size=(ROWS, 2)), holes),
        lambda: regressor().fit(FRAME, pl.Series(holes)),
        lambda: regressor().fit(FRAME, pd.DataFrame({"a": holes, "b": TARGET})),
        lambda: classifier().fit(FRAME, pd.Series(labels)),
        lambda: classifier().fit(FRAME, pl.Series(labels)),
    ):
        with pytest.raises(ValueError, match="Input y contains NaN: 2 of 60 rows have no target; drop"):
            attempt()


def test_a_target_among_the_inputs_is_told():
    for copy in (TARGET, 3 - 1e4 * TARGET):
        with pytest.warns(UserWarning, match="column 'fare' of X tells the target exactly"):
            regressor()._prepare(FRAME.assign(fare=copy), TARGET, None)
    labels = pd.Series(cycled("a", "b", "c"))
    codes = labels.map({"a": 7, "b": 1, "c": 2})
    for copy in (labels, codes, labels.map({"a": "x", "b": "y", "c": "z"})):
        with pytest.warns(UserWarning, match="column 'alive' of X tells the target exactly"):
            classifier()._prepare(pd.DataFrame({"alive": copy, "noise": NOISE}), labels, None)
    # Warnings are errors: these have none.
    regressor()._prepare(FRAME.assign(fare=TARGET + 0.01 * NOISE), TARGET, None)
    one_other = codes.where(codes.index > 0, 1)
    classifier()._prepare(pd.DataFrame({"alive": one_other, "noise": NOISE}), labels, None)
    regressor()._prepare(FRAME[:9].assign(fare=TARGET[:9])[["area", "fare"]], TARGET[:9], None)


def test_a_target_that_is_a_sum_of_inputs_is_told():
    parts = pd.DataFrame(RNG.normal(size=(ROWS, 3)), columns=["net", "tax", "other"]).assign(
        town=FRAME["town"]
    )
    total = (parts["net"] + 0.2 * parts["tax"] + 5 * (parts["town"] == parts["town"][0])).to_numpy()
    with pytest.warns(UserWarning, match="linear function of them, mostly of 'town', 'net', 'tax'. If"):
        regressor()._prepare(parts, total, None)
    # Warnings are errors: these have none, and neither has chance, where rows are few.
    regressor()._prepare(parts, total + 1e-4 * NOISE, None)
    regressor()._prepare(parts, np.exp(total), None)
    regressor()._prepare(parts, np.full(ROWS, 3.0), None)
    # Of many rows few are looked at first: one that is wrong among the others is found, too.
    longer = pd.concat([parts.drop(columns="town")] * 5, ignore_index=True)
    sums = longer.sum(axis=1).to_numpy()
    with pytest.warns(UserWarning, match="linear function of them"):
        regressor()._prepare(longer, sums, None)
    regressor()._prepare(longer, sums + np.where(np.arange(len(sums)) == 1, 0.1, 0.0), None)
    many = pd.DataFrame(RNG.normal(size=(ROWS, 30))).add_prefix("c")
    regressor()._prepare(many, TARGET, None)
    regressor()._prepare(pd.DataFrame(np.eye(ROWS)).add_prefix("c"), TARGET, None)


# Sparse matrices


def test_sparse_matrices_are_their_arrays(monkeypatch):
    rows = np.where(RNG.random((ROWS, 5)) < 0.3, 1.0, 0.0)
    found = regressor().fit(scipy.sparse.csr_matrix(rows), TARGET)
    expected = regressor().fit(rows, TARGET).predict(rows)
    table = regressor()._prepare(rows, TARGET, None).table
    for kind in (scipy.sparse.csr_matrix, scipy.sparse.coo_array, scipy.sparse.csc_matrix):
        assert np.array_equal(regressor()._prepare(kind(rows), TARGET, None).table.inputs, table.inputs)
        assert np.array_equal(found.predict(kind(rows)), expected)
    everything = np.arange(ROWS)
    scores = cross_validate(regressor(), scipy.sparse.coo_matrix(rows), TARGET, cv=[(everything, everything)])
    mean = np.sqrt(np.mean((expected - TARGET) ** 2))
    assert scores["root_mean_square_error"] == pytest.approx(mean, rel=0.2)
    monkeypatch.setattr(reading, "free_memory", lambda: 1e3)
    with pytest.raises(MemoryError, match=r"X is a sparse matrix of 60 × 5, .* fewer rows at a time"):
        found.predict(scipy.sparse.csr_matrix(rows))


# Cross-validation


@pytest.mark.few(1)
@pytest.mark.parametrize("library", [pd.DataFrame, pl.DataFrame])
def test_frames_are_cross_validated(library):
    """Levels are those of the training rows: the second split never saw "late"."""
    frame = library({"x": ["early"] * 15 + ["mid"] * 30 + ["late"] * 15, "z": NOISE})
    early, mid, late = np.arange(15), np.arange(15, 45), np.arange(45, 60)
    splits = [(np.r_[mid, late], early), (np.r_[early, mid], late), (mid, late)]
    with pytest.warns(UserWarning, match="which is none of the levels") as told:
        found = cross_validate(regressor(), frame, TARGET, cv=splits, return_estimator=True)
    new = {
        level for one in told for level in ("early", "mid", "late") if f"holds '{level}'" in str(one.message)
    }
    assert new == {"early", "late"}
    assert [one.columns_.names for one in found["estimator"]] == [
        ("x=mid", "x=late", "z"),
        ("x=mid", "x=early", "z"),
        ("z",),
    ]
    assert np.isfinite(found["negative_log_likelihood"]).all()


# Files


def test_fitted_estimators_are_saved_and_pickled(model, tmp_path):
    path = tmp_path / "model.safetensors"
    model.save(path)
    for back in (mf.load(path), pickle.loads(pickle.dumps(model))):
        assert back.columns_ == model.columns_
        assert np.array_equal(back.predict(FRAME), model.predict(FRAME))
    many = pd.DataFrame(RNG.normal(size=(20, 1_500))).add_prefix("c")
    estimator = fitted(regressor(hidden=()), np.arange(20.0), many)
    estimator.save(path, force=True)
    assert mf.load(path).columns_ == estimator.columns_


def of(kind):
    return lambda columns: next(
        column["dict"] for column in columns["list"] if column["dict"]["kind"] == kind
    )


HOSTILE = {
    "kind": (of("number"), "kind", "os.system", "not valid"),
    "median": (of("number"), "median", {"float": "inf"}, "median of 'area' is no finite number"),
    "median of integers": (of("number"), "median", 3, "median of 'area'"),
    "part": (of("number"), "parts", {"tuple": ["", "!"]}, "parts of 'area' are not those of a number"),
    "parts": (of("category"), "parts", {"tuple": [f"={i}" for i in range(70)]}, "parts of 'town'"),
    "twice": (of("category"), "parts", {"tuple": ["=a", "=a"]}, "parts of 'town'"),
    "long": (of("category"), "parts", {"tuple": ["=" + "a" * 1_001, "=b"]}, "parts of 'town'"),
    "number for a level": (of("category"), "parts", {"tuple": [3, "=b"]}, "parts of 'town'"),
    "name": (of("category"), "name", 3, "name is no text"),
    "long name": (of("category"), "name", "a" * 2_000, "name is no text"),
    "levels": (of("ordered"), "levels", {"tuple": ["S"] * 3}, "levels of 'size'"),
    "too many levels": (
        of("ordered"),
        "levels",
        {"tuple": [str(i) for i in range(10_001)]},
        "levels of 'size'",
    ),
    "date": (of("date"), "median", 1e300, "median or the zone of 'sold'"),
    "zone": (of("date"), "zone", 1, "median or the zone of 'sold'"),
    "fewer parts": (of("date"), "parts", {"tuple": []}, "input_mean_"),
    "more": (of("date"), "code", "import os", "not valid"),
    "no columns": (lambda columns: columns, "list", [], "no column is left"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_a_file_says_of_columns_is_checked(name, model, tmp_path):
    find, key, value, message = HOSTILE[name]
    path = tmp_path / "model.safetensors"
    model.save(path)
    document, header, data = parts(path.read_bytes())
    node = find(document["fields"]["fitted"]["dict"]["columns_"]["fields"]["columns"])
    node[key] = value
    path.write_bytes(sealed(document, header, data))
    with pytest.raises(FileFormatError, match=message):
        mf.load(path)


def test_a_file_cannot_leave_columns_out(model, tmp_path):
    path = tmp_path / "model.safetensors"
    model.save(path)
    document, header, data = parts(path.read_bytes())
    columns = document["fields"]["fitted"]["dict"]["columns_"]["fields"]["columns"]["list"]
    assert columns.pop()["dict"]["kind"] == "left out"
    path.write_bytes(sealed(document, header, data))
    with pytest.raises(FileFormatError, match="columns_ has not one entry for each feature"):
        mf.load(path)


# Pipelines


def test_methods_through_a_pipeline():
    rows = RNG.normal(size=(ROWS, 2))
    pipeline = make_pipeline(StandardScaler(), regressor()).fit(rows, TARGET)
    low, high = mf.through(pipeline, "predict_interval", rows, coverage=0.5)
    scaled = pipeline[0].transform(rows)
    expected = pipeline[-1].predict_interval(scaled, 0.5)
    assert np.array_equal(low, expected[0])
    assert np.array_equal(high, expected[1])
    assert mf.through(pipeline, "predict_dist", rows).batch_shape == (ROWS,)
    search = GridSearchCV(pipeline, {})
    search.best_estimator_ = make_pipeline(pipeline)
    found = mf.through(search, "predict_interval", rows, 0.5)
    assert np.array_equal(found[0], low)
    assert np.array_equal(mf.through(pipeline[-1], "predict", scaled), pipeline.predict(rows))
    with pytest.raises(TypeError, match=r"EnsembleRegressor, the last step .* has no method"):
        mf.through(pipeline, "predict_proba", rows)


# Real tables

TABLES = os.environ.get("MEASUREFLOW_TABLES")


@pytest.mark.skipif(TABLES is None, reason="MEASUREFLOW_TABLES names no folder of tables")
@pytest.mark.parametrize("read", [pd.read_csv, pl.read_csv])
def test_penguins(read):
    frame = read(Path(str(TABLES)) / "mixed" / "penguins.csv")
    y = frame["species"]
    X = frame.drop(columns="species") if hasattr(frame, "iloc") else frame.drop("species")
    estimator = classifier(steps=300).fit(X, y)
    assert {"island=Biscoe", "sex is missing", "bill_length_mm is missing"} <= set(estimator.columns_.names)
    assert estimator.n_features_in_ == 6
    assert np.mean(estimator.predict(X) == y.to_numpy()) > 0.9
