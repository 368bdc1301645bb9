"""Figure 3 ("FD-GVI vs ID-GVI"): four Gaussian modes in the plane.

Appendix G: ℓ = −log of four equal Gaussians at (±3, ±3), P flat, Q₀ = N(0, I), τ = 0.2 (the paper's λ_DLE
and λ_DRLE), λ₁ = 0.6 (its λ′_DRLE; MMD² weight 0.3), η = 0.1, K = 10,000; FD-GVI with 200 draws and KL weight
0.5 for the figure. With a flat P the median heuristic is taken over Q₀.

Barriers between modes are about 19 τ high, so no particle changes its mode: the weights of the modes are
right by the symmetry of Q₀ alone. They are claimed apart from the law within a mode, which the flow has to
get right.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array
from scipy import stats
from tqdm import tqdm

from measureflow.flows.integrators import EulerMaruyama
from measureflow.flows.parametric import MeanFieldGaussian, ParametricFlow
from measureflow.flows.wasserstein import WassersteinFlow
from measureflow.prediction.colours import COLOURS
from measureflow.runs.solve import solve
from measureflow.spaces.kernels import SquaredExponential, median_heuristic
from measureflow.spaces.measures import Flat, Gaussian
from measureflow.statement.problem import (
    Problem,
    deep_ensemble,
    deep_langevin_ensemble,
    deep_repulsive_langevin_ensemble,
)
from measureflow.study.paper.claims import SIZE, Claim, Reproduction, at_most, greater, near, not_rejected
from measureflow.study.paper.seeds import particles_of_seeds
from measureflow.theory import four_modes_loss, minimiser, value

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INITIAL = Gaussian(jnp.zeros(2), 1.0)
TAU, MMD, STEP_SIZE = 0.2, 0.3, 0.1
MODES = np.array([[a, b] for a in (-3.0, 3.0) for b in (-3.0, 3.0)])
AXIS = np.linspace(-7, 7, 141)
GRID = np.stack(np.meshgrid(AXIS, AXIS, indexing="ij"), axis=-1)


class Setting(NamedTuple):
    """The paper's numbers, or smaller ones for a look."""

    particles: int
    steps: int
    seeds: int


def recorded(setting: Setting, kernel: SquaredExponential) -> dict[str, Any]:
    """The numbers of a run, for its record."""
    weights = {"tau": TAU, "mmd": MMD, "step_size": STEP_SIZE}
    return {**setting._asdict(), **weights, "lengthscale": float(kernel.lengthscale)}


def statements(kernel: SquaredExponential) -> dict[str, Problem]:
    """The three problems; with a flat prior their potential is the same, ℓ."""
    return {
        "DE": deep_ensemble(four_modes_loss),
        "DLE": deep_langevin_ensemble(four_modes_loss, Flat(), kl=TAU),
        "DRLE": deep_repulsive_langevin_ensemble(four_modes_loss, Flat(), kernel, mmd=MMD, kl=TAU),
    }


def reproduce(seed: int, quick: bool = False, progress: bool = False) -> Reproduction:
    """The particle methods over several seeds, FD-GVI on the same problem, and the exact q* in the plane."""
    setting = Setting(300, 1_000, 4) if quick else Setting(300, 10_000, 10)
    kernel_key, flow_key, fit_key = jax.random.split(jax.random.key(seed), 3)
    kernel = SquaredExponential(median_heuristic(INITIAL.sample(kernel_key, 1000)))
    problems = statements(kernel)
    particles = final_particles(problems, setting, flow_key, progress)
    densities = {name: minimiser(problems[name], GRID) for name in ("DLE", "DRLE")}
    fits = {
        "figure": fit_gaussian(deep_langevin_ensemble(four_modes_loss, Flat(), kl=0.5), fit_key, progress),
        "same problem": fit_gaussian(problems["DRLE"], fit_key, progress),
    }
    claims = [_at_the_minima(particles["DE"])]
    for name, density in densities.items():
        claims += _within_modes(name, particles[name], density)
    claims += _against_fd_gvi(
        problems["DRLE"], particles["DRLE"], densities["DRLE"], fits["same problem"], fit_key
    )
    claims.append(_wider_modes(particles, densities))
    shown = {name: rows[0] for name, rows in particles.items()}
    shown["FD-GVI"] = np.asarray(fits["figure"].sample(fit_key, setting.particles))
    return Reproduction(
        claims,
        recorded(setting, kernel),
        lambda figure: draw(figure, shown),
        figure_size=(12.0, 3.3),
    )


def final_particles(
    problems: dict[str, Problem], setting: Setting, key: Array, progress: bool
) -> dict[str, np.ndarray]:
    """Particles of shape (seeds, N, 2) for every method, from the same beginnings."""
    keys, flow = jax.random.split(key, setting.seeds), WassersteinFlow(STEP_SIZE, integrator=EulerMaruyama())
    return {
        name: particles_of_seeds(
            problem,
            flow,
            INITIAL,
            setting.particles,
            setting.steps,
            keys,
            f"{name}, {setting.seeds} seeds" if progress else None,
        )
        for name, problem in problems.items()
    }


def fit_gaussian(problem: Problem, key: Array, progress: bool) -> Gaussian:
    """FD-GVI with the paper's family, independent Gaussians, and its 200 draws per step.

    L is not convex in the family's parameters, so it starts from five draws of Q₀ and keeps the best.
    """
    flow = ParametricFlow(MeanFieldGaussian(), optax.adam(1e-2), samples=200)
    start_key, run_key = jax.random.split(key)
    fits = []
    for mean in tqdm(INITIAL.sample(start_key, 5), desc="FD-GVI, starts", disable=not progress):
        measure = solve(problem, flow, Gaussian(mean, 1.0), 4_000, run_key).measure
        assert isinstance(measure, Gaussian)
        fits.append(measure)
    return min(fits, key=lambda fit: float(problem.value(fit)))


def nearest_mode(points: np.ndarray) -> np.ndarray:
    """The index of the mode whose quadrant a point is in."""
    return np.argmin(((points[..., None, :] - MODES) ** 2).sum(-1), axis=-1)


def _at_the_minima(particles: np.ndarray) -> Claim:
    offset = particles - MODES[nearest_mode(particles)]
    return at_most("DE sits at the minima: largest distance of a particle", 1e-2, np.abs(offset).max())


def _covariance_within_a_mode(density: np.ndarray) -> np.ndarray:
    """The covariance of the upper right quadrant, under the exact q*."""
    mass = np.where((GRID > 0).all(axis=-1), density, 0.0).reshape(-1)
    return np.cov(GRID.reshape(-1, 2).T, aweights=mass, bias=True)


def _variance_within_a_mode(density: np.ndarray) -> float:
    return float(np.diagonal(_covariance_within_a_mode(density)).mean())


def _centred(particles: np.ndarray) -> np.ndarray:
    """Offsets from the mean of the mode, each mode reflected onto the upper right one, all seeds together."""
    points = particles.reshape(-1, 2)
    modes = nearest_mode(points)
    means = np.stack([points[modes == mode].mean(axis=0) for mode in range(4)])
    return (points - means[modes]) * np.sign(MODES[modes])


def _within_modes(name: str, particles: np.ndarray, density: np.ndarray) -> list[Claim]:
    counts = np.bincount(nearest_mode(particles.reshape(-1, 2)), minlength=4)
    offsets = _centred(particles)
    degrees = 2 * (len(offsets) - 4)
    variance = float((offsets**2).sum() / degrees)
    exact, covariance = _variance_within_a_mode(density), _covariance_within_a_mode(density)
    # Euler–Maruyama's own law: a mode of curvature a = τ/variance is wider by 1/(1 − ηa/2).
    expected = exact / (1 - STEP_SIZE * (TAU / exact) / 2)
    return [
        not_rejected(
            f"{name}: a quarter of the particles in each mode (χ² test)",
            stats.chisquare(counts).pvalue,
            f"counts {counts.tolist()}; right by the symmetry of Q₀.",
        ),
        near(
            f"{name}: variance within a mode is that of q*, wider by the known 1/(1 − ηa/2)",
            expected,
            variance,
            stats.norm.isf(SIZE / 2) * expected * np.sqrt(2 / degrees),
            f"exact q*: {exact:.4f}; tolerance: a test of size 0.001.",
        ),
        near(
            f"{name}: correlation of the coordinates within a mode is that of q*",
            float(covariance[0, 1] / covariance[0, 0]),
            float(np.corrcoef(offsets.T)[0, 1]),
            float(stats.norm.isf(SIZE / 2)) / np.sqrt(len(offsets)),
            "modes are mirror images; tolerance: a test of size 0.001.",
        ),
    ]


def sliced_wasserstein(points: np.ndarray, density: np.ndarray, directions: int = 32) -> float:
    """Mean over directions of W₁ between projected points and the projected grid density."""
    angles = np.pi * np.arange(directions) / directions
    mass, grid = density.reshape(-1), GRID.reshape(-1, 2)
    heavy = mass > 1e-9 * mass.max()
    axes = np.stack([np.cos(angles), np.sin(angles)])
    return float(
        np.mean(
            [
                stats.wasserstein_distance(points @ axis, grid[heavy] @ axis, None, mass[heavy])
                for axis in axes.T
            ]
        )
    )


def _against_fd_gvi(
    problem: Problem, particles: np.ndarray, density: np.ndarray, fit: Gaussian, key: Array
) -> list[Claim]:
    """FD-GVI minimises the same L over Gaussians only: farther from q*, and higher in L."""
    draws = np.asarray(fit.sample(key, particles.shape[1]))
    ours = np.mean([sliced_wasserstein(rows, density) for rows in particles])
    theirs = sliced_wasserstein(draws, density)
    best = value(problem, GRID, density)
    found = float(problem.value(fit))
    return [
        greater(
            "FD-GVI is farther from q* than DRLE: ratio of sliced Wasserstein distances",
            2.0,
            float(theirs / ours),
            f"DRLE {ours:.3f}, FD-GVI {theirs:.3f}, both with {particles.shape[1]} points.",
        ),
        greater(
            "FD-GVI's L exceeds the minimum, by",
            0.05,
            found - best,
            f"L(q*) = {best:.3f}, FD-GVI {found:.3f}.",
        ),
    ]


def _wider_modes(particles: dict[str, np.ndarray], densities: dict[str, np.ndarray]) -> Claim:
    """Repulsion widens the modes, by as much as the exact minimisers say."""
    exact = np.sqrt(_variance_within_a_mode(densities["DRLE"]) / _variance_within_a_mode(densities["DLE"]))
    offsets = {name: _centred(particles[name]) for name in densities}
    measured = offsets["DRLE"].std() / offsets["DLE"].std()
    error = exact * np.sqrt(2 / (2 * 2 * len(offsets["DLE"])))
    return near(
        "repulsion spreads the particles of a mode: ratio of standard deviations DRLE / DLE",
        exact,
        measured,
        stats.norm.isf(SIZE / 2) * error + 0.005 * exact,
        "tolerance: a test of size 0.001, and 0.5% for the two different O(η) biases.",
    )


def draw(figure: "Figure", shown: dict[str, np.ndarray]) -> None:
    """The loss in grey, particles on top."""
    points = jnp.asarray(GRID.reshape(-1, 2), jnp.float32)
    loss = np.asarray(jax.vmap(four_modes_loss)(points)).reshape(GRID.shape[:2])
    axes = figure.subplots(1, len(shown), sharex=True, sharey=True)
    for axis, (name, rows) in zip(axes, shown.items(), strict=True):
        axis.contour(AXIS, AXIS, loss.T, levels=np.linspace(3.3, 12, 12), colors="0.75", linewidths=0.8)
        axis.scatter(
            rows[:, 0],
            rows[:, 1],
            s=30 if len(rows) < 50 else 8,
            color=COLOURS[name],
            alpha=0.7,
            linewidths=0,
        )
        axis.set(title=name, xlim=(-6, 6), ylim=(-6, 6), aspect="equal")
