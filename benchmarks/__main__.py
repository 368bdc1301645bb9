"""`make bench`: all benchmarks, in minutes on two cores.

    python -m benchmarks [--only imports fits overhead residual pairs peers growth] [--quick] [--out FOLDER]

Prints tables, and writes results.json, tables.md and figures. `python -m benchmarks.page FOLDER` makes a page
of the documentation of them. `--quick` takes tiny sizes, to see that all of it runs; its numbers say nothing.
"""

import argparse
import json
import os
import time
from pathlib import Path

# Libraries that see a GPU otherwise take all of its memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

from tqdm import tqdm

from benchmarks import figures, fits, growth, imports, overhead, pairs, peers, residual, tables
from benchmarks.machine import machine

PARTS = {
    "imports": imports,
    "fits": fits,
    "overhead": overhead,
    "residual": residual,
    "pairs": pairs,
    "peers": peers,
    "growth": growth,
}


def measure(parts: list[str], *, quick: bool, out: Path) -> dict:
    """All results, by part, with the machine they were found on; what there is so far is written to `out`."""
    out.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    found: dict = {"machine": machine(), "quick": quick}
    jobs = [(part, job) for part in parts for job in PARTS[part].jobs(quick=quick)]
    with tqdm(total=sum(job.ticks for _, job in jobs), unit="round") as bar:
        for part, job in jobs:
            bar.set_description(job.name)
            found.setdefault(part, []).append(job.run(bar.update))
            _write(found | {"seconds": time.perf_counter() - began}, out)
        bar.set_description("benchmarks")
    return found | {"seconds": time.perf_counter() - began}


def _write(results: dict, out: Path) -> None:
    (out / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), help="parts to run")
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    parser.add_argument("--out", type=Path, default=Path("build/bench"), help="where to write")
    asked = parser.parse_args()
    results = measure(asked.only, quick=asked.quick, out=asked.out)
    _write(results, asked.out)
    text = tables.all_tables(results)
    (asked.out / "tables.md").write_text(text, encoding="utf-8")
    figures.draw_all(results, asked.out)
    print(text)
    print(f"Written to {asked.out}.")


if __name__ == "__main__":
    main()
