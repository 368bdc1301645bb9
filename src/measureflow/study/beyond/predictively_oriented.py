"""The log score of the mixture (McLatchie, Chérief-Abdellatif, Frazier and Knoblauch, 2025): where the model
is wrong, Bayes collapses to one member, and a predictively oriented posterior does not; where it is right,
both do.

A location model has the law N(m, s² − σ²) in closed form. A regression through the origin, of two groups with
slopes ±1, shows what that means for predictions.
"""

from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jaxtyping import Array
from scipy import stats
from scipy.special import logsumexp

from measureflow.prediction.colours import COLOURS
from measureflow.statement.problem import Problem
from measureflow.statement.scores import LogScore
from measureflow.study.beyond.location import (
    CASES,
    DATA_VARIANCE,
    GRID,
    MODEL_VARIANCE,
    PRIOR_SCALE,
    law_of,
    log_likelihood,
    particles_claims,
    quantiles,
    variance_of,
    with_kl,
)
from measureflow.study.paper.claims import Claim, Reproduction, at_most, greater, near
from measureflow.theory import log_score_certificate, minimiser

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TEMPERATURES = (1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001)
#: At which particles are run, and at which regressions are compared.
SHOWN, SLOPES_TEMPERATURE = 0.1, 0.03
NOISE, ROWS, TEST_ROWS = 0.3, 200, 20_000


class Location(NamedTuple):
    """Variances of q* by temperature, for the wrong and the right model, and what the figure shows."""

    bayes: list[float]
    predictive: list[float]
    right: list[float]
    certificate: float
    densities: dict[str, np.ndarray]
    particles: np.ndarray


class Regression(NamedTuple):
    """Rows, the two posteriors of the slope on the grid, and their log scores on other rows."""

    x: np.ndarray
    y: np.ndarray
    densities: dict[str, np.ndarray]
    scores: dict[str, np.ndarray]
    truth: np.ndarray


def reproduce(seed: int, quick: bool = False, progress: bool = False) -> Reproduction:
    """Both examples: the law on a grid, particles over it, and the test scores of the regression."""
    location, claims = _location(seed, progress)
    regression = _regression(seed)
    return Reproduction(
        [*claims, *_regression_claims(regression)],
        {
            "cases": CASES,
            "model variance": MODEL_VARIANCE,
            "data variance": DATA_VARIANCE,
            "temperatures": TEMPERATURES,
            "particles at temperature": SHOWN,
            "rows of the regression": ROWS,
        },
        lambda figure: _draw(figure, location, regression),
        figure_size=(14.0, 3.4),
    )


def _bayes(data: np.ndarray, temperature: float) -> Problem:
    likelihood = log_likelihood(data)
    return with_kl(lambda theta: -jnp.mean(likelihood(theta)), temperature)


def _predictive(data: np.ndarray, temperature: float) -> Problem:
    return with_kl(LogScore(log_likelihood(data)), temperature)


def _location(seed: int, progress: bool) -> tuple[Location, list[Claim]]:
    wrong, right = quantiles(DATA_VARIANCE), quantiles(MODEL_VARIANCE)
    predictive = {tau: law_of(_predictive(wrong, tau)) for tau in TEMPERATURES}
    bayes = {tau: law_of(_bayes(wrong, tau))[1] for tau in TEMPERATURES}
    rightly = [variance_of(law_of(_predictive(right, tau))[1]) for tau in TEMPERATURES]
    particles, found = particles_claims(
        "log score", _predictive(wrong, SHOWN), predictive[SHOWN][0], seed, progress
    )
    coldest = TEMPERATURES[-1]
    certificate = log_score_certificate(_predictive(wrong, coldest), GRID, predictive[coldest][1])
    location = Location(
        [variance_of(density) for density in bayes.values()],
        [variance_of(density) for _, density in predictive.values()],
        rightly,
        certificate,
        {"Bayes": bayes[SHOWN], "log score": predictive[SHOWN][1]},
        found,
    )
    return location, [*_law_claims(location), *particles]


def _law_claims(location: Location) -> list[Claim]:
    lacking, coldest = DATA_VARIANCE - MODEL_VARIANCE, TEMPERATURES[-1]
    # Conjugate: precision 1/τσ² from the data, and 1/1.5² from the prior.
    conjugate = 1 / (1 / (coldest * MODEL_VARIANCE) + 1 / PRIOR_SCALE**2)
    return [
        near(
            f"Bayes collapses: its variance at τ = {coldest:g} is the conjugate one",
            conjugate,
            location.bayes[-1],
            0.01 * conjugate,
            "tolerance: the grid.",
        ),
        near(
            f"the log score does not: its variance at τ = {coldest:g} is s² − σ²",
            lacking,
            location.predictive[-1],
            10 * coldest,
            f"O(τ): {', '.join(f'{v:.3f} at {t:g}' for t, v in _by_temperature(location.predictive))}.",
        ),
        at_most(
            f"nobody could predict much better: sup (1/n) Σ p(y | θ)/∫p dQ − 1 at τ = {coldest:g}",
            coldest,
            location.certificate,
            "it bounds the log score minus the least that any Q has.",
        ),
        at_most(
            "where the model is right the log score collapses, too: variance at τ = 0.001 over that at 1",
            0.1,
            location.right[-1] / location.right[0],
            f"{', '.join(f'{v:.3f} at {t:g}' for t, v in _by_temperature(location.right))}.",
        ),
    ]


def _by_temperature(variances: list[float]) -> list[tuple[float, float]]:
    return [(t, v) for t, v in zip(TEMPERATURES, variances, strict=True) if t in (0.1, 0.01, 0.001)]


def _rows(rng: np.random.Generator, number: int) -> tuple[np.ndarray, np.ndarray]:
    x, sign = rng.uniform(-2, 2, number), rng.choice([-1.0, 1.0], number)
    return x, sign * x + NOISE * rng.normal(size=number)


def _regression(seed: int) -> Regression:
    rng = np.random.default_rng(seed)
    x, y = _rows(rng, ROWS)
    inputs, targets = jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)

    def likelihood(theta: Array) -> Array:
        return dist.Normal(theta[0] * inputs, NOISE).log_prob(targets)

    problems = {
        "Bayes": with_kl(lambda theta: -jnp.mean(likelihood(theta)), 1 / ROWS),
        "log score": with_kl(LogScore(likelihood), SLOPES_TEMPERATURE),
    }
    densities = {name: minimiser(problem, GRID) for name, problem in problems.items()}
    test_x, test_y = _rows(rng, TEST_ROWS)
    scores = {name: _log_densities(density, test_x, test_y) for name, density in densities.items()}
    members = stats.norm.logpdf(test_y, np.stack([test_x, -test_x]), NOISE)
    return Regression(x, y, densities, scores, logsumexp(members, axis=0) - np.log(2))


def _log_densities(density: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """log ∫ N(y; θx, σ²) dQ of every row."""
    mass = density / density.sum()
    kept = mass > 1e-12
    members = stats.norm.logpdf(y, GRID[kept, None] * x, NOISE)
    return np.asarray(logsumexp(members, axis=0, b=mass[kept, None]))


def _regression_claims(regression: Regression) -> list[Claim]:
    mass = {name: density / density.sum() for name, density in regression.densities.items()}
    near_truth = np.abs(np.abs(GRID) - 1) < 0.25
    missing = {name: regression.truth - score for name, score in regression.scores.items()}
    excess = {name: float(rows.mean()) for name, rows in missing.items()}
    error = float(missing["log score"].std() / np.sqrt(TEST_ROWS))
    return [
        at_most(
            "two groups with slopes ±1: share of Bayes' mass within 0.25 of either",
            0.01,
            float(mass["Bayes"][near_truth].sum()),
            f"it is N({mass['Bayes'] @ GRID:.2f}, {variance_of(mass['Bayes']) ** 0.5:.3f}²), between them.",
        ),
        greater(
            "share of the log score's mass within 0.25 of either",
            0.5,
            float(mass["log score"][near_truth].sum()),
            f"{mass['log score'][GRID > 0].sum():.2f} of it near +1; τ = {SLOPES_TEMPERATURE:g}.",
        ),
        Claim(
            "the predictively oriented posterior predicts better than Bayes where the model is wrong",
            "paper",
            "a lower test NLL",
            {name: round(value, 3) for name, value in excess.items()},
            f"excess over the true law; ± {error:.3f}",
            excess["log score"] < 0.5 * excess["Bayes"],
            f"the true law has NLL {-regression.truth.mean():.3f} on {TEST_ROWS:,} rows.",
        ),
    ]


def _draw(figure: "Figure", location: Location, regression: Regression) -> None:
    axes = figure.subplots(1, 4)
    colours = {"Bayes": COLOURS["DLE"], "log score": COLOURS["FD-GVI"]}
    for name, density in location.densities.items():
        axes[0].plot(GRID, density, color=colours[name], label=f"q*, {name}")
    axes[0].hist(location.particles, 40, density=True, color=colours["log score"], alpha=0.3)
    limit = stats.norm.pdf(GRID, 0, (DATA_VARIANCE - MODEL_VARIANCE) ** 0.5)
    axes[0].plot(GRID, limit, "k--", linewidth=1, label="N(m, s² − σ²)")
    axes[0].set(xlim=(-3.5, 3.5), yticks=[], xlabel="θ", title=f"posteriors at τ = {SHOWN:g}")
    for name, values in (("Bayes", location.bayes), ("log score", location.predictive)):
        axes[1].plot(TEMPERATURES, values, "o-", color=colours[name], label=name)
    label = "log score, model right"
    axes[1].plot(TEMPERATURES, location.right, "o:", color=colours["log score"], mfc="w", label=label)
    axes[1].axhline(DATA_VARIANCE - MODEL_VARIANCE, color="k", linestyle="--", linewidth=1)
    axes[1].set(xscale="log", yscale="log", xlabel="τ", title="their variances; dashed: s² − σ²")
    for name, density in regression.densities.items():
        axes[2].plot(GRID, density, color=colours[name], label=name)
    axes[2].set(xlim=(-2, 2), yscale="log", ylim=(1e-3, 40), xlabel="slope θ", title="q* of the slope")
    axes[3].plot(regression.x, regression.y, "k.", markersize=3)
    line = np.linspace(-2, 2, 81)
    for name, density in regression.densities.items():
        axes[3].fill_between(line, *_band(density, line), color=colours[name], alpha=0.3, label=name)
    axes[3].set(xlabel="x", ylabel="y", title="90% of what each predicts")
    for axis in axes:
        axis.legend(frameon=False, fontsize=7)


def _band(density: np.ndarray, line: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The 5% and 95% quantiles of the mixture at every x."""
    mass, levels = density / density.sum(), np.linspace(-3.5, 3.5, 701)
    below = np.stack([mass @ stats.norm.cdf(levels, GRID[:, None] * x, NOISE) for x in line])
    low, high = (np.array([np.interp(p, row, levels) for row in below]) for p in (0.05, 0.95))
    return low, high
