"""From a problem, a flow and a beginning to a measure: compiled calls, and what is kept between them."""

import contextlib
import math
import sys
import time
import warnings
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, Key
from tqdm.auto import tqdm

from measureflow.core.devices import agreed, place, require_mesh
from measureflow.core.pytrees import particle_count
from measureflow.core.validation import require_count, typed_key
from measureflow.flows.flow import AbstractFlow
from measureflow.flows.parametric import ParametricState
from measureflow.flows.wasserstein import ParticleState
from measureflow.runs.batches import AbstractBatches, data_key
from measureflow.runs.checkpoint import Checkpoint, Saved, Store
from measureflow.runs.devices import place_batches
from measureflow.runs.fingerprints import fingerprint
from measureflow.runs.loop import advance
from measureflow.runs.signals import Signals
from measureflow.runs.solution import DataExhaustedError, DivergenceError, Interrupted, Log, Restart, Solution
from measureflow.runs.sources import AbstractSource, batch_source
from measureflow.statement.problem import Problem

# The shapes of one compiled call: how many records and scheduled step sizes it can hold. Fixed, so that
# any number of steps is one program.
_RECORDS = 128
_SCHEDULED = 4096
# How long one compiled call should take: short enough for a progress bar and Ctrl-C, long enough to
# forget the cost of the call. It groups steps; it never changes them.
_SECONDS = 0.3
# After so many, a run that restarts lost particles gives up.
_MOST_RESTARTS = 100


@eqx.filter_jit
def _chunk(
    problem: Problem,
    flow: AbstractFlow,
    state: Any,
    batches: AbstractBatches,
    key: Key[Array, ""],
    records: Int[Array, ""],
    steps: Int[Array, ""],
    mesh: Mesh | None,
) -> tuple[Any, dict[str, Array]]:
    """`records` times: record the state, then take `steps` steps. All counts are data."""

    def observe(state: Any) -> dict[str, Array]:
        batch = batches.at(state.step, data_key(key))
        return flow.observe(problem, state, batch, key, batches.sampled_share()) | {"step": state.step}

    def body(slot: Array, carry: tuple) -> tuple:
        state, table = carry
        table = jax.tree.map(lambda column, value: column.at[slot].set(value), table, observe(state))
        return advance(problem, flow, state, batches, key, steps), table

    table = jax.tree.map(lambda leaf: jnp.zeros((_RECORDS,), leaf.dtype), jax.eval_shape(observe, state))
    state, table = jax.lax.fori_loop(0, records, body, (state, table))
    return flow.spread(state, mesh), place(mesh, table)


@eqx.filter_jit
def _finite(flow: AbstractFlow, state: Any, mesh: Mesh | None) -> Bool[Array, " n"]:
    return place(mesh, flow.finite(state))


def _next_call(step: int, end: int, record_every: int, budget: int) -> tuple[int, int]:
    """(records, steps of each) of the next compiled call: whole record intervals, or part of one."""
    if step % record_every == 0 and min(budget, end - step) >= record_every:
        return min(_RECORDS, min(budget, end - step) // record_every), record_every
    return 1, min(budget, record_every - step % record_every, end - step)


def default_record_every(steps: int) -> int:
    """About 1,000 records in a long run. A record costs some steps, so in a short one no more than every
    tenth step has one, and at least a hundred are made."""
    return max(1, steps // 1000, min(10, steps // 100))


def solve(
    problem: Problem,
    flow: AbstractFlow,
    initial: Any,
    steps: int,
    key: Key[Array, ""],
    *,
    data: Any = None,
    batch_size: int | None = None,
    record_every: int | None = None,
    progress: bool | str = False,
    checkpoint: Checkpoint | None = None,
    on_divergence: str = "raise",
    mesh: Mesh | None = None,
) -> Solution:
    """Follow `flow` for `steps` steps from `initial`.

    `initial` is particles, a `Gaussian` (ParametricFlow), or `solution.state`: then k more steps with
    the same key equal one run of the sum, bit for bit. `data` is a pytree of arrays with one row per
    case (with `batch_size`, shuffled epochs, the remainder dropped), on the device or on a disk
    (memory-mapped, h5py, Zarr: rows are read as they are needed); or an iterator of batches, asked in another
    thread while the device computes. `steps=0` records and returns the beginning. The same key gives the
    same result. `progress` shows a bar on stderr, named by it if it is a text.

    With a `checkpoint`, the same call resumes a run that was cut off, and returns at once if it was finished;
    `steps` may have grown. Ctrl-C and SIGTERM stop after the steps under way and raise `Interrupted`, which
    holds the solution so far; a second Ctrl-C stops at once. `on_divergence="restart"` lets particles that
    leave the finite numbers go on as copies of those with the smallest loss.

    With a `mesh` of devices, of one process or of many, the particles are cut over its axis "particles", and
    if it has an axis "batch", the cases of a batch over that. The result is the same up to rounding.
    """
    steps = require_count("steps", steps, 0, "it counts the steps to take from `initial`.")
    if record_every is not None:
        record_every = require_count("record_every", record_every, 1, "1 records every step.")
    _require_divergence(on_divergence, flow)
    if checkpoint is not None and not isinstance(checkpoint, Checkpoint):
        raise TypeError(f"checkpoint must be a Checkpoint, got {checkpoint!r}; pass mf.Checkpoint(folder).")
    key = typed_key(key)
    source = batch_source(data, batch_size, key)
    is_state = isinstance(initial, ParticleState | ParametricState)
    state = flow.resume(problem, initial) if is_state else flow.init(problem, initial)
    _warn_of_loneliness(problem, state)
    if mesh is not None:
        count = particle_count(state.particles) if isinstance(state, ParticleState) else 1
        flow.on(require_mesh(mesh, count))
    store = None
    if checkpoint is not None:
        made_of = fingerprint(
            problem=problem,
            flow=flow,
            initial=state,
            key=key,
            data=source.made_of(),
            record_every=record_every,
            on_divergence=on_divergence,
        )
        store = Store(checkpoint, made_of)
    run = _Run(problem, flow, key, source, on_divergence, store, mesh)
    with contextlib.closing(source):
        try:
            return run.from_state(state, steps, record_every, progress)
        finally:
            if store is not None:
                store.close()


class _Run:
    """One call of `solve`: compiled calls one after the other, and what is kept between them."""

    def __init__(
        self,
        problem: Problem,
        flow: AbstractFlow,
        key: Array,
        source: AbstractSource,
        on_divergence: str,
        store: Store | None,
        mesh: Mesh | None,
    ):
        self.problem, self.flow, self.key = place(mesh, (problem, flow.on(mesh), key))
        self.source, self.on_divergence, self.store, self.mesh = source, on_divergence, store, mesh
        self.placed: tuple[AbstractBatches, AbstractBatches] | None = None
        self.restarts: list[Restart] = []
        # How many steps the next compiled call may take, found by the clock.
        self.budget = min(source.most, 16)

    def _take(self, first: int, count: int) -> AbstractBatches:
        """The batches of `count` steps from `first` on, where the steps are taken."""
        batches = self.source.take(first, count)
        if self.placed is None or self.placed[0] is not batches:
            self.placed = (batches, place_batches(self.mesh, batches))
        return self.placed[1]

    def call(self, state: Any, batches: AbstractBatches, records: int, steps: int) -> tuple[Any, dict]:
        flow = self.flow.tabulated(int(state.step), max(records * steps, 1), _SCHEDULED)
        counts = jnp.asarray(records, jnp.int32), jnp.asarray(steps, jnp.int32)
        flow, counts = place(self.mesh, (flow, counts))
        return _chunk(self.problem, flow, state, batches, self.key, counts[0], counts[1], self.mesh)

    def from_state(self, state: Any, steps: int, record_every: int | None, progress: bool | str) -> Solution:
        state = self.flow.spread(state, self.mesh)
        first, end = int(state.step), int(state.step) + steps
        saved = None if self.store is None else self.store.latest(state)
        if saved is None:
            self.log = Log(record_every or default_record_every(steps))
            self._record(state)
            self._require_finite_start(state)
        else:
            state = self._resume(saved, first, end)
        with (
            tqdm(
                total=steps,
                desc=progress if isinstance(progress, str) else None,
                initial=int(state.step) - first,
                unit="step",
                disable=not progress,
            ) as bar,
            Signals() as signals,
        ):
            while int(state.step) < end and not agreed(signals.caught is not None):
                state = self._next(state, end, bar)
                if self.store is not None and self.store.is_due(int(state.step)) and int(state.step) < end:
                    self._save(state)
            if int(state.step) == end and not self.log.reaches(end):
                self._record(state)
            self._save(state)
            # Here, so that a signal does not cut the writing off.
            is_saved = self.store is not None and self.store.holds(int(state.step))
        if int(state.step) < end or signals.caught is not None:
            raise self._interrupted(state, signals.caught or "a signal to another process", end, is_saved)
        return self._solution(state)

    def _next(self, state: Any, end: int, bar: Any) -> Any:
        """The state after the next compiled call, or a few steps later with some particles restarted."""
        began, step, last = time.perf_counter(), int(state.step), end
        if self.store is not None:
            every = self.store.checkpoint.every
            end = min(end, (step // every + 1) * every)
        possible = self._with_batches(state, min(self.budget, end - step))
        records, each = _next_call(step, end, self.log.record_every, possible)
        batches = self._take(step, records * each)
        # While the next line runs.
        self.source.ahead(lambda i: math.prod(_next_call(i, last, self.log.record_every, self.budget)))
        after, table = self.call(state, batches, records, each)
        if not np.all(_finite(self.flow, after, self.mesh)):
            after = self._diverged(state, batches, records * each)
        else:
            self.log.add(table, records)
            bar.set_postfix(loss=f"{float(table['loss'][records - 1]):.4g}", refresh=False)
        taken = int(after.step) - step
        rate = taken / (time.perf_counter() - began)
        self.budget = agreed(int(np.clip(rate * _SECONDS, 1, min(self.source.most, 8 * self.budget))))
        bar.update(taken)
        return after

    def _solution(self, state: Any) -> Solution:
        return Solution(self.flow.measure(state), self.log.history(), state, tuple(self.restarts))

    def _save(self, state: Any) -> None:
        if self.store is None:
            return
        notes = {
            "record_every": self.log.record_every,
            "restarts": [restart._asdict() for restart in self.restarts],
            "source": self.source.position(int(state.step)),
        }
        self.store.save(int(state.step), Saved(state, dict(self.log.history()), notes))

    def _resume(self, saved: Saved, first: int, end: int) -> Any:
        step, folder = int(saved.state.step), self.store.checkpoint.folder if self.store else None
        if step > end:
            raise ValueError(
                f"the run in {folder} is at step {step}, beyond steps={end - first}; steps may only grow."
            )
        self.log = Log(saved.notes["record_every"])
        self.log.resume(saved.history, step, goes_on=step < end)
        self.restarts = [
            Restart(r["step"], tuple(r["lost"]), tuple(r["copied"])) for r in saved.notes["restarts"]
        ]
        self.source.skip(step, step - first, saved.notes["source"])
        if step == end and not self.log.reaches(end):
            self._with_batches(saved.state, 1)
        done = "finished" if step == end else f"resuming at step {step} of {end}"
        sys.stderr.write(f"measureflow: {folder}: {done}\n")
        return saved.state

    def _interrupted(self, state: Any, signal_name: str, end: int, is_saved: bool) -> Interrupted:
        where = f" It is saved in {self.store.checkpoint.folder}." if self.store and is_saved else ""
        return Interrupted(
            f"{signal_name} at step {int(state.step)} of {end}: the exception's `solution` is the run so "
            f"far, to continue from.{where}",
            self._solution(state),
        )

    def _record(self, state: Any) -> None:
        """The state as it is: no step is taken."""
        _, table = self.call(state, self._take(int(state.step), 0), 1, 0)
        self.log.add(table, 1, always=True)

    def _with_batches(self, state: Any, wanted: int) -> int:
        """How many of the next steps have a batch."""
        steps = self.source.prefetch(int(state.step), wanted)
        if steps == 0:
            raise DataExhaustedError(
                f"the iterator of batches ended at step {int(state.step)}; pass one that goes on, or a "
                "loader that can be started over. The exception's `state` can be continued from.",
                state,
                self.log.history(),
            )
        return steps

    def _require_finite_start(self, state: Any) -> None:
        if not np.all(_finite(self.flow, state, self.mesh)):
            raise ValueError("initial holds numbers that are not finite; check it for NaN and infinities.")
        loss = self.log.rows[0]["loss"]
        if not np.isfinite(loss) and not self._can_restart(state):
            raise ValueError(
                f"loss is {loss} at `initial` (its mean over particles), step {int(state.step)}; check the "
                "loss, the data and `initial` for NaN, infinities and logarithms of zero."
            )

    def _can_restart(self, state: Any) -> bool:
        if self.on_divergence != "restart":
            return False
        losses = _losses(self.problem, state, self._take(int(state.step), 0), self.key, self.mesh)
        return bool(np.any(np.isfinite(losses)))

    def _diverged(self, state: Any, batches: AbstractBatches, steps: int) -> Any:
        """The last finite state, lost particles restarted, or an error. The run is deterministic, so the step
        is found by bisection from the last good state."""
        good, bad = 0, steps
        while bad - good > 1:
            middle = (good + bad) // 2
            tried, _ = self.call(state, batches, 1, middle)
            good, bad = (middle, bad) if np.all(_finite(self.flow, tried, self.mesh)) else (good, middle)
        last, table = self.call(state, batches, 1, good)
        self.log.add(table, 1)
        failed, _ = self.call(state, batches, 1, bad)
        finite = np.asarray(_finite(self.flow, failed, self.mesh))
        lost, step = np.flatnonzero(~finite), int(state.step) + bad
        if self.on_divergence == "restart" and finite.any() and len(self.restarts) < _MOST_RESTARTS:
            return self._restarted(last, batches, lost, step)
        raise DivergenceError(
            f"diverged at step {step}: {len(lost)} of {len(finite)} {self.flow.movers} are no longer finite; "
            f"try {self.flow.remedy}. The exception's `state` is the last finite one.",
            last,
            self.log.history(),
            step,
            lost,
        )

    def _restarted(self, last: Any, batches: AbstractBatches, lost: np.ndarray, step: int) -> Any:
        losses = np.asarray(_losses(self.problem, last, batches, self.key, self.mesh))
        left = np.setdiff1d(np.arange(len(losses)), lost)
        known = left[np.isfinite(losses[left])]
        left = known if len(known) else left
        best = left[np.argsort(losses[left], kind="stable")]
        sources = np.arange(len(losses))
        sources[lost] = best[np.arange(len(lost)) % len(best)]
        copied = tuple(sources[lost].tolist())
        self.restarts.append(Restart(step, tuple(lost.tolist()), copied))
        warnings.warn(
            f"at step {step} particles {lost.tolist()} left the finite numbers; they go on as copies of "
            f"{list(copied)}. If this happens again and again, try {self.flow.remedy}.",
            stacklevel=6,
        )
        rearranged = self.flow.rearranged(last, place(self.mesh, jnp.asarray(sources)))
        return self.flow.spread(rearranged, self.mesh)


@eqx.filter_jit
def _losses(
    problem: Problem,
    state: ParticleState,
    batches: AbstractBatches,
    key: Key[Array, ""],
    mesh: Mesh | None,
) -> Float[Array, " n"]:
    """ℓ of every particle, on the batch of its step."""
    loss = problem.loss_energy(batches.at(state.step, data_key(key))).potential
    assert loss is not None
    return place(mesh, jax.vmap(loss)(state.particles))


def _require_divergence(on_divergence: str, flow: AbstractFlow) -> None:
    if on_divergence not in ("raise", "restart"):
        raise ValueError(f"on_divergence must be 'raise' or 'restart', got {on_divergence!r}.")
    if on_divergence == "restart" and not flow.restarts:
        raise ValueError(
            f"on_divergence='restart' needs particles, got {type(flow).__name__}; use 'raise', and "
            f"{flow.remedy}."
        )


def _warn_of_loneliness(problem: Problem, state: Any) -> None:
    repels = problem.free_energy().interaction is not None
    if repels and isinstance(state, ParticleState) and particle_count(state.particles) == 1:
        warnings.warn(
            "one particle does not repel itself (∇₁κ(θ, θ) = 0): of MMD² only the pull of the reference, "
            "its kernel mean embedding, acts; use several particles for repulsion.",
            stacklevel=3,
        )
