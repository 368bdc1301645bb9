"""Every flow on the same problems, each of which has an exact answer.

`python -m verification.which_flow` writes docs/which-flow.md: the error of every flow after as many
gradients, and how the errors fall with the number of particles. What was measured of a problem lies in
build/which-flow, and is not measured again.
"""

import argparse
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import scipy.stats

import measureflow as mf
from verification.flow_problems import CASES, Case, two_modes
from verification.which_flow_page import MODES, page

PAGE = Path(__file__).parent.parent / "docs" / "which-flow.md"
PARTICLES, GRADIENTS = 100, 1_000
NUMBERS = (10, 30, 100, 300)
# Powers of two, in units of the problem; each flow has the best of them, found with other seeds than those
# that are shown.
STEP_SIZES = 2.0 ** np.arange(-9, 2)
TUNED, SHOWN = range(2), range(10, 16)
# Those of which errors are measured for other numbers of particles, and where.
FEW = (
    "noise, Leimkuhler–Matthews",
    "Stein, squared exponential",
    "Stein, inverse multiquadric",
    "kernel density",
)
COUNTED = ("two basins", "correlated, 20-D", "small Bayesian network")


class Result(NamedTuple):
    """The error, the processor seconds of a run that had been compiled before, and what was found."""

    error: float
    seconds: float
    found: np.ndarray | None = None


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
    "Gaussian, Bures–Wasserstein": lambda eta: mf.BuresWassersteinFlow(eta, samples=20),
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
    began = time.process_time()
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
    seconds = time.process_time() - began
    seen = case.view(np.asarray(found, np.float64).reshape(particles, -1))
    return Result(error(seen, case.exact), seconds, seen)


def mean_error(case: Case, flow: mf.AbstractFlow, particles: int, seeds: range) -> float:
    """Over some seeds."""
    return float(np.mean([run(case, flow, particles, seed).error for seed in seeds]))


def best_step_size(case: Case, make: Callable[[Any], mf.AbstractFlow]) -> float:
    """By the error, with other seeds than those that are shown."""
    step_sizes = case.unit * STEP_SIZES
    errors = [mean_error(case, make(eta), PARTICLES, TUNED) for eta in step_sizes]
    return float(step_sizes[int(np.argmin(errors))])


def measured(case: Case, make: Callable[[Any], mf.AbstractFlow], counted: bool) -> dict[str, Any]:
    """Of one flow: errors by seed; seconds of the quickest, which compiled nothing; how far means are off, in
    deviations, and what part of the deviation they have, root mean square over coordinates and seeds."""
    step_size = best_step_size(case, make)
    runs = [run(case, make(step_size), PARTICLES, seed) for seed in SHOWN]
    found = np.array([one.found for one in runs if one.found is not None])
    mean, deviation = case.exact.mean(axis=0), case.exact.std(axis=0)
    record = {
        "step_size": step_size,
        "errors": [one.error for one in runs],
        "seconds": min(one.seconds for one in runs),
        "means": float(np.sqrt(np.mean(((found.mean(axis=1) - mean) / deviation) ** 2))),
        "deviations": float(np.sqrt(np.mean((found.std(axis=1) / deviation) ** 2))),
    }
    if counted:
        record["numbers"] = [mean_error(case, make(step_size), number, SHOWN) for number in NUMBERS]
    return record


def sampled(case: Case) -> dict[str, Any] | None:
    """`mf.sample`, where there is a density to accept by."""
    energy = case.problem.free_energy()
    if energy.interaction is not None or energy.rest is not None:
        return None
    start_key, run_key = jax.random.split(jax.random.key(SHOWN[0]))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        draws = mf.sample(case.problem, case.start(start_key, PARTICLES), run_key)
    found = np.asarray(jax.tree.leaves(draws.draws)[0], np.float64)
    last = case.view(found[:, -1].reshape(PARTICLES, -1))
    return {"error": error(last, case.exact), "gradients": draws.gradients, "warned": bool(told)}


def chance(case: Case, particles: int) -> float:
    """The error of as many exact draws, mean over a hundred sets of them."""
    rng = np.random.default_rng(1)
    exact = case.exact
    sets = [exact[rng.choice(len(exact), particles, replace=False)] for _ in range(100)]
    return float(np.mean([error(one, exact) for one in sets]))


def of_case(name: str) -> dict[str, Any]:
    """All that is measured on one problem."""
    case = CASES[name]()
    flows = {flow: measured(case, make, name in COUNTED and flow in FEW) for flow, make in FLOWS.items()}
    draws = {str(number): chance(case, number) for number in NUMBERS}
    return {"flows": flows, "sample": sampled(case), "exact draws": draws}


def of_two_modes() -> dict[str, Any]:
    """What is left of a mass of 0.5 that should be 0.8: mean over seeds, with a step size of 1/64, which
    all can take."""
    case = two_modes()
    found = {}
    for flow, make in FLOWS.items():
        runs = [run(case, make(1 / 64), PARTICLES, seed).found for seed in SHOWN]
        found[flow] = float(np.mean([np.mean(one < 0) for one in runs if one is not None]))
    return found


def main() -> None:
    """Measure what has not been, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=PAGE.parent.parent / "build" / "which-flow")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    records = {}
    for name in (*CASES, MODES):
        path = out / f"{name}.json"
        if not path.exists():
            began = time.process_time()
            found = of_two_modes() if name == MODES else of_case(name)
            path.write_text(json.dumps(found, indent=1), encoding="utf-8")
            print(f"{name}: {time.process_time() - began:.0f} processor seconds", flush=True)
        records[name] = json.loads(path.read_text(encoding="utf-8"))
    before = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    settings = (PARTICLES, GRADIENTS, NUMBERS, len(TUNED), len(SHOWN))
    PAGE.write_text(page(records, before, *settings), encoding="utf-8")


if __name__ == "__main__":
    main()
