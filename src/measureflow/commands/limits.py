"""A fit that ends in time.

The step size of a fit falls to 0 along a cosine, and a fit that is merely cut off is one at a high
temperature, with intervals far too wide. So a limit makes a fit shorter instead: once it is clear that it
would last too long, it begins again with as many steps as there is time for. Choosing a model gets half of
the time; where that is too little, nothing is chosen, and the user told.
"""

import _thread
import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from measureflow.core.pytrees import dimension
from measureflow.tables.members import of_all_steps
from measureflow.tables.posterior import POSTERIOR, is_sampled
from measureflow.tables.recipe import steps_for
from measureflow.tables.targets import likelihoods_for

# The share of the time that is left which a shorter fit may plan with, and so many seconds are timed for
# that.
_PLANNED, _TIMED = 0.8, 0.7
# Fits are begun again so many times; the last one is cut off where it comes to that.
_ATTEMPTS = 3
_FEWEST_STEPS = 100
#: What is given where there is no time to choose, beside the law that held-out rows would most often take.
PLAIN = {"encoding": 0, "prior_weight": 1.0}


class Pace:
    """A callback of `fit`: how fast it is, and whether it would be over in time. Its first call is not timed:
    it compiles. A true answer ends the fit."""

    def __init__(self, deadline: float, planned: int, cut: bool):
        self.deadline, self.planned, self.cut = deadline, planned, cut
        self.first: tuple[int, float] | None = None
        self.rate = 0.0
        self.stopped_at: int | None = None

    def __call__(self, step: int, record: dict[str, Any], state: Any) -> bool:
        now = time.monotonic()
        if self.first is None:
            self.first = step, now
        elif now > self.first[1]:
            self.rate = (step - self.first[0]) / (now - self.first[1])
        timed = now - self.first[1] >= _TIMED and self.rate > 0
        late = timed and now + (self.planned - step) / self.rate > self.deadline
        if step < self.planned and (now > self.deadline or (late and not self.cut)):
            self.stopped_at = step
        return self.stopped_at is not None


def fit_within(estimator: Any, frame: Any, targets: Any, seconds: float | None) -> list[str]:
    """Fit an estimator, in some seconds if they are given; what there is to say of that."""
    if seconds is None:
        estimator.fit(frame, targets)
        return []
    if is_sampled(estimator.method):
        raise ValueError(
            f"--time {seconds:g} limits steps, and method={POSTERIOR!r} draws until draws are certified; "
            "leave out --time, or use --method DLE."
        )
    deadline, notes, kept = time.monotonic() + seconds, [], {}
    asked, rows, classes = estimator.steps, len(targets), not hasattr(estimator, "likelihood")
    planned = asked or steps_for(rows, 1, classes=classes)
    for attempt in range(_ATTEMPTS):
        pace = Pace(deadline, planned, cut=attempt == _ATTEMPTS - 1)
        if _fit(estimator, frame, targets, pace, 0.0 if attempt else seconds / 2):
            plain = {
                name: value
                for name, value in _plain(None if classes else targets).items()
                if getattr(estimator, name) is None
            }
            estimator.set_params(**plain)
            given = ", ".join(f"{name}={value}" for name, value in plain.items())
            notes.append(
                f"half of --time {seconds:g} was over before candidates had been compared, so that nothing "
                f"was chosen ({given}); allow more time, or give these options."
            )
            continue
        if pace.stopped_at is None:
            break
        if pace.cut:
            notes.append(
                f"--time {seconds:g} ended the fit at step {pace.stopped_at} of {planned}, before its step "
                "size had come down: intervals may be far too wide; allow more time."
            )
            break
        kept = kept or _spread_of(estimator)
        usual = asked or _usual_steps(estimator, rows, classes)
        planned = min(_steps(pace, deadline), usual)
        estimator.set_params(**_chosen(estimator), steps=planned)
        if planned < usual and not any("fewer steps" in note for note in notes):
            notes.append(
                f"--time {seconds:g} leaves room for fewer steps than the usual {usual}: the model is less "
                "well trained than it could be."
            )
    vars(estimator).update(kept)
    return notes


def _usual_steps(estimator: Any, rows: int, classes: bool) -> int:
    """Of the model that was chosen, without a limit."""
    shape = estimator.shape_
    simple = shape.encoding == 0 and len(shape.hidden) <= 1
    steps = steps_for(rows, dimension(estimator.network_.prior().mean), classes=classes, simple=simple)
    return int(steps * np.max(estimator.members_["share_of_steps"]))


def _fit(estimator: Any, frame: Any, targets: Any, pace: Pace, for_choosing: float) -> bool:
    """Fit; whether the alarm rang before the final training."""
    with _alarm(for_choosing) as alarm:

        def callback(step: int, record: dict[str, Any], state: Any) -> bool:
            alarm.cancel()
            return pace(step, record, state)

        try:
            estimator.fit(frame, targets, callback=callback)
        except KeyboardInterrupt:
            if not alarm.rang:
                raise
    return alarm.rang


class _Alarm:
    """As if the user had pressed Ctrl-C, which a fit answers between two steps."""

    def __init__(self, seconds: float):
        self.rang = False
        self._timer = threading.Timer(seconds, self._ring)

    def start(self) -> None:
        self._timer.daemon = True
        self._timer.start()

    def cancel(self) -> None:
        self._timer.cancel()

    def _ring(self) -> None:
        self.rang = True
        _thread.interrupt_main()


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[_Alarm]:
    """One that rings after some seconds, unless there are none; processes in the background ignore it
    else."""
    alarm = _Alarm(seconds)
    if not seconds or threading.current_thread() is not threading.main_thread():
        yield alarm
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    alarm.start()
    try:
        yield alarm
    finally:
        alarm.cancel()
        signal.signal(signal.SIGINT, before)


def _plain(targets: Any) -> dict[str, Any]:
    """None for classes."""
    return PLAIN | ({} if targets is None else {"likelihood": likelihoods_for(np.asarray(targets))[1]})


def _chosen(estimator: Any) -> dict[str, Any]:
    """What a fit that was ended has chosen, to be given to the next."""
    shape = estimator.shape_
    found = {"hidden": shape.hidden, "encoding": shape.encoding, "members": of_all_steps(estimator.members_)}
    return found | ({"likelihood": shape.likelihood} if hasattr(estimator, "likelihood") else {})


def _spread_of(estimator: Any) -> dict[str, Any]:
    """What held-out rows chose beside the model, and the scores by which they did."""
    names = ("spread_", "spread_power_", "typical_deviation_", "validation_scores_")
    return {name: getattr(estimator, name) for name in names}


def _steps(pace: Pace, deadline: float) -> int:
    left = max(deadline - time.monotonic(), 0.0)
    return max(int(pace.rate * left * _PLANNED), _FEWEST_STEPS)
