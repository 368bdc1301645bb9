"""Particles that became NaN or infinite: where it began, and what the run does about it."""

import warnings
from typing import Any

import numpy as np

from measureflow.runs.batches import AbstractBatches
from measureflow.runs.draws import Buffer
from measureflow.runs.history import Log
from measureflow.runs.program import Program
from measureflow.runs.solution import DivergenceError, Restart
from measureflow.spaces.empirical import Empirical

# After so many, a run that restarts lost particles gives up.
_MOST_RESTARTS = 100


class Divergence:
    """What is done where particles are no longer finite: "raise", or "restart" them as copies of others."""

    def __init__(self, program: Program, log: Log, on_divergence: str):
        self.program, self.log, self.on_divergence = program, log, on_divergence
        self.restarts: list[Restart] = []

    def can_begin(self, state: Any, batches: AbstractBatches) -> bool:
        """Whether a loss that is not finite at the start is that of some particles only."""
        if self.on_divergence != "restart":
            return False
        return bool(np.any(np.isfinite(self.program.losses(state, batches))))

    def mended(
        self, state: Any, batches: AbstractBatches, steps: int, buffer: Buffer | None
    ) -> tuple[Any, Buffer | None]:
        """The last finite state of the `steps` after `state`, lost particles restarted, and the draws up to
        it; or an error. The run is deterministic, so the step is found by bisection from the last good
        state."""
        good, bad = 0, steps
        while bad - good > 1:
            middle = (good + bad) // 2
            tried = self.program.call(state, batches, 1, middle, buffer)[0]
            good, bad = (middle, bad) if np.all(self.program.finite(tried)) else (good, middle)
        last, table, kept = self.program.call(state, batches, 1, good, buffer)
        self.log.add(table, 1)
        failed = self.program.call(state, batches, 1, bad, buffer)[0]
        finite = np.asarray(self.program.finite(failed))
        lost, step = np.flatnonzero(~finite), int(state.step) + bad
        if self.on_divergence == "restart" and finite.any() and len(self.restarts) < _MOST_RESTARTS:
            return self._restarted(last, batches, lost, step), kept
        flow = self.program.flow
        raise DivergenceError(
            f"diverged at step {step}: {len(lost)} of {len(finite)} {flow.movers} became NaN or infinite; "
            f"try {flow.remedy}.{self._of_the_sign()} The exception's `state` is the last finite one.",
            last,
            self.log.history(),
            step,
            lost,
        )

    def _of_the_sign(self) -> str:
        """Without a divergence, a loss that falls for ever is often a log density."""
        losses = [float(row.get("loss", 0.0)) for row in self.log.rows]
        is_falling = len(losses) > 1 and losses[-1] < losses[0] and losses[-1] < 0
        if self.program.problem.regulariser is not None or not is_falling:
            return ""
        return (
            " The loss fell all the way: if it is a log density, pass its negative, and mf.KL(mf.Flat()) as "
            "the regulariser."
        )

    def _restarted(self, last: Any, batches: AbstractBatches, lost: np.ndarray, step: int) -> Any:
        losses = np.asarray(self.program.losses(last, batches))
        left = np.setdiff1d(np.arange(len(losses)), lost)
        known = left[np.isfinite(losses[left])]
        left = known if len(known) else left
        best = left[np.argsort(losses[left], kind="stable")]
        sources = np.arange(len(losses))
        sources[lost] = best[np.arange(len(lost)) % len(best)]
        copied = tuple(sources[lost].tolist())
        self.restarts.append(Restart(step, tuple(lost.tolist()), copied))
        warnings.warn(
            f"at step {step} particles {lost.tolist()} became NaN or infinite; they go on as copies of "
            f"{list(copied)}. If this happens again and again, try {self.program.flow.remedy}.",
            stacklevel=7,
        )
        return self.program.rearranged(last, sources)


def require_on_divergence(on_divergence: str, flow: Any, measure: Any) -> None:
    """What a user may ask for."""
    if on_divergence not in ("raise", "restart"):
        raise ValueError(f"on_divergence must be 'raise' or 'restart', got {on_divergence!r}.")
    if on_divergence == "restart" and not isinstance(measure, Empirical):
        raise ValueError(
            f"on_divergence='restart' needs particles, got {type(flow).__name__}; use 'raise', and "
            f"{flow.remedy}."
        )
