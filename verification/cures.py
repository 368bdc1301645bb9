"""The paper's Figures 3 and 4 from a start with the wrong masses, without a cure and with one.

Particles keep to the basins in which they start (Theorem 1), and noise does not help where barriers are many
τ high. The paper starts symmetrically, so that the masses of the modes are right from the start; here most
particles start in one mode of Figure 3, and all of them on one side of Figure 4.
`python -m verification.cures` prints the tables of docs/posteriors.md and draws its picture; with
`--out FOLDER` that goes there.
"""

import argparse
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib import pyplot as plt

import measureflow as mf
from measureflow.study.paper.many_modes import HALF
from measureflow.study.paper.many_modes import TAU as COLD
from measureflow.study.paper.multimodal import GRID, INITIAL, STEP_SIZE, nearest_mode, statements

#: By the way in which they came: (n, J).
Particles: TypeAlias = dict[str, np.ndarray]

KERNEL_KEY, START_KEY, RUN_KEY, SAMPLE_KEY = jax.random.split(jax.random.key(0), 4)
N, STEPS = 300, 2_000
# Births and deaths are slow beside the motion within a mode, and q̂ is narrower than a mode of Figure 3.
RATE, BANDWIDTH = 0.02, 0.1
# Figure 4 has a flat P, under which no law on the line has a minimum; this one is proper.
PRIOR = mf.Gaussian(jnp.zeros(1), 0.3 * HALF * np.pi)


def rows(run: Callable[[], Any]) -> np.ndarray:
    """What `run` returns, as (n, J). Warnings are left to the tables, which say more."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = np.asarray(run())
    return found.reshape(-1, found.shape[-1])


def ways(problem: mf.Problem, step_size: float, start: jax.Array, steps: int = STEPS) -> Particles:
    """The flow alone, with births and deaths, and, where there is a density to accept by, `sample`."""

    def end(flow: mf.AbstractFlow) -> Any:
        return mf.solve(problem, flow, start, steps, RUN_KEY, certify=False).state.particles

    flow = mf.WassersteinFlow(step_size)
    found = {"start": np.asarray(start), "flow": rows(lambda: end(flow))}
    found["BirthDeath"] = rows(lambda: end(mf.BirthDeath(flow, RATE, BANDWIDTH)))
    if problem.regulariser_energy().interaction is None:
        found["sample"] = rows(lambda: mf.sample(problem, start, SAMPLE_KEY).draws)
    return found


def four_modes(name: str, particles: int = N, steps: int = STEPS) -> Particles:
    """Figure 3's DLE or DRLE, from N((1, 1), I): most particles start at the mode (3, 3)."""
    kernel = mf.SquaredExponential(mf.median_heuristic(INITIAL.sample(KERNEL_KEY, 1000)))
    problem = statements(kernel)[name]
    start = mf.Gaussian(jnp.ones(2), 1.0).sample(START_KEY, particles)
    points = GRID.reshape(-1, 2)
    mass = mf.theory.minimiser(problem, GRID).reshape(-1)
    drawn = np.random.default_rng(0).choice(len(points), 100_000, p=mass / mass.sum())
    return ways(problem, STEP_SIZE, start, steps) | {"exact": points[drawn]}


def many_modes(particles: int = N, steps: int = STEPS) -> Particles:
    """Figure 4's DLE with a proper prior, from the right half of its range."""
    problem = mf.Problem(mf.theory.many_modes_loss, COLD * mf.KL(PRIOR))
    start = mf.Uniform(jnp.zeros(1), jnp.full(1, HALF * np.pi)).sample(START_KEY, particles)
    grid = np.linspace(-1.5 * HALF * np.pi, 1.5 * HALF * np.pi, 600_001)
    law = mf.theory.GridLaw(grid, mf.theory.minimiser(problem, grid))
    exact = law.sample(np.random.default_rng(0), (100_000, 1))
    return ways(problem, 0.01, start, steps) | {"exact": exact}


def shares(points: np.ndarray) -> np.ndarray:
    """Of the four modes of Figure 3."""
    return np.bincount(nearest_mode(points), minlength=4) / len(points)


def variance_within(points: np.ndarray, mode: np.ndarray) -> float:
    """Of a coordinate about the mean of its mode, over modes with at least ten particles."""
    parts = [points[mode == each] for each in np.unique(mode)]
    squares = [np.square(part - part.mean(axis=0)).sum() for part in parts if len(part) >= 10]
    count = sum(part.shape[1] * (len(part) - 1) for part in parts if len(part) >= 10)
    return float(np.sum(squares) / count)


def table_of_four_modes(found: dict[str, Particles]) -> str:
    """Mode by mode."""
    lines = [
        "| | (−3, −3) | (−3, 3) | (3, −3) | (3, 3) | variance within |",
        "|---|---|---|---|---|---|",
    ]
    for name, results in found.items():
        for way, points in results.items():
            within = variance_within(points, nearest_mode(points))
            cells = [f"{name}, {way}", *(f"{share:.2f}" for share in shares(points)), f"{within:.3f}"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def table_of_many_modes(results: Particles) -> str:
    """Sides, moments, and how many modes have a particle."""
    lines = ["| | left of 0 | mean/σ | deviation/σ | modes occupied |", "|---|---|---|---|---|"]
    sigma = float(PRIOR.scale)
    for way, points in results.items():
        theta = points[:, 0]
        # Of the exact law, by as many independent draws.
        occupied = len(np.unique(np.floor((theta[:N] if way == "exact" else theta) / np.pi)))
        numbers = np.mean(theta < 0), theta.mean() / sigma, theta.std() / sigma
        cells = [way, *(f"{number:.2f}" for number in numbers), str(occupied)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(four: Particles, many: Particles, path: Path) -> None:
    """Figure 3 above, Figure 4 below: the start, the ways, and the exact law."""
    figure = plt.figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.subplots(2, len(four))
    for upper, (name, points) in zip(axes[0], four.items(), strict=True):
        shown = points[np.random.default_rng(0).choice(len(points), min(N, len(points)), replace=False)]
        upper.scatter(*shown.T, s=3, color="C0", alpha=0.5, linewidths=0)
        upper.set(title=name, xlim=(-6, 6), ylim=(-6, 6), xticks=[-3, 3], yticks=[-3, 3])
    for lower, points in zip(axes[1], many.values(), strict=True):
        lower.hist(points[:, 0] / np.pi, np.linspace(-1_000, 1_000, 21), density=True, color="C0")
        lower.set(xlim=(-1_000, 1_000), ylim=(0, 3e-3), yticks=[], xticks=[-500, 500], xlabel="θ/π")
    axes[0, 0].set_ylabel("Figure 3, DLE")
    axes[1, 0].set_ylabel("Figure 4, DLE")
    figure.savefig(path, dpi=100)
    plt.close(figure)


def main() -> None:
    """Tables to the terminal, the picture to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/assets"))
    folder = parser.parse_args().out
    four = {name: four_modes(name) for name in ("DLE", "DRLE")}
    print(table_of_four_modes(four), flush=True)
    many = many_modes()
    print(f"\n{table_of_many_modes(many)}")
    draw(four["DLE"], many, folder / "cures.png")


if __name__ == "__main__":
    main()
