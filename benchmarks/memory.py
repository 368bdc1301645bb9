"""Memory of long runs: what a process holds after a tenth of the steps, and after all of them.

A million cheap steps with history and a progress bar; then fewer, with batches from an iterator, and with
checkpoints. Nothing but the history may grow, and that has about 1,000 records however long the run is.

    python benchmarks/memory.py [--steps 1000000] [--out FILE]
"""

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import measureflow as mf

# Megabytes. What the allocator keeps in reserve comes and goes.
AT_MOST = 20.0


def resident():
    """Megabytes of this process that lie in memory (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def loss(theta, batch=0.0):
    return jnp.sum((theta - jnp.mean(batch)) ** 2)


def measured(steps, **options):
    """(megabytes at a tenth, megabytes at the end, seconds, records) of a run."""
    seen = {}

    def watch(step, record, state):
        if step >= steps // 10:
            seen.setdefault("tenth", resident())

    prior = mf.Gaussian(jnp.zeros(2), 1.0)
    problem = mf.deep_langevin_ensemble(loss, prior, kl=0.1)
    began = time.perf_counter()
    solution = mf.solve(
        problem,
        mf.WassersteinFlow(1e-2),
        prior.sample(jax.random.key(0), 10),
        steps,
        jax.random.key(1),
        progress=True,
        callback=watch,
        **options,
    )
    return seen["tenth"], resident(), time.perf_counter() - began, len(solution.history.step)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path, help="write the numbers to this JSON file")
    chosen = parser.parse_args()
    batches = (np.full(4, k % 7, np.float32) for k in itertools.count())
    with tempfile.TemporaryDirectory() as folder:
        runs = {
            "no data": (chosen.steps, {}),
            "an iterator": (chosen.steps // 10, {"data": batches}),
            "checkpoints": (
                chosen.steps // 10,
                {"checkpoint": mf.Checkpoint(Path(folder) / "run", every=1000)},
            ),
        }
        found = {name: measured(steps, **options) for name, (steps, options) in runs.items()}
    row = "{:<12} {:>9} {:>8} {:>9} {:>9} {:>9} {:>9}"
    print(row.format("run", "steps", "records", "MB at 10%", "at 100%", "grown", "seconds"))
    for name, (tenth, end, seconds, records) in found.items():
        sizes = (f"{size:.1f}" for size in (tenth, end, end - tenth, seconds))
        print(row.format(name, runs[name][0], records, *sizes))
    grown = {name: end - tenth for name, (tenth, end, *_) in found.items()}
    print(f"most grown {max(grown.values()):.1f} MB (at most {AT_MOST:.0f})")
    if chosen.out:
        chosen.out.write_text(json.dumps(grown, indent=2) + "\n")
    return 0 if max(grown.values()) <= AT_MOST else 1


if __name__ == "__main__":
    sys.exit(main())
