"""The same experiment over many seeds, as one program."""

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Int, Key

from measureflow.flows.wasserstein import ParticleState, WassersteinFlow
from measureflow.runs.loop import run
from measureflow.runs.together import Together
from measureflow.spaces.measures import AbstractMeasure
from measureflow.statement.problem import Problem


@eqx.filter_jit
def _advance(
    problem: Problem,
    flow: WassersteinFlow,
    keys: Key[Array, " seeds"],
    states: ParticleState,
    steps: Int[Array, ""],
) -> ParticleState:
    return jax.vmap(lambda state, key: run(problem, flow, state, None, key, steps))(states, keys)


def particles_of_seeds(
    problem: Problem,
    flow: WassersteinFlow,
    initial: AbstractMeasure,
    particles: int,
    steps: int,
    keys: Key[Array, " seeds"],
    label: str | None = None,
) -> np.ndarray:
    """Final particles, shape (seeds, N, J), each seed from its own draws of `initial`.

    The same keys start every problem from the same particles. With a label, a progress bar.
    """
    split = jax.vmap(jax.random.split)(keys)
    states = jax.vmap(lambda key: flow.init(problem, initial.sample(key, particles)))(split[:, 0])
    runs = Together(eqx.Partial(_advance, problem, flow, split[:, 1]), states)
    return np.asarray(runs.to(steps, label).particles)
