"""A realistic size: residual networks of 10⁷ parameters in bfloat16, with particles in float32.

Exact interactions pass over all parameters of all particles; in random projections they are a thousand
numbers a particle. Held to plain training of the same ensemble.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import measureflow as mf
from benchmarks import bare
from benchmarks.overhead import BARE
from benchmarks.targets import STEP_SIZE, TEMPERATURE, Target, residual
from benchmarks.timing import Contender, Job, Ratio, comparison
from measureflow.core.pytrees import squared_distances

ROUNDS, STEPS = 5, 10
# Of the order of the distance between two networks.
LENGTHSCALE = 150.0
EXACT, PROJECTED = "DRLE, exact", "DRLE, projected"
REPULSIVE = "DRE, projected"


def jobs(*, quick: bool = False) -> list[Job]:
    """One comparison; on a CPU only the quick one, which only shows that it runs."""
    if quick:
        return [_job(residual(2, 4, 4, 2, 3), 1, 1, 7)]
    return [] if jax.default_backend() == "cpu" else [_job(residual(20), STEPS, ROUNDS, 1021)]


def _job(target: Target, steps: int, rounds: int, count: int) -> Job:
    projection = mf.RandomProjection(jax.random.key(3), count)

    def run(tick: Callable[[], None]) -> dict[str, Any]:
        ours = (EXACT, PROJECTED, REPULSIVE)
        programs = {name: _compiled(target, name, projection, steps) for name in ours}
        contenders = {BARE: Contender(bare.gradient_steps(target, steps, draws=False), steps)}
        contenders |= {name: Contender(call, steps) for name, (call, _) in programs.items()}
        wanted = [Ratio(EXACT, BARE), Ratio(PROJECTED, BARE, 1.1), Ratio(REPULSIVE, BARE, 1.1)]
        found = comparison(target.title, contenders, wanted, rounds, tick, unit="step")
        used = {BARE: _bare_bytes(target, steps)} | {name: used for name, (_, used) in programs.items()}
        more = {"particles": len(jax.tree.leaves(target.particles)[0]), "count": projection.count}
        return found | more | {"bytes": used, "error": distance_error(target.particles, projection)}

    return Job(target.title, rounds + 1, run)


def _problem(target: Target, name: str, projection: mf.RandomProjection) -> mf.Problem:
    one = jax.tree.map(lambda leaf: jnp.zeros_like(leaf[0]), target.particles)
    prior, kernel = mf.Gaussian(one, 1.0), mf.SquaredExponential(LENGTHSCALE)
    kernel = kernel if name == EXACT else kernel.on(projection)
    if name == REPULSIVE:
        return mf.deep_repulsive_ensemble(target.loss, prior, kernel, mmd=0.1)
    return mf.deep_repulsive_langevin_ensemble(target.loss, prior, kernel, mmd=0.1, kl=TEMPERATURE)


def _compiled(
    target: Target, name: str, projection: mf.RandomProjection, steps: int
) -> tuple[Callable[[], Any], int]:
    """Its steps by `mf.run`, and the bytes of the compiled program."""
    problem, flow = _problem(target, name, projection), mf.WassersteinFlow(STEP_SIZE)
    state, count = flow.init(problem, target.particles), jnp.asarray(steps, jnp.int32)
    arguments = (problem, flow, state, target.data, jax.random.key(2), count)
    program = eqx.filter_jit(mf.run).lower(*arguments).compile()
    return lambda: program(*arguments), _bytes(program.compiled)


def _bare_bytes(target: Target, steps: int) -> int:
    program = bare.compiled_steps(target, steps, draws=False)
    return _bytes(program.lower(target.particles, target.data, jax.random.key(2)).compile())


def _bytes(compiled: Any) -> int:
    """Arguments, results and what is held between them."""
    found = compiled.memory_analysis()
    return int(found.argument_size_in_bytes + found.output_size_in_bytes + found.temp_size_in_bytes)


def distance_error(particles: Any, projection: mf.RandomProjection) -> float:
    """The relative error of squared distances in the projections, root mean square over pairs."""
    pairs = np.triu_indices(len(jax.tree.leaves(particles)[0]), 1)
    exact = np.asarray(jax.jit(squared_distances)(particles, particles))[pairs]
    features = jax.jit(jax.vmap(projection))(particles)
    projected = np.asarray(squared_distances(features, features))[pairs]
    return float(np.sqrt(np.mean((projected / exact - 1) ** 2)))
