"""Draws of a posterior in one call: descend, adapt, sample, certify; and say where that cannot be trusted."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key, PyTree
from tqdm.auto import tqdm

from measureflow.core.pytrees import Particles, as_matrix, particle_count
from measureflow.core.validation import positive_number, require_count, require_particles, typed_key
from measureflow.flows.ensembles import ensemble_covariance
from measureflow.runs.history import History
from measureflow.runs.mixing import effective_draws, nested_r_hat
from measureflow.runs.phases import Report, adapt, begun, descend, draw, looked_at
from measureflow.runs.sampled import Sample, SamplingWarning
from measureflow.runs.targets import Ensemble, Target, Tuning
from measureflow.runs.tempering import temper
from measureflow.runs.unadjusted import unadjusted
from measureflow.spaces.empirical import Empirical
from measureflow.spaces.measures import AbstractMeasure
from measureflow.statement.certificate import NotStationaryWarning
from measureflow.statement.problem import Problem

_DESCENT_ROUNDS, _DESCENT_STEPS = 24, 50
_BLOCK, _LEAST_BLOCKS, _MOST_BLOCKS = 20, 3, 12
_DOUBLINGS, _RETUNED = 4, 8
#: Where particles have not forgotten their start; where trajectories diverge too often.
R_HAT, _DIVERGENCES, _STUCK = 1.03, 2e-3, 1e-2
_LENGTH = 1.6


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
    progress: bool = False,
) -> Sample:
    """Draws of the posterior exp(−V/τ), with nothing to tune.

    Particles go down a few hundred robust gradient steps, then adapt: their own covariance is the inverse
    mass of Hamiltonian trajectories, their acceptance sets the step size. With both frozen they are sampled
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
    progress
        Whether to show a progress bar.
    """
    key = typed_key(key)
    draws = require_count("draws", draws, 2, "10 is a start.")
    precision = float(positive_number("precision", precision, "0.05 is a start."))
    start_key, run_key = jax.random.split(key)
    start = _particles(problem, initial, start_key, require_count("particles", particles, 20, "1,000."))
    energy = problem.free_energy(data)
    if energy.temperature is None:
        raise ValueError(
            "sample was given a problem without temperature: without a KL term there is no law to draw from; "
            "add 1.0 * mf.KL(prior), or mf.KL(mf.Flat()) where the loss is a negative log density."
        )
    if energy.interaction is not None or energy.rest is not None or batch_size is not None:
        return unadjusted(problem, start, run_key, draws, data, batch_size, progress)
    target = Target(problem, jax.tree.map(lambda leaf: leaf[0], start), data)
    run = _Run(target, as_matrix(start), run_key, draws, precision, progress)
    return run.result()


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


class _Run:
    """One call of `sample`."""

    def __init__(
        self, target: Target, rows: Array, key: Key[Array, ""], draws: int, precision: float, progress: bool
    ):
        self.target, self.start, self.key, self.number = target, rows, key, draws
        self.precision, self.calls = precision, 0
        self.gradients, self.records, self.problems = 0, [], []
        self.replaced, self.levels, self.islands = 0, 0, None
        self.bar = tqdm(disable=not progress, unit="gradient")

    def next_key(self) -> Key[Array, ""]:
        """A key of its own for every compiled call."""
        self.calls += 1
        return jax.random.fold_in(self.key, self.calls)

    def result(self) -> Sample:
        """All phases."""
        with self.bar:
            state = self._descended()
            state, tuning = self._adapted(state, self._tuned(state))
            state, kept, report, begin = self._drawn(state, tuning)
            if self._r_hat(begin, kept).max() > R_HAT and self.start.shape[1] <= 500:
                state, kept, report, begin = self._tempered(state, kept, report, begin, tuning)
        return self._judged(state, kept, report, begin)

    def _record(self, phase: str, gradients: int, **numbers: float) -> None:
        self.gradients += gradients
        self.bar.set_description(phase)
        self.bar.update(gradients)
        self.records.append({"gradients": self.gradients, "phase": phase, **numbers})

    # ---- Into the typical set. ----

    def _descended(self) -> Ensemble:
        rows = self._finite(self.start)
        scale = jnp.maximum(_spread(rows), 1e-3 * (1 + jnp.max(jnp.abs(rows), axis=0)))
        state, rate, small = begun(rows, looked_at(self.target, rows).values), 0.1, 0
        steps = jnp.asarray(_DESCENT_STEPS, jnp.int32)
        for _ in range(_DESCENT_ROUNDS):
            before = float(jnp.median(state.values))
            state = descend(self.target, state, scale, jnp.asarray(rate, rows.dtype), steps)
            after = float(jnp.median(state.values))
            self._record("descent", _DESCENT_STEPS, potential=after)
            # The typical set is J/2 above the minimum: what is less than that is no matter.
            if before - after > max(1.0, 0.05 * rows.shape[1]):
                rate, small = min(rate * 1.5, 3.0), 0
                continue
            rate, small = rate * 0.3, small + 1
            if small == 3:
                break
        return looked_at(self.target, self._rescued(state.best, state.values))

    def _finite(self, rows: Array) -> Array:
        found = looked_at(self.target, rows)
        good = np.asarray(jnp.isfinite(found.values) & jnp.all(jnp.isfinite(found.gradients), axis=1))
        if not good.any():
            raise ValueError(
                "the potential is not finite at any particle of `initial`; check the loss, the data and "
                "`initial` for NaN, infinities and logarithms of zero."
            )
        return self._replaced(rows, good)

    def _rescued(self, rows: Array, values: Array) -> Array:
        """Without hopeless particles: stuck far above all others, where no mass is."""
        values = np.asarray(values, np.float64)
        middle = np.median(values)
        spread = 1.4826 * np.median(np.abs(values - middle))
        good = values <= middle + 10 * spread + rows.shape[1] + 50
        return self._replaced(rows, good)

    def _replaced(self, rows: Array, good: np.ndarray) -> Array:
        lost = np.flatnonzero(~good)
        self.replaced += len(lost)
        sources = np.arange(len(rows))
        rng = np.random.default_rng(self.calls)
        sources[lost] = rng.choice(np.flatnonzero(good), len(lost))
        return rows[jnp.asarray(sources)]

    # ---- Adaptation. ----

    def _tuned(self, state: Ensemble) -> Tuning:
        dtype = state.rows.dtype
        return Tuning(
            ensemble_covariance(state.rows), jnp.asarray(np.log(0.3), dtype), jnp.asarray(_LENGTH, dtype)
        )

    def _adapted(self, state: Ensemble, tuning: Tuning) -> tuple[Ensemble, Tuning]:
        count = jnp.asarray(_BLOCK, jnp.int32)
        for block in range(_MOST_BLOCKS):
            state, tuning, report = adapt(self.target, state, tuning, self.next_key(), count)
            if block == 1:
                state = looked_at(self.target, self._rescued(state.rows, state.values))
            certificate = self._certified(state)
            self._record(
                "adaptation",
                int(report.leaps),
                acceptance=float(report.acceptance),
                step_size=float(jnp.exp(tuning.log_step_size)),
                statistic=certificate.statistic,
            )
            if block + 1 >= _LEAST_BLOCKS and certificate:
                break
        return state, tuning

    def _certified(self, state: Ensemble) -> Any:
        return self.target.problem.certify(self.target.unravelled(state.rows), self.target.batch)

    # ---- Sampling. ----

    def _drawn(self, state: Ensemble, tuning: Tuning) -> tuple[Ensemble, np.ndarray, Report, np.ndarray]:
        """Draws further and further apart, until particles have forgotten their start and means are known."""
        between, kept, report = 1, np.empty(0), None
        begin = np.asarray(state.rows)
        for doubling in range(_DOUBLINGS + 1):
            if doubling > 0:
                few = jnp.asarray(_RETUNED, jnp.int32)
                state, tuning, retuned = adapt(self.target, state, tuning, self.next_key(), few)
                self._record("adaptation", int(retuned.leaps), acceptance=float(retuned.acceptance))
            begin = np.asarray(state.rows)
            count = jnp.asarray(between, jnp.int32)
            state, rows, report = draw(self.target, state, tuning, self.next_key(), count, self.number)
            kept = np.swapaxes(np.asarray(rows), 0, 1)
            r_hat, effective = self._r_hat(begin, kept).max(), effective_draws(kept).min()
            self._record(
                "sampling",
                int(report.leaps),
                acceptance=float(report.acceptance),
                r_hat=float(r_hat),
                effective_draws=float(effective),
            )
            # Tempered particles need not cross: islands are independent.
            known = self.levels > 0 or effective >= 1 / self.precision**2
            if r_hat <= R_HAT and known:
                break
            between *= 2
            if doubling == 1:
                tuning = tuning._replace(length=2 * tuning.length)
        assert report is not None
        return state, kept, report, begin

    def _r_hat(self, begin: np.ndarray, kept: np.ndarray) -> np.ndarray:
        return nested_r_hat(begin, kept, self.islands)

    def _tempered(
        self, state: Ensemble, kept: np.ndarray, report: Report, begin: np.ndarray, tuning: Tuning
    ) -> tuple[Ensemble, np.ndarray, Report, np.ndarray]:
        found = temper(self.target, jnp.asarray(kept[:, -1]), tuning, self.next_key())
        self._record("tempering", found.leaps, levels=float(found.levels))
        if not found.reached:
            return state, kept, report, begin
        self.levels, self.islands = found.levels, found.islands
        state = looked_at(self.target, self._finite(found.rows))
        state, tuning = self._adapted(state, self._tuned(state))
        return self._drawn(state, tuning)

    # ---- What came of it. ----

    def _judged(self, state: Ensemble, kept: np.ndarray, report: Report, begin: np.ndarray) -> Sample:
        n = len(kept)
        r_hat, effective = self._r_hat(begin, kept), effective_draws(kept)
        # After tempering, islands are compared; particles may still not cross.
        apart = float(nested_r_hat(begin, kept).max()) if self.levels else 1.0
        certificate = self._certified(state)
        result = Sample(
            draws=_as_draws(self.target, kept),
            measure=Empirical(self.target.unravelled(jnp.asarray(kept.reshape(-1, kept.shape[2])))),
            certificate=certificate,
            r_hat=_as_one(self.target, r_hat),
            effective_draws=_as_one(self.target, effective),
            gradients=self.gradients,
            history=_history(self.records),
            acceptance=float(report.acceptance),
            divergences=float(report.diverged),
            replaced=self.replaced,
            levels=self.levels,
            exact=True,
            problems=tuple(self._problems(report, r_hat, effective, state, n) + _crossing(apart, r_hat)),
        )
        if not certificate:
            warnings.warn(str(certificate), NotStationaryWarning, stacklevel=4)
        for text in result.problems:
            warnings.warn(text, SamplingWarning, stacklevel=4)
        return result

    def _problems(
        self, report: Report, r_hat: np.ndarray, effective: np.ndarray, state: Ensemble, n: int
    ) -> list[str]:
        found, worst = [], float(r_hat.max())
        if worst > R_HAT:
            where = "islands of tempering disagree" if self.levels else "particles remember where they began"
            found.append(
                f"nested R̂ is {worst:.3g}, above {R_HAT}: {where}, so means and the masses of modes may be "
                "those of the start; use more particles, a wider `initial`, or another parametrisation."
            )
        share = float(report.diverged)
        if share > _DIVERGENCES:
            found.append(
                f"{share:.2%} of the trajectories with small steps diverged: there is a region, such as the "
                "neck of a funnel, that the particles cannot enter; use another parametrisation "
                "(non-centred, for a hierarchical model)."
            )
        stuck = float(np.mean(np.asarray(report.moved) < 0.1))
        if stuck > _STUCK:
            found.append(
                f"{stuck:.1%} of the particles hardly move: the posterior is much narrower where they are; "
                "use another parametrisation."
            )
        if float(report.acceptance) < 0.5:
            found.append(f"the acceptance is {float(report.acceptance):.2f}, where 0.9 was aimed at.")
        if not self.levels and effective.min() < 1 / self.precision**2:
            found.append(
                f"the precision asked for was not reached: the standard error of a mean is "
                f"{1 / np.sqrt(effective.min()):.2g} standard deviations, not {self.precision}; ask for more "
                "particles or draws."
            )
        if self.replaced > 0.05 * n:
            found.append(
                f"{self.replaced} of {n} particles were hopeless and were replaced by copies of others."
            )
        rounding = float(np.finfo(state.rows.dtype).eps * np.median(np.abs(np.asarray(state.values))))
        if rounding > 0.05:
            found.append(
                f"rounding changes log densities by about {rounding:.2g}; use double precision: "
                'jax.config.update("jax_enable_x64", True).'
            )
        return found


def _crossing(apart: float, r_hat: np.ndarray) -> list[str]:
    """Where particles do not cross between regions, their masses are those of tempering."""
    if apart <= 1.1:
        return []
    disagreement = float(np.sqrt(np.maximum(r_hat.max() ** 2 - 1, 0.0)))
    return [
        "particles do not cross between separated regions: their masses are those of tempering, whose "
        f"islands differ by about {disagreement:.2g} standard deviations beyond chance; regions that no "
        "particle of `initial` came near are missing."
    ]


def _spread(rows: Array) -> Array:
    middle = jnp.median(rows, axis=0)
    return 1.4826 * jnp.median(jnp.abs(rows - middle[None]), axis=0)


def _as_one(target: Target, row: np.ndarray) -> PyTree:
    """A number for every coordinate, shaped like θ."""
    return jax.tree.map(lambda leaf: np.asarray(leaf[0]), target.unravelled(jnp.asarray(row)[None]))


def _as_draws(target: Target, kept: np.ndarray) -> PyTree:
    n, m, number = kept.shape
    flat = target.unravelled(jnp.asarray(kept.reshape(n * m, number)))
    return jax.tree.map(lambda leaf: np.asarray(leaf).reshape(n, m, *leaf.shape[1:]), flat)


def _history(records: list[dict[str, Any]]) -> History:
    names = [
        "phase",
        "gradients",
        *sorted({name for row in records for name in row} - {"phase", "gradients"}),
    ]
    return History({name: np.array([row.get(name, np.nan) for row in records]) for name in names})
