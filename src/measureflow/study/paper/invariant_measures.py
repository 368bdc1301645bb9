"""Theorem 7 (Appendix F): repulsion without noise has many invariant measures; with KL there is one.

For every N the particle energy L̃(θ₁, …, θ_N) = Σ V(θᵢ) + 1/(2N) Σᵢⱼ W(θᵢ, θⱼ) of DRE has a minimiser, and
its empirical measure is stationary for the McKean–Vlasov flow. These measures differ, so the flow cannot have
a unique limit. MMD² weight 3 here, strong enough for several atoms on the quartic loss of Figure 2.
"""

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from scipy import stats
from scipy.optimize import minimize
from tqdm import tqdm

from measureflow.flows.integrators import EulerMaruyama
from measureflow.flows.wasserstein import WassersteinFlow
from measureflow.runs.solve import solve
from measureflow.spaces.empirical import Empirical
from measureflow.spaces.kernels import SquaredExponential
from measureflow.spaces.measures import Gaussian
from measureflow.statement.problem import Problem, deep_repulsive_ensemble, deep_repulsive_langevin_ensemble
from measureflow.study.paper.claims import Claim, Reproduction, at_most, greater
from measureflow.theory import GridLaw, minimiser, quartic_loss

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GRID = np.linspace(-5, 4, 1801)
MMD, KL, LENGTHSCALE = 3.0, 1.0, 0.7
NUMBERS = (2, 3, 5, 10, 20)
COPIES = 600


def reproduce(seed: int, quick: bool = False, progress: bool = False) -> Reproduction:
    """Invariant measures of DRE for several N, and DRLE started from each of them."""
    time = 4.0 if quick else 12.0
    with jax.enable_x64(True):
        dre, _ = _problems()
        atoms, gradients, moved = {}, {}, {}
        for n in tqdm(NUMBERS, desc="minimising the particle energy", disable=not progress):
            atoms[n] = _minimise_particle_energy(dre, n, seed)
            gradients[n] = float(dre.stationarity(atoms[n]))
            after = solve(
                dre, WassersteinFlow(1e-2, integrator=EulerMaruyama()), atoms[n], 2_000, jax.random.key(seed)
            ).measure
            assert isinstance(after, Empirical)
            moved[n] = float(jnp.abs(after.particles - atoms[n]).max())
    _, drle = _problems()
    law = GridLaw(GRID, minimiser(drle, GRID))
    ends = {}
    for n in tqdm(NUMBERS, desc="DRLE from each of them", disable=not progress):
        start = jnp.asarray(np.resize(np.asarray(atoms[n], np.float32), (COPIES, 1)))
        measure = solve(
            drle,
            WassersteinFlow(2e-3, integrator=EulerMaruyama()),
            start,
            round(time / 2e-3),
            jax.random.key(seed + n),
        ).measure
        assert isinstance(measure, Empirical)
        ends[n] = np.asarray(measure.particles)
    points = {n: np.asarray(atoms[n])[:, 0] for n in NUMBERS}
    return Reproduction(
        [*_invariance(points, gradients, moved), *_one_law(points, ends, law, np.random.default_rng(seed))],
        {
            "mmd": MMD,
            "kl": KL,
            "lengthscale": LENGTHSCALE,
            "numbers": list(NUMBERS),
            "copies": COPIES,
            "time": time,
        },
        lambda figure: _draw(figure, points, ends, law),
        figure_size=(10.0, 3.6),
    )


def _problems() -> tuple[Problem, Problem]:
    prior, kernel = Gaussian(jnp.zeros(1), 1.0), SquaredExponential(LENGTHSCALE)
    return (
        deep_repulsive_ensemble(quartic_loss, prior, kernel, mmd=MMD),
        deep_repulsive_langevin_ensemble(quartic_loss, prior, kernel, mmd=MMD, kl=KL),
    )


def _minimise_particle_energy(problem: Problem, n: int, seed: int) -> Array:
    """The best of several starts of BFGS on L̃, whose gradient is the Wasserstein gradient."""
    energy = problem.free_energy()

    @jax.jit
    def value_and_gradient(flat: Array) -> tuple[Array, Array]:
        particles = flat[:, None]
        value = energy.potential_energy(particles) + energy.interaction_energy(particles)
        return n * value, energy.wasserstein_gradient(particles)[:, 0]

    starts = np.random.default_rng(seed).normal(scale=1.5, size=(8, n))
    found = [
        minimize(
            lambda x: [np.asarray(part, np.float64) for part in value_and_gradient(jnp.asarray(x))],
            start,
            jac=True,
            method="BFGS",
            options={"gtol": 1e-10, "maxiter": 5_000},
        )
        for start in starts
    ]
    return jnp.sort(jnp.asarray(min(found, key=lambda result: result.fun).x))[:, None]


def _invariance(
    points: dict[int, np.ndarray], gradients: dict[int, float], moved: dict[int, float]
) -> list[Claim]:
    distances = {
        (n, m): stats.wasserstein_distance(points[n], points[m]) for n in NUMBERS for m in NUMBERS if n < m
    }
    nearest = min(distances, key=lambda pair: distances[pair])
    numbers = ", ".join(map(str, NUMBERS))
    return [
        at_most(
            f"DRE, N = {numbers}: each is stationary: largest Wasserstein gradient",
            1e-6,
            max(gradients.values()),
        ),
        at_most("DRE: the flow leaves each unchanged over T = 20: largest move", 1e-6, max(moved.values())),
        greater(
            "DRE: no two of these measures agree: smallest W₁ between two",
            1e-3,
            distances[nearest],
            f"between N = {nearest[0]} and N = {nearest[1]}.",
        ),
    ]


def _one_law(
    points: dict[int, np.ndarray], ends: dict[int, np.ndarray], law: GridLaw, rng: np.random.Generator
) -> list[Claim]:
    """DRLE from each of them: W₁ to its q* is what as many independent draws have."""
    mean, deviation = law.expected_wasserstein_1(rng, COPIES, 1_000)
    # W₁ is close to the modulus of a normal, the imbalance between the wells: mean + 5 sd has size 1.4e-4,
    # and there are five of them.
    allowed = mean + 5 * deviation
    before = min(law.wasserstein_1(row[:, None]) for row in points.values())
    after = {n: law.wasserstein_1(row) for n, row in ends.items()}
    return [
        greater("these measures are not the minimiser of DRLE: smallest W₁ to it", allowed, before),
        at_most(
            "DRLE moves on from all of them to one law: largest W₁ to its q*",
            allowed,
            max(after.values()),
            f"{COPIES} independent draws have {mean:.3f} ± {deviation:.3f}.",
        ),
    ]


def _draw(figure: "Figure", points: dict[int, np.ndarray], ends: dict[int, np.ndarray], law: GridLaw) -> None:
    left, right = figure.subplots(1, 2)
    for row, (n, atoms) in enumerate(points.items()):
        left.scatter(atoms, np.full(n, row), s=60 * 3 / (n + 2), color="#CC79A7", alpha=0.8, linewidths=0)
    left.set(
        yticks=range(len(points)), yticklabels=[f"N = {n}" for n in points], xlabel="θ", xlim=(-3.2, 2.2)
    )
    left.set_title("DRE: each of these measures is invariant")
    centres = (law.edges[1:] + law.edges[:-1]) / 2
    right.plot(centres, np.diff(law.cumulative) / np.diff(law.edges), "k--", label="exact $q^*$ of DRLE")
    for n, row in ends.items():
        right.hist(
            row[:, 0],
            np.linspace(-3.5, 2.5, 41).tolist(),
            density=True,
            histtype="step",
            alpha=0.6,
            label=f"from N = {n}",
        )
    right.set(xlabel="θ", xlim=(-3.2, 2.2), yticks=[], title="with KL (DRLE) all of them flow to one law")
    right.legend(frameon=False, fontsize=8)
