"""CRPS and MMD scores of the mixture (Shen, Knoblauch, Power and Oates, 2024): quadratic in Q, hence a
potential and an interaction.

On the location model that is too narrow every proper score has the same limit as τ → 0, N(m, s² − σ²): the
mixture ∫ N(y; θ, σ²) dQ is then the law of the data. Particles repel one another by what they predict.
"""

from typing import TYPE_CHECKING

import numpy as np
from scipy import stats

from measureflow.prediction.colours import COLOURS
from measureflow.spaces.kernels import SquaredExponential
from measureflow.statement.functionals import AbstractFunctional
from measureflow.statement.scores import KernelScore, LogScore, RankedProbabilityScore
from measureflow.study.beyond.location import (
    CASES,
    DATA_VARIANCE,
    GRID,
    MODEL_VARIANCE,
    laws,
    log_likelihood,
    particles_claims,
    quantiles,
    variance_of,
    with_kl,
)
from measureflow.study.paper.claims import Claim, Reproduction, at_most, near
from measureflow.theory import GridLaw, minimiser, stationarity_residual

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LENGTHSCALE, SHOWN = 1.0, 0.1
TEMPERATURES = (1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001)
#: Particles are run on fewer cases: every pair of them is compared on every case.
FEW = 12


def scores(data: np.ndarray) -> dict[str, AbstractFunctional]:
    """Each is proper."""
    predicted = laws(data)
    return {
        "CRPS": RankedProbabilityScore(predicted),
        "MMD": KernelScore(predicted, SquaredExponential(LENGTHSCALE)),
        "log score": LogScore(log_likelihood(data)),
    }


def reproduce(seed: int, quick: bool = False, progress: bool = False) -> Reproduction:
    """Variances by temperature on a grid, and particles over q* at one of them."""
    temperatures = TEMPERATURES[::2] if quick else TEMPERATURES
    variances = {
        name: [variance_of(minimiser(with_kl(score, tau), GRID)) for tau in temperatures]
        for name, score in scores(quantiles(DATA_VARIANCE)).items()
    }
    claims, shown = _limits(variances, temperatures[-1]), {}
    for name, score in scores(quantiles(DATA_VARIANCE, FEW)).items():
        if name == "log score":
            continue
        problem = with_kl(score, SHOWN)
        density = minimiser(problem, GRID)
        residual = stationarity_residual(problem, GRID, density)
        claims.append(at_most(f"{name}: the grid's q* is stationary: total variation", 1e-8, residual))
        law = GridLaw(GRID, density)
        found, particles = particles_claims(name, problem, law, seed, progress, step_size=0.5, particles=60)
        claims += found
        shown[name] = (density, particles)
    return Reproduction(
        claims,
        {
            "cases": CASES,
            "cases of particles": FEW,
            "data variance": DATA_VARIANCE,
            "temperatures": temperatures,
            "lengthscale of MMD": LENGTHSCALE,
        },
        lambda figure: _draw(figure, variances, temperatures, shown),
        figure_size=(11.0, 3.4),
    )


def _limits(variances: dict[str, list[float]], coldest: float) -> list[Claim]:
    lacking = DATA_VARIANCE - MODEL_VARIANCE
    return [
        near(
            f"{name}: its variance at τ = {coldest:g} is near s² − σ², where Bayes has {coldest:g}",
            lacking,
            values[-1],
            0.1 * lacking,
            "tolerance: 10% for τ > 0; the limit is that of every proper score.",
        )
        for name, values in variances.items()
    ]


def _draw(
    figure: "Figure",
    variances: dict[str, list[float]],
    temperatures: tuple[float, ...],
    shown: dict[str, tuple[np.ndarray, np.ndarray]],
) -> None:
    axes = figure.subplots(1, 3)
    colours = {"CRPS": COLOURS["DRLE"], "MMD": COLOURS["DRE"], "log score": COLOURS["FD-GVI"]}
    limit = stats.norm.pdf(GRID, 0, (DATA_VARIANCE - MODEL_VARIANCE) ** 0.5)
    for axis, (name, (density, particles)) in zip(axes, shown.items(), strict=False):
        axis.hist(particles, 30, density=True, color=colours[name], alpha=0.35, label="particles")
        axis.plot(GRID, density, color=colours[name], label="q*")
        axis.plot(GRID, limit, "k--", linewidth=1, label="N(m, s² − σ²)")
        axis.set(xlim=(-5, 5), yticks=[], xlabel="θ", title=f"{name} at τ = {SHOWN:g}")
    for name, values in variances.items():
        # CRPS and MMD all but coincide.
        marker = {"markersize": 10, "mfc": "none"} if name == "CRPS" else {}
        axes[2].plot(temperatures, values, "o-", color=colours[name], label=name, **marker)
    axes[2].plot(temperatures, temperatures, color=COLOURS["DLE"], label="Bayes")
    axes[2].axhline(DATA_VARIANCE - MODEL_VARIANCE, color="k", linestyle="--", linewidth=1)
    axes[2].set(xscale="log", yscale="log", xlabel="τ", title="variances; dashed: s² − σ²")
    for axis in axes:
        axis.legend(frameon=False, fontsize=8)
