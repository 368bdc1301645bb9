"""docs/which-flow.md, from what `verification.which_flow` measured."""

from typing import Any

import numpy as np

Records = dict[str, dict[str, Any]]
#: The record of what none can do.
MODES = "modes far apart"
NETWORK = "small Bayesian network"
SQUARED, MULTIQUADRIC = "Stein, squared exponential", "Stein, inverse multiquadric"

INTRODUCTION = """\
# Which flow?

One problem, every flow: what `python -m verification.which_flow` found. The error is the Wasserstein-1
distance between the particles and exact draws, by coordinate, in standard deviations, mean over coordinates.
A row of exact draws, as many as there are particles, says what chance alone makes of that: whoever is below
spreads particles more evenly than chance. The weights of the Bayesian network, 1-10-1 with 24 rows, are
symmetric, so that its coordinates are what it says, f(x) at 16 inputs; its exact draws are 20,000 of a long
run of NUTS, which the same command makes.

Every flow takes {gradients:,} gradients of every particle, from the same start, and has the best of eleven
step sizes, each twice the one before, found with {tuned} other seeds. So the numbers, means over {shown}
seeds, are of what a flow can do, and not of how easy it is to tune. The Gaussian has 20 draws a step.
`mf.sample` is tuned by nobody, and spends as many gradients as it takes, which are shown; its error is that
of one seed. Seconds are processor seconds of one run, after compiling.
"""


def page(
    records: Records, before: str, particles: int, gradients: int, numbers: tuple[int, ...], *seeds: int
) -> str:
    """The whole page; what is written by hand comes last, and stays."""
    cases = {name: record for name, record in records.items() if name != MODES}
    tuned, shown = seeds
    _, mark, by_hand = before.partition("## What to take from it")
    parts = [
        INTRODUCTION.format(gradients=gradients, tuned=tuned, shown=shown),
        f"## {particles} particles, {gradients:,} gradients",
        _errors(cases, particles),
        "## What they are worth",
        f"{particles} particles have the error of so many exact draws: {particles} times the square of the "
        "error of as many exact draws over theirs.",
        _worth(cases, particles),
        "## Which kernel",
        _kernels(cases),
        *_by_number(cases, numbers),
        "## A Bayesian network: means and deviations",
        "How far the mean of f(x) is off, in its deviations, and the deviation over the right one, root mean "
        f"square over inputs and seeds. {particles} exact draws are off by {particles**-0.5:.2f} and 1.00.",
        _moments(cases[NETWORK]),
        "## What none of them can do",
        "Two modes ten deviations apart, of masses 0.80 and 0.20, and a start with half of the particles "
        "in each. The mass that the first mode has at the end, with a step size of 1/64:",
        _table(["", "mass, of 0.80"], [[flow, f"{mass:.2f}"] for flow, mass in records[MODES].items()]),
        mark + by_hand if mark else "## What to take from it\n",
    ]
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def _table(header: list[str], rows: list[list[str]]) -> str:
    """In Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _flows(cases: Records) -> list[str]:
    return list(next(iter(cases.values()))["flows"])


def _error(record: dict[str, Any], flow: str) -> float:
    return float(np.mean(record["flows"][flow]["errors"]))


def _errors(cases: Records, particles: int) -> str:
    rows = []
    for flow in _flows(cases):
        cells = [f"{_error(one, flow):.2f} ({one['flows'][flow]['seconds']:.2f} s)" for one in cases.values()]
        rows.append([flow, *cells])
    sampled = []
    for record in cases.values():
        found = record["sample"]
        warned = ", warned" if found and found["warned"] else ""
        sampled.append(f"{found['error']:.2f} ({found['gradients']:,}{warned})" if found else "—")
    rows.append(["`mf.sample`, the last draws (gradients)", *sampled])
    draws = (f"*{record['exact draws'][str(particles)]:.2f}*" for record in cases.values())
    return _table(["", *cases], [*rows, ["*exact draws*", *draws]])


def _worth(cases: Records, particles: int) -> str:
    rows = []
    for flow in _flows(cases):
        cells = []
        for record in cases.values():
            draws = particles * (record["exact draws"][str(particles)] / _error(record, flow)) ** 2
            cells.append(f"{draws:,.0f}" if draws >= 1 else f"{draws:.1f}")
        rows.append([flow, *cells])
    return _table(["", *cases], rows)


def _kernels(cases: Records) -> str:
    """Judged by errors, paired by seed."""
    rows, better = [], {SQUARED: [], MULTIQUADRIC: []}
    for name, record in cases.items():
        errors = [np.array(record["flows"][flow]["errors"]) for flow in (MULTIQUADRIC, SQUARED)]
        difference = errors[0] - errors[1]
        mean, error = difference.mean(), difference.std(ddof=1) / len(difference) ** 0.5
        verdict = "neither"
        if abs(mean) > 2 * error:
            verdict = MULTIQUADRIC if mean < 0 else SQUARED
            better[verdict].append(name)
        shown = f"{mean:+.3f} ± {error:.3f}"
        rows.append(
            [name, f"{errors[0].mean():.3f}", f"{errors[1].mean():.3f}", shown, verdict.split(", ")[-1]]
        )
    told = "; ".join(
        f"the {flow.split(', ')[1]} on {len(names)} of {len(cases)}"
        + (f" ({', '.join(names)})" if names else "")
        for flow, names in better.items()
    )
    header = ["", "inverse multiquadric", "squared exponential", "difference", "better"]
    return (
        "Stein's flow with two kernels, both with `MedianBandwidth`: differences of errors, paired by seed, "
        f"mean ± standard error. Better by more than two of these is {told}.\n\n{_table(header, rows)}"
    )


def _by_number(cases: Records, numbers: tuple[int, ...]) -> list[str]:
    parts = []
    for name, record in cases.items():
        counted = {flow: one["numbers"] for flow, one in record["flows"].items() if "numbers" in one}
        if counted:
            rows = [
                [flow, *(f"{error:.2f}" if np.isfinite(error) else "diverged" for error in errors)]
                for flow, errors in counted.items()
            ]
            rows.append(["*exact draws*", *(f"*{record['exact draws'][str(n)]:.2f}*" for n in numbers)])
            told = "Every flow has the step size that was best for 100."
            parts += [f"## How many particles: {name}", told, _table(["", *map(str, numbers)], rows)]
    return parts


def _moments(record: dict[str, Any]) -> str:
    rows = [
        [flow, f"{one['means']:.2f}", f"{one['deviations']:.2f}"] for flow, one in record["flows"].items()
    ]
    return _table(["", "mean off by", "deviation over the right one"], rows)
