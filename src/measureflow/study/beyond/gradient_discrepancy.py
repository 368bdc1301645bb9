"""Kernel gradient discrepancy (Chazal, Kanagawa, Shen, Korba and Oates, 2025): how far particles are from the
minimiser of any entropy-regularised objective, at the price of one gradient. It is the kernel Stein
discrepancy of Q against its own score −∇_W(F without entropy)/τ, so for a linear objective that of Q against
the Gibbs measure: `Problem.stationarity`.

Here it judges particles for the log score of the location model that is too narrow, whose q* is known.
"""

from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from scipy import stats
from tqdm import tqdm

from measureflow.flows.stein import SteinFlow
from measureflow.flows.wasserstein import WassersteinFlow
from measureflow.prediction.colours import COLOURS
from measureflow.runs.loop import run
from measureflow.spaces.bandwidths import MedianBandwidth
from measureflow.statement.problem import Problem
from measureflow.statement.scores import LogScore
from measureflow.study.beyond.location import (
    DATA_VARIANCE,
    PRIOR,
    law_of,
    log_likelihood,
    quantiles,
    with_kl,
)
from measureflow.study.paper.claims import SIZE, Claim, Reproduction, at_most, greater, near

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CASES, TEMPERATURE = 100, 0.1
NUMBERS, DRAWN = (25, 50, 100, 200, 400), 20
PARTICLES, STEP_SIZE, LOOKS, BETWEEN = 100, 0.2, 30, 20
STEIN_STEPS, STEIN_STEP_SIZE = 1_500, 2.0


def reproduce(seed: int, quick: bool = False, progress: bool = False) -> Reproduction:
    """Against N for exact draws and for wrong ones, and along a flow; and what Stein's flow makes of it."""
    likelihood = log_likelihood(quantiles(DATA_VARIANCE, CASES))
    problem = with_kl(LogScore(likelihood), TEMPERATURE)
    bayes = with_kl(lambda theta: -jnp.mean(likelihood(theta)), TEMPERATURE)
    exact, wrong = law_of(problem)[0], law_of(bayes)[0]
    rng, judge = np.random.default_rng(seed), jax.jit(jax.vmap(problem.stationarity))
    numbers = NUMBERS[:-1] if quick else NUMBERS
    found = {
        name: np.stack(
            [np.asarray(judge(jnp.asarray(law.sample(rng, (DRAWN, n, 1)), jnp.float32))) for n in numbers]
        )
        for name, law in (("exact draws", exact), ("draws of Bayes", wrong))
    }
    along = _along_the_flow(problem, seed, progress)
    distances = [exact.wasserstein_1(points) for points in along]
    discrepancies = [float(problem.stationarity(points)) for points in along]
    best = _stein(problem, seed)
    stein = float(problem.stationarity(best)), exact.wasserstein_1(best)
    level = found["exact draws"][numbers.index(PARTICLES)]
    chance = exact.expected_wasserstein_1(rng, PARTICLES)[0]
    return Reproduction(
        [
            *_rates(found, numbers),
            *_flow_claims(discrepancies, distances, level),
            _stein_claim(stein, level, chance),
        ],
        {"cases": CASES, "temperature": TEMPERATURE, "numbers": numbers, "particles": PARTICLES},
        lambda figure: _draw(figure, numbers, found, discrepancies, distances, stein),
        figure_size=(11.0, 3.4),
    )


def _along_the_flow(problem: Problem, seed: int, progress: bool) -> list[Array]:
    """Particles that start far away, looked at now and then."""
    flow, key = WassersteinFlow(STEP_SIZE), jax.random.key(seed)
    start = 0.3 * PRIOR.sample(jax.random.fold_in(key, 1), PARTICLES) + 3.0
    advance = eqx.filter_jit(lambda state: run(problem, flow, state, None, key, BETWEEN))
    state, looks = flow.init(problem, start), [start]
    for _ in tqdm(range(LOOKS), desc="along the flow", disable=not progress):
        state = advance(state)
        looks.append(state.particles)
    return looks


def _stein(problem: Problem, seed: int) -> Array:
    """Variational gradient descent: Stein's flow for an objective that is not linear."""
    flow, key = SteinFlow(MedianBandwidth(), STEIN_STEP_SIZE), jax.random.key(seed)
    state = flow.init(problem, PRIOR.sample(jax.random.fold_in(key, 2), PARTICLES))
    return eqx.filter_jit(lambda s: run(problem, flow, s, None, key, STEIN_STEPS))(state).particles


def _rates(found: dict[str, np.ndarray], numbers: tuple[int, ...]) -> list[Claim]:
    at = np.log(np.array(numbers))
    slopes = {}
    for name, rows in found.items():
        # One slope for every set of draws: independent, so that their spread is the error.
        each = np.array([np.polyfit(at, np.log(rows[:, i]), 1)[0] for i in range(rows.shape[1])])
        slopes[name] = float(each.mean()), float(each.std(ddof=1) / np.sqrt(len(each)))
    slope, error = slopes["exact draws"]
    return [
        near(
            "exact draws: it falls as N^−½: slope in log N",
            -0.5,
            slope,
            float(stats.norm.isf(SIZE / 2)) * error + 0.03,
            "tolerance: a test of size 0.001, and 0.03 for the median lengthscale.",
        ),
        greater(
            "draws of Bayes: it does not go to 0: slope in log N",
            -0.1,
            slopes["draws of Bayes"][0],
            f"at N = {numbers[-1]} it is {found['draws of Bayes'][-1].mean():.2f}, for exact draws "
            f"{found['exact draws'][-1].mean():.3f}.",
        ),
    ]


def _flow_claims(discrepancies: list[float], distances: list[float], level: np.ndarray) -> list[Claim]:
    rank: Any = stats.spearmanr(discrepancies, distances)
    return [
        greater(
            "along the flow it falls as the distance W₁ to q* does: the first over the last five",
            10.0,
            discrepancies[0] / float(np.mean(discrepancies[-5:])),
            f"W₁ from {distances[0]:.2f} to {distances[-1]:.2f}; rank correlation {rank.statistic:.2f}.",
        ),
        at_most(
            "at its end it is that of exact draws: in their standard deviations above the mean",
            4.0,
            float((np.mean(discrepancies[-5:]) - level.mean()) / level.std(ddof=1)),
        ),
    ]


def _stein_claim(stein: tuple[float, float], level: np.ndarray, chance: float) -> Claim:
    return Claim(
        "Stein's flow (variational gradient descent) spreads particles better than chance",
        "paper",
        "a smaller discrepancy than exact draws",
        {"Stein's flow": round(stein[0], 4), "exact draws": round(float(level.mean()), 4)},
        f"{PARTICLES} particles each",
        bool(stein[0] < level.min()),
        f"W₁ to q* is {stein[1]:.3f}, of exact draws {chance:.3f}.",
    )


def _draw(
    figure: "Figure",
    numbers: tuple[int, ...],
    found: dict[str, np.ndarray],
    discrepancies: list[float],
    distances: list[float],
    stein: tuple[float, float],
) -> None:
    left, middle, right = figure.subplots(1, 3)
    for (name, rows), colour in zip(found.items(), (COLOURS["DRLE"], COLOURS["FD-GVI"]), strict=True):
        left.errorbar(numbers, rows.mean(axis=1), rows.std(axis=1), fmt="o-", color=colour, label=name)
    first = found["exact draws"][0].mean()
    left.plot(
        numbers, first * np.sqrt(numbers[0] / np.array(numbers)), "k--", linewidth=1, label="$N^{-1/2}$"
    )
    left.plot(PARTICLES, stein[0], "*", color=COLOURS["DRE"], markersize=11, label="Stein's flow")
    left.set(xscale="log", yscale="log", xlabel="N", title="kernel gradient discrepancy")
    left.set_xticks(numbers, [str(n) for n in numbers])
    left.minorticks_off()
    time = np.arange(LOOKS + 1) * BETWEEN * STEP_SIZE
    middle.plot(time, discrepancies, color=COLOURS["DLE"], label="discrepancy")
    middle.plot(time, distances, color=COLOURS["DE"], label="W₁ to q*")
    middle.axhline(
        found["exact draws"][numbers.index(PARTICLES)].mean(), color="k", linestyle="--", linewidth=1
    )
    middle.set(yscale="log", xlabel="t", title="along the flow; dashed: of exact draws")
    right.plot(distances, discrepancies, ".", color=COLOURS["DLE"], label="along the flow")
    right.plot(stein[1], stein[0], "*", color=COLOURS["DRE"], markersize=11, label="Stein's flow")
    right.set(xscale="log", yscale="log", xlabel="W₁ to q*", title="discrepancy and distance")
    for axis in (left, middle, right):
        axis.legend(frameon=False, fontsize=8)
