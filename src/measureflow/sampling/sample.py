"""Draws of a posterior in one call: descend, adapt, sample, certify; and say where that cannot be trusted."""

import contextlib
from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Key

from measureflow.core.devices import PARTICLES, place, require_mesh
from measureflow.core.pytrees import Particles, as_matrix, particle_count
from measureflow.core.validation import positive_number, require_count, require_particles, typed_key
from measureflow.runs.checkpoint import Checkpoint, Store
from measureflow.runs.draws import free_memory
from measureflow.runs.fingerprints import fingerprint
from measureflow.sampling.result import Sample
from measureflow.sampling.run import Run
from measureflow.sampling.trajectories import Target
from measureflow.sampling.unadjusted import unadjusted
from measureflow.spaces.empirical import Empirical
from measureflow.spaces.measures import AbstractMeasure
from measureflow.statement.problem import Problem


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
    checkpoint: Checkpoint | None = None,
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
    checkpoint
        With one, the same call goes on with a run that was cut off, and ends with the same draws, bit for
        bit; one that was finished returns at once. It is saved at the end of the descent, of adaptation, of
        tempering and of every round of draws, and between blocks of adaptation where `every` gradients have
        been taken since: what comes after that is computed again. The unadjusted flow is saved every `every`
        steps.

    Notes
    -----
    Ctrl-C ends it with the draws so far, and says so.
    """
    if checkpoint is not None and not isinstance(checkpoint, Checkpoint):
        raise TypeError(
            f"checkpoint must be of type Checkpoint, got {checkpoint!r}; pass mf.Checkpoint(...)."
        )
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
        return unadjusted(problem, start, run_key, draws, data, batch_size, mesh, progress, checkpoint)
    target = Target(problem, jax.tree.map(lambda leaf: leaf[0], start), data)
    store = None
    if checkpoint is not None:
        made_of = fingerprint(
            problem=problem,
            initial=initial,
            particles=particle_count(start),
            key=key,
            data=data,
            draws=draws,
            precision=precision,
        )
        store = Store(checkpoint, made_of)
    with contextlib.closing(store) if store else contextlib.nullcontext():
        return Run(target, as_matrix(start), run_key, draws, precision, progress, mesh, store).result()


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
