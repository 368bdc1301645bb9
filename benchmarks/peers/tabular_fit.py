"""A whole tabular fit: `mf.EnsembleRegressor` against scikit-learn-contrib's bde (Microcanonical Langevin
Ensembles), https://scikit-learn-contrib.github.io/bde.

Diabetes, split once; networks of the same size, as many members. bde has the settings of its documentation's
regression example, and, as that says, one XLA device for each core. Three of ours: the defaults, which also
choose the prior's weight on held-out rows; bde's own statement, the Bayes posterior, in as many steps as it
makes in training, warming up and sampling; and the same with as many gradients of all rows as bde takes, of
which its sampler needs two a step, where ours makes do with one of a batch.

Each runs in a fresh process and fits twice, with two seeds: the first fit compiles, the second finds compiled
what can be reused. bde pins an old BlackJAX, so it has an environment of its own (`benchmarks.install`).
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.install import BDE_PYTHON
from benchmarks.timing import AbsentError, Job, Ratio, ratios

ROUNDS = 2
BDE, DEFAULTS = "bde", "EnsembleRegressor"
STEPS, GRADIENTS = "EnsembleRegressor, as many steps", "EnsembleRegressor, as many gradients"
FITS = ("first fit", "second fit")
HIDDEN, MEMBERS = (16, 16), 8
#: The regression example of bde's documentation.
DOCUMENTED = {
    "epochs": 200,
    "validation_split": 0.15,
    "lr": 1e-3,
    "weight_decay": 1e-4,
    "warmup_steps": 5000,
    "n_samples": 2000,
    "n_thinning": 2,
    "patience": 10,
}
SAMPLING = DOCUMENTED["warmup_steps"] + DOCUMENTED["n_samples"]
TRAINING_ROWS = 331
OURS = {"hidden": HIDDEN, "particles": MEMBERS}
BAYES = OURS | {"prior_weight": 1.0}
# Of each contender: who fits, and with which settings.
CONTENDERS = {
    BDE: ("bde", {"hidden_layers": HIDDEN, "n_members": MEMBERS} | DOCUMENTED),
    DEFAULTS: ("measureflow", OURS),
    STEPS: ("measureflow", BAYES | {"steps": DOCUMENTED["epochs"] + SAMPLING}),
    GRADIENTS: (
        "measureflow",
        BAYES | {"steps": DOCUMENTED["epochs"] + 2 * SAMPLING, "batch_size": TRAINING_ROWS},
    ),
}
WANTED = [Ratio(BDE, name, at_least=5.0) for name in (DEFAULTS, STEPS, GRADIENTS)]

# Of one contender: seconds and NLL of both its fits, in a fresh process.
Process = list[dict[str, float]]


def jobs(*, quick: bool = False) -> list[Job]:
    """One job: each contender fits twice. Processes have no short form."""
    if quick:
        return []
    return [
        Job("whole fit of diabetes", len(CONTENDERS) * ROUNDS, lambda tick: measured(process, ROUNDS, tick))
    ]


def measured(start: Callable[[str], Process], rounds: int, tick: Callable[[], None]) -> dict[str, Any]:
    """What is written of this comparison. `start(contender)` is one process."""
    found: dict[str, list[Process]] = {name: [] for name in CONTENDERS}
    left_out = {}
    for _ in range(rounds):
        for name, processes in found.items():
            if name not in left_out:
                try:
                    processes.append(start(name))
                except AbsentError as absent:
                    left_out[name] = str(absent)
            tick()
    found = {name: processes for name, processes in found.items() if name not in left_out}
    times = {}
    for index, which in enumerate(FITS):
        for name, processes in found.items():
            seconds = [process[index]["seconds"] for process in processes]
            times[f"{name}, {which}"] = {"median": statistics.median(seconds), "rounds": seconds}
    wanted = [
        ratio._replace(of=f"{ratio.of}, {which}", over=f"{ratio.over}, {which}")
        for which in FITS
        for ratio in WANTED
    ]
    hidden = "-".join(str(width) for width in HIDDEN)
    return {
        "title": f"diabetes, {MEMBERS} networks 10-{hidden}-2",
        "unit": "fit",
        "times": times,
        "ratios": ratios(times, wanted),
        "left_out": left_out,
        "nll": {
            name: statistics.mean(fit["nll"] for process in processes for fit in process)
            for name, processes in found.items()
        },
        "settings": {name: settings for name, (_, settings) in CONTENDERS.items()},
    }


def process(name: str) -> Process:
    """Both fits of a contender in a fresh process."""
    who, settings = CONTENDERS[name]
    environment = dict(os.environ)
    if who == "bde":
        if not BDE_PYTHON.exists():
            raise AbsentError("bde is not installed: `python -m benchmarks.install`")
        environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={os.cpu_count()}"
    python = str(BDE_PYTHON) if who == "bde" else sys.executable
    command = [python, "-P", str(Path(__file__).parent / "fit.py"), who, json.dumps(settings)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        if who != "bde":
            raise RuntimeError(f"{name} failed: {done.stderr}")
        raise AbsentError(f"bde failed: {(done.stderr.strip().splitlines() or ['no word'])[-1][:200]}")
    return json.loads(done.stdout.strip().splitlines()[-1])
