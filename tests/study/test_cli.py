"""The shell around the studies: where results go, what is shown, and what an exit code means."""

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from measureflow import cli
from measureflow.study import datasets, demo, files
from measureflow.study import uci_benchmark as uci
from measureflow.study.paper.claims import Claim, Reproduction

SCORES = ("negative_log_likelihood", "root_mean_square_error", "crps", "coverage", "width")
HOLDS = Claim("a claim", "theory", 0.123456, 0.123455, "± 1e-5", True, "[a note]")
BROKEN = Claim("a wrong one", "theory", 0.0, 1.0, "± 0.1", False, "")


@pytest.fixture
def invoke(tmp_path, monkeypatch):
    """Runs a command in a folder of its own, on results made by hand; `worked` is what was computed."""
    monkeypatch.chdir(tmp_path)
    worked, claims = [], [HOLDS]

    def reproduced(name, seed, *, quick, progress):
        worked.append((name, progress))
        return Reproduction(
            list(claims), {}, lambda figure: figure.subplots(), tables={"table": [{"a": 1.5}]}
        )

    def scored(sets, methods, splits, seed, progress):
        worked.append((*sets, progress))
        for method in methods:
            yield uci.Result(sets[0], method, {name: [-0.1234, -0.5678] for name in SCORES}, [1.0, 0.3], 1.0)

    monkeypatch.setattr(cli, "run_reproduction", reproduced)
    monkeypatch.setattr(cli, "run_uci", scored)

    def run(*arguments):
        return CliRunner().invoke(cli.app, arguments)

    run.worked, run.claims = worked, claims
    return run


COMMANDS = {
    "reproduce": ("reproduce", "lifting"),
    "all": ("reproduce", "all"),
    "uci": ("uci", "--sets", "yacht"),
}


def words(result):
    return " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize("name", COMMANDS)
def test_a_folder_that_cannot_be_written_is_noticed_before_any_work(name, invoke, tmp_path):
    """And not with 1, which says that a claim does not hold."""
    (tmp_path / "file").write_text("mine")
    for out in ("file", "file/below"):
        refused = invoke(*COMMANDS[name], "--out", out)
        assert refused.exit_code == 2
        assert "nothing can be written to" in words(refused)
        assert "pass another --out" in words(refused)
    assert invoke.worked == []
    assert (tmp_path / "file").read_text() == "mine"


def test_the_demo_notices_it_too(invoke, tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "run_demo", lambda *_, **__: pytest.fail("worked in vain"))
    (tmp_path / "file").write_text("mine")
    assert invoke("demo", "--out", "file/here").exit_code == 2


@pytest.mark.parametrize("name", COMMANDS)
def test_a_disk_that_is_full_at_the_end_loses_nothing_that_can_be_shown(name, invoke, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cli, "write_json", full)
    failed = invoke(*COMMANDS[name], "--out", "here")
    assert failed.exit_code == 2
    assert "No space left on device" in words(failed)
    assert ("a claim" if name != "uci" else "NLL -0.346") in words(failed)


@pytest.mark.parametrize("error", [FileNotFoundError("no such set; get it"), datasets.DataError("damaged")])
@pytest.mark.parametrize("name", COMMANDS)
def test_missing_data_leave_no_folder_behind(name, error, invoke, tmp_path, monkeypatch):
    """The corrected call is not refused for an empty folder."""

    def missing(*_, **__):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(cli, "run_reproduction", missing)
        patch.setattr(cli, "run_uci", missing)
        failed = invoke(*COMMANDS[name], "--out", "deep/here")
    assert failed.exit_code == 2
    assert str(error) in words(failed)
    assert list(tmp_path.iterdir()) == []
    assert invoke(*COMMANDS[name], "--out", "deep/here").exit_code == 0


def test_folders_that_were_there_stay(invoke, tmp_path, monkeypatch):
    (tmp_path / "here" / "lifting").mkdir(parents=True)
    monkeypatch.setattr(cli, "run_reproduction", lambda *_, **__: 1 / 0)
    assert invoke("reproduce", "lifting", "--out", "here").exit_code == 1
    assert (tmp_path / "here" / "lifting").is_dir()


def test_an_empty_folder_is_no_earlier_result(invoke, tmp_path):
    (tmp_path / "here").mkdir()
    assert invoke(*COMMANDS["uci"], "--out", "here").exit_code == 0
    assert invoke(*COMMANDS["uci"], "--out", "here").exit_code == 2


def test_exit_codes_of_claims(invoke):
    assert invoke("reproduce", "lifting", "--out", "a").exit_code == 0
    invoke.claims.append(BROKEN)
    broken = invoke("reproduce", "all", "--out", "b")
    assert broken.exit_code == 1
    assert f"{len(cli.NAMES) - 1} claims of theory do not hold" in words(broken)
    assert "Exits 1" in words(invoke("reproduce", "--help"))


def test_a_file_is_replaced_whole(tmp_path, monkeypatch):
    path = tmp_path / "results.json"
    files.write_json(path, {"a": 1})
    monkeypatch.setattr(Path, "write_text", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        files.write_json(path, {"a": 2})
    assert json.loads(path.read_bytes()) == {"a": 1}


@pytest.mark.parametrize("seed", ["-1", str(2**32)])
def test_seeds_that_some_generator_would_refuse_later(seed, invoke):
    for command in COMMANDS.values():
        refused = invoke(*command, "--seed", seed)
        assert refused.exit_code == 2
        assert "--seed" in refused.output
    assert invoke.worked == []


# What is shown


@pytest.mark.parametrize("width", [24, 40, 60, 80, 100, 140])
def test_numbers_are_never_cut(width, invoke, monkeypatch):
    """At 60 columns, the table of scores had -0… for every number."""
    monkeypatch.setattr(cli, "console", Console(width=width))
    shown = invoke("uci", "--sets", "yacht", "--methods", "DE,DRLE", "--out", "a").output
    assert "…" not in shown
    # Four scores of two methods, and a line for each while it works.
    tokens = shown.replace(",", "").split()
    assert tokens.count("-0.346") == tokens.count("0.222") == 4 * 2 + 2, shown
    assert max(map(len, shown.splitlines())) <= width
    shown = invoke("reproduce", "lifting", "--out", "b").output
    assert "0.1235 ± 1e-5" in " ".join(shown.split()) or width >= 100
    assert "0.1235" in shown
    assert "…" not in shown
    assert "[a note]" in " ".join(shown.split())


def test_the_demo_s_table_keeps_its_columns(monkeypatch, capsys):
    row = demo.Row("DE", "Theorem 1", -2.7441, 0.05, 0.07, 0.517, 0.5)
    monkeypatch.setattr(cli, "console", Console(width=140))
    cli._print_demo([SimpleNamespace(rows=[row])])
    assert "│ DE     │ -2.744 │ Theorem 1 │    0.050 │" in capsys.readouterr().out


# Progress bars


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("name", COMMANDS)
def test_bars_are_for_terminals(name, invoke, monkeypatch):
    invoke(*COMMANDS[name], "--out", "a")
    assert not any(bars for *_, bars in invoke.worked), "stderr is a file"
    invoke.worked.clear()
    monkeypatch.setattr(cli, "_has_bars", lambda: True)
    invoke(*COMMANDS[name], "--out", "b")
    assert all(bars for *_, bars in invoke.worked)
    monkeypatch.undo()
    assert not cli._has_bars()
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert cli._has_bars()


@pytest.mark.parametrize(("progress", "name"), [(True, "DE"), (False, False)])
def test_bars_of_the_demo_are_named(progress, name, monkeypatch):
    def solved(*_, progress):
        assert progress == name
        raise StopAsyncIteration

    monkeypatch.setattr(demo, "solve", solved)
    with pytest.raises(StopAsyncIteration):
        next(iter(demo.run_demo(0, progress=progress)))


# Sets


def test_all_sets_are_looked_for_before_the_first_fit(monkeypatch):
    def load(name, progress):
        if name == "wine":
            raise FileNotFoundError("no wine")
        return datasets.RegressionSet(np.zeros((2, 1)), np.zeros(2), [])

    monkeypatch.setattr(uci, "load_uci", load)
    with pytest.raises(FileNotFoundError, match="no wine"):
        next(iter(uci.run_uci(["yacht", "wine"], ["DE"], None, 0, progress=False)))
