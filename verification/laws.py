"""The flow's law against exact minimisers, and against deliberately wrong versions of itself.

The test problem is the paper's one-dimensional one: the quartic loss, P = Q₀ = N(0, 1), KL weight 1, MMD²
weight ½ with a squared exponential kernel.
"""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

import measureflow as mf
from measureflow.spaces.kernels import RadialCombination
from measureflow.statement.divergences import negative_log_density

PRIOR = mf.Gaussian(jnp.zeros(1), 1.0)
KERNEL = mf.SquaredExponential(0.7)
GRID = np.linspace(-5, 4, 1801)


def dle(kl: float = 1.0) -> mf.Problem:
    """The deep Langevin ensemble of the test problem."""
    return mf.deep_langevin_ensemble(mf.theory.quartic_loss, PRIOR, kl=kl)


def drle(mmd: float = 0.5, kl: float = 1.0) -> mf.Problem:
    """The deep repulsive Langevin ensemble of the test problem."""
    return mf.deep_repulsive_langevin_ensemble(mf.theory.quartic_loss, PRIOR, KERNEL, mmd=mmd, kl=kl)


class Mutant(mf.Problem):
    """A problem whose flow is wrong: noise variance, interaction or prior pull times a factor."""

    noise: float = 1.0
    interaction: float = 1.0
    prior: float = 1.0

    def free_energy(self, batch: object = None) -> mf.FreeEnergy:
        """The normal form of the problem with its parts tampered with."""
        energy = super().free_energy(batch)
        kernel = energy.interaction
        if kernel is not None:
            kernel = RadialCombination((jnp.asarray(self.interaction),), (kernel,))
        potential = energy.potential
        if self.prior != 1.0:
            pull = (self.prior - 1.0) * jnp.asarray(1.0)
            potential = _Added(potential, pull, eqx.Partial(negative_log_density, PRIOR))
        return mf.FreeEnergy(potential, kernel, self.noise * energy.temperature)


class _Added(eqx.Module):
    first: object
    weight: Array
    second: object

    def __call__(self, theta: Array) -> Array:
        return self.first(theta) + self.weight * self.second(theta)


def mutant(problem: mf.Problem, **factors: float) -> Mutant:
    """`problem` with a deliberate mistake in its flow."""
    return Mutant(problem.objective, problem.regulariser, **factors)


def exact(problem: mf.Problem) -> mf.theory.GridLaw:
    """The law q* of the problem as stated."""
    return mf.theory.GridLaw(GRID, mf.theory.minimiser(problem, GRID))


class Snapshot(NamedTuple):
    """A distance, and the one that chance allows: mean + 4 sd over as many independent draws."""

    distance: float
    allowed: float

    @property
    def holds(self) -> bool:
        """Whether the particles are as close as independent draws would be."""
        return self.distance <= self.allowed


def snapshot(
    problem: mf.Problem, law: mf.theory.GridLaw, n: int, *, seed: int, time: float = 12.0, eta: float = 5e-3
) -> Snapshot:
    """W₁ of the particles at one time, from Q₀ = N(0, 1)."""
    init_key, run_key = jax.random.split(jax.random.key(seed))
    flow = mf.WassersteinFlow(step_size=eta)
    steps = round(time / eta)
    solution = mf.solve(problem, flow, PRIOR.sample(init_key, n), steps, run_key, record_every=steps)
    mean, deviation = law.expected_wasserstein_1(np.random.default_rng(seed), n)
    return Snapshot(law.wasserstein_1(solution.measure.particles), mean + 4 * deviation)


class TimeAverage(NamedTuple):
    """Stationary averages of θ and of 1{θ < 0}, with their standard errors by batch means."""

    mean: np.ndarray
    error: np.ndarray

    def deviations(self, law: mf.theory.GridLaw) -> np.ndarray:
        """How many standard errors from the exact law."""
        u = (np.arange(100_000) + 0.5) / 100_000
        expected = np.array([law.quantile(u).mean(), law.mass_below(0.0)])
        return (self.mean - expected) / self.error

    def holds(self, law: mf.theory.GridLaw) -> bool:
        """Whether both are within 4 standard errors."""
        return bool(np.all(np.abs(self.deviations(law)) <= 4))


_THIN = 10
_BATCHES = 30


@eqx.filter_jit
def _batch_means(
    problem: mf.Problem, flow: mf.WassersteinFlow, state: mf.ParticleState, key: Array, length: int
):
    """The mean of each of 30 batches of `length` looks, `_THIN` steps apart."""

    def look(state: mf.ParticleState, _: None):
        state = mf.run(problem, flow, state, None, key, _THIN)
        theta = state.particles
        return state, jnp.stack([jnp.mean(theta), jnp.mean((theta < 0).astype(theta.dtype))])

    def batch(state: mf.ParticleState, _: None):
        state, looks = jax.lax.scan(look, state, None, length=length)
        return state, jnp.mean(looks, axis=0)

    return jax.lax.scan(batch, state, None, length=_BATCHES)[1]


def time_average(
    problem: mf.Problem,
    *,
    seed: int,
    time: float,
    n: int = 300,
    eta: float = 5e-3,
    start: Array | None = None,
) -> TimeAverage:
    """Averages over `time`, after a burn-in of 15 from Q₀; or from `start` on, without one."""
    init_key, run_key = jax.random.split(jax.random.key(seed))
    flow = mf.WassersteinFlow(step_size=eta)
    state = flow.init(problem, PRIOR.sample(init_key, n) if start is None else start)
    if start is None:
        state = eqx.filter_jit(mf.run)(problem, flow, state, None, run_key, jnp.asarray(round(15 / eta)))
    length = round(time / (eta * _THIN * _BATCHES))
    means = np.asarray(_batch_means(problem, flow, state, run_key, length), dtype=np.float64)
    return TimeAverage(means.mean(axis=0), means.std(axis=0, ddof=1) / np.sqrt(_BATCHES))
