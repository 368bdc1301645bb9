"""The study: which fits are missing, and running them."""

import ast
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from measureflow.study.provenance import provenance
from measureflow.study.tables.fitting import Job, about, fit_ours, fit_rival
from measureflow.study.tables.records import Record, is_done, write_record
from measureflow.study.tables.rivals import RIVALS, missing
from measureflow.study.tables.tasks import COLLECTIONS, TABLES, Task, load_task
from measureflow.study.tables.workers import in_processes

OURS = "measureflow"


class Plan(NamedTuple):
    """What is to be run, and how."""

    tables: tuple[str, ...] = TABLES
    competitors: tuple[str, ...] = (OURS, *RIVALS)
    variants: tuple[str, ...] = ()
    splits: tuple[int, ...] | None = None
    most_rows: int | None = None
    seconds_per_fit: float | None = None
    jobs: int = 1
    threads: int = 1
    seed: int = 0


def chosen_tables(names: Sequence[str]) -> tuple[str, ...]:
    """Names of tables, or of collections."""
    found: list[str] = []
    for name in names:
        if name not in TABLES and name not in COLLECTIONS:
            raise ValueError(f"unknown table {name!r}; known are {', '.join((*COLLECTIONS, *TABLES))}.")
        found += COLLECTIONS.get(name, (name,))
    return tuple(dict.fromkeys(found))


def chosen_splits(text: str) -> tuple[int, ...]:
    """`0,1,2` as numbers."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"splits are numbers from 0 on, separated by commas, got {text!r}.")
    return tuple(dict.fromkeys(int(part) for part in parts))


def settings_of(variant: str) -> dict[str, Any]:
    """`method=DLE,particles=40` as arguments of the estimators."""
    settings: dict[str, Any] = {}
    for part in variant.split(",") if variant else ():
        name, equals, value = part.partition("=")
        if not equals or not name.strip().isidentifier():
            raise ValueError(f"a variant of ours is written name=value,name=value, got {variant!r}.")
        try:
            settings[name.strip()] = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError):
            settings[name.strip()] = value.strip()
    return settings


def run_tables(plan: Plan, out: Path) -> Iterator[Record]:
    """Records as they are written; those that lie in `out` already are not computed again."""
    tasks = [load_task(name) for name in plan.tables]
    if plan.most_rows is not None:
        tasks = [task for task in tasks if len(task.targets) <= plan.most_rows]
    # Both first: what cannot be resumed is said before anything is computed.
    ours, jobs = _fits_of_ours(plan, tasks, out), _jobs(plan, tasks, out)
    yield from _run_ours(plan, ours, out)
    yield from _run_rivals(plan, {task.name: task for task in tasks}, jobs, out)


def _wanted(plan: Plan, task: Task, competitor: str, out: Path) -> list[int]:
    """Numbers of the splits that are missing."""
    splits = [split for split in plan.splits or range(len(task.splits)) if split < len(task.splits)]
    how = (plan.seed, plan.seconds_per_fit)
    return [split for split in splits if not is_done(out, task.name, competitor, split, *how)]


def _fits_of_ours(plan: Plan, tasks: Sequence[Task], out: Path) -> list[tuple[Task, str, list[int]]]:
    names = [OURS] if OURS in plan.competitors else []
    names += [f"{OURS} {variant}" for variant in plan.variants]
    found = [(task, name, _wanted(plan, task, name, out)) for task in tasks for name in names]
    return [(task, name, splits) for task, name, splits in found if splits]


def _jobs(plan: Plan, tasks: Sequence[Task], out: Path) -> list[Job]:
    """Of the rivals that are installed: the first split of everything, the largest tables first."""
    rivals = [name for name in plan.competitors if name in RIVALS and missing(name) is None]
    rows = {task.name: len(task.targets) for task in tasks}
    jobs = [
        Job(task.name, name, split, plan.seed, plan.threads)
        for task in tasks
        for name in rivals
        if task.kind in RIVALS[name].kinds
        for split in _wanted(plan, task, name, out)
    ]
    return sorted(jobs, key=lambda job: (job.split, -rows[job.table]))


def _run_ours(plan: Plan, fits: list[tuple[Task, str, list[int]]], out: Path) -> Iterator[Record]:
    if not fits:
        return
    origin = provenance(plan.seed, {})
    for task, name, splits in fits:
        settings = settings_of(name.removeprefix(OURS).strip())
        for record in fit_ours(task, name, settings, splits, plan.seed):
            yield _written(origin | record, out)


def _run_rivals(plan: Plan, tasks: dict[str, Task], jobs: list[Job], out: Path) -> Iterator[Record]:
    if not jobs:
        return
    # Rivals run on the CPU, whatever JAX has.
    origin = provenance(plan.seed, {}) | {"device": f"{os.cpu_count()} CPU cores", "jobs": plan.jobs}
    found = in_processes(
        fit_rival,
        jobs,
        processes=plan.jobs,
        threads=plan.threads,
        seconds_per_job=plan.seconds_per_fit,
    )
    for job, record, wrong in found:
        if record is None:
            record = _without_answer(tasks[job.table], job, wrong, plan.seconds_per_fit)
        yield _written(origin | record, out)


def _without_answer(task: Task, job: Job, wrong: str, limit: float | None) -> Record:
    record = about(task, job.rival, job.split)
    if wrong == "stopped":
        reason = f"longer than {limit:g} seconds"
        return record | {"status": "stopped", "reason": reason, "seconds_per_fit": limit}
    return record | {"status": "failed", "reason": "its process died"}


def _written(record: Record, out: Path) -> Record:
    write_record(out, record)
    return record
