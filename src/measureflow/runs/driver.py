"""The one driver of every run: compiled calls one after the other, and what happens between them.

It knows steps, the clock, signals, progress and callbacks. What a call computes, records and keeps is the
run's own affair: that of `solve`, of an estimator's tables, of the same experiment over many seeds.
"""

import abc
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from tqdm.auto import tqdm

from measureflow.core.devices import agreed
from measureflow.runs.signals import Signals

#: Called between compiled calls with (step, record, state); a true answer ends the run.
Callback: TypeAlias = Callable[[int, dict[str, Any], Any], Any]

_FIRST_BUDGET = 16


class AbstractRun(abc.ABC):
    """A run as the driver sees it."""

    #: At which step it is, its newest record, and what callbacks see.
    step: int
    record: dict[str, Any]
    state: Any
    #: How many steps one call may take.
    most: int
    #: How many seconds one call should take: short enough for a progress bar and Ctrl-C, long enough to
    #: forget the cost of the call. It groups steps; it never changes them.
    seconds: float = 0.3

    @abc.abstractmethod
    def advance(self, budget: int, end: int) -> None:
        """One compiled call: some steps, at least one and at most `budget`, not beyond `end`."""

    def between(self, end: int) -> None:
        """After every call, before the callbacks: the place for a checkpoint."""
        return

    def finish(self, end: int) -> None:
        """After the last call, while signals are still held back: the place for the last record."""
        return


def drive(
    run: AbstractRun,
    end: int,
    *,
    first: int = 0,
    progress: str | None = None,
    callbacks: Sequence[Callback] = (),
) -> str | None:
    """Take a run to step `end`. Returned is the name of the signal that ended it before, if one did.

    `progress` is the name of a progress bar, which may be empty, or None for no bar; the bar begins at
    `first`.
    """
    budget, stopped = min(run.most, _FIRST_BUDGET), False
    bar = tqdm(
        desc=progress or None,
        total=end - first,
        initial=run.step - first,
        unit="step",
        disable=progress is None,
    )
    with bar, Signals() as signals:
        while run.step < end and not stopped and not agreed(signals.caught is not None):
            began, before = time.perf_counter(), run.step
            run.advance(budget, end)
            run.between(end)
            rate = (run.step - before) / (time.perf_counter() - began)
            budget = agreed(int(np.clip(rate * run.seconds, 1, min(run.most, 8 * budget))))
            if "loss" in run.record:
                bar.set_postfix(loss=f"{np.mean(run.record['loss']):.4g}", refresh=False)
            bar.update(run.step - before)
            # All are asked, also where the first has had enough.
            answers = [bool(call(run.step, run.record, run.state)) for call in callbacks]
            stopped = bool(agreed(max(answers, default=False)))
        run.finish(end)
    if signals.caught is None and (run.step == end or stopped):
        return None
    return signals.caught or "a signal to another process"


def require_callback(callback: Any) -> tuple[Callback, ...]:
    """A user's callback, or none."""
    if callback is not None and not callable(callback):
        raise TypeError(
            f"callback must be a function of (step, record, state), got {callback!r}; it is called between "
            "compiled calls, and a true answer ends the run."
        )
    return () if callback is None else (callback,)
