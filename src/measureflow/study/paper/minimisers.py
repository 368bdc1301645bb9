"""Figure 2 ("Global minimisers"): DE, DLE and DRLE, 300 particles each, over their exact targets.

Appendix G: ℓ quartic, P = Q₀ = N(0, 1), λ_DLE = 1, DRLE with both weights 1 (so MMD² weight ½), η = 1e-4,
K = 100,000, SE kernel with the median heuristic on samples of the prior.

The exact targets are computed here from the formulas of the paper alone, with nothing of the library, so
that a mistake in the library cannot move both the particles and what they are compared with.
"""

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from measureflow.flows.integrators import EulerMaruyama
from measureflow.flows.wasserstein import WassersteinFlow
from measureflow.prediction.colours import COLOURS
from measureflow.spaces.embeddings import mean_kernel
from measureflow.spaces.empirical import Empirical
from measureflow.spaces.kernels import SquaredExponential, median_heuristic
from measureflow.spaces.measures import Gaussian
from measureflow.statement.problem import (
    Problem,
    deep_ensemble,
    deep_langevin_ensemble,
    deep_repulsive_langevin_ensemble,
)
from measureflow.study.paper.claims import SIZE, Claim, Reproduction, at_most, greater, near, not_rejected
from measureflow.study.paper.seeds import particles_of_seeds
from measureflow.theory import AtomicLaw, GridLaw, deep_ensemble_limit, minimiser, quartic_loss, value

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GRID = np.linspace(-5, 4, 1801)
PRIOR = Gaussian(jnp.zeros(1), 1.0)
KL, MMD, PARTICLES = 1.0, 0.5, 300


class Setting(NamedTuple):
    """The paper's numbers, or smaller ones for a look."""

    step_size: float
    steps: int
    seeds: int


def reproduce(seed: int, quick: bool = False, progress: bool = False) -> Reproduction:
    """All three methods over several seeds at once, tested against Theorem 1 and the exact q*."""
    setting = Setting(4e-3, 3_000, 16) if quick else Setting(1e-4, 100_000, 20)
    kernel_key, run_key = jax.random.split(jax.random.key(seed))
    keys = jax.random.split(run_key, setting.seeds)
    kernel = SquaredExponential(median_heuristic(PRIOR.sample(kernel_key, 1000)))
    problems = {
        "DE": deep_ensemble(quartic_loss),
        "DLE": deep_langevin_ensemble(quartic_loss, PRIOR, kl=KL),
        "DRLE": deep_repulsive_langevin_ensemble(quartic_loss, PRIOR, kernel, mmd=MMD, kl=KL),
    }
    particles = {
        name: particles_of_seeds(
            problem,
            WassersteinFlow(setting.step_size, integrator=EulerMaruyama()),
            PRIOR,
            PARTICLES,
            setting.steps,
            keys,
            f"{name}, {setting.seeds} seeds" if progress else None,
        )[..., 0]
        for name, problem in problems.items()
    }
    densities = {
        "DLE": _exact(0.0, float(kernel.lengthscale)),
        "DRLE": _exact(2 * MMD, float(kernel.lengthscale)),
    }
    atoms, weights = deep_ensemble_limit(quartic_loss, PRIOR, GRID)
    claims = _theorem_1(particles["DE"], atoms, weights)
    for name, density in densities.items():
        claims += _global_minimiser(name, problems[name], particles[name], density)
    distance = _total_variation(densities["DLE"], densities["DRLE"])
    claims.append(
        greater(
            "the minimisers of DLE and DRLE differ: total variation", 0.01, distance, "the paper: slightly."
        )
    )
    return Reproduction(
        claims,
        {
            **setting._asdict(),
            "particles": PARTICLES,
            "kl": KL,
            "mmd": MMD,
            "lengthscale": float(kernel.lengthscale),
        },
        lambda figure: _draw(figure, particles, densities, AtomicLaw(atoms, weights)),
    )


def _exact(strength: float, lengthscale: float) -> np.ndarray:
    """log q* = −(ℓ − λ₁μ_P − λ₂ log p + λ₁ ∫κ(·,θ′) q*(θ′) dθ′)/λ₂ + const: the paper's q*, normalised.

    λ₁ = `strength`, λ₂ = `KL`; integrals are sums over the grid. Damped iteration.
    """
    h = GRID[1] - GRID[0]
    loss = 1.5 * (GRID**4 / 4 + GRID**3 / 3 - GRID**2) - 3 / 8
    prior = np.exp(-0.5 * GRID**2) / np.sqrt(2 * np.pi)
    gram = np.exp(-0.5 * (GRID[:, None] - GRID[None]) ** 2 / lengthscale**2)
    potential = loss - KL * np.log(prior) - strength * gram @ prior * h
    density, change = prior, 1.0
    while change > 1e-12:
        exponent = -(potential + strength * gram @ density * h) / KL
        target = np.exp(exponent - exponent.max())
        target /= target.sum() * h
        change = np.abs(target - density).max()
        density = 0.5 * (density + target)
    return density


def _total_variation(first: np.ndarray, second: np.ndarray) -> float:
    return float(0.5 * np.abs(first - second).sum() * (GRID[1] - GRID[0]))


def _theorem_1(particles: np.ndarray, atoms: np.ndarray, weights: np.ndarray) -> list[Claim]:
    """Deep ensembles end at Σ Q₀(Θᵢ) δ(mᵢ), which is not the global minimiser δ₋₂."""
    order = np.argsort(atoms[:, 0])
    minima, shares = atoms[order, 0], weights[order]
    theta = particles.reshape(-1)
    off = np.abs(theta[:, None] - minima[None]).min(axis=1).max()
    left = int(np.sum(theta < 0))
    return [
        near("DE: Theorem 1's atoms are −2 and 1: the lower", -2.0, minima[0], 1e-3),
        near("DE: Theorem 1's atoms are −2 and 1: the upper", 1.0, minima[1], 1e-3),
        at_most("DE: every particle is at one of them: the largest distance", 1e-2, off),
        not_rejected(
            f"DE: the share at −2 is Q₀(Θ) = {shares[0]:.3f} (binomial test)",
            float(stats.binomtest(left, theta.size, float(shares[0])).pvalue),
            f"measured share {left / theta.size:.3f} of {theta.size} particles.",
        ),
        greater("DE: this is not the global minimiser δ₋₂: share elsewhere", 0.4, 1 - left / theta.size),
    ]


def _global_minimiser(name: str, problem: Problem, particles: np.ndarray, density: np.ndarray) -> list[Claim]:
    """Particles of a Langevin ensemble are draws from q*: in every seed, in all of them, and in L."""
    law, n = GridLaw(GRID, density), particles.shape[1]
    p_values = np.array([stats.kstest(row, law.mass_below).pvalue for row in particles])
    values = [float(problem.value(Empirical(jnp.asarray(row)[:, None]))) for row in particles]
    error = np.std(values, ddof=1) / np.sqrt(len(values))
    # The empirical measure's MMD² has κ(θ, θ) on its diagonal, which independent draws do not.
    diagonal = 0.0
    energy = problem.free_energy()
    if energy.interaction is not None:
        # W = 2wκ and κ(θ, θ) = 1; ∬W dq*dq* from a large sample of q*.
        sample = Empirical(jnp.asarray(law.quantile((np.arange(3000) + 0.5) / 3000))[:, None])
        diagonal = MMD * (1 - float(mean_kernel(energy.interaction, sample, sample)) / (2 * MMD)) / n
    expected = value(problem, GRID, density) + diagonal
    return [
        at_most(
            f"{name}: theory.minimiser is the paper's q*: total variation",
            1e-4,
            _total_variation(minimiser(problem, GRID), density),
        ),
        not_rejected(
            f"{name}: Kolmogorov–Smirnov p-values over {len(p_values)} seeds are not smaller than uniform",
            float(stats.kstest(p_values, "uniform", alternative="greater").pvalue),
            f"p-values from {p_values.min():.3f} to {p_values.max():.3f}, median {np.median(p_values):.2f}.",
        ),
        not_rejected(
            f"{name}: all {particles.size} particles together are a sample of q* (Kolmogorov–Smirnov)",
            float(stats.kstest(particles.reshape(-1), law.mass_below).pvalue),
        ),
        near(
            f"{name}: L(Q) is L(q*)" + (" + w(κ(θ,θ) − ∬κ)/N" if diagonal else ""),
            expected,
            float(np.mean(values)),
            stats.t.isf(SIZE / 2, len(values) - 1) * error + 0.02,
            "tolerance: a t-test of size 0.001, and 0.02 for the bias of the nearest-neighbour entropy.",
        ),
    ]


def _draw(
    figure: "Figure", particles: dict[str, np.ndarray], densities: dict[str, np.ndarray], law: AtomicLaw
) -> None:
    width = 0.15
    bins = np.arange(-3.5 - width / 2, 2.6, width)
    for axis, name in zip(figure.subplots(1, 3), particles, strict=True):
        colour = COLOURS[name]
        axis.hist(
            particles[name][0],
            bins,
            density=True,
            color=colour,
            alpha=0.45,
            label="300 particles, first seed",
        )
        if name == "DE":
            heights = np.diff(law.cumulative, prepend=0.0) / width
            axis.vlines(law.atoms, 0, heights, "k", linestyles="--", label="Theorem 1")
            axis.plot([-2], [0.2], "kv", markersize=7, label="$Q^* = \\delta_{-2}$")
        else:
            axis.plot(GRID, densities[name], "k--", linewidth=1.3, label="exact $q^*$")
        axis.set(xlim=(-3.5, 2.5), xlabel="θ", yticks=[], title=name)
        axis.set_ylim(0, 1.4 * axis.get_ylim()[1])
        axis.legend(fontsize=8, frameon=False)
