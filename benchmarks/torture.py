"""Kill a checkpointed run again and again, and see what is left of it.

A DRLE on a small network, with shuffled batches, runs in a process of its own. SIGKILL comes at a random
moment: one time in ten while the process starts, else after it has made some progress. The same call resumes
it, until it is finished; then comes the next run, until all kills are spent. Counted are the checkpoints that
cannot be read (none may be), the steps lost at a kill, in units of `every` (at most two: one being written
while the next steps are computed), and whether particles, optimiser state and history at the end are those,
to the bit, of a run that nobody disturbed.

    python benchmarks/torture.py [--kills 100] [--minutes 25] [--seed 0] [--out FILE]
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

STEPS, EVERY, PARTICLES, CASES, BATCH = 20_000, 250, 5, 200, 20
# Seconds. Until it can be interrupted, a process imports, reads a checkpoint and compiles.
LONGEST_PROGRESS, LONGEST_START = 1.0, 4.0


def child(folder, seed, steps, result):
    """The run: as a user would write it, but that it says which steps it has reached."""
    import jax
    import jax.numpy as jnp

    import measureflow as mf

    def say(step, record, state):
        print(step, flush=True)

    data_key, start_key, run_key = jax.random.split(jax.random.key(seed), 3)
    x = jax.random.normal(data_key, (CASES, 8))
    y = jnp.sin(x[:, 0]) + x[:, 1]
    shapes = {"w": jnp.zeros((8, 20)), "b": jnp.zeros(20), "v": jnp.zeros(20), "c": jnp.zeros(())}
    prior = mf.Gaussian(shapes, 0.5)
    problem = mf.deep_repulsive_langevin_ensemble(
        squared_error, prior, mf.SquaredExponential(5.0), mmd=0.1, kl=1e-3
    )
    flow = mf.WassersteinFlow(1e-3, preconditioner=mf.RMSPreconditioner(adapt_steps=steps // 2), momentum=0.9)
    solution = mf.solve(
        problem,
        flow,
        prior.sample(start_key, PARTICLES),
        steps,
        run_key,
        data=(x, y),
        batch_size=BATCH,
        checkpoint=mf.Checkpoint(folder, every=EVERY) if folder else None,
        callback=say,
    )
    leaves = {f"state_{i}": leaf for i, leaf in enumerate(jax.tree.leaves(solution.state))}
    np.savez(result, **leaves, **solution.history)


def squared_error(theta, batch):
    import jax.numpy as jnp

    x, y = batch
    prediction = jnp.tanh(x @ theta["w"] + theta["b"][None, :]) @ theta["v"] + theta["c"]
    return jnp.mean((prediction - y) ** 2)


class Attempt(NamedTuple):
    """One process: the step it started at, the last one it reached, whether it was killed, what it said."""

    started: int | None
    reached: int | None
    killed: bool
    said: str


def begin(cache, folder, seed, steps, result):
    options = {
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    command = [sys.executable, __file__, "--child", json.dumps([str(folder or ""), seed, steps, str(result)])]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | options
    )


def attempt(process, dice):
    """Let a process run, and kill it at a random moment if there are `dice`."""
    timer = None
    if dice and dice.random() < 0.1:
        timer = threading.Timer(dice.uniform(0.0, LONGEST_START), process.kill)
        timer.start()
    steps, said = [], ""
    with process:
        for line in process.stdout:
            if not line.strip().isdigit():
                said += line
                continue
            steps.append(int(line))
            if len(steps) == 2 and dice and timer is None:
                timer = threading.Timer(dice.uniform(0.0, LONGEST_PROGRESS), process.kill)
                timer.start()
    code = process.returncode
    if timer is not None:
        timer.cancel()
    if code not in (0, -9):
        raise RuntimeError(f"a run failed with exit code {code}:\n{said}")
    return Attempt(steps[0] if steps else None, steps[-1] if steps else None, code == -9, said)


def unreadable(folder):
    """How many of the checkpoints that stand in a folder are not what was written."""
    import measureflow as mf

    count = len(list(folder.glob("*.unreadable")))
    for path in folder.glob("*.safetensors"):
        try:
            saved = mf.load(path)
            count += set(saved) != {"state", "history", "notes"} or int(path.name.split("-")[0]) % EVERY != 0
        except Exception as error:
            print(f"{path}: {error}")
            count += 1
    return count


def same(first, second):
    """Whether two results are equal to the bit."""
    with np.load(first) as a, np.load(second) as b:
        return set(a) == set(b) and all(a[name].tobytes() == b[name].tobytes() for name in a)


def one_run(work, seed, steps, kills, dice):
    """Kill a run until `kills` are spent or it is finished."""
    folder, ours, theirs = (work / f"{seed}{name}" for name in ("", "-killed.npz", "-undisturbed.npz"))
    undisturbed = begin(work / "cache", None, seed, steps, theirs)
    attempts, lost, bad = [], [], 0
    while not attempts or attempts[-1].killed:
        may_kill = sum(made.killed for made in attempts) < kills
        made = attempt(begin(work / "cache", folder, seed, steps, ours), dice if may_kill else None)
        before = [earlier for earlier in attempts if earlier.reached is not None]
        if before and made.started is not None:
            lost.append((before[-1].reached - made.started) / EVERY)
        attempts.append(made)
        bad += unreadable(folder) if folder.exists() else 0
    attempt(undisturbed, None)
    return {
        "run": seed,
        "kills": sum(made.killed for made in attempts),
        "while starting": sum(made.killed and made.reached is None for made in attempts),
        "unreadable": bad,
        "most lost": max(lost, default=0.0),
        "mean lost": float(np.mean(lost)) if lost else 0.0,
        "identical": same(ours, theirs),
    }


def torture(kills, minutes, seed, steps=STEPS):
    """Run after run, until all kills or the time are spent."""
    dice, began, runs = random.Random(seed), time.monotonic(), []
    with tempfile.TemporaryDirectory() as work:
        while (left := kills - sum(run["kills"] for run in runs)) > 0:
            if time.monotonic() - began > 60 * minutes:
                break
            runs.append(one_run(Path(work), seed + len(runs), steps, left, dice))
            print_row(runs[-1], header=len(runs) == 1)
    return runs


def print_row(run, header):
    if header:
        print(f"a checkpoint every {EVERY} steps; lost steps in units of {EVERY}")
        print("  ".join(f"{name:>14}" for name in run), flush=True)
    shown = (f"{value:.2f}" if isinstance(value, float) else str(value) for value in run.values())
    print("  ".join(f"{value:>14}" for value in shown), flush=True)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=25.0, help="begin no run after this time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS, help="of each run")
    parser.add_argument("--out", type=Path, help="write the numbers to this JSON file")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.child:
        child(*chosen.child)
        return 0
    runs = torture(chosen.kills, chosen.minutes, chosen.seed, chosen.steps)
    most = max(run["most lost"] for run in runs)
    bad, equal = sum(run["unreadable"] for run in runs), sum(run["identical"] for run in runs)
    print(f"kills {sum(run['kills'] for run in runs)}, unreadable checkpoints {bad} (none may be)")
    print(f"most steps lost {most:.2f} × every (at most 2)")
    print(f"runs identical to an undisturbed one {equal} of {len(runs)}")
    if chosen.out:
        chosen.out.write_text(json.dumps(runs, indent=2) + "\n")
    return 0 if bad == 0 and most <= 2 and equal == len(runs) else 1


if __name__ == "__main__":
    sys.exit(main())
