"""measureflow's contenders: the four named ensembles on a target, by `mf.run` in one jit or `mf.solve`."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

import measureflow as mf
from benchmarks.targets import STEP_SIZE, TEMPERATURE, Target
from measureflow.statement.problem import Problem

METHODS = ("DE", "DLE", "DRE", "DRLE")
# Of the order of the distance between two networks.
LENGTHSCALE = 20.0
MMD = 0.1


def problems(loss: Callable, one: Any) -> dict[str, Problem]:
    """The four ensembles for particles shaped like `one`, with a standard normal prior."""
    prior, kernel = mf.Gaussian(jax.tree.map(jnp.zeros_like, one), 1.0), mf.SquaredExponential(LENGTHSCALE)
    return {
        "DE": mf.deep_ensemble(loss),
        "DLE": mf.deep_langevin_ensemble(loss, prior, kl=TEMPERATURE),
        "DRE": mf.deep_repulsive_ensemble(loss, prior, kernel, mmd=MMD),
        "DRLE": mf.deep_repulsive_langevin_ensemble(loss, prior, kernel, mmd=MMD, kl=TEMPERATURE),
    }


def projected(target: Target) -> dict[str, Problem]:
    """The repulsive ones, their interactions in random projections."""
    one = jax.tree.map(lambda leaf: jnp.zeros_like(leaf[0]), target.particles)
    prior = mf.Gaussian(one, 1.0)
    kernel = mf.SquaredExponential(LENGTHSCALE).on(mf.RandomProjection(jax.random.key(3)))
    return {
        "DRE, projected": mf.deep_repulsive_ensemble(target.loss, prior, kernel, mmd=MMD),
        "DRLE, projected": mf.deep_repulsive_langevin_ensemble(
            target.loss, prior, kernel, mmd=MMD, kl=TEMPERATURE
        ),
    }


def problem_of(target: Target, method: str) -> Problem:
    """One of the four ensembles on a target."""
    return problems(target.loss, jax.tree.map(lambda leaf: leaf[0], target.particles))[method]


def steps_of(
    problem: Problem, particles: Any, steps: int, data: Any = None, step_size: float = STEP_SIZE
) -> Callable[[], Any]:
    """`steps` steps from `particles` by `mf.run`, inside one jit."""
    flow = mf.WassersteinFlow(step_size)
    state = flow.init(problem, particles)
    # What stays the same is an argument all the same, so that nothing is folded into the program.
    compiled = eqx.filter_jit(mf.run)
    count = jnp.asarray(steps, jnp.int32)
    return lambda: compiled(problem, flow, state, data, jax.random.key(2), count)


def run(target: Target, method: str, steps: int) -> Callable[[], Any]:
    """A method on a target, by `mf.run` inside one jit."""
    return steps_of(problem_of(target, method), target.particles, steps, target.data)


def solve(target: Target, method: str, steps: int) -> Callable[[], Any]:
    """The same by `mf.solve`, with the history that it keeps."""
    problem, flow = problem_of(target, method), mf.WassersteinFlow(STEP_SIZE)
    key = jax.random.key(2)
    return lambda: mf.solve(problem, flow, target.particles, steps, key, data=target.data).state
