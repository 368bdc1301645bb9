"""`make verify`: the long statistical runs.

Prints what it finds and writes docs/verification.md; exits 1 if a law does not hold or a wrong flow passes.
"""

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import measureflow as mf
from measureflow.study.provenance import provenance
from verification.laws import PRIOR, dle, drle, exact, mutant, snapshot, time_average

PAGE = Path(__file__).parent.parent / "docs" / "verification.md"

INTRODUCTION = """\
# Verification

What `make verify` found: the flow's law against exact minimisers, and the same tests on flows that are
wrong on purpose. A test that a wrong flow passes would prove nothing, so both are shown. The problem is the
paper's one-dimensional one (quartic loss, P = Q₀ = N(0, 1), KL weight 1, MMD² weight ½, squared exponential
kernel with σ = 0.7). `make test` runs shorter forms of the same.
"""

Row = list[str]


def snapshots() -> Iterator[tuple[Row, bool]]:
    """Wasserstein-1 distances at T = 12 with 5,000 particles."""
    cases = [("DLE", dle, {}), *[("DLE", dle, {"noise": f}) for f in (0.8, 1.25)]]
    cases += [("DRLE", drle, {}), *[("DRLE", drle, {"noise": f}) for f in (0.8, 1.25)]]
    cases += [("DRLE", drle, {"interaction": f}) for f in (0.5, 2.0)]
    for name, statement, mistake in cases:
        problem = mutant(statement(), **mistake) if mistake else statement()
        found = snapshot(problem, exact(statement()), 5_000, seed=11, eta=0.01)
        row = [name, _mistake(mistake), f"{found.distance:.4f}", f"{found.allowed:.4f}"]
        yield [*row, _verdict(found.holds, bool(mistake))], found.holds == (not mistake)


def time_averages() -> Iterator[tuple[Row, bool]]:
    """Stationary averages over T = 1,600 with 300 particles, η = 0.002."""
    cases = [
        ("DLE", dle(), dle(), {}),
        ("DRLE", drle(), drle(), {}),
        ("DRLE", mutant(drle(), noise=1.1), drle(), {"noise": 1.1}),
        ("DRLE", drle(kl=1.1), drle(), {"KL weight": 1.1}),
        ("DRLE", drle(mmd=0.55), drle(), {"MMD² weight": 1.1}),
    ]
    for name, problem, stated, mistake in cases:
        found = time_average(problem, seed=12, time=1_600, eta=2e-3)
        off, law = found.deviations(exact(stated)), exact(stated)
        row = [name, _mistake(mistake)]
        row += [f"{m:.4f} ± {e:.4f} ({d:+.1f})" for m, e, d in zip(found.mean, found.error, off, strict=True)]
        yield [*row, _verdict(found.holds(law), bool(mistake))], found.holds(law) == (not mistake)


def biases() -> Iterator[tuple[Row, bool]]:
    """Started at the exact DRLE minimiser: what finite η and N leave of it."""
    law = exact(drle())
    u = (np.arange(100_000) + 0.5) / 100_000
    expected = law.quantile(u).mean()
    for n, eta, horizon in [
        (300, 0.08, 4_000),
        (300, 0.04, 4_000),
        (300, 0.02, 4_000),
        (300, 0.01, 2_000),
        (4, 0.005, 20_000),
        (8, 0.005, 20_000),
        (16, 0.005, 10_000),
    ]:
        start = jnp.asarray(law.sample(np.random.default_rng(13), (n, 1)), jnp.float32)
        found = time_average(drle(), seed=13, time=horizon, n=n, eta=eta, start=start)
        bias, error = found.mean[0] - expected, found.error[0]
        row = [str(n), f"{eta:g}", f"{bias:+.4f} ± {error:.4f}"]
        per_eta = [f"{bias / eta:+.2f} ± {error / eta:.2f}", ""]
        row += per_eta if n == 300 else ["", f"{bias * n:+.2f} ± {error * n:.2f}"]
        yield row, True


def stationarity() -> Iterator[tuple[Row, bool]]:
    """The kernel Stein discrepancy of 1,000 particles along the flow."""
    for name, problem in (("DLE", dle()), ("DRLE", drle())):
        law, rng = exact(problem), np.random.default_rng(14)
        draws = [
            float(problem.stationarity(jnp.asarray(law.sample(rng, (1_000, 1)), jnp.float32)))
            for _ in range(50)
        ]
        limit = np.mean(draws) + 4 * np.std(draws, ddof=1)
        flow, key = mf.WassersteinFlow(5e-3, integrator=mf.EulerMaruyama()), jax.random.key(15)
        state = flow.init(problem, PRIOR.sample(jax.random.key(16), 1_000))
        seen = []
        for steps in (0, 40, 160, 400, 1_800):
            state = mf.solve(problem, flow, state, steps, key, record_every=10_000).state
            seen.append(float(problem.stationarity(state.particles)))
        row = [name, *[f"{value:.3f}" for value in seen], f"{np.mean(draws):.3f}", f"{limit:.3f}"]
        yield row, seen[-1] <= limit < seen[2]


SECTIONS: list[tuple[str, str, Row, Callable[[], Iterator[tuple[Row, bool]]]]] = [
    (
        "One snapshot",
        "W₁ between 5,000 particles at T = 12 (η = 0.01) and the exact minimiser, against mean + 4 sd of "
        "the distance of 5,000 independent draws.",
        ["method", "mistake", "W₁", "allowed", "verdict"],
        snapshots,
    ),
    (
        "Time averages",
        "Stationary averages of 300 particles over T = 1,600 (η = 0.002), standard error by 30 batch means; "
        "in brackets the distance from the exact minimiser in standard errors, of which 4 are allowed.",
        ["method", "mistake", "mean of θ", "mass of θ < 0", "verdict"],
        time_averages,
    ),
    (
        "What finite step size and ensemble leave",
        "DRLE started from draws of the exact minimiser: the bias of the mean of θ, which is O(η) + O(1/N).",
        ["N", "η", "bias", "bias / η", "bias · N"],
        biases,
    ),
    (
        "Stationarity without a grid",
        "`problem.stationarity` of 1,000 particles at T = 0, 0.2, 1, 3 and 12, next to its mean for "
        "independent draws from the exact minimiser and that mean + 4 sd.",
        ["method", "T = 0", "0.2", "1", "3", "12", "exact draws", "allowed"],
        stationarity,
    ),
]


def _mistake(factors: dict[str, float]) -> str:
    return ", ".join(f"{name} × {factor:g}" for name, factor in factors.items()) or "none"


def _verdict(holds: bool, wrong: bool) -> str:
    return {(True, False): "holds", (False, True): "caught"}.get((holds, wrong), "**WRONG**")


def main() -> int:
    """Run every section; the number of failures is the exit code's business."""
    page, failures = [INTRODUCTION], 0
    for title, text, header, section in SECTIONS:
        began = time.perf_counter()
        lines = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
        for row, fine in tqdm(section(), desc=title, unit="row"):
            failures += not fine
            lines.append(f"| {' | '.join(row)} |")
        seconds = time.perf_counter() - began
        block = "\n".join(lines)
        print(f"\n{title}\n{block}\n", flush=True)
        page.append(f"## {title}\n\n{text}\n\n{block}\n\n*{seconds:.0f} s.*\n")
    origin = provenance(0, {})
    page.append(
        f"Made by `make verify` with measureflow {origin['measureflow']}, JAX {origin['jax']}, "
        f"Python {origin['python']} on {origin['device']}.\n"
    )
    PAGE.write_text("\n".join(page), encoding="utf-8")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
