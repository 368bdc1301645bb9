"""A location model that is too narrow: N(θ, σ²) for data of variance s² > σ². What every score makes of it is
known in closed form.

    Bayes           N(m, ·) whose variance is τσ² as τ → 0: it collapses
    proper scores   N(m, s² − σ²) as τ → 0: the mixture ∫ N(y; θ, σ²) dQ is then the law of the data
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jaxtyping import Array
from scipy import stats

from measureflow.flows.integrators import LeimkuhlerMatthews
from measureflow.flows.wasserstein import WassersteinFlow
from measureflow.spaces.measures import Gaussian
from measureflow.statement.divergences import KL
from measureflow.statement.problem import Problem
from measureflow.study.paper.claims import SIZE, Claim, near, not_rejected
from measureflow.study.paper.seeds import particles_of_seeds
from measureflow.theory import GridLaw, minimiser

MODEL_VARIANCE, DATA_VARIANCE, CASES = 1.0, 1.5, 300
GRID = np.linspace(-8.0, 8.0, 641)
PRIOR_SCALE = 1.5
PRIOR = Gaussian(jnp.zeros(1), PRIOR_SCALE)


def quantiles(variance: float, cases: int = CASES) -> np.ndarray:
    """A table without chance in it: quantiles of a Normal, of exactly this variance and mean 0."""
    y = stats.norm.ppf((np.arange(cases) + 0.5) / cases)
    return np.sqrt(variance) * y / y.std()


def log_likelihood(data: np.ndarray) -> Callable[[Array], Array]:
    """θ ↦ log N(yᵢ; θ, σ²) of every case."""
    cases = jnp.asarray(data, jnp.float32)
    return lambda theta: dist.Normal(theta[0], MODEL_VARIANCE**0.5).log_prob(cases)


def laws(data: np.ndarray) -> Callable[[Array], tuple[dist.Normal, Array]]:
    """θ ↦ N(θ, σ²) for every case, and the cases."""
    cases = jnp.asarray(data, jnp.float32)
    return lambda theta: (dist.Normal(jnp.broadcast_to(theta[0], cases.shape), MODEL_VARIANCE**0.5), cases)


def with_kl(objective: Any, temperature: float) -> Problem:
    """The objective and τ·KL to the prior."""
    return Problem(objective, temperature * KL(PRIOR))


def law_of(problem: Problem) -> tuple[GridLaw, np.ndarray]:
    """q* on the grid."""
    density = minimiser(problem, GRID)
    return GridLaw(GRID, density), density


def variance_of(density: np.ndarray) -> float:
    """Of a density on the grid."""
    mass = density / density.sum()
    return float(mass @ GRID**2 - (mass @ GRID) ** 2)


def particles_claims(
    name: str,
    problem: Problem,
    law: GridLaw,
    seed: int,
    progress: bool,
    *,
    step_size: float = 0.1,
    particles: int = 200,
) -> tuple[list[Claim], np.ndarray]:
    """Whether particles that follow the flow are a sample of q*: 4 runs of them, from the prior."""
    keys = jax.random.split(jax.random.key(seed), 4)
    flow = WassersteinFlow(step_size, integrator=LeimkuhlerMatthews())
    label = f"particles, {name}" if progress else None
    # To T = 10/τ: the prior alone pulls with a relaxation time of 2.25/τ, from where all begin.
    temperature = float(np.asarray(problem.free_energy().temperature))
    steps = round(10 / temperature / step_size)
    found = particles_of_seeds(problem, flow, PRIOR, particles, steps, keys, label)
    found = found.ravel().astype(np.float64)
    expected = float(np.var(law.sample(np.random.default_rng(0), (200_000,))))
    spread = float(stats.norm.isf(SIZE / 2)) * expected * np.sqrt(2 / len(found))
    p_value = stats.kstest(found, lambda x: law.mass_below(x)).pvalue
    return [
        not_rejected(f"{name}: {len(found)} particles are a sample of q* (Kolmogorov–Smirnov)", p_value),
        near(
            f"{name}: the particles' variance is that of q*",
            expected,
            float(found.var()),
            spread + 0.02 * expected,
            "tolerance: a test of size 0.001, and 2% for finite N and η.",
        ),
    ], found
