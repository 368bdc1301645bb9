"""`measureflow tables`: what it runs, what it leaves, and the page that is made of it."""

import inspect
import json
import os
import time

import numpy as np
import pytest
from typer.testing import CliRunner
from verification import tables_page

from measureflow import cli
from measureflow.study.tables import fitting, running
from measureflow.study.tables.records import (
    ResumeError,
    read_records,
    record_path,
    write_archive,
    write_record,
)
from measureflow.study.tables.running import OURS, Plan, chosen_splits, chosen_tables, run_tables, settings_of
from measureflow.study.tables.summary import CRPS, NLL, Scores, mean_ranks, verdicts
from measureflow.study.tables.tasks import Task
from measureflow.study.tables.workers import in_processes
from measureflow.tables import crossvalidation

# NumPyro and Optax promote integers and ranks.
pytestmark = pytest.mark.standard_promotion


def toy(name="yacht", rows=30, splits=3):
    rng = np.random.default_rng(0)
    parts = [(np.delete(np.arange(rows), [i, i + 1]), np.array([i, i + 1])) for i in range(splits)]
    columns = {f"x{i}": rng.normal(size=rows) for i in range(2)}
    return Task(name, "uci", "regression", columns, rng.normal(size=rows), parts)


def record(table="yacht", competitor=OURS, split=0, nll=1.0, crps=2.0, **more):
    scores = {NLL: nll, CRPS: crps, "root_mean_square_error": 3.0, "coverage": 0.9, "width": 4.0}
    return {
        "table": table,
        "collection": "gap" if table.endswith("gap") else "uci",
        "kind": "regression",
        "competitor": competitor,
        "split": split,
        "train_rows": 28,
        "test_rows": 2,
        "columns": 2,
        "status": "scored",
        "scores": scores,
        "seconds": 1.5,
        "seed": 0,
        "device": "8 CPU cores",
        "commit": "abc",
        "measureflow": "0.1.0",
    } | more


# Runs


@pytest.fixture
def study(monkeypatch):
    """Two tables; rivals are fitted in this process, ours by a stand-in. What is fitted is noted."""
    fitted = []

    def ours(task, name, settings, splits, seed):
        fitted.extend((task.name, name, split) for split in splits)
        return [record(task.name, name, split, settings=settings) for split in splits]

    def here(answer, jobs, **_):
        for job in jobs:
            fitted.append((job.table, job.rival, job.split))
            yield job, answer(job), ""

    tasks = {"yacht": toy(), "boston": toy("boston", rows=50)}
    monkeypatch.setattr(running, "load_task", tasks.get)
    monkeypatch.setattr(fitting, "load_task", tasks.get)
    monkeypatch.setattr(running, "fit_ours", ours)
    monkeypatch.setattr(running, "in_processes", here)
    return fitted


PLAN = Plan(("yacht", "boston"), (OURS, "constant"), splits=(0, 2))


def test_runs_resume(study, tmp_path):
    written = list(run_tables(PLAN, tmp_path))
    ours = [(table, OURS, split) for table in ("yacht", "boston") for split in (0, 2)]
    # The first split of all first, and of it the largest table.
    theirs = [(table, "constant", split) for split in (0, 2) for table in ("boston", "yacht")]
    assert study == ours + theirs
    assert len(written) == 8
    stored = json.loads((tmp_path / "boston" / "constant" / "2.json").read_text(encoding="utf-8"))
    assert {"measureflow", "commit", "device", "seed", "jax", "threads", "settings"} <= set(stored)
    study.clear()
    assert list(run_tables(PLAN, tmp_path)) == [] == study
    (tmp_path / "boston" / "constant" / "2.json").write_text("{", encoding="utf-8")
    list(run_tables(PLAN, tmp_path))
    assert study == [("boston", "constant", 2)], "a damaged file is written again"


def test_plans_can_be_cut(study, tmp_path):
    list(run_tables(PLAN._replace(most_rows=40, competitors=("constant",), splits=None), tmp_path))
    assert study == [("yacht", "constant", split) for split in range(3)]


def test_variants_of_ours(study, tmp_path):
    plan = PLAN._replace(tables=("yacht",), competitors=(), variants=("method=DLE,particles=4",), splits=(0,))
    (written,) = run_tables(plan, tmp_path)
    assert written["competitor"] == "measureflow method=DLE,particles=4"
    assert written["settings"] == {"method": "DLE", "particles": 4}
    assert record_path(tmp_path, "yacht", written["competitor"], 0).exists()


def test_another_seed_does_not_go_on(study, tmp_path):
    list(run_tables(PLAN, tmp_path))
    study.clear()
    with pytest.raises(ResumeError, match="was run with seed 0, and now the seed is 1"):
        list(run_tables(PLAN._replace(seed=1), tmp_path))
    assert study == []


def test_stopped_and_failed_fits_are_tried_again(study, tmp_path):
    plan = PLAN._replace(tables=("yacht",), competitors=("constant",), splits=(0,), seconds_per_fit=10)
    stopped = record(competitor="constant", status="stopped", seconds_per_fit=10, reason="")
    write_record(tmp_path, stopped)
    assert list(run_tables(plan, tmp_path)) == [], "in as many seconds it would be stopped again"
    list(run_tables(plan._replace(seconds_per_fit=20), tmp_path))
    write_record(tmp_path, stopped | {"status": "failed"})
    list(run_tables(plan, tmp_path))
    assert study == [("yacht", "constant", 0)] * 2


def test_fits_without_an_answer_are_recorded(study, tmp_path, monkeypatch):
    def unanswered(answer, jobs, **_):
        yield from zip(jobs, [None] * 2, ["stopped", "died"], strict=True)

    monkeypatch.setattr(running, "in_processes", unanswered)
    plan = PLAN._replace(tables=("yacht",), competitors=("constant",), seconds_per_fit=5)
    first, second = run_tables(plan, tmp_path)
    assert (first["status"], first["reason"]) == ("stopped", "longer than 5 seconds")
    assert (second["status"], second["reason"]) == ("failed", "its process died")


def test_ours_fits_the_splits_of_a_table_together(monkeypatch):
    real, asked = inspect.signature(crossvalidation.cross_validate), []

    def together(*arguments, **more):
        asked.append(real.bind(*arguments, **more).arguments)
        return {NLL: np.arange(2.0), CRPS: np.arange(2.0) + 5}

    monkeypatch.setattr(crossvalidation, "cross_validate", together)
    first, second = fitting.fit_ours(toy(), OURS, {"particles": 3}, [0, 2], seed=4)
    (call,) = asked
    assert call["estimator"].get_params()["particles"] == 3
    assert call["estimator"].get_params()["random_state"] == 4
    assert [test.tolist() for _, test in call["cv"]] == [[0, 1], [2, 3]]
    assert call["X"].shape == (30, 2)
    assert call["coverage"] == 0.9
    assert (first["split"], second["split"], first["fitted_together"]) == (0, 2, 2)
    assert first["scores"] == {NLL: 0.0, CRPS: 5.0}
    assert second["scores"] == {NLL: 1.0, CRPS: 6.0}
    assert first["seconds"] == second["seconds"] > 0


def test_errors_of_ours_are_recorded():
    (failed,) = fitting.fit_ours(toy(), OURS, {"particles": -1}, [0], seed=0)
    assert failed["status"] == "failed"
    assert "particles" in failed["reason"]


def test_mixed_tables_are_one_hot_until_ours_takes_text():
    columns = toy().columns | {"colour": np.array(["red", "blue"] * 15, object)}
    mixed = toy()._replace(columns=columns)

    class Estimator:
        def __init__(self, text):
            self.text = text

        def __sklearn_tags__(self):
            tags = type("Tags", (), {"string": self.text, "categorical": False})
            return type("All", (), {"input_tags": tags})

    assert fitting._inputs(mixed, Estimator(text=False), np.arange(20)).shape == (30, 4)
    frame = fitting._inputs(mixed, Estimator(text=True), np.arange(20))
    assert list(frame.columns) == ["x0", "x1", "colour"]
    assert frame["colour"].iloc[1] == "blue"


# Processes


def test_processes_answer():
    found = sorted((job, answer) for job, answer, _ in in_processes(abs, [-1, -2, 3], processes=2, threads=1))
    assert found == [(-2, 2), (-1, 1), (3, 3)]


def test_processes_that_die_or_take_too_long_are_told():
    before = os.environ.get("OMP_NUM_THREADS")
    assert list(in_processes(os._exit, [3], processes=1, threads=1)) == [(3, None, "died")]
    late = in_processes(time.sleep, [600], processes=1, threads=1, seconds_per_job=0.2)
    assert list(late) == [(600, None, "stopped")]
    assert os.environ.get("OMP_NUM_THREADS") == before


# Records and summaries


def test_records_are_joined_and_scores_count_first(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    write_record(one, record(status="stopped", reason="longer"))
    write_record(two, record(nll=7.0))
    write_record(one, record(split=1, nll=float("nan")))
    write_record(two, record(split=1, nll=8.0))
    first, second = sorted(read_records([one, two]), key=lambda found: found["split"])
    assert first["scores"][NLL] == 7.0
    assert second["scores"][NLL] is None, "JSON knows no NaN; of two scored, the first folder's"
    (two / "yacht" / OURS / "0.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ValueError, match="not a result of the study"):
        read_records([two])


def test_an_archive_stands_for_a_folder(tmp_path):
    """So ours can be run again without the rivals."""
    kept, again = tmp_path / "kept.json.gz", tmp_path / "again"
    write_archive(kept, records())
    assert sorted(map(str, read_records([kept]))) == sorted(map(str, records()))
    first = kept.read_bytes()
    write_archive(kept, reversed(records()))
    assert kept.read_bytes() == first
    write_record(again, record(split=0, nll=0.5))
    joined = Scores(read_records([again, kept]))
    assert sorted(joined.of("yacht", OURS, NLL).values()) == [0.5, 1.1, 1.3]
    assert sorted(Scores(read_records([kept, again])).of("yacht", OURS, NLL).values()) == [1.0, 1.1, 1.3]
    (tmp_path / "text.txt").write_text("no archive", encoding="utf-8")
    with pytest.raises(ValueError, match=r"text.txt is no archive of records.*name a folder of results"):
        read_records([tmp_path / "text.txt"])


def records():
    """Ours is better than A on yacht, and worse on boston; B has yacht alone, and no NLL."""
    found = []
    for split, noise in enumerate([0.0, 0.1, 0.3]):
        found += [record(split=split, nll=1 + noise, crps=2 + noise)]
        found += [record(competitor="A", split=split, nll=2 + noise + 0.01 * split, crps=3 + noise)]
        found += [record(competitor="B", split=split, nll=None, crps=1 + noise)]
        found += [record("boston", split=split, nll=3 + noise)]
        found += [record("boston", "A", split, nll=2 + noise - 0.01 * split)]
    return found


def test_differences_are_paired_by_split():
    scores = Scores(records())
    difference = scores.difference("yacht", "A", NLL)
    assert difference is not None
    assert difference.splits == 3
    assert difference.mean == pytest.approx(-1.01)
    # The noise that both share is gone: what is left is 0, 0.01, 0.02.
    assert difference.error == pytest.approx(0.01 / np.sqrt(3))
    assert difference.verdict == -1
    assert scores.difference("yacht", "B", NLL) is None
    assert verdicts(scores, ["yacht", "boston"], "A", NLL) == (1, 0, 1)
    assert scores.best_rival("yacht", NLL) == "A"
    assert scores.best_rival("yacht", CRPS) == "B"


def test_one_split_is_no_verdict():
    difference = Scores([record(nll=1.0), record(competitor="A", nll=9.0)]).difference("yacht", "A", NLL)
    assert difference is not None
    assert np.isnan(difference.error)
    assert difference.verdict == 0


def test_ranks_are_of_those_who_have_every_table():
    scores = Scores(records())
    ranks, tables = mean_ranks(scores, ["boston", "yacht"], NLL)
    assert ranks == {"A": 1.5, OURS: 1.5}
    assert tables == ["boston", "yacht"]
    ranks, _ = mean_ranks(scores, ["yacht"], CRPS)
    assert ranks == {"B": 1.0, OURS: 2.0, "A": 3.0}


def test_page(tmp_path):
    for one in [*records(), record("yacht-gap", nll=1.25)]:
        write_record(tmp_path / "results", one)
    unsuited = record("boston", "Gaussian-process", status="unsuited", reason="more than 1500 training rows")
    write_record(tmp_path / "results", unsuited)
    (tmp_path / "docs" / "assets").mkdir(parents=True)
    tables_page.main([tmp_path / "results"], tmp_path / "docs", keep=tmp_path / "kept.json.gz")
    text = (tmp_path / "docs" / "tables.md").read_text(encoding="utf-8")
    assert tables_page.page([tmp_path / "kept.json.gz"]) in text.replace(tables_page.PICTURE + "\n", "")
    assert (tmp_path / "docs" / "assets" / "tables.png").stat().st_size > 1000
    assert "| A | 3 | 2.143 ± 0.094 | -1.01 ± 0.0058 |" in text
    assert "| A | 2 | 1 / 0 / 1 |" in text
    assert "over 2 tables, 1 the best, of those who have it on all of them: A 1.50, measureflow 1.50." in text
    assert "unsuited: more than 1500 training rows" in text
    assert "| yacht-gap | 1.25 | 1.58 |" in text, "beside the best published"
    assert "| TabPFN v2, by a public rerun |  | -0.73 |" in text
    assert "8 CPU cores" in text
    assert "nan" not in text.replace("Lakshminarayanan", "")


def test_shifted_splits_have_a_page_of_their_own(tmp_path):
    for one in (record("yacht-gap", nll=1.25), record("yacht-gap", competitor="A", nll=2.25)):
        write_record(tmp_path / "results", one)
    (tmp_path / "docs" / "assets").mkdir(parents=True)
    tables_page.main([tmp_path / "results"], tmp_path / "docs", "Two of them.", name="shifted")
    text = (tmp_path / "docs" / "shifted.md").read_text(encoding="utf-8")
    assert text.startswith("# Tables under shift, beside rivals\n")
    assert "Two of them.\n\n![" in text
    assert "](assets/shifted.png)" in text
    assert (tmp_path / "docs" / "assets" / "shifted.png").stat().st_size > 1000
    assert "| yacht-gap | 1.25 | 1.58 |" in text


def test_a_page_needs_scores(tmp_path):
    with pytest.raises(ValueError, match="no scores there"):
        tables_page.page([tmp_path])


# What a user passes


def test_choices():
    assert chosen_tables(["mixed", "yacht", "ames"]) == ("ames", "taxis", "titanic", "penguins", "yacht")
    with pytest.raises(ValueError, match="unknown table 'yatch'"):
        chosen_tables(["yatch"])
    assert chosen_splits("0, 2,2") == (0, 2)
    with pytest.raises(ValueError, match="numbers from 0 on"):
        chosen_splits("0,-1")
    assert settings_of("method=DLE,mmd=0.5,hidden=None") == {"method": "DLE", "mmd": 0.5, "hidden": None}
    with pytest.raises(ValueError, match="name=value"):
        settings_of("DLE")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only-tables", "yatch"], "unknown table 'yatch'"),
        (["--only", "NGBost"], "unknown 'NGBost'"),
        (["--splits", "one"], "numbers from 0 on"),
        (["--ours", "DLE"], "name=value"),
    ],
)
def test_wrong_options_exit_2(arguments, said, tmp_path):
    done = CliRunner().invoke(cli.app, ["tables", "--out", str(tmp_path / "out"), *arguments])
    assert done.exit_code == 2
    assert said in " ".join(done.output.replace("│", " ").split())
    assert not (tmp_path / "out").exists()


def test_missing_tables_exit_2(tmp_path, monkeypatch):
    monkeypatch.delenv("MEASUREFLOW_TABLES", raising=False)
    out = tmp_path / "out"
    done = CliRunner().invoke(cli.app, ["tables", "--out", str(out), "--only-tables", "stock"])
    assert done.exit_code == 2
    assert "MEASUREFLOW_TABLES" in done.output
    assert not out.exists()


def test_command(study, tmp_path):
    arguments = ["--only-tables", "yacht,boston", "--only", "constant,measureflow", "--splits", "0"]
    done = CliRunner().invoke(cli.app, ["tables", "--out", str(tmp_path), *arguments])
    assert done.exit_code == 0, done.output
    assert "yacht 0 measureflow: NLL 1.000, 1.5 s" in done.output
    assert "Wrote 4 files" in done.output
    done = CliRunner().invoke(cli.app, ["tables", "--out", str(tmp_path), *arguments])
    assert "Wrote 0 files" in done.output
