"""From a problem, a flow and a beginning to a measure."""

import contextlib
import math
import sys
import warnings
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Key

from measureflow.core.devices import require_mesh
from measureflow.core.pytrees import particle_count
from measureflow.core.statistics import WithStatistics
from measureflow.core.validation import require_count, typed_key
from measureflow.flows.counting import begun
from measureflow.flows.flow import AbstractFlow
from measureflow.runs.batches import AbstractBatches, Whole
from measureflow.runs.checkpoint import Checkpoint, Saved, Store
from measureflow.runs.data import batch_source
from measureflow.runs.devices import place_batches
from measureflow.runs.divergence import Divergence, require_on_divergence
from measureflow.runs.draws import Buffer, Collector, Draws
from measureflow.runs.driver import AbstractRun, Callback, drive, require_callback
from measureflow.runs.fingerprints import fingerprint
from measureflow.runs.history import Log, default_record_every
from measureflow.runs.program import RECORDS, Program
from measureflow.runs.solution import DataExhaustedError, Interrupted, Restart, Solution
from measureflow.runs.sources import AbstractSource, Arrays
from measureflow.spaces.empirical import Empirical
from measureflow.spaces.measures import AbstractMeasure
from measureflow.statement.certificate import FEW, NotStationaryWarning
from measureflow.statement.problem import Problem

# How the names of draws begin among the columns of a checkpoint.
_DRAWS = "draws "


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
    callback: Callback | None = None,
    collect: Draws | None = None,
    on_divergence: str = "raise",
    mesh: Mesh | None = None,
    certify: bool = True,
) -> Solution:
    """Follow `flow` for `steps` steps from `initial`. The same key gives the same result.

    Parameters
    ----------
    problem
        What is minimised.
    flow
        How.
    initial
        Particles, a `Gaussian` (ParametricFlow), or `solution.state`: then k more steps with the same key
        equal one run of the sum, bit for bit.
    steps
        How many to take; 0 records and returns the beginning.
    key
        A JAX random key.
    data
        A pytree of arrays with one row per case (with `batch_size`, shuffled epochs, the remainder dropped),
        on the device or on a disk (memory-mapped, h5py, Zarr: rows are read as they are needed); or an
        iterator of batches, asked in another thread while the device computes.
    batch_size
        How many cases the loss sees at a step; None is all of them.
    record_every
        How many steps lie between two records of `history`; None makes about 1,000 of them.
    progress
        Whether to show a progress bar; a text is its name.
    checkpoint
        With one, the same call resumes a run that was cut off, and returns at once if it was finished;
        `steps` may have grown.
    callback
        A function of (step, record, state), called between compiled calls, some three times a second; a true
        answer ends the run.
    collect
        Which particles to keep along the way, as `solution.draws`.
    on_divergence
        "raise", or "restart": particles that become NaN or infinite go on as copies of those with the
        smallest loss.
    mesh
        Devices, of one process or of many: particles are cut over its axis "particles", and the cases of a
        batch over its axis "batch", if it has one. The result is the same up to rounding.
    certify
        Whether to warn (`NotStationaryWarning`) where the particles claim to be draws of q* and fail
        `problem.certify`: for τ > 0, at least 50 particles, on one process and without batches. It costs one
        gradient; where particles interact, about twenty.

    Raises
    ------
    Interrupted
        At Ctrl-C or SIGTERM, after the steps under way; it holds the solution so far. A second Ctrl-C stops
        at once.
    DivergenceError
        Where particles became NaN or infinite; it holds the last finite state.
    """
    steps = require_count("steps", steps, 0, "it counts the steps to take from `initial`.")
    if record_every is not None:
        record_every = require_count("record_every", record_every, 1, "1 records every step.")
    for name, given, kind in (("checkpoint", checkpoint, Checkpoint), ("collect", collect, Draws)):
        if given is not None and not isinstance(given, kind):
            raise TypeError(
                f"{name} must be of type {kind.__name__}, got {given!r}; pass mf.{kind.__name__}(...)."
            )
    callbacks, key = require_callback(callback), typed_key(key)
    source = batch_source(data, batch_size, key)
    flow, state, measure = _begun(problem, flow, initial)
    require_on_divergence(on_divergence, flow, measure)
    _warn_of_loneliness(problem, measure)
    if mesh is not None:
        require_mesh(mesh, _particles_to_cut(flow, measure, mesh))
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
            **({} if collect is None else {"collect": collect}),
        )
        store = Store(checkpoint, made_of)
    with contextlib.closing(source), contextlib.closing(store) if store else contextlib.nullcontext():
        program = Program(problem, flow, key, state, mesh, collect)
        run = SolveRun(program, source, store, state, steps, record_every, on_divergence)
        solution = run.solved(callbacks, progress)
    if certify:
        _warn_of_what_is_not_stationary(problem, solution.measure, source)
    return solution


def _begun(problem: Problem, flow: AbstractFlow, initial: Any) -> tuple[AbstractFlow, Any, AbstractMeasure]:
    """The flow, its state at `initial`, and the measure of that."""
    flow, state = begun(flow, problem, initial)
    measure = flow.measure(state)
    if not isinstance(measure, AbstractMeasure):
        raise TypeError(
            f"{type(flow).__name__}.measure must return a measure, got {type(measure).__name__}; return "
            "mf.Empirical(particles), or another measure."
        )
    return flow, state, measure


class SolveRun(AbstractRun):
    """One call of `solve`."""

    def __init__(
        self,
        program: Program,
        source: AbstractSource,
        store: Store | None,
        state: Any,
        steps: int,
        record_every: int | None,
        on_divergence: str,
    ):
        self.program, self.source, self.store = program, source, store
        self._go_to(program.layout.placed(state))
        self.most, self.record = source.most, {}
        self.first, self.end = int(state.step), int(state.step) + steps
        self.log = Log(record_every or default_record_every(steps))
        self.divergence = Divergence(program, self.log, on_divergence)
        collect = program.layout.collect
        self.collector = (
            None if collect is None else Collector(collect, program.flow, state, self.first, self.end)
        )
        self.placed: tuple[AbstractBatches, AbstractBatches] | None = None
        self.is_saved = False

    def _go_to(self, state: Any) -> None:
        self.state, self.step = state, int(state.step)

    def solved(self, callbacks: tuple[Callback, ...], progress: bool | str) -> Solution:
        """The run from its beginning, or from its newest checkpoint, to its end."""
        saved = None if self.store is None else self.store.latest(lambda notes: self.state)
        if saved is None:
            self._record()
            self._require_finite_start()
        else:
            self._resume(saved)
        bar = (progress if isinstance(progress, str) else "") if progress else None
        signal = drive(self, self.end, first=self.first, progress=bar, callbacks=callbacks)
        if signal is not None:
            raise self._interrupted(signal)
        return self._solution()

    def advance(self, budget: int, end: int) -> None:
        """The next compiled call; where particles diverge in it, a few steps and some particles restarted."""
        if self.store is not None:
            every = self.store.checkpoint.every
            end = min(end, (self.step // every + 1) * every)
        if self.collector is not None:
            budget = min(budget, self.collector.most_steps())
        step, every = self.step, self.log.record_every
        possible = self._with_batches(min(budget, end - step))
        records, each = _next_call(step, end, every, possible)
        batches = self._take(step, records * each)
        # While the next line runs.
        self.source.ahead(lambda i: math.prod(_next_call(i, self.end, every, budget)))
        buffer = self._buffer()
        after, table, kept = self.program.call(self.state, batches, records, each, buffer)
        # One wait for all that is looked at.
        is_finite, table, _ = jax.device_get((self.program.finite(after), table, after.step))
        if np.all(is_finite):
            self.log.add(table, records)
            self.record = {name: column[records - 1] for name, column in table.items()}
        else:
            after, kept = self.divergence.mended(self.state, batches, records * each, buffer)
        self._go_to(after)
        if self.collector is not None and kept is not None:
            self.collector.add(kept, self.step)

    def between(self, end: int) -> None:
        if self.store is not None and self.store.is_due(self.step) and self.step < end:
            self._save(self.store)

    def finish(self, end: int) -> None:
        if self.step == end and not self.log.reaches(end):
            self._record()
        if self.store is not None:
            self._save(self.store)
            self.is_saved = self.store.holds(self.step)

    def _buffer(self) -> Buffer | None:
        return None if self.collector is None else self.collector.buffer(self.step)

    def _take(self, first: int, count: int) -> AbstractBatches:
        """The batches of `count` steps from `first` on, where the steps are taken."""
        batches = self.source.take(first, count)
        if self.placed is None or self.placed[0] is not batches:
            self.placed = (batches, place_batches(self.program.mesh, batches))
        return self.placed[1]

    def _record(self) -> None:
        """The state as it is: no step is taken."""
        _, table, _ = self.program.call(self.state, self._take(self.step, 0), 1, 0, self._buffer())
        self.record = self.log.add(table, 1, always=True)[-1]

    def _solution(self) -> Solution:
        draws = None if self.collector is None else self.collector.draws()
        restarts = tuple(self.divergence.restarts)
        return Solution(
            self.program.flow.measure(self.state), self.log.history(), self.state, restarts, draws
        )

    def _save(self, store: Store) -> None:
        notes = {
            "record_every": self.log.record_every,
            "restarts": [restart._asdict() for restart in self.divergence.restarts],
            "source": self.source.position(self.step),
        }
        draws = {} if self.collector is None else self.collector.leaves()
        columns = dict(self.log.history()) | {f"{_DRAWS}{name}": leaf for name, leaf in draws.items()}
        store.save(self.step, Saved(self.state, columns, notes))

    def _resume(self, saved: Saved) -> None:
        self._go_to(saved.state)
        folder = self.store.checkpoint.folder if self.store else None
        if self.step > self.end:
            raise ValueError(
                f"the run in {folder} is at step {self.step}, beyond steps={self.end - self.first}; steps "
                "may only grow."
            )
        columns = {name: values for name, values in saved.history.items() if not name.startswith(_DRAWS)}
        self.log.record_every = saved.notes["record_every"]
        self.log.resume(columns, self.step, goes_on=self.step < self.end)
        self.divergence.restarts = [
            Restart(r["step"], tuple(r["lost"]), tuple(r["copied"])) for r in saved.notes["restarts"]
        ]
        if self.collector is not None:
            self.collector.resume(
                {n.removeprefix(_DRAWS): leaf for n, leaf in saved.history.items() if n.startswith(_DRAWS)}
            )
        self.source.skip(self.step, self.step - self.first, saved.notes["source"])
        if self.step == self.end and not self.log.reaches(self.end):
            self._with_batches(1)
        done = "finished" if self.step == self.end else f"resuming at step {self.step} of {self.end}"
        sys.stderr.write(f"measureflow: {folder}: {done}\n")

    def _interrupted(self, signal_name: str) -> Interrupted:
        where = f" It is saved in {self.store.checkpoint.folder}." if self.store and self.is_saved else ""
        return Interrupted(
            f"{signal_name} at step {self.step} of {self.end}: the exception's `solution` is the run so "
            f"far, to continue from.{where}",
            self._solution(),
        )

    def _with_batches(self, wanted: int) -> int:
        """How many of the next steps have a batch."""
        steps = self.source.prefetch(self.step, wanted)
        if steps == 0:
            raise DataExhaustedError(
                f"the iterator of batches ended at step {self.step}; pass one that goes on, or a "
                "loader that can be started over. The exception's `state` can be continued from.",
                self.state,
                self.log.history(),
            )
        return steps

    def _require_finite_start(self) -> None:
        if not np.all(self.program.finite(self.state)):
            raise ValueError("initial holds numbers that are not finite; check it for NaN and infinities.")
        for name in ("loss", "rest"):
            value = self.record.get(name, 0.0)
            if np.isfinite(value) or (name == "loss" and self._can_restart()):
                continue
            what = (
                "the functional of the regulariser" if name == "rest" else self.program.problem.objective.name
            )
            raise ValueError(
                f"{what} is {value} at `initial`, step {self.step}; check it, the data and `initial` for "
                "NaN, infinities and logarithms of zero."
            )

    def _can_restart(self) -> bool:
        return self.divergence.can_begin(self.state, self._take(self.step, 0))


def _next_call(step: int, end: int, record_every: int, budget: int) -> tuple[int, int]:
    """(records, steps of each) of the next compiled call: whole record intervals, or part of one."""
    if step % record_every == 0 and min(budget, end - step) >= record_every:
        return min(RECORDS, min(budget, end - step) // record_every), record_every
    return 1, min(budget, record_every - step % record_every, end - step)


def _particles_to_cut(flow: AbstractFlow, measure: AbstractMeasure, mesh: Any) -> int:
    """How many particles there are for a mesh."""
    if isinstance(measure, Empirical):
        return particle_count(measure.particles)
    raise ValueError(
        f"mesh={mesh} was given for {type(flow).__name__}, which has no particles to cut over it; use "
        "WassersteinFlow, or leave the mesh out."
    )


def _warn_of_loneliness(problem: Problem, measure: AbstractMeasure) -> None:
    is_alone = isinstance(measure, Empirical) and particle_count(measure.particles) == 1
    if is_alone and problem.regulariser_energy().interaction is not None:
        warnings.warn(
            "one particle does not repel itself (∇₁κ(θ, θ) = 0): of MMD² only the pull of the reference, "
            "its kernel mean embedding, acts; use several particles for repulsion.",
            stacklevel=3,
        )


def _warn_of_what_is_not_stationary(
    problem: Problem, measure: AbstractMeasure, source: AbstractSource
) -> None:
    if not isinstance(measure, Empirical) or jax.process_count() > 1:
        return
    batches = source.batches if isinstance(source, Arrays) else None
    if not isinstance(batches, Whole) or particle_count(measure.particles) < FEW:
        return
    if problem.temperature() is None:
        return
    # Of networks that are trained otherwise than they predict, no potential is known that they would sample.
    if isinstance(measure.particles, WithStatistics):
        return
    certificate = problem.certify(jax.device_get(measure.particles), batches.data)
    if not certificate:
        warnings.warn(str(certificate), NotStationaryWarning, stacklevel=3)
