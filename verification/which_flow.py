"""Every flow on the same problems, each of which has an exact answer.

`python -m verification.which_flow` writes docs/which-flow.md: the error of every flow after as many
gradients, and how the errors fall with the number of particles.
"""

import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats

import measureflow as mf
from measureflow.study.beyond import mean_field_langevin
from measureflow.study.paper.multimodal import GRID, INITIAL, statements

PAGE = Path(__file__).parent.parent / "docs" / "which-flow.md"
PARTICLES, GRADIENTS, EXACT = 100, 1_000, 20_000
NUMBERS = (10, 30, 100, 300)
# Powers of two; each flow has the best of them, found with other seeds than those that are shown.
STEP_SIZES = 2.0 ** np.arange(-9, 2)
TUNED, SHOWN = range(3), range(10, 20)

INTRODUCTION = f"""\
# Which flow?

One problem, every flow: what `python -m verification.which_flow` found. The error is the Wasserstein-1
distance between the particles and exact draws, by coordinate, in standard deviations, mean over coordinates.
A row of exact draws, as many as there are particles, says what chance alone makes of that: whoever is below
spreads particles more evenly than chance.

Every flow takes {GRADIENTS:,} gradients of every particle, from the same start, and has the best of the step
sizes 2⁻⁹, 2⁻⁸, …, 2, found with three other seeds. So the numbers, means over ten seeds, are of what a flow
can do, and not of how easy it is to tune. `mf.sample` is tuned by nobody, and spends as many gradients as it
takes, which are shown; its error is that of one seed. Seconds are those of one run on two cores, after
compiling.
"""


class Case(NamedTuple):
    """A problem, where its particles start, and draws of its minimiser."""

    problem: mf.Problem
    start: Callable[[jax.Array, int], jax.Array]
    exact: np.ndarray


class Result(NamedTuple):
    """The error, and the seconds of a run that had been compiled before."""

    error: float
    seconds: float


def _normal(dimension: int, scale: float = 1.0) -> Callable[[jax.Array, int], jax.Array]:
    return mf.Gaussian(jnp.zeros(dimension), scale).sample


def two_basins() -> Case:
    """Figure 2: the quartic loss, P = N(0, 1), KL weight 1."""
    problem = mf.Problem(mf.theory.quartic_loss, mf.KL(mf.Gaussian(jnp.zeros(1), 1.0)))
    grid = np.linspace(-5.0, 4.0, 9_001)
    law = mf.theory.GridLaw(grid, mf.theory.minimiser(problem, grid))
    return Case(problem, _normal(1), law.sample(np.random.default_rng(0), (EXACT, 1)))


def four_modes() -> Case:
    """Figure 3: DRLE, with its interaction."""
    kernel = mf.SquaredExponential(mf.median_heuristic(INITIAL.sample(jax.random.key(0), 1000)))
    problem = statements(kernel)["DRLE"]
    points, mass = GRID.reshape(-1, 2), mf.theory.minimiser(problem, GRID).reshape(-1)
    rng = np.random.default_rng(0)
    drawn = points[rng.choice(len(points), EXACT, p=mass / mass.sum())]
    # Anywhere in their cells.
    cell = GRID[1, 1] - GRID[0, 0]
    return Case(problem, INITIAL.sample, drawn + cell * rng.uniform(-0.5, 0.5, drawn.shape))


def correlated() -> Case:
    """N(0, Σ) in 20 dimensions, condition number 100."""
    rng = np.random.default_rng(0)
    axes = np.linalg.qr(rng.normal(size=(20, 20)))[0]
    deviations = np.geomspace(0.2, 2.0, 20)
    precision = jnp.asarray((axes / deviations**2) @ axes.T, jnp.float32)
    problem = mf.Problem(lambda theta: 0.5 * theta @ precision @ theta, mf.KL(mf.Flat()))
    return Case(problem, _normal(20), rng.normal(size=(EXACT, 20)) * deviations @ axes.T)


def funnel() -> Case:
    """v ~ N(0, 1.5²) and four x ~ N(0, exp(v))."""

    def loss(theta: jax.Array) -> jax.Array:
        v, x = theta[0], theta[1:]
        return v**2 / 4.5 + 0.5 * jnp.sum(x**2) * jnp.exp(-v) + 2 * v

    rng = np.random.default_rng(0)
    v = 1.5 * rng.normal(size=(EXACT, 1))
    exact = np.concatenate([v, np.exp(v / 2) * rng.normal(size=(EXACT, 4))], axis=1)
    return Case(mf.Problem(loss, mf.KL(mf.Flat())), _normal(5), exact)


def mean_field_network() -> Case:
    """A two-layer network of infinite width, θ where a unit bends: its squared error is a function of a mean
    over Q."""
    problem, grid = mean_field_langevin.stated(), mean_field_langevin.GRID
    law = mf.theory.GridLaw(grid, mf.theory.minimiser(problem, grid))
    start = mean_field_langevin.PRIOR.sample
    return Case(problem, start, law.sample(np.random.default_rng(0), (EXACT, 1)))


CASES = {
    "two basins": two_basins,
    "four modes, repulsion": four_modes,
    "correlated, 20-D": correlated,
    "funnel, 5-D": funnel,
    "mean-field network": mean_field_network,
}
FLOWS: dict[str, Callable[[Any], mf.AbstractFlow]] = {
    "noise, Euler–Maruyama": lambda eta: mf.WassersteinFlow(eta, integrator=mf.EulerMaruyama()),
    "noise, Leimkuhler–Matthews": lambda eta: mf.WassersteinFlow(eta),
    "noise, covariance of the particles": lambda eta: mf.WassersteinFlow(
        eta, mf.EnsemblePreconditioner(GRADIENTS // 2)
    ),
    "kinetic, BAOAB": lambda eta: mf.KineticFlow(eta, friction=1.0),
    "Stein, squared exponential": lambda eta: mf.SteinFlow(mf.MedianBandwidth(), eta),
    "Stein, inverse multiquadric": lambda eta: mf.SteinFlow(mf.MedianBandwidth(mf.InverseMultiquadric), eta),
    "kernel density": lambda eta: mf.WassersteinFlow(eta, entropy=mf.KernelDensity(mf.MedianBandwidth())),
    "blob": lambda eta: mf.WassersteinFlow(eta, entropy=mf.Blob(mf.MedianBandwidth())),
    "Gaussian, Bures–Wasserstein": lambda eta: mf.BuresWassersteinFlow(eta),
}


def error(found: np.ndarray, exact: np.ndarray) -> float:
    """The mean over coordinates of W₁ of marginals, in standard deviations."""
    if not np.all(np.isfinite(found)):
        return np.inf
    return float(
        np.mean(
            [
                scipy.stats.wasserstein_distance(one, other) / np.std(other)
                for one, other in zip(found.T, exact.T, strict=True)
            ]
        )
    )


def run(case: Case, flow: mf.AbstractFlow, particles: int, seed: int) -> Result:
    """The particles, or draws of the Gaussian, after as many steps as all have."""
    start_key, run_key, draw_key = jax.random.split(jax.random.key(seed), 3)
    start = case.start(start_key, particles)
    began = time.perf_counter()
    with warnings.catch_warnings():
        # Of what is not stationary there is more to say in the table.
        warnings.simplefilter("ignore")
        try:
            solution = mf.solve(
                case.problem, flow, start, GRADIENTS, run_key, record_every=GRADIENTS, certify=False
            )
        except mf.DivergenceError:
            return Result(np.inf, 0.0)
    measure: Any = solution.measure
    found = measure.particles if hasattr(measure, "particles") else measure.sample(draw_key, particles)
    seconds = time.perf_counter() - began
    return Result(error(np.asarray(found, np.float64).reshape(particles, -1), case.exact), seconds)


def mean_error(case: Case, flow: mf.AbstractFlow, particles: int, seeds: range) -> Result:
    """Over some seeds; the seconds of the quickest, which compiled nothing."""
    runs = [run(case, flow, particles, seed) for seed in seeds]
    return Result(float(np.mean([one.error for one in runs])), min(one.seconds for one in runs))


def best_step_size(case: Case, make: Callable[[Any], mf.AbstractFlow]) -> float:
    """By the error, with other seeds than those that are shown."""
    errors = [mean_error(case, make(eta), PARTICLES, TUNED).error for eta in STEP_SIZES]
    return float(STEP_SIZES[int(np.argmin(errors))])


def sampled(case: Case) -> str:
    """`mf.sample`, where there is a density to accept by."""
    energy = case.problem.free_energy()
    if energy.interaction is not None or energy.rest is not None:
        return "—"
    start_key, run_key = jax.random.split(jax.random.key(SHOWN[0]))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        draws = mf.sample(case.problem, case.start(start_key, PARTICLES), run_key)
    found = np.asarray(jax.tree.leaves(draws.draws)[0], np.float64)
    last = found[:, -1].reshape(PARTICLES, -1)
    return f"{error(last, case.exact):.2f} ({draws.gradients:,}{', warned' if told else ''})"


def chance(case: Case, particles: int) -> float:
    """The error of as many exact draws, mean over a hundred sets of them."""
    rng = np.random.default_rng(1)
    sets = [case.exact[rng.choice(EXACT, particles, replace=False)] for _ in range(100)]
    return float(np.mean([error(one, case.exact) for one in sets]))


def table(header: list[str], rows: list[list[str]]) -> str:
    """In Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Run all, and write the page."""
    cases = {name: make() for name, make in CASES.items()}
    step_sizes, rows = {}, []
    for name, make in FLOWS.items():
        cells = [name]
        for of_case, case in cases.items():
            step_sizes[name, of_case] = best_step_size(case, make)
            found = mean_error(case, make(step_sizes[name, of_case]), PARTICLES, SHOWN)
            cells.append(f"{found.error:.2f} ({found.seconds:.2f} s)")
        rows.append(cells)
        print(*cells, sep=" | ", flush=True)
    rows.append(["`mf.sample`, the last draws (gradients)", *(sampled(case) for case in cases.values())])
    rows.append(["*exact draws*", *(f"*{chance(case, PARTICLES):.2f}*" for case in cases.values())])
    parts = [INTRODUCTION, f"## {PARTICLES} particles, {GRADIENTS:,} gradients", table(["", *cases], rows)]
    few = [
        "noise, Leimkuhler–Matthews",
        "Stein, squared exponential",
        "Stein, inverse multiquadric",
        "kernel density",
    ]
    for of_case in ("two basins", "correlated, 20-D"):
        case = cases[of_case]
        rows = [
            [
                name,
                *(
                    f"{mean_error(case, FLOWS[name](step_sizes[name, of_case]), n, SHOWN).error:.2f}"
                    for n in NUMBERS
                ),
            ]
            for name in few
        ]
        rows.append(["*exact draws*", *(f"*{chance(case, n):.2f}*" for n in NUMBERS)])
        parts += [f"## How many particles: {of_case}", table(["", *map(str, NUMBERS)], rows)]
    before = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    # What is written by hand comes last, and stays.
    _, mark, by_hand = before.partition("## What to take from it")
    parts.append(mark + by_hand if mark else "## What to take from it\n")
    PAGE.write_text("\n\n".join(part.rstrip("\n") for part in parts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
