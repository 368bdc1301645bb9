"""Fits in processes of their own: so many at a time, each with its threads, and stopped where they take too
long."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

#: Libraries that would take every core otherwise.
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class _Worker:
    """A process that answers one job after the other."""

    def __init__(self, answer: Callable[[Any], Any]):
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(answer, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.job: Any = None
        self.since = 0.0

    def ask(self, job: Any) -> None:
        self.job, self.since = job, time.monotonic()
        self.pipe.send(job)

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _serve(answer: Callable[[Any], Any], pipe: Connection) -> None:
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        pipe.send(answer(job))


def in_processes(
    answer: Callable[[Any], Any],
    jobs: Sequence[Any],
    *,
    processes: int,
    threads: int,
    seconds_per_job: float | None = None,
) -> Iterator[tuple[Any, Any | None, str]]:
    """(job, its answer, "") in the order in which they end; or (job, None, what went wrong): "stopped" after
    `seconds_per_job`, which count from when the process was asked, or "died"."""
    before = {name: os.environ.get(name) for name in (*_THREADS, "JAX_PLATFORMS")}
    os.environ.update(dict.fromkeys(_THREADS, str(threads)), JAX_PLATFORMS="cpu")
    waiting, workers = list(reversed(jobs)), []
    try:
        while waiting or workers:
            while waiting and len(workers) < processes:
                workers.append(_Worker(answer))
                workers[-1].ask(waiting.pop())
            for worker, outcome in _ended(workers, seconds_per_job):
                job = worker.job
                if outcome[1] or not waiting:
                    worker.end()
                    workers.remove(worker)
                else:
                    worker.ask(waiting.pop())
                yield job, *outcome
    finally:
        for worker in workers:
            worker.end()
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


def _ended(workers: list[_Worker], limit: float | None) -> list[tuple[_Worker, tuple[Any | None, str]]]:
    """Waits until at least one has an answer, has died, or has had its time."""
    left = None
    if limit is not None:
        left = max(0.0, min(worker.since + limit for worker in workers) - time.monotonic())
    ready = wait([worker.pipe for worker in workers], left)
    found: list[tuple[_Worker, tuple[Any | None, str]]] = []
    for worker in workers:
        if worker.pipe in ready:
            try:
                found.append((worker, (worker.pipe.recv(), "")))
            except (EOFError, OSError):
                found.append((worker, (None, "died")))
        elif limit is not None and time.monotonic() - worker.since >= limit:
            found.append((worker, (None, "stopped")))
    return found
