"""Theorem 2 (Section 4.3), and the finer analysis that the paper leaves open: rates in N, T and η.

DRLE on the quartic loss of Figure 2. The sampling error should fall as N^-½, the distance to q* exponentially
in T, and the bias of the discretisation in proportion to η. The last is read off the discrete chain's own
invariant law, computed on a grid, where sampling error does not drown it.
"""

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats
from tqdm import tqdm

from measureflow.flows.integrators import EulerMaruyama
from measureflow.flows.wasserstein import WassersteinFlow
from measureflow.spaces.kernels import SquaredExponential
from measureflow.spaces.measures import Gaussian
from measureflow.statement.problem import Problem, deep_repulsive_langevin_ensemble
from measureflow.study.paper.claims import SIZE, Claim, Reproduction, at_most, near
from measureflow.study.paper.seeds import particles_of_seeds
from measureflow.theory import GridLaw, minimiser, quartic_loss
from measureflow.theory.grids import GridEnergy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PRIOR = Gaussian(jnp.zeros(1), 1.0)
GRID = np.linspace(-4.2, 3.3, 751)
KL, MMD, LENGTHSCALE = 1.0, 0.5, 0.7
STEP_SIZES = (0.04, 0.02, 0.01, 0.005)


class Setting(NamedTuple):
    """How much to simulate."""

    numbers: tuple[int, ...]
    times: tuple[float, ...]
    many: int
    draws: int


def reproduce(seed: int, quick: bool = False, progress: bool = False) -> Reproduction:
    """Distances to q* against N, against T, and of the chain's own law against η."""
    setting = (
        Setting((10, 30, 100, 300), (0.25, 0.5, 1.0, 2.0, 4.0), 500, 3_000)
        if quick
        else Setting((10, 30, 100, 300, 1000), (0.25, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 10.0), 2000, 12_000)
    )
    problem = deep_repulsive_langevin_ensemble(
        quartic_loss, PRIOR, SquaredExponential(LENGTHSCALE), mmd=MMD, kl=KL
    )
    law = GridLaw(GRID, minimiser(problem, GRID))
    in_n = _against_numbers(problem, law, setting, seed, progress)
    in_t = _against_times(problem, law, setting, seed, progress)
    evolution = _mean_field_evolution(problem, setting.times, progress)
    in_eta = _against_step_sizes(problem, progress)
    return Reproduction(
        [*_rate_in_n(in_n), *_rate_in_t(in_t, evolution), *_rate_in_eta(in_eta)],
        {
            **setting._asdict(),
            "kl": KL,
            "mmd": MMD,
            "lengthscale": LENGTHSCALE,
            "step_sizes": list(STEP_SIZES),
        },
        lambda figure: _draw(figure, in_n, in_t, evolution, in_eta),
        figure_size=(11.0, 3.4),
    )


def _distances(
    problem: Problem, law: GridLaw, n: int, time: float, seeds: int, seed: int, eta: float, label: str | None
) -> np.ndarray:
    keys = jax.random.split(jax.random.key(seed), seeds)
    found = particles_of_seeds(
        problem, WassersteinFlow(eta, integrator=EulerMaruyama()), PRIOR, n, round(time / eta), keys, label
    )
    return np.array([law.wasserstein_1(row) for row in found])


def _against_numbers(
    problem: Problem, law: GridLaw, setting: Setting, seed: int, progress: bool
) -> dict[int, np.ndarray]:
    return {
        n: _distances(
            problem, law, n, 10.0, int(np.clip(setting.draws // n, 8, 400)), seed + n, 5e-3,
            f"N = {n}" if progress else None,
        )
        for n in setting.numbers
    }  # fmt: skip


def _against_times(
    problem: Problem, law: GridLaw, setting: Setting, seed: int, progress: bool
) -> dict[float, tuple[float, float]]:
    """F(0) − F_N(0), the mass still missing from θ < 0, and its standard error, at each time."""
    found = {}
    for time in setting.times:
        keys = jax.random.split(jax.random.key(seed + round(100 * time)), 4)
        label = f"T = {time:g}" if progress else None
        steps, flow = round(time / 5e-3), WassersteinFlow(5e-3, integrator=EulerMaruyama())
        share = float(np.mean(particles_of_seeds(problem, flow, PRIOR, setting.many, steps, keys, label) < 0))
        error = np.sqrt(share * (1 - share) / (4 * setting.many))
        found[time] = (float(law.mass_below(0.0)) - share, float(error))
    return found


def _mean_field_evolution(problem: Problem, times: tuple[float, ...], progress: bool) -> np.ndarray:
    """The same mass at the same times for N = ∞: the nonlinear Fokker–Planck equation on the grid, by the
    transition densities of steps of 0.02."""
    energy, eta = GridEnergy(problem, GRID), 0.02
    exact = minimiser(problem, GRID)
    mass = np.exp(-0.5 * GRID**2)
    mass /= mass.sum()
    missing, left = [], GRID < 0
    steps = np.round(np.array(times) / eta).astype(int)
    for step in tqdm(range(1, steps[-1] + 1), desc="N = ∞", disable=not progress):
        mass = mass @ _transition(energy, mass, eta)
        if step in steps:
            missing.append(exact[left].sum() / exact.sum() - mass[left].sum())
    return np.array(missing)


def _transition(energy: GridEnergy, mass: np.ndarray, eta: float) -> np.ndarray:
    """Euler–Maruyama from every grid point: N(θ − η∇(V + ∫W dq)(θ), 2ητ)."""
    drift = np.gradient(energy.first_variation(mass), GRID[1] - GRID[0])
    distance = GRID[None, :] - (GRID - eta * drift)[:, None]
    transition = np.exp(-(distance**2) / (4 * eta * energy.temperature))
    return transition / transition.sum(axis=1, keepdims=True)


def _against_step_sizes(problem: Problem, progress: bool) -> dict[float, float]:
    """W₁ between q* and the invariant law of the mean-field Euler–Maruyama chain, both on the grid."""
    energy, h = GridEnergy(problem, GRID), GRID[1] - GRID[0]
    exact = minimiser(problem, GRID) * h
    found = {}
    for eta in tqdm(STEP_SIZES, desc="the chain's own law", disable=not progress):
        mass, change = exact, 1.0
        while change > 1e-9:
            # With the drift held still, many steps at once; then the drift of the law that gives.
            settled = np.linalg.matrix_power(_transition(energy, mass, eta), 2 ** round(np.log2(8 / eta)))
            updated = mass @ settled
            change = np.abs(updated - mass).sum()
            mass = updated / updated.sum()
        found[eta] = float(np.abs(np.cumsum(mass - exact)).sum() * h)
    return found


def _slope(x: np.ndarray, y: np.ndarray, errors: np.ndarray) -> tuple[float, float]:
    """Weighted least squares of log y on log x (or x), with the standard error of the slope."""
    weights = 1 / errors**2
    centre = np.average(x, weights=weights)
    squares = np.sum(weights * (x - centre) ** 2)
    return float(np.sum(weights * (x - centre) * y) / squares), float(squares**-0.5)


def _rate_in_n(distances: dict[int, np.ndarray]) -> list[Claim]:
    mean = np.array([row.mean() for row in distances.values()])
    relative = np.array([row.std(ddof=1) / np.sqrt(len(row)) / row.mean() for row in distances.values()])
    slope, error = _slope(np.log(list(distances)), np.log(mean), relative)
    tolerance = float(stats.norm.isf(SIZE / 2)) * error + 0.03
    note = "tolerance: a test of size 0.001, and 0.03 for the O(1/N) and O(η) parts."
    return [near("W₁ to q* at T = 10 falls as N^−½: slope in log N", -0.5, slope, tolerance, note)]


def _rate_in_t(errors: dict[float, tuple[float, float]], exact: np.ndarray) -> list[Claim]:
    """The slowest mode of the flow: mass that has yet to cross from one well to the other."""
    times = np.array(list(errors))
    values, noise = np.array(list(errors.values())).T
    off = np.abs(values - exact) / noise
    late = times >= 2
    rate = np.polyfit(times[late], np.log(exact[late]), 1)[0]
    return [
        at_most(
            "the missing mass of θ < 0 decays as the mean-field equation says: largest error in s.e.",
            float(stats.norm.isf(SIZE / 2 / len(times))),
            float(off.max()),
            f"over T = {', '.join(f'{t:g}' for t in times)}; the bound is a test of size 0.001. "
            f"For N = ∞ the decay is exp({rate:.2f} T).",
        )
    ]


def _rate_in_eta(biases: dict[float, float]) -> list[Claim]:
    orders = np.diff(np.log(list(biases.values()))) / np.diff(np.log(list(biases)))
    return [
        near(
            "the discretisation bias W₁(q_η, q*) is of first order in η: order between the two smallest η",
            1.0,
            float(orders[-1]),
            0.05,
            "bias "
            + ", ".join(f"{bias:.2g} at η = {eta:g}" for eta, bias in biases.items())
            + "; nothing random.",
        )
    ]


def _draw(
    figure: "Figure",
    in_n: dict[int, np.ndarray],
    in_t: dict[float, tuple[float, float]],
    evolution: np.ndarray,
    in_eta: dict[float, float],
) -> None:
    left, middle, right = figure.subplots(1, 3)
    numbers = np.array(list(in_n))
    means = np.array([row.mean() for row in in_n.values()])
    errors = np.array([row.std(ddof=1) / np.sqrt(len(row)) for row in in_n.values()])
    left.errorbar(numbers, means, 2 * errors, fmt="o", color="#009E73")
    left.plot(numbers, means[0] * np.sqrt(numbers[0] / numbers), "k--", linewidth=1, label="$N^{-1/2}$")
    left.set(xscale="log", yscale="log", xlabel="N", ylabel="$W_1(Q_N, q^*)$ at T = 10")
    left.legend(frameon=False)
    times = np.array(list(in_t))
    values, noise = np.array(list(in_t.values())).T
    middle.errorbar(times, np.abs(values), 2 * noise, fmt="o", color="#009E73", label="|error|, ± 2 s.e.")
    middle.plot(times, np.abs(evolution), "k--", linewidth=1, label="N = ∞, exact")
    middle.set(yscale="log", xlabel="T", ylabel="mass missing from θ < 0")
    middle.legend(frameon=False)
    eta, bias = np.array(list(in_eta)), np.array(list(in_eta.values()))
    right.plot(eta, bias, "o", color="#009E73")
    right.plot(eta, bias[-1] * eta / eta[-1], "k--", linewidth=1, label="first order")
    right.set(xscale="log", yscale="log", xlabel="η", ylabel="$W_1(q_\\eta, q^*)$")
    right.set_xticks(eta, [f"{value:g}" for value in eta])
    right.minorticks_off()
    right.legend(frameon=False)
