"""What came of a run of `sample`, and why it is not to be trusted, if there is a reason."""

import warnings
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from measureflow.runs.history import History
from measureflow.sampling.mixing import Watched, drifting, hopeless
from measureflow.sampling.phases import DEEPEST, STIFF, Report
from measureflow.sampling.result import R_HAT, Sample, SamplingWarning
from measureflow.sampling.trajectories import Target
from measureflow.spaces.empirical import Empirical
from measureflow.statement.certificate import Certificate, NotStationaryWarning

# Particles that hardly ever move, at most; copies of others, at most.
_STUCK, _COPIES = 1e-2, 0.5


class Facts(NamedTuple):
    """What a run has counted."""

    records: list[dict[str, Any]]
    gradients: int
    replaced: int
    levels: int
    precision: float
    signal: str | None
    folder: Path | None = None


def judged(
    target: Target,
    rows: np.ndarray,
    certificate: Certificate,
    r_hat: np.ndarray,
    watched: Watched,
    report: Report,
    apart: float,
    stay: float,
    facts: Facts,
) -> Sample:
    """The sample of these draws (particle, draw, J), with a warning for everything that speaks against it."""
    effective = watched.effective()
    problems = [
        *_of_interruption(facts),
        *_of_mixing(r_hat, effective, stay, watched, facts),
        *_of_trajectories(report, watched, facts),
        *_of_rounding(watched, rows, target),
        *_crossing(apart, r_hat),
    ]
    result = Sample(
        draws=_as_draws(target, rows),
        measure=Empirical(target.unravelled(_as_rows(target, rows.reshape(-1, rows.shape[2])))),
        certificate=certificate,
        r_hat=_as_one(target, r_hat),
        effective_draws=_as_one(target, effective),
        gradients=facts.gradients,
        history=_history(facts.records),
        acceptance=float(report.acceptance),
        stiff=float(report.stiff),
        replaced=facts.replaced,
        levels=facts.levels,
        exact=True,
        problems=tuple(problems),
        interrupted=facts.signal,
    )
    warn(result, stacklevel=5)
    return result


def warn(result: Sample, stacklevel: int) -> None:
    """Of everything that speaks against a result."""
    if not result.certificate:
        warnings.warn(str(result.certificate), NotStationaryWarning, stacklevel=stacklevel)
    for text in result.problems:
        warnings.warn(text, SamplingWarning, stacklevel=stacklevel)


def _of_interruption(facts: Facts) -> list[str]:
    if facts.signal is None:
        return []
    goes_on = f" The same call goes on from {facts.folder}." if facts.folder else ""
    return [f"sample was interrupted by {facts.signal}: these are the draws so far.{goes_on}"]


def _of_mixing(
    r_hat: np.ndarray, effective: np.ndarray, stay: float, watched: Watched, facts: Facts
) -> list[str]:
    found, worst = [], float(r_hat.max())
    if worst > R_HAT:
        where = "islands of tempering disagree" if facts.levels else "particles remember where they began"
        found.append(
            f"nested R̂ is {worst:.4g}, above {R_HAT}: {where}, so means and the masses of modes may be "
            "those of the start; use more particles, a wider `initial`, or another parametrisation."
        )
    if stay > 0:
        found.append(
            "particles that began far out stayed there, as in a small mode: its mass is that of the start; "
            "use a narrower `initial`, more draws, or another parametrisation."
        )
    if drifting(watched.draws) > 0:
        found.append(
            "later draws have other moments than earlier ones: the particles are still on their way, or the "
            "posterior is improper and they run away; use a proper prior, or another parametrisation."
        )
    if not facts.levels and effective.min() < 1 / facts.precision**2:
        found.append(
            f"the precision asked for was not reached: the standard error of a mean is "
            f"{1 / np.sqrt(effective.min()):.2g} standard deviations, not {facts.precision:.3g}; ask for "
            "more particles or draws."
        )
    return found


def _of_trajectories(report: Report, watched: Watched, facts: Facts) -> list[str]:
    found, n = [], len(watched.draws)
    if float(report.stiff) > 2 * STIFF:
        found.append(
            f"{float(report.stiff):.1%} of the trajectories were rejected although their steps were "
            f"up to {4**DEEPEST} times smaller than the common ones: there is a region, such as the neck of "
            "a funnel, that the particles cannot enter; use another parametrisation (non-centred, for a "
            "hierarchical model), or double precision."
        )
    lost = int(hopeless(watched.draws[:, -1, -1]).sum())
    if lost:
        found.append(
            f"{lost} of {n} particles are far from all others, where there is no mass, and did not come "
            "back; use a narrower `initial`."
        )
    stuck = float(np.mean(np.asarray(report.moved) < 0.1))
    if stuck > _STUCK:
        found.append(
            f"{stuck:.1%} of the particles hardly move: the posterior is much narrower where they are; "
            "use another parametrisation."
        )
    if float(report.acceptance) < 0.5:
        found.append(f"the median acceptance is {float(report.acceptance):.2f}, where 0.88 was aimed at.")
    if facts.replaced > _COPIES * n:
        found.append(
            f"{facts.replaced} of {n} particles were hopeless and were replaced by copies of others."
        )
    return found


def _of_rounding(watched: Watched, rows: np.ndarray, target: Target) -> list[str]:
    dtype = jnp.result_type(*jax.tree.leaves(target.one))
    rounding = float(jnp.finfo(dtype).eps) * float(np.median(np.abs(watched.draws[..., -1])))
    if rounding <= 0.05:
        return []
    return [
        f"rounding changes log densities by about {rounding:.2g}; use double precision: "
        'jax.config.update("jax_enable_x64", True).'
    ]


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


def _as_rows(target: Target, rows: np.ndarray) -> Any:
    return jnp.asarray(rows, jnp.result_type(*jax.tree.leaves(target.one)))


def _as_one(target: Target, row: np.ndarray) -> PyTree:
    """A number for every coordinate, shaped like θ."""
    return jax.tree.map(lambda leaf: np.asarray(leaf[0]), target.unravelled(_as_rows(target, row[None])))


def _as_draws(target: Target, rows: np.ndarray) -> PyTree:
    n, m, number = rows.shape
    flat = target.unravelled(_as_rows(target, rows.reshape(n * m, number)))
    return jax.tree.map(lambda leaf: np.asarray(leaf).reshape(n, m, *leaf.shape[1:]), flat)


def _history(records: list[dict[str, Any]]) -> History:
    others = sorted({name for row in records for name in row} - {"phase", "gradients"})
    names = ["phase", "gradients", *others]
    return History({name: np.array([row.get(name, np.nan) for row in records]) for name in names})
