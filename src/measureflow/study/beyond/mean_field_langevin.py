"""Mean-field Langevin dynamics (Mei, Montanari and Nguyen, 2018; Hu, Ren, Šiška and Szpruch, 2021): a
two-layer network of infinite width is f(x) = ∫ g(θ, x) dQ, and noisy gradient descent of its neurons is the
flow of

    F(Q) = (1/2n) Σᵢ (f(xᵢ) − yᵢ)² + τ KL(Q, P),   `Moment`, and convex.

Units here are g(θ, x) = A tanh(4(x − θ)) with θ on the line, so that q*, and the evolution of the density q_t
at N = ∞, are computed on a grid. Nitanda, Wu and Suzuki (2022) and Chizat (2022) prove that F falls to its
minimum exponentially, by the entropy sandwich

    τ KL(q_t, q*)  ≤  F(q_t) − F(q*)  ≤  τ KL(q_t, q̂_t),   q̂_t ∝ exp(−δF/δQ[q_t]/τ) without its entropy;

N neurons differ from the limit by O(1/N) in mean square.
"""

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from scipy import stats
from scipy.special import logsumexp, xlogy

from measureflow.flows.wasserstein import WassersteinFlow
from measureflow.prediction.colours import COLOURS
from measureflow.spaces.measures import Gaussian
from measureflow.statement.divergences import KL
from measureflow.statement.moments import Moment
from measureflow.statement.problem import Problem
from measureflow.study.paper.claims import SIZE, Claim, Reproduction, at_most, near
from measureflow.study.paper.seeds import particles_of_seeds
from measureflow.theory import minimiser
from measureflow.theory.grids import GridEnergy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

AMPLITUDE, SHARPNESS, TEMPERATURE, CASES = 2.0, 4.0, 0.05, 25
PRIOR = Gaussian(jnp.zeros(1), 1.5)
GRID = np.linspace(-6.0, 6.0, 241)
INPUTS = np.linspace(-2.0, 2.0, CASES)
#: Two steps, one steeper than the other.
TARGETS = 0.9 * np.tanh(3 * (INPUTS + 1)) + 0.6 * np.tanh(6 * (INPUTS - 1))
NUMBERS, SEEDS, STEP_SIZE, STEPS = (8, 16, 32, 64, 128), 40, 0.05, 2_000
TIME, PART = 60.0, 0.01


def unit(theta: Array, inputs: Array) -> Array:
    """g(θ, x) at every x."""
    return AMPLITUDE * jnp.tanh(SHARPNESS * (inputs - theta[0]))


def stated() -> Problem:
    """The squared error of the mean over neurons, and τ·KL."""
    inputs, targets = jnp.asarray(INPUTS, jnp.float32), jnp.asarray(TARGETS, jnp.float32)
    error = Moment(lambda theta: unit(theta, inputs), lambda f: 0.5 * jnp.mean((f - targets) ** 2))
    return Problem(error, TEMPERATURE * KL(PRIOR))


class Evolution(NamedTuple):
    """Of the density at N = ∞: times, F(q_t) − F(q*), and the two sides of the sandwich."""

    times: np.ndarray
    gap: np.ndarray
    below: np.ndarray
    above: np.ndarray


def reproduce(seed: int, quick: bool = False, progress: bool = False) -> Reproduction:
    """The evolution on the grid, and networks of N neurons over many seeds."""
    problem = stated()
    density = minimiser(problem, GRID)
    evolution = _evolution(problem, density)
    seeds, numbers = (SEEDS // 2, NUMBERS[::2]) if quick else (SEEDS, NUMBERS)
    errors, shown = {}, np.empty(0)
    outputs = AMPLITUDE * np.tanh(SHARPNESS * (INPUTS[:, None] - GRID)) @ (density / density.sum())
    for number in numbers:
        keys = jax.random.split(jax.random.key(seed + number), seeds)
        flow, label = WassersteinFlow(STEP_SIZE), f"{number} neurons" if progress else None
        neurons = particles_of_seeds(problem, flow, PRIOR, number, STEPS, keys, label)[..., 0]
        found = AMPLITUDE * np.tanh(SHARPNESS * (INPUTS[:, None] - neurons[:, None, :])).mean(axis=2)
        errors[number], shown = np.mean((found - outputs) ** 2, axis=1), neurons.ravel()
    return Reproduction(
        [*_sandwich(evolution), _chaos(errors)],
        {
            "temperature": TEMPERATURE,
            "cases": CASES,
            "neurons": numbers,
            "seeds": seeds,
            "step size": STEP_SIZE,
            "steps": STEPS,
        },
        lambda figure: _draw(figure, density, outputs, evolution, errors, shown),
        figure_size=(14.0, 3.4),
    )


def _evolution(problem: Problem, exact: np.ndarray) -> Evolution:
    """∂q = ∂(q ∂(δ + τ log q)) with the fluxes of Scharfetter and Gummel, whose fixed point is the grid's own
    Gibbs measure: implicit in q, δ that of the step before."""
    energy, h, tau = GridEnergy(problem, GRID), GRID[1] - GRID[0], TEMPERATURE
    target = exact * h
    least, mass = energy.value(target), np.exp(-0.5 * ((GRID - 3) / 0.5) ** 2)
    mass /= mass.sum()
    rows = []
    steps = round(TIME / PART)
    for step in range(steps + 1):
        slope = energy.first_variation(mass)
        if step % (steps // 60) == 0:
            gibbs = -slope / tau
            gibbs -= logsumexp(gibbs)
            rows.append(
                (
                    step * PART,
                    energy.value(mass) - least,
                    tau * np.sum(xlogy(mass, mass / target)),
                    tau * np.sum(xlogy(mass, mass) - mass * gibbs),
                )
            )
        mass = _stepped(mass, slope / tau, tau * PART / h**2)
    return Evolution(*np.array(rows).T)


def _stepped(mass: np.ndarray, slope: np.ndarray, rate: float) -> np.ndarray:
    """(I − rate·A) q′ = q, A the generator between neighbours with Bernoulli's function b(x) = x/(eˣ − 1)."""
    from scipy.linalg import solve_banded

    jump = np.clip(np.diff(slope), -500, 500)
    small = np.abs(jump) < 1e-6
    safe = np.where(small, 1.0, jump)
    right = np.where(small, 1 - jump / 2, safe / np.expm1(safe))
    left = right + jump
    out = np.append(right, 0.0) + np.append(0.0, left)
    banded = np.zeros((3, len(mass)))
    banded[0, 1:], banded[1], banded[2, :-1] = -rate * left, 1 + rate * out, -rate * right
    return solve_banded((1, 1), banded, mass)


def _sandwich(evolution: Evolution) -> list[Claim]:
    late = (evolution.times > TIME / 6) & (evolution.gap > 1e-9)
    logarithms = np.log(evolution.gap[late])
    rate, start = np.polyfit(evolution.times[late], logarithms, 1)
    off = np.abs(logarithms - rate * evolution.times[late] - start).max()
    violated = max(np.max(evolution.below - evolution.gap), np.max(evolution.gap - evolution.above))
    return [
        at_most(
            "the entropy sandwich holds along all of the flow: largest violation",
            1e-6,
            float(violated),
            "τKL(q_t, q*) ≤ F(q_t) − F(q*) ≤ τKL(q_t, q̂_t), N = ∞, on the grid.",
        ),
        at_most(
            "F(q_t) − F(q*) falls exponentially: largest distance of its logarithm from a line",
            0.5,
            float(off),
            f"rate {-rate:.3f}, over {logarithms[0] - logarithms[-1]:.1f} units of the logarithm.",
        ),
    ]


def _chaos(errors: dict[int, np.ndarray]) -> Claim:
    numbers = np.log(np.array(list(errors)))
    means = np.array([row.mean() for row in errors.values()])
    relative = np.array([row.std(ddof=1) / np.sqrt(len(row)) for row in errors.values()]) / means
    weights = 1 / relative**2
    centre = np.average(numbers, weights=weights)
    squares = np.sum(weights * (numbers - centre) ** 2)
    slope = float(np.sum(weights * (numbers - centre) * np.log(means)) / squares)
    return near(
        "networks of N neurons differ from f* by O(1/N) in mean square: slope in log N",
        -1.0,
        slope,
        float(stats.norm.isf(SIZE / 2)) * squares**-0.5 + 0.1,
        "tolerance: a test of size 0.001, and 0.1 for O(1/N²) and O(η).",
    )


def _draw(
    figure: "Figure",
    density: np.ndarray,
    outputs: np.ndarray,
    evolution: Evolution,
    errors: dict[int, np.ndarray],
    neurons: np.ndarray,
) -> None:
    axes, colour = figure.subplots(1, 4), COLOURS["DLE"]
    axes[0].plot(INPUTS, TARGETS, "k.", label="data")
    axes[0].plot(INPUTS, outputs, color=colour, label="f*, infinitely wide")
    axes[0].set(xlabel="x", title="the network")
    axes[1].hist(neurons, 60, density=True, color=colour, alpha=0.35, label="neurons")
    axes[1].plot(GRID, density, color=colour, label="q*")
    axes[1].set(xlim=(-5, 5), yticks=[], xlabel="θ", title="where its neurons are")
    axes[2].fill_between(evolution.times, evolution.below, evolution.above, color=colour, alpha=0.25)
    axes[2].plot(evolution.times, evolution.gap, color=colour, label="F(q_t) − F(q*), in its sandwich")
    axes[2].set(yscale="log", ylim=(1e-5, None), xlabel="t", title="exponential convergence")
    numbers = np.array(list(errors))
    means = np.array([row.mean() for row in errors.values()])
    bars = np.array([row.std(ddof=1) / np.sqrt(len(row)) for row in errors.values()])
    axes[3].errorbar(numbers, means, 2 * bars, fmt="o", color=colour, label="E (f_N − f*)²")
    axes[3].plot(numbers, means[0] * numbers[0] / numbers, "k--", linewidth=1, label="1/N")
    axes[3].set(xscale="log", yscale="log", xlabel="N", title="finitely many neurons")
    for axis in axes:
        axis.legend(frameon=False, fontsize=8)
