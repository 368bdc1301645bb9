"""What `import measureflow` takes, in fresh processes, beside `import jax`."""

import subprocess
import sys
from typing import Any

from benchmarks.timing import Contender, Job, Ratio, comparison

JAX, OURS, USED = "import jax", "import measureflow", "measureflow, to the first call"
PROGRAMS = {
    JAX: "import jax",
    OURS: "import measureflow",
    # What a user of `solve` asks for.
    USED: "from measureflow import KL, Gaussian, Problem, WassersteinFlow, solve",
}


def jobs(*, quick: bool = False) -> list[Job]:
    """The parts of this benchmark; `quick` only shows that they run."""
    rounds = 1 if quick else 7
    return [Job("imports", rounds + 1, lambda tick: _imports(rounds, tick))]


def _imports(rounds: int, tick) -> dict[str, Any]:
    contenders = {name: Contender(lambda code=code: _run(code)) for name, code in PROGRAMS.items()}
    wanted = [Ratio(OURS, JAX, at_most=0.5), Ratio(USED, JAX, at_most=3.0)]
    return comparison("a fresh process", contenders, wanted, rounds, tick, unit="import")


def _run(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True)
