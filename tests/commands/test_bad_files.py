"""Bad input: an error that names file, column and remedy, exit code 2, and nothing written."""

import numpy as np
import pandas as pd
import pytest
from tests.commands.flats import TINY, flats, invoke

import measureflow as mf
from measureflow.saving import documents

# Laws are NumPyro's; and one process fits the models that all of these tests use.
pytestmark = [pytest.mark.standard_promotion, pytest.mark.xdist_group("commands")]


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def table(path, change):
    """The usual table with one thing wrong."""
    frame = flats(40, 2).drop(columns="cheap")
    change(frame).to_csv(path, index=False)
    return path


def broken(path):
    lines = table(path, lambda frame: frame).read_text().splitlines()
    lines[3] += ",one more"
    return write(path, "\n".join(lines))


def cut_short(path):
    lines = table(path, lambda frame: frame).read_text().splitlines()
    lines[5] = lines[5].rpartition(",")[0]
    return write(path, "\n".join(lines))


def gap(frame):
    frame.loc[7, "rent"] = None
    return frame


BAD_TABLES = {
    "missing target": (
        lambda p: table(p, lambda f: f.drop(columns="rent")),
        ["no column 'rent'", "There are"],
    ),
    "targets that are missing": (
        lambda p: table(p, gap),
        ["'rent' is missing in 1 of 40 rows", "row 8", "--skip-missing-targets"],
    ),
    "constant target": (
        lambda p: table(p, lambda f: f.assign(rent=5.0)),
        ["'rent' is 5.0 in every row", "--target"],
    ),
    "a column of all missing values": (
        lambda p: table(p, lambda f: f.assign(area=None)),
        ["column 'area' has no value in any row", "--drop 'area'"],
    ),
    "an empty file": (lambda p: write(p, ""), ["the file is empty"]),
    "only column names": (lambda p: write(p, "area,rent\n"), ["no rows"]),
    "10,000 columns": (
        lambda p: write(p, ",".join(f"x{i}" for i in range(10_000)) + "\n"),
        ["10,000 columns", "at most 5,000"],
    ),
    "a file of another program": (
        lambda p: _bytes(p, b"PK\x03\x04 a workbook"),
        ["Excel workbook", "as CSV"],
    ),
    "a picture": (lambda p: _bytes(p, b"\x89PNG\r\n\x1a\n"), ["no CSV file", "picture"]),
    "another encoding": (
        lambda p: _bytes(p, "größe,rent\n1,2\n".encode("latin1")),
        ["line 1", "UTF-8", "iconv"],
    ),
    "a broken line": (broken, ["line 4 has 6 cells", "names 5", "mend that line"]),
    "a line that is cut short": (cut_short, ["line 6 has 4 cells", "mend that line"]),
    "a quote that is left open": (lambda p: write(p, 'area,rent\n1,"2\n3,4\n'), ["line", "quotes"]),
    "a column that stands twice": (
        lambda p: write(p, "area,area,rent\n1,2,3\n"),
        ["'area' stands there 2 times"],
    ),
    "no column beside the target": (lambda p: write(p, "rent\n1\n2\n"), ["no column beside the target"]),
    "an infinite number": (
        lambda p: table(p, lambda f: f.assign(area="1e999")),
        ["infinity in column 'area'"],
    ),
}  # fmt: skip


def _bytes(path, content):
    path.write_bytes(content)
    return path


def words(text):
    return " ".join(text.split())


@pytest.mark.parametrize("command", ["fit", "evaluate"])
@pytest.mark.parametrize("name", BAD_TABLES)
def test_tables_that_cannot_be_fitted(name, command, tmp_path):
    make, expected = BAD_TABLES[name]
    path, out = make(tmp_path / "table.csv"), tmp_path / ("model.mf" if command == "fit" else "board.csv")
    refused = invoke(command, path, "--target", "rent", "--out", out, *TINY)
    assert refused.exit_code == 2, refused.output
    assert refused.stdout == ""
    said = words(refused.stderr)
    assert "table.csv" in said
    for part in expected:
        assert part in said
    assert [one.name for one in tmp_path.iterdir()] == ["table.csv"]


def renamed(frame):
    return frame.rename(columns={"area": "size"})


NEW_TABLES = {
    "an unknown category": (
        lambda f: f.assign(district=["Hafen", *f["district"][1:]]),
        ["column 'district' holds 'Hafen' in row 1", "no training row had", "--unseen"],
    ),
    "columns in another order": (
        lambda f: f[[*reversed(f.columns)]],
        ["another order", "'district' stood in the place of 'listed'", "--by-name"],
    ),
    "a column that is not there": (renamed, ["column 'area' is missing, which the model reads"]),
    "text among numbers": (
        lambda f: f.assign(area="large"),
        ["column 'area' of X held numbers in fit, and now 'large'"],
    ),
    "dates that are none": (lambda f: f.assign(listed="yesterday"), ["column 'listed' of X held dates"]),
    "a column of all missing values": (
        lambda f: f.assign(listed=None),
        ["column 'listed' has no value in any row", "--unseen"],
    ),
}


@pytest.mark.parametrize("name", NEW_TABLES)
def test_rows_that_cannot_be_predicted(name, fitted, tmp_path):
    change, expected = NEW_TABLES[name]
    path, out = table(tmp_path / "rows.csv", change), tmp_path / "predictions.csv"
    for command in ("predict", "report"):
        refused = invoke(command, fitted.rent, path, "--out", out)
        assert refused.exit_code == 2, refused.output
        said = words(refused.stderr)
        assert "rows.csv" in said
        for part in expected:
            assert part in said
        assert not out.exists()


def test_what_the_remedies_do(fitted, tmp_path):
    """They let rows pass, and change no other number."""
    usual = table(tmp_path / "usual.csv", lambda frame: frame)
    expected = invoke("predict", fitted.rent, usual).stdout
    turn = NEW_TABLES["columns in another order"][0]
    turned = table(tmp_path / "turned.csv", lambda frame: turn(frame).assign(pets=1))
    passed = invoke("predict", fitted.rent, turned, "--by-name")
    assert passed.stdout == expected
    assert "not read, since the model has not seen them: 'pets'" in passed.stderr
    new = table(tmp_path / "new.csv", NEW_TABLES["an unknown category"][0])
    found = invoke("predict", fitted.rent, new, "--unseen").stdout.splitlines()
    assert found[2:] == expected.splitlines()[2:]
    assert found[1] != expected.splitlines()[1]


REPORT_TABLES = {
    name: BAD_TABLES[name]
    for name in (
        "missing target",
        "targets that are missing",
        "constant target",
        "an empty file",
        "a broken line",
    )
}


@pytest.mark.parametrize("name", REPORT_TABLES)
def test_tables_that_judge_nothing(name, fitted, tmp_path):
    make, expected = REPORT_TABLES[name]
    refused = invoke("report", fitted.rent, make(tmp_path / "table.csv"), "--out", tmp_path / "report.html")
    assert refused.exit_code == 2, refused.output
    assert "table.csv" in words(refused.stderr)
    for part in expected:
        assert part in words(refused.stderr)
    assert [one.name for one in tmp_path.iterdir()] == ["table.csv"]


def test_a_report_on_a_class_that_no_training_row_had(fitted, tmp_path):
    flats(40, 2).assign(cheap=["perhaps", *["no", "yes"] * 19, "no"]).to_csv(
        tmp_path / "new.csv", index=False
    )
    refused = invoke("report", fitted.cheap, tmp_path / "new.csv", "--out", tmp_path / "report.html")
    assert refused.exit_code == 2
    assert "'cheap' holds 'perhaps', a class that no training row had" in words(refused.stderr)


def of_another_version(path, monkeypatch):
    monkeypatch.setattr(documents, "VERSION", 99)
    mf.save({"a": np.zeros(2)}, path)
    monkeypatch.undo()


def of_another_program(path, monkeypatch):
    path.write_bytes(b"\x80\x04 a pickle")


def of_something_else(path, monkeypatch):
    mf.save(mf.Gaussian(np.zeros(2, np.float32), 1.0), path)


BAD_MODELS = {
    "of another version": (of_another_version, ["version 99 of the format", "upgrade"]),
    "of another program": (of_another_program, ["cannot be loaded", "get it again"]),
    "of something else": (of_something_else, ["holds a Gaussian", "measureflow fit"]),
    "not there": (lambda path, _: None, ["there is no file", "check the path"]),
}


@pytest.mark.parametrize("name", BAD_MODELS)
def test_models_that_are_none(name, fitted, tmp_path, monkeypatch):
    make, expected = BAD_MODELS[name]
    path, out = tmp_path / "model.mf", tmp_path / "out.csv"
    make(path, monkeypatch)
    for arguments in (
        ("predict", path, fitted.new, "--out", out),
        ("report", path, fitted.new, "--out", out),
        ("describe", path),
    ):
        refused = invoke(*arguments)
        assert refused.exit_code == 2, refused.output
        said = words(refused.stderr)
        assert "model.mf" in said
        for part in expected:
            assert part in said
    assert not out.exists()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--method", "SVGD"), "unknown method 'SVGD'; known are"),
        (("--type", "area"), "--type must be COLUMN=KIND"),
        (("--type", "size=number"), "no column 'size'"),
        (("--type", "district=number"), "column 'district' holds"),
        (("--type", "rent=number"), "'rent' is the target"),
        (("--task", "ranking"), "--task must be regression or classification"),
        (("--likelihood", "cauchy"), "likelihood must be one of heteroscedastic"),
        (("--task", "classification"), "classes"),
        (("--hidden", "wide"), "--hidden must be numbers"),
    ],
)
def test_options_that_make_no_sense(options, expected, tmp_path):
    path = table(tmp_path / "table.csv", lambda frame: pd.concat([frame] * 4))
    frame = pd.read_csv(path)
    frame["rent"] = np.arange(len(frame)) + 0.5
    frame.to_csv(path, index=False)
    refused = invoke("fit", path, "--target", "rent", "--out", tmp_path / "model.mf", *TINY, *options)
    assert refused.exit_code == 2, refused.output
    assert expected in words(refused.stderr)
    assert not (tmp_path / "model.mf").exists()


def test_a_result_that_cannot_be_written_is_noticed_first(fitted, tmp_path):
    for arguments in (
        ("fit", "nowhere.csv", "--target", "rent", "--out", tmp_path / "none" / "model.mf"),
        ("predict", "nowhere.mf", fitted.new, "--out", tmp_path / "none" / "out.csv"),
        ("fit", "nowhere.csv", "--target", "rent", "--out", tmp_path),
    ):
        refused = invoke(*arguments)
        assert refused.exit_code == 2
        assert "nowhere" not in refused.stderr
        assert "folder" in refused.stderr
