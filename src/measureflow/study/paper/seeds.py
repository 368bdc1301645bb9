"""The same experiment over many seeds, as one program."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key
from tqdm import tqdm

from measureflow.flows.wasserstein import ParticleState, WassersteinFlow
from measureflow.runs.loop import run
from measureflow.spaces.measures import AbstractMeasure
from measureflow.statement.problem import Problem

_CALLS = 50  # so that a progress bar can move


@eqx.filter_jit
def _advance(
    problem: Problem, flow: WassersteinFlow, states: ParticleState, keys: Array, steps: Array
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
    counts = np.diff(np.linspace(0, steps, _CALLS + 1).round().astype(int))
    for count in tqdm(counts, desc=label, disable=label is None):
        states = jax.block_until_ready(_advance(problem, flow, states, split[:, 1], jnp.asarray(count)))
    return np.asarray(states.particles)
