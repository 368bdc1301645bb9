"""`sample` where no density can be accepted by: interactions, nonlinear functionals, batches."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Key

from measureflow.core.pytrees import Particles, like_rows
from measureflow.flows.ensembles import EnsemblePreconditioner
from measureflow.flows.wasserstein import WassersteinFlow
from measureflow.runs.draws import Draws
from measureflow.runs.solve import solve
from measureflow.sampling.judging import warn
from measureflow.sampling.mixing import effective_draws, nested_r_hat
from measureflow.sampling.result import Sample
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
) -> Sample:
    """Leimkuhler–Matthews in coordinates that the particles whiten; nothing is accepted or rejected."""
    flow = WassersteinFlow(_STEP_SIZE, EnsemblePreconditioner(_ADAPT))
    every = (_STEPS - _ADAPT) // draws
    solution = solve(
        problem,
        flow,
        particles,
        _ADAPT + draws * every,
        key,
        data=data,
        batch_size=batch_size,
        mesh=mesh,
        progress=progress,
        collect=Draws(after=_ADAPT, every=every),
        certify=False,
    )
    assert isinstance(solution.measure, Empirical)
    leaves = jax.tree.leaves(solution.draws)
    n, m = leaves[0].shape[:2]
    kept = np.concatenate([np.asarray(leaf).reshape(n, m, -1) for leaf in leaves], axis=2)
    one = jax.tree.map(lambda leaf: leaf[:1], solution.measure.particles)
    shaped = [
        jax.tree.map(lambda leaf: np.asarray(leaf[0]), like_rows(jnp.asarray(row)[None], one))
        for row in (nested_r_hat(kept[:, 0], kept), effective_draws(kept))
    ]
    problems = []
    if batch_size is not None:
        problems.append("batches heat the particles; see history.batch_noise, its ratio to the temperature.")
    certificate = problem.certify(solution.measure.particles, data)
    rows = jnp.asarray(kept.reshape(n * m, -1))
    result = Sample(
        draws=solution.draws,
        measure=Empirical(like_rows(rows, one)),
        certificate=certificate,
        r_hat=shaped[0],
        effective_draws=shaped[1],
        gradients=_ADAPT + draws * every,
        history=solution.history,
        acceptance=float("nan"),
        stiff=0.0,
        replaced=0,
        levels=0,
        exact=False,
        problems=tuple(problems),
    )
    warn(result, stacklevel=4)
    return result
