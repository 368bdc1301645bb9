"""How long a fit takes, by rows and columns; writes docs/timing.md.

python -m verification.fit_times [--rows 300 1000] [--columns 5 20] [--skip default] [--machine WORDS]

Every fit is in a process of its own, so that compiling counts. Results are kept in the file `--out`, and what
is there is not measured again: to begin afresh, delete it. A fit that takes longer than `--limit` seconds by
the clock is ended, and shown as "> limit".
"""

import argparse
import json
import multiprocessing
import platform
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent.parent / "docs" / "timing.md"
GIVEN: dict[str, Any] = {"hidden": (50,), "encoding": 0, "prior_weight": 1.0}
KINDS = {
    "regression, default": ("EnsembleRegressor", {}),
    "regression, given": ("EnsembleRegressor", GIVEN | {"likelihood": "heteroscedastic"}),
    "classes, default": ("EnsembleClassifier", {}),
    "classes, given": ("EnsembleClassifier", GIVEN),
}

INTRODUCTION = """\
# How long a fit takes

Processor seconds of one call of `fit`, compiling included, on {machine}, by
`python -m verification.fit_times`. They hardly depend on what else the machine does; by the clock, an idle
machine with two cores takes between half of them and all of them. The inputs are standard normal, and the
target is $\\sin(2x_1) + x_2 x_3 + \\tfrac12 \\varepsilon$, or its sign for classes.

*Default* is `mf.EnsembleRegressor()` or `mf.EnsembleClassifier()`: held-out rows choose how networks are
trained, and the spread, and choosing is half of the work. *Given* is one layer of 50 units, no bins, prior
weight 1 and a Normal likelihood, with the default number of steps: nothing is held out, nothing is chosen.
"""
REMEDIES = """
## To be quicker

- **Give what you know**: `hidden=`, `encoding=`, `likelihood=` and `prior_weight=`. Each that is given is one
  less to choose.
- **Take fewer `steps`.** Too few, and intervals are far too wide; `fit` then warns that it has not converged.
- **Limit the time**: on the command line, `--time 60` takes as many steps as there is time for, and says what
  it left out.
- **Let splits share a program**: `mf.cross_validate` trains all folds side by side.
- **A second fit of the same shape compiles nothing**, and one of about as many rows has the same shape: there
  are eight sizes between a power of two and the next. Another number of columns or particles is another
  program.
- **Use a GPU for many or wide networks**; small ones leave it waiting ([speed and scale](scaling.md)).

How long the commands take on real tables: [the command line](command-line.md#how-long-it-takes). What a
single step costs: [benchmarks](benchmarks.md).
"""


def main() -> None:
    """Measure what is asked for, and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[300, 1000])
    parser.add_argument("--columns", type=int, nargs="+", default=[5, 20])
    parser.add_argument("--skip", choices=["default", "given"], help="leave these fits out")
    parser.add_argument(
        "--limit", type=float, default=900.0, help="seconds by the clock after which a fit is ended"
    )
    parser.add_argument("--machine", default=f"{platform.machine()}, CPU only", help="words for the page")
    parser.add_argument("--out", type=Path, default=Path("build/fit-times.json"))
    asked = parser.parse_args()
    found = json.loads(asked.out.read_text(encoding="utf-8")) if asked.out.exists() else {}
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    for rows in asked.rows:
        for columns in asked.columns:
            for kind in KINDS:
                name = f"{kind}; {rows}; {columns}"
                if name in found or (asked.skip and kind.endswith(asked.skip)):
                    continue
                found[name] = measured(kind, rows, columns, asked.limit)
                print(f"{name}: {found[name]} s", flush=True)
                asked.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(found, asked.machine), encoding="utf-8")


def measured(kind: str, rows: int, columns: int, limit: float) -> float | str:
    """Processor seconds of a fit in a fresh process, all of its threads together."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=fit, args=(there, kind, rows, columns))
    process.start()
    there.close()
    found = round(here.recv(), 1) if here.poll(limit) else f"> {limit:.0f}"
    # One that is done goes by itself, and tidies up.
    process.join(0 if isinstance(found, str) else 60)
    process.kill()
    process.join()
    return found


def fit(connection: Connection, kind: str, rows: int, columns: int) -> None:
    """Fit once, and send the processor seconds that it took."""
    import numpy as np

    import measureflow as mf

    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(rows, columns))
    y = np.sin(2 * inputs[:, 0]) + inputs[:, 1] * inputs[:, 2] + 0.5 * rng.normal(size=rows)
    name, settings = KINDS[kind]
    estimator = getattr(mf, name)(**settings, random_state=0)
    began = time.process_time()
    estimator.fit(inputs, y if "Regressor" in name else y > 0)
    connection.send(time.process_time() - began)


def page(found: dict[str, float | str], machine: str) -> str:
    """The page: a row for each size, a column for each kind of fit."""
    sizes = sorted({(int(rows), int(columns)) for _, rows, columns in (name.split("; ") for name in found)})
    lines = ["| rows | columns | " + " | ".join(KINDS) + " |", "|---|---|" + "---|" * len(KINDS)]
    for rows, columns in sizes:
        cells = [_shown(found.get(f"{kind}; {rows}; {columns}")) for kind in KINDS]
        lines.append(f"| {rows:,} | {columns} | " + " | ".join(cells) + " |")
    return "\n".join([INTRODUCTION.format(machine=machine), *lines, REMEDIES])


def _shown(seconds: float | str | None) -> str:
    if seconds is None:
        return "—"
    return seconds if isinstance(seconds, str) else f"{seconds:.0f}"


if __name__ == "__main__":
    main()
