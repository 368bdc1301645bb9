"""One call of `sample`, part by part: the descent, blocks of adaptation, rounds of draws, tempering. Between
two of them it can be saved, and goes on from there as if nothing had happened."""

import dataclasses
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Key
from tqdm.auto import tqdm

from measureflow.core.devices import PARTICLES, agreed, place
from measureflow.flows.ensembles import ensemble_covariance
from measureflow.runs.checkpoint import Saved, Store
from measureflow.runs.signals import Signals
from measureflow.sampling.judging import Facts, judged
from measureflow.sampling.mixing import Watched, drifting, hopeless
from measureflow.sampling.phases import Report, adapt, deepened, descend, draw, looked_at
from measureflow.sampling.result import R_HAT, Sample
from measureflow.sampling.tempering import islands_of, temper
from measureflow.sampling.trajectories import Ensemble, Target, Tuning
from measureflow.statement.certificate import Certificate

_DESCENT_ROUNDS, _DESCENT_STEPS = 40, 50
_BLOCK, _LEAST_BLOCKS, _MOST_BLOCKS = 20, 3, 12
_DOUBLINGS, _RETUNED = 5, 8
_LENGTH = 1.6
# Particles that have spread so far from where they began are on their way to infinity.
_FAR = 1e8
# Beyond so many dimensions a Gaussian is too far from the posterior for tempering to bridge.
_MOST_TEMPERED = 500


class Drawn(NamedTuple):
    """A round of draws (particle, draw, J), where it began (rows and U there) and where it ended."""

    begin: tuple[np.ndarray, np.ndarray]
    end: Ensemble
    rows: np.ndarray
    watched: Watched
    report: Report

    def columns(self, dtype: np.dtype) -> dict[str, np.ndarray]:
        """For a checkpoint, all but where it ended; in the precision in which it was computed."""
        numbers = {"rows": self.rows, "values": self.watched.draws[..., -1]}
        numbers |= {"begin rows": self.begin[0], "begin values": self.begin[1]}
        report = {f"report {name}": np.asarray(value) for name, value in self.report._asdict().items()}
        return {name: column.astype(dtype) for name, column in numbers.items()} | report

    @classmethod
    def of_columns(cls, columns: dict[str, np.ndarray], end: Ensemble) -> "Drawn":
        """As it was."""
        names = ("rows", "values", "begin rows", "begin values")
        rows, values, *begin = (columns[name].astype(np.float64) for name in names)
        report = Report(*(jnp.asarray(columns[f"report {name}"]) for name in Report._fields))
        return cls((begin[0], begin[1]), end, rows, Watched(rows, values), report)


@dataclasses.dataclass
class Progress:
    """What comes next (descent, adaptation, sampling, tempering, or done), and what was counted so far:
    compiled calls, gradients, hopeless particles, levels of tempering. `stiff` is the share of the finest
    trajectories that were too stiff when their size was chosen: a round of draws may have none of them.
    `spreads` are those before and after every block of this adaptation. Draws are `between` trajectories
    apart, after so many `doublings`; `forgotten` says whether the last round had forgotten its start."""

    stage: str = "descent"
    calls: int = 0
    gradients: int = 0
    replaced: int = 0
    levels: int = 0
    stiff: float = 0.0
    spreads: list[float] = dataclasses.field(default_factory=list)
    between: int = 1
    doublings: int = 0
    forgotten: bool = False


class _StoppedError(Exception):
    """A signal came between two compiled calls."""


class Run:
    """One call of `sample`."""

    def __init__(
        self,
        target: Target,
        rows: Array,
        key: Key[Array, ""],
        draws: int,
        precision: float,
        progress: bool,
        mesh: Mesh | None = None,
        store: Store | None = None,
    ):
        self.target, self.start, self.key, self.number = target, rows, key, draws
        self.precision, self.mesh, self.store = precision, mesh, store
        self.so_far, self.records = Progress(), []
        self.newest: Drawn | None = None
        self.saved_at = -1
        self._go_to(Ensemble(rows, jnp.zeros_like(rows[:, 0]), jnp.zeros_like(rows)), self._tuned(rows))
        self.bar = tqdm(disable=not progress, unit="gradient")

    def next_key(self) -> Key[Array, ""]:
        """A key of its own for every compiled call."""
        self.so_far.calls += 1
        return jax.random.fold_in(self.key, self.so_far.calls)

    def result(self) -> Sample:
        """All parts, or as many as a signal leaves time for."""
        self._resume()
        with self.bar, Signals() as self.signals:
            try:
                while self.so_far.stage != "done":
                    self._advance()
            except _StoppedError:
                pass
        drawn, folder = self.newest, self._folder()
        if drawn is None:
            kept = f"the same call goes on from {folder}" if folder else "nothing is kept"
            raise KeyboardInterrupt(
                f"sample was interrupted by {self.signals.caught} before there were draws; {kept}."
            )
        facts = Facts(
            self.records,
            self.so_far.gradients,
            self.so_far.replaced,
            self.so_far.levels,
            self.precision,
            self.signals.caught,
            None if self.so_far.stage == "done" else folder,
        )
        # After tempering, islands are compared; particles may still not cross.
        tempered = self.so_far.levels > 0
        apart = float(drawn.watched.r_hat(*drawn.begin).max()) if tempered else 1.0
        stay = 0.0 if tempered else drawn.watched.staying(*drawn.begin)
        certificate, r_hat = self._certified(drawn.end), self._r_hat(drawn)
        return judged(
            self.target, drawn.rows, certificate, r_hat, drawn.watched, drawn.report, apart, stay, facts
        )

    def _advance(self) -> None:
        """The next part."""
        stage = self.so_far.stage
        parts = {
            "descent": self._descent,
            "adaptation": self._block,
            "sampling": self._next_round,
            "tempering": self._tempering,
        }
        parts[stage]()
        if self.store is not None:
            since = self.so_far.gradients - max(self.saved_at, 0)
            is_due = since >= self.store.checkpoint.every
            if is_due or stage == "sampling" or stage != self.so_far.stage:
                self._save(self.store)

    def _go_to(self, state: Ensemble, tuning: Tuning) -> None:
        """Where the next part begins, on the devices where it belongs: so it is the same program that goes
        on, saved or not."""
        self.state, self.tuning = place(self.mesh, state, P(PARTICLES)), place(self.mesh, tuning)

    def _record(self, phase: str, gradients: int, **numbers: float) -> None:
        self.so_far.gradients += gradients
        self.bar.set_description(phase)
        self.bar.update(gradients)
        self.records.append({"gradients": self.so_far.gradients, "phase": phase, **numbers})
        if agreed(self.signals.caught is not None):
            raise _StoppedError

    # ---- Checkpoints. ----

    def _save(self, store: Store) -> None:
        self.saved_at = self.so_far.gradients
        # Between two parts, a round of draws ended where the particles are.
        columns = {} if self.newest is None else self.newest.columns(self.start.dtype)
        notes = {"so_far": dataclasses.asdict(self.so_far), "records": list(self.records)}
        store.save(self.saved_at, Saved((self.state, self.tuning), columns, notes))

    def _resume(self) -> None:
        saved = None if self.store is None else self.store.latest(lambda notes: (self.state, self.tuning))
        if self.store is None or saved is None:
            return
        self.state, self.tuning = saved.state
        self.so_far, self.records = Progress(**saved.notes["so_far"]), saved.notes["records"]
        self.newest = Drawn.of_columns(saved.history, self.state) if saved.history else None
        self.saved_at = self.so_far.gradients
        self.bar.update(self.saved_at)
        is_done = self.so_far.stage == "done"
        where = "finished" if is_done else f"resuming {self.so_far.stage} after {self.saved_at} gradients"
        sys.stderr.write(f"measureflow: {self.store.checkpoint.folder}: {where}\n")

    def _folder(self) -> Path | None:
        """Where it is saved, if it is."""
        is_saved = self.store is not None and self.saved_at >= 0 and self.store.holds(self.saved_at)
        return self.store.checkpoint.folder if self.store is not None and is_saved else None

    # ---- Into the typical set. ----

    def _descent(self) -> None:
        """Steps that become smaller wherever potentials fall no more, until that does not help."""
        state = looked_at(self.target, self._finite(self.start))
        rows = state.rows
        scale = jnp.maximum(_spread(rows), 1e-3 * (1 + jnp.max(jnp.abs(rows), axis=0)))
        rate, small, steps = 0.1, 0, jnp.asarray(_DESCENT_STEPS, jnp.int32)
        for _ in range(_DESCENT_ROUNDS):
            before = float(jnp.median(state.values))
            size = jnp.asarray(rate, rows.dtype)
            state = descend(self.target, state, scale, size, self.next_key(), steps)
            after = float(jnp.median(state.values))
            self._record("descent", _DESCENT_STEPS, potential=after)
            # The typical set is J/2 above the minimum: what is less than that is no matter.
            fallen = before - after > max(1.0, 0.1 * rows.shape[1])
            rate, small = (rate, 0) if fallen else (0.3 * rate, small + 1)
            if small == 3:
                break
        state = looked_at(self.target, self._rescued(state))
        self._begin_adaptation(state, self._tuned(state.rows))

    def _finite(self, rows: Array) -> Array:
        found = looked_at(self.target, rows)
        good = np.asarray(jnp.isfinite(found.values) & jnp.all(jnp.isfinite(found.gradients), axis=1))
        if not good.any():
            raise ValueError(
                "the potential is not finite at any particle of `initial`; check the loss, the data and "
                "`initial` for NaN, infinities and logarithms of zero."
            )
        return self._replaced(rows, good)

    def _rescued(self, state: Ensemble) -> Array:
        """Without hopeless particles: stuck far above all others, where no mass is."""
        return self._replaced(state.rows, ~hopeless(np.asarray(state.values, np.float64)))

    def _replaced(self, rows: Array, good: np.ndarray) -> Array:
        lost = np.flatnonzero(~good)
        self.so_far.replaced += len(lost)
        sources = np.arange(len(rows))
        rng = np.random.default_rng(self.so_far.calls)
        sources[lost] = rng.choice(np.flatnonzero(good), len(lost))
        return rows[jnp.asarray(sources)]

    # ---- Adaptation. ----

    def _tuned(self, rows: Array) -> Tuning:
        size, length = (jnp.asarray(x, rows.dtype) for x in (np.log(0.3), _LENGTH))
        return Tuning(ensemble_covariance(rows), size, length, jnp.zeros((), jnp.int32))

    def _begin_adaptation(self, state: Ensemble, tuning: Tuning) -> None:
        self._go_to(state, tuning)
        self.so_far.stage, self.so_far.spreads = "adaptation", [_widest(state)]

    def _block(self) -> None:
        """Some trajectories of adaptation, until the particles are certified."""
        state, tuning = self._deepen(*self._adapt(self.state, self.tuning, _BLOCK))
        state = looked_at(self.target, self._rescued(state))
        self._go_to(state, tuning)
        spreads = self.so_far.spreads
        spreads.append(_widest(state))
        blocks, is_far = len(spreads) - 1, spreads[-1] > _FAR * spreads[0]
        if not is_far and blocks >= _LEAST_BLOCKS and self._certified(state):
            self._begin_sampling()
        elif is_far or blocks == _MOST_BLOCKS:
            _require_proper(spreads)
            self._begin_sampling()

    def _adapt(self, state: Ensemble, tuning: Tuning, count: int) -> tuple[Ensemble, Tuning]:
        number = jnp.asarray(count, jnp.int32)
        state, tuning, report = adapt(self.target, state, tuning, self.next_key(), number)
        size, acceptance = float(jnp.exp(tuning.log_step_size)), float(report.acceptance)
        potential = float(jnp.median(state.values))
        self._record(
            "adaptation", int(report.leaps), acceptance=acceptance, step_size=size, potential=potential
        )
        return state, tuning

    def _deepen(self, state: Ensemble, tuning: Tuning) -> tuple[Ensemble, Tuning]:
        state, tuning, stiff, leaps = deepened(self.target, state, tuning, self.next_key())
        self.so_far.stiff = float(stiff)
        self._record("adaptation", int(leaps), depth=float(tuning.depth), stiff=self.so_far.stiff)
        return state, tuning

    def _certified(self, state: Ensemble) -> Certificate:
        return self.target.problem.certify(self.target.unravelled(state.rows), self.target.batch)

    # ---- Sampling. ----

    def _begin_sampling(self) -> None:
        so_far = self.so_far
        so_far.stage, so_far.between, so_far.doublings, so_far.forgotten = "sampling", 1, 0, False

    def _next_round(self) -> None:
        """Draws further and further apart, until particles have forgotten their start and means are known.

        Draws on the way there still remember the start: so those are kept that begin where a round ended
        which had forgotten it, and that forget it again.
        """
        so_far = self.so_far
        if so_far.doublings and not so_far.forgotten:
            self._retune()
        drawn = self._round(self.state, self.tuning, so_far.between)
        passes = self._passes(drawn)
        self._go_to(drawn.end, self.tuning)
        if (passes and so_far.forgotten) or (not passes and so_far.doublings == _DOUBLINGS):
            so_far.stage = "tempering" if self._is_to_be_tempered(drawn) else "done"
        so_far.forgotten = passes
        if not passes:
            so_far.between, so_far.doublings = 2 * so_far.between, so_far.doublings + 1

    def _retune(self) -> None:
        """After a round that remembers its start."""
        tuning = self.tuning
        if self.so_far.doublings == 2:
            tuning = tuning._replace(length=2 * tuning.length)
        self.state, self.tuning = self._deepen(*self._adapt(self.state, tuning, _RETUNED))

    def _round(self, state: Ensemble, tuning: Tuning, between: int) -> Drawn:
        count = jnp.asarray(between, jnp.int32)
        end, rows, values, report = draw(self.target, state, tuning, self.next_key(), count, self.number)
        rows, values = (np.swapaxes(np.asarray(x, np.float64), 0, 1) for x in (rows, values))
        report = report._replace(stiff=jnp.maximum(report.stiff, self.so_far.stiff))
        begin = np.asarray(state.rows, np.float64), np.asarray(state.values, np.float64)
        self.newest = Drawn(begin, end, rows, Watched(rows, values), report)
        return self.newest

    def _passes(self, drawn: Drawn) -> bool:
        r_hat, effective = self._r_hat(drawn).max(), drawn.watched.effective().min()
        drift, stay = drifting(drawn.watched.draws), drawn.watched.staying(*drawn.begin)
        report = drawn.report
        self._record(
            "sampling",
            int(report.leaps),
            acceptance=float(report.acceptance),
            stiff=float(report.stiff),
            r_hat=float(r_hat),
            effective_draws=float(effective),
            drift=drift,
            staying=stay,
        )
        # Tempered particles need not cross: islands are independent.
        tempered = self.so_far.levels > 0
        known = tempered or effective >= 1 / self.precision**2
        crossed = tempered or stay <= 0
        return bool(r_hat <= R_HAT and known and crossed and drift <= 0)

    def _r_hat(self, drawn: Drawn) -> np.ndarray:
        islands = islands_of(len(self.start)) if self.so_far.levels else None
        return drawn.watched.r_hat(*drawn.begin, islands)

    def _is_to_be_tempered(self, drawn: Drawn) -> bool:
        apart = self._r_hat(drawn).max() > R_HAT or drawn.watched.staying(*drawn.begin) > 0
        return bool(apart and not self.so_far.levels and self.start.shape[1] <= _MOST_TEMPERED)

    def _tempering(self) -> None:
        found = temper(self.target, self.state.rows, self.tuning, self.next_key())
        self._record("tempering", found.leaps, levels=float(found.levels))
        if not found.reached:
            self.so_far.stage = "done"
            return
        self.so_far.levels, self.newest = found.levels, None
        state = looked_at(self.target, self._finite(found.rows))
        self._begin_adaptation(state, self.tuning._replace(depth=self._tuned(state.rows).depth))


def _require_proper(spreads: list[float]) -> None:
    if spreads[-1] > 2 * spreads[-2]:
        raise ValueError(
            f"the particles run away: their spread has grown from {spreads[0]:.2g} to {spreads[-1]:.2g} "
            "and grows on, as it does where the posterior is improper; give every parameter a proper "
            "prior, mf.KL(prior) in the place of mf.KL(mf.Flat())."
        )


def _spread(rows: Array) -> Array:
    """Of every coordinate, by the median of absolute deviations."""
    middle = jnp.median(rows, axis=0)
    return 1.4826 * jnp.median(jnp.abs(rows - middle[None]), axis=0)


def _widest(state: Ensemble) -> float:
    return float(jnp.max(_spread(state.rows)))
