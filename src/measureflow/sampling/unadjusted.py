"""`sample` where no density can be accepted by: interactions, nonlinear functionals, batches."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Key, PyTree

from measureflow.core.pytrees import Particles, like_rows
from measureflow.flows.ensembles import EnsemblePreconditioner
from measureflow.flows.wasserstein import WassersteinFlow
from measureflow.runs.checkpoint import Checkpoint
from measureflow.runs.draws import Draws
from measureflow.runs.solve import solve
from measureflow.sampling.judging import warn
from measureflow.sampling.mixing import drifting, effective_draws, nested_r_hat
from measureflow.sampling.result import R_HAT, Sample
from measureflow.spaces.empirical import Empirical
from measureflow.statement.problem import Problem

_ADAPT, _STEPS, _STEP_SIZE = 600, 1_600, 0.05


def unadjusted(
    problem: Problem,
    particles: Particles,
    key: Key[Array, ""],
    draws: int,
    data: Any,
    batch_size: int | None,
    mesh: Mesh | None,
    progress: bool,
    checkpoint: Checkpoint | None,
) -> Sample:
    """Leimkuhler–Matthews in coordinates that the particles whiten; nothing is accepted or rejected."""
    every = max((_STEPS - _ADAPT) // draws, 1)
    steps = _ADAPT + draws * every
    solution = solve(
        problem,
        WassersteinFlow(_STEP_SIZE, EnsemblePreconditioner(_ADAPT)),
        particles,
        steps,
        key,
        data=data,
        batch_size=batch_size,
        mesh=mesh,
        progress=progress,
        checkpoint=checkpoint,
        collect=Draws(after=_ADAPT, every=every),
        certify=False,
    )
    assert isinstance(solution.measure, Empirical)
    rows = _rows(solution.draws)
    one = jax.tree.map(lambda leaf: leaf[:1], solution.measure.particles)
    r_hat = nested_r_hat(rows[:, 0], rows)
    result = Sample(
        draws=solution.draws,
        measure=Empirical(like_rows(jnp.asarray(rows.reshape(-1, rows.shape[2])), one)),
        certificate=problem.certify(solution.measure.particles, data),
        r_hat=_shaped(r_hat, one),
        effective_draws=_shaped(effective_draws(rows), one),
        gradients=steps,
        history=solution.history,
        acceptance=float("nan"),
        stiff=0.0,
        replaced=0,
        levels=0,
        exact=False,
        problems=tuple(_problems(rows, r_hat, batch_size)),
    )
    warn(result, stacklevel=4)
    return result


def _rows(draws: PyTree) -> np.ndarray:
    """(particle, draw, J)."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(draws)]
    return np.concatenate([leaf.reshape(*leaf.shape[:2], -1) for leaf in leaves], axis=2)


def _shaped(row: np.ndarray, one: Particles) -> PyTree:
    """A number for every coordinate, shaped like θ."""
    return jax.tree.map(lambda leaf: np.asarray(leaf[0]), like_rows(jnp.asarray(row)[None], one))


def _problems(rows: np.ndarray, r_hat: np.ndarray, batch_size: int | None) -> list[str]:
    found = []
    if batch_size is not None:
        found.append("batches heat the particles; see history.batch_noise, its ratio to the temperature.")
    if r_hat.max() > R_HAT or drifting(rows) > 0:
        found.append(
            f"{_STEPS:,} steps were not enough: particles remember where they began (nested R̂ "
            f"{r_hat.max():.3g}), or their moments still drift; go on with mf.solve from "
            "`result.measure.particles`."
        )
    return found
