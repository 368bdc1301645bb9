"""Draws of a posterior in one call: descend, adapt, sample, certify; and say where that cannot be trusted."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Key
from tqdm.auto import tqdm

from measureflow.core.devices import PARTICLES, agreed, place, require_mesh
from measureflow.core.pytrees import Particles, as_matrix, particle_count
from measureflow.core.validation import positive_number, require_count, require_particles, typed_key
from measureflow.flows.ensembles import ensemble_covariance
from measureflow.runs.draws import free_memory
from measureflow.runs.signals import Signals
from measureflow.sampling.judging import Facts, judged
from measureflow.sampling.mixing import Watched, drifting, hopeless
from measureflow.sampling.phases import Report, adapt, deepened, descend, draw, looked_at
from measureflow.sampling.result import R_HAT, Sample
from measureflow.sampling.tempering import temper
from measureflow.sampling.trajectories import Ensemble, Target, Tuning
from measureflow.sampling.unadjusted import unadjusted
from measureflow.spaces.empirical import Empirical
from measureflow.spaces.measures import AbstractMeasure
from measureflow.statement.certificate import Certificate
from measureflow.statement.problem import Problem

_DESCENT_ROUNDS, _DESCENT_STEPS = 40, 50
_BLOCK, _LEAST_BLOCKS, _MOST_BLOCKS = 20, 3, 12
_DOUBLINGS, _RETUNED = 5, 8
_LENGTH = 1.6
# Particles that have spread so far from where they began are on their way to infinity.
_FAR = 1e8
# Beyond so many dimensions a Gaussian is too far from the posterior for tempering to bridge.
_MOST_TEMPERED = 500


def sample(
    problem: Problem,
    initial: Any,
    key: Key[Array, ""],
    *,
    particles: int = 1_000,
    draws: int = 10,
    data: Any = None,
    batch_size: int | None = None,
    precision: float = 0.05,
    mesh: Mesh | None = None,
    progress: bool = False,
) -> Sample:
    """Draws of the posterior exp(−V/τ), with nothing to tune.

    A few hundred Langevin steps lead particles to where the mass is; then they adapt: their own covariance is
    the inverse mass of Hamiltonian trajectories, their acceptance sets the step size. With both frozen they
    are sampled
    by Metropolised trajectories, which have the right law for any step size, until particles have forgotten
    where they came from. Where they do not, as between separated modes, tempering with resampling sets the
    masses. Then the result is tested. All of it warns (`SamplingWarning`, `NotStationaryWarning`) where the
    numbers are not to be trusted; `result.problems` lists why.

    Parameters
    ----------
    problem
        With a temperature τ > 0. With an interaction, a nonlinear functional or batches there is no density
        to accept by: then it is an unadjusted flow (`LeimkuhlerMatthews` with the ensemble's covariance),
        whose error in the step size is not corrected, and `result.exact` is False.
    initial
        Particles, or a measure to draw them from: wide enough to reach every mode that matters. Modes that no
        particle comes near cannot be found.
    key
        A JAX random key.
    particles
        How many, where `initial` is a measure.
    draws
        How many draws of each particle to keep.
    data
        What the loss takes as its batch: all cases.
    batch_size
        With one, the unadjusted flow.
    precision
        Standard errors of means to reach, in standard deviations.
    mesh
        A mesh of devices with an axis "particles", over which they are cut.
    progress
        Whether to show a progress bar.

    Ctrl-C ends it with the draws so far, and says so.
    """
    key = typed_key(key)
    draws = require_count("draws", draws, 4, "10 is a start.")
    precision = float(positive_number("precision", precision, "0.05 is a start."))
    start_key, run_key = jax.random.split(key)
    start = _particles(problem, initial, start_key, require_count("particles", particles, 20, "1,000."))
    _require_memory(start, draws)
    if mesh is not None:
        start = place(require_mesh(mesh, particle_count(start)), start, P(PARTICLES))
    energy = problem.free_energy(data)
    if energy.temperature is None:
        raise ValueError(
            "sample was given a problem without temperature: without a KL term there is no law to draw from; "
            "add 1.0 * mf.KL(prior), or mf.KL(mf.Flat()) where the loss is a negative log density."
        )
    if energy.interaction is not None or energy.rest is not None or batch_size is not None:
        return unadjusted(problem, start, run_key, draws, data, batch_size, mesh, progress)
    target = Target(problem, jax.tree.map(lambda leaf: leaf[0], start), data)
    return _Run(target, as_matrix(start), run_key, draws, precision, progress).result()


def _particles(problem: Problem, initial: Any, key: Key[Array, ""], number: int) -> Particles:
    if isinstance(initial, Empirical):
        initial = initial.particles
    elif isinstance(initial, AbstractMeasure):
        initial = initial.sample(key, number)
    particles = require_particles("initial", initial, problem.template())
    if particle_count(particles) < 20:
        raise ValueError(
            f"initial holds {particle_count(particles)} particles; sample learns the posterior's covariance "
            "from its particles and needs at least 20, better 1,000: pass a measure, or more particles."
        )
    return particles


def _require_memory(particles: Particles, draws: int) -> None:
    rows = sum(leaf.size for leaf in jax.tree.leaves(particles))
    # Draws, what is watched of them, and a few copies on the way, in double precision.
    needed, free = 8 * 8 * rows * draws, free_memory()
    if needed > free:
        raise ValueError(
            f"draws={draws:,} of {particle_count(particles):,} particles take about {needed / 2**30:.3g} GiB "
            f"of memory, and {free / 2**30:.3g} GiB are free; ask for fewer draws or fewer particles."
        )


class _Drawn(NamedTuple):
    """A round of draws (particle, draw, J), where it began and where it ended."""

    begin: Ensemble
    end: Ensemble
    rows: np.ndarray
    watched: Watched
    report: Report


class _StoppedError(Exception):
    """A signal came between two compiled calls."""


class _Run:
    """One call of `sample`."""

    def __init__(
        self, target: Target, rows: Array, key: Key[Array, ""], draws: int, precision: float, progress: bool
    ):
        self.target, self.start, self.key, self.number = target, rows, key, draws
        self.precision, self.calls = precision, 0
        self.gradients, self.records = 0, []
        self.replaced, self.levels, self.islands = 0, 0, None
        self.newest: _Drawn | None = None
        # Of the finest trajectories, when their size was chosen: a round of draws may have none of them.
        self.stiff = 0.0
        self.bar = tqdm(disable=not progress, unit="gradient")

    def next_key(self) -> Key[Array, ""]:
        """A key of its own for every compiled call."""
        self.calls += 1
        return jax.random.fold_in(self.key, self.calls)

    def result(self) -> Sample:
        """All phases, or as many as a signal leaves time for."""
        with self.bar, Signals() as self.signals:
            try:
                drawn = self._all_phases()
            except _StoppedError:
                drawn = self.newest
        if drawn is None:
            raise KeyboardInterrupt(
                f"sample was interrupted by {self.signals.caught} before there were draws; nothing is kept."
            )
        facts = Facts(
            self.records, self.gradients, self.replaced, self.levels, self.precision, self.signals.caught
        )
        # After tempering, islands are compared; particles may still not cross.
        begin = _looked_back(drawn)
        apart = float(drawn.watched.r_hat(*begin).max()) if self.levels else 1.0
        stay = 0.0 if self.levels else drawn.watched.staying(*begin)
        certificate, r_hat = self._certified(drawn.end), self._r_hat(drawn)
        return judged(
            self.target, drawn.rows, certificate, r_hat, drawn.watched, drawn.report, apart, stay, facts
        )

    def _all_phases(self) -> _Drawn:
        state = self._descended()
        state, tuning = self._adapted(state, self._tuned(state))
        drawn, tuning = self._drawn(state, tuning)
        apart = self._r_hat(drawn).max() > R_HAT or drawn.watched.staying(*_looked_back(drawn)) > 0
        if apart and self.start.shape[1] <= _MOST_TEMPERED:
            drawn = self._tempered(drawn, tuning)
        return drawn

    def _record(self, phase: str, gradients: int, **numbers: float) -> None:
        self.gradients += gradients
        self.bar.set_description(phase)
        self.bar.update(gradients)
        self.records.append({"gradients": self.gradients, "phase": phase, **numbers})
        if agreed(self.signals.caught is not None):
            raise _StoppedError

    # ---- Into the typical set. ----

    def _descended(self) -> Ensemble:
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
        return looked_at(self.target, self._rescued(state))

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
        self.replaced += len(lost)
        sources = np.arange(len(rows))
        rng = np.random.default_rng(self.calls)
        sources[lost] = rng.choice(np.flatnonzero(good), len(lost))
        return rows[jnp.asarray(sources)]

    # ---- Adaptation. ----

    def _tuned(self, state: Ensemble) -> Tuning:
        size, length = (jnp.asarray(x, state.rows.dtype) for x in (np.log(0.3), _LENGTH))
        return Tuning(ensemble_covariance(state.rows), size, length, jnp.zeros((), jnp.int32))

    def _adapted(self, state: Ensemble, tuning: Tuning) -> tuple[Ensemble, Tuning]:
        spreads = [float(jnp.max(_spread(state.rows)))]
        for block in range(_MOST_BLOCKS):
            state, tuning = self._deepen(*self._adapt(state, tuning, _BLOCK))
            state = looked_at(self.target, self._rescued(state))
            spreads.append(float(jnp.max(_spread(state.rows))))
            if spreads[-1] > _FAR * spreads[0]:
                break
            if block + 1 >= _LEAST_BLOCKS and self._certified(state):
                return state, tuning
        if spreads[-1] > 2 * spreads[-2]:
            raise ValueError(
                f"the particles run away: their spread has grown from {spreads[0]:.2g} to {spreads[-1]:.2g} "
                "and grows on, as it does where the posterior is improper; give every parameter a proper "
                "prior, mf.KL(prior) in the place of mf.KL(mf.Flat())."
            )
        return state, tuning

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
        self.stiff = float(stiff)
        self._record("adaptation", int(leaps), depth=float(tuning.depth), stiff=self.stiff)
        return state, tuning

    def _certified(self, state: Ensemble) -> Certificate:
        return self.target.problem.certify(self.target.unravelled(state.rows), self.target.batch)

    # ---- Sampling. ----

    def _drawn(self, state: Ensemble, tuning: Tuning) -> tuple[_Drawn, Tuning]:
        """Draws further and further apart, until particles have forgotten their start and means are known.

        Draws on the way there still remember the start: so those are kept that begin where a round ended
        which had forgotten it, and that forget it again.
        """
        between, doublings, forgotten = 1, 0, False
        while True:
            drawn = self._round(state, tuning, between)
            passes = self._passes(drawn)
            if (passes and forgotten) or (not passes and doublings == _DOUBLINGS):
                return drawn, tuning
            forgotten, state = passes, drawn.end
            if not passes:
                between, doublings = 2 * between, doublings + 1
                if doublings == 2:
                    tuning = tuning._replace(length=2 * tuning.length)
                state, tuning = self._deepen(*self._adapt(state, tuning, _RETUNED))

    def _round(self, state: Ensemble, tuning: Tuning, between: int) -> _Drawn:
        count = jnp.asarray(between, jnp.int32)
        end, rows, values, report = draw(self.target, state, tuning, self.next_key(), count, self.number)
        rows, values = (np.swapaxes(np.asarray(x, np.float64), 0, 1) for x in (rows, values))
        report = report._replace(stiff=jnp.maximum(report.stiff, self.stiff))
        self.newest = _Drawn(state, end, rows, Watched(rows, values), report)
        return self.newest

    def _passes(self, drawn: _Drawn) -> bool:
        r_hat, effective = self._r_hat(drawn).max(), drawn.watched.effective().min()
        drift, stay = drifting(drawn.watched.draws), drawn.watched.staying(*_looked_back(drawn))
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
        known = self.levels > 0 or effective >= 1 / self.precision**2
        crossed = self.levels > 0 or stay <= 0
        return bool(r_hat <= R_HAT and known and crossed and drift <= 0)

    def _r_hat(self, drawn: _Drawn) -> np.ndarray:
        return drawn.watched.r_hat(*_looked_back(drawn), self.islands)

    def _tempered(self, drawn: _Drawn, tuning: Tuning) -> _Drawn:
        found = temper(self.target, drawn.end.rows, tuning, self.next_key())
        self._record("tempering", found.leaps, levels=float(found.levels))
        if not found.reached:
            return drawn
        self.levels, self.islands, self.newest = found.levels, found.islands, None
        state = looked_at(self.target, self._finite(found.rows))
        state, tuning = self._adapted(state, tuning._replace(depth=self._tuned(state).depth))
        return self._drawn(state, tuning)[0]


def _looked_back(drawn: _Drawn) -> tuple[np.ndarray, np.ndarray]:
    """Where a round began: rows, and U there."""
    return np.asarray(drawn.begin.rows, np.float64), np.asarray(drawn.begin.values, np.float64)


def _spread(rows: Array) -> Array:
    """Of every coordinate, by the median of absolute deviations."""
    middle = jnp.median(rows, axis=0)
    return 1.4826 * jnp.median(jnp.abs(rows - middle[None]), axis=0)
