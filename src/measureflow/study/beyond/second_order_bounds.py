"""PAC²-Bayes (Masegosa, 2020): Jensen's inequality to the second order, between Bayes and the log score.

    −E log ∫ p dQ  ≤  −∫ E log p dQ − V(Q)  ≤  −∫ E log p dQ,   V(Q) = E Var_Q(p)/(2 max p²)

The middle is a function of moments of Q, φ(∫ g dQ) with g = (log p, r, r²), r = p/max p: `Moment`, and
convex. V is at most 1/8, so where the expected loss is curved it changes little: in the location model that
is too narrow, PAC² collapses as Bayes does, to a variance that is larger by 1/(1 − s²/(1 + 2s²)^{3/2}) at
σ = 1. Where the expected loss is flat, V decides: two groups of cases under a Laplace law.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jaxtyping import Array

from measureflow.prediction.colours import COLOURS
from measureflow.statement.functionals import AbstractFunctional, ExpectedLoss
from measureflow.statement.moments import Moment
from measureflow.statement.problem import Problem
from measureflow.statement.scores import LogScore
from measureflow.study.beyond.location import (
    CASES,
    DATA_VARIANCE,
    GRID,
    MODEL_VARIANCE,
    law_of,
    log_likelihood,
    particles_claims,
    quantiles,
    variance_of,
    with_kl,
)
from measureflow.study.paper.claims import Claim, Reproduction, at_most, greater, near
from measureflow.theory import minimiser, value

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TEMPERATURES = (1.0, 0.3, 0.1, 0.03, 0.01, 0.003)
SHOWN = 0.1
#: Two groups of cases, N(±1.5, 0.3²), under a Laplace law of scale 0.5.
CENTRE, SPREAD, LAPLACE_SCALE = 1.5, 0.3, 0.5
Likelihood = Callable[[Array], Array]


def normal() -> tuple[Likelihood, float]:
    """log p of every case of the location model, and log max p."""
    return log_likelihood(quantiles(DATA_VARIANCE)), float(-0.5 * np.log(2 * np.pi * MODEL_VARIANCE))


def laplace() -> tuple[Likelihood, float]:
    """The same for the two groups."""
    group = SPREAD * quantiles(1.0, CASES // 2)
    cases = jnp.asarray(np.concatenate([group - CENTRE, group + CENTRE]), jnp.float32)
    law = dist.Laplace(0.0, LAPLACE_SCALE)
    return lambda theta: law.log_prob(cases - theta[0]), float(-np.log(2 * LAPLACE_SCALE))


def second_order_bound(likelihood: Likelihood, largest: float) -> Moment:
    """−∫ E log p dQ − V(Q)."""

    def features(theta: Array) -> tuple[Array, Array, Array]:
        logarithms = likelihood(theta)
        relative = jnp.exp(logarithms - largest)
        return logarithms, relative, relative**2

    def bound(means: tuple[Array, Array, Array]) -> Array:
        logarithm, relative, square = means
        return -jnp.mean(logarithm) - 0.5 * jnp.mean(square - relative**2)

    return Moment(features, bound)


def objectives(likelihood: Likelihood, largest: float) -> dict[str, AbstractFunctional]:
    """From the largest to the smallest."""
    return {
        "Bayes": ExpectedLoss(lambda theta: -jnp.mean(likelihood(theta))),
        "PAC²": second_order_bound(likelihood, largest),
        "log score": LogScore(likelihood),
    }


def reproduce(seed: int, quick: bool = False, progress: bool = False) -> Reproduction:
    """Variances and log scores of all three minimisers by temperature; particles at one of them."""
    narrow, groups = objectives(*normal()), objectives(*laplace())
    variances = {
        name: [variance_of(minimiser(with_kl(objective, tau), GRID)) for tau in TEMPERATURES]
        for name, objective in narrow.items()
    }
    densities = {
        name: [minimiser(with_kl(objective, tau), GRID) for tau in TEMPERATURES]
        for name, objective in groups.items()
    }
    scores = {
        name: [value(Problem(groups["log score"]), GRID, density) for density in of_tau]
        for name, of_tau in densities.items()
    }
    problem = with_kl(groups["PAC²"], SHOWN)
    reached, _ = particles_claims("PAC²", problem, law_of(problem)[0], seed, progress)
    return Reproduction(
        [_inequality(narrow, seed), _law(variances), *_flat(densities, scores), *reached],
        {"cases": CASES, "data variance": DATA_VARIANCE, "temperatures": TEMPERATURES},
        lambda figure: _draw(figure, variances, densities, scores),
        figure_size=(11.0, 3.4),
    )


def _inequality(stated: dict[str, AbstractFunctional], seed: int) -> Claim:
    """On mixtures of Normals at random."""
    rng, worst = np.random.default_rng(seed), -np.inf
    for _ in range(20):
        centres, scales = rng.normal(0, 2, 3), rng.uniform(0.05, 1.5, 3)
        density = (rng.dirichlet(np.ones(3)) / scales) @ np.exp(
            -0.5 * ((GRID - centres[:, None]) / scales[:, None]) ** 2
        )
        density /= density.sum() * (GRID[1] - GRID[0])
        found = [value(Problem(objective), GRID, density) for objective in stated.values()]
        worst = max(worst, found[2] - found[1], found[1] - found[0])
    return at_most(
        "log score ≤ PAC² ≤ expected loss for 20 random Q: largest violation", 1e-6, worst, "to rounding."
    )


def _law(variances: dict[str, list[float]]) -> Claim:
    coldest, square = TEMPERATURES[-1], DATA_VARIANCE / MODEL_VARIANCE
    expected = 1 / (1 - square / (1 + 2 * square) ** 1.5)
    return near(
        f"location model: PAC² collapses, too; its variance over that of Bayes at τ = {coldest:g}",
        expected,
        variances["PAC²"][-1] / variances["Bayes"][-1],
        0.01,
        f"1/(1 − s²/(1 + 2s²)^(3/2)) as τ → 0; the log score keeps {variances['log score'][-1]:.3f}.",
    )


def _flat(densities: dict[str, list[np.ndarray]], scores: dict[str, list[float]]) -> list[Claim]:
    coldest = TEMPERATURES[-1]
    groups = np.abs(np.abs(GRID) - CENTRE) < 3 * SPREAD
    mass = {name: float(of_tau[-1][groups].sum() / of_tau[-1].sum()) for name, of_tau in densities.items()}
    last = {name: of_name[-1] for name, of_name in scores.items()}
    gained = (last["Bayes"] - last["PAC²"]) / (last["Bayes"] - last["log score"])
    return [
        greater(
            f"two groups, the expected loss is flat: mass in them at τ = {coldest:g}, over that of Bayes",
            2.0,
            mass["PAC²"] / mass["Bayes"],
            f"PAC² {mass['PAC²']:.2f}, Bayes {mass['Bayes']:.2f}, log score {mass['log score']:.2f}.",
        ),
        greater(
            "and predicts better than Bayes: difference of log scores",
            0.0,
            last["Bayes"] - last["PAC²"],
            f"{100 * gained:.0f}% of what the log score itself gains.",
        ),
        at_most(
            "but no better than the log score's own minimiser: difference of log scores",
            0.0,
            last["log score"] - last["PAC²"],
        ),
    ]


def _draw(
    figure: "Figure",
    variances: dict[str, list[float]],
    densities: dict[str, list[np.ndarray]],
    scores: dict[str, list[float]],
) -> None:
    left, middle, right = figure.subplots(1, 3)
    colours = {"Bayes": COLOURS["DLE"], "PAC²": COLOURS["DRLE"], "log score": COLOURS["FD-GVI"]}
    for name, colour in colours.items():
        left.plot(TEMPERATURES, variances[name], "o-", color=colour, label=name)
        middle.plot(GRID, densities[name][-1], color=colour, label=name)
        right.plot(TEMPERATURES, scores[name], "o-", color=colour, label=name)
    left.axhline(DATA_VARIANCE - MODEL_VARIANCE, color="k", linestyle="--", linewidth=1)
    left.set(xscale="log", yscale="log", xlabel="τ", title="location model: variances")
    title = f"two groups: q* at τ = {TEMPERATURES[-1]:g}"
    middle.set(xlim=(-3, 3), ylim=(1e-3, 10), yscale="log", xlabel="θ", title=title)
    right.set(xscale="log", xlabel="τ", title="two groups: log scores")
    for axis in (left, middle, right):
        axis.legend(frameon=False, fontsize=8)
