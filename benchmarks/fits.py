"""What a person waits for: default fits in fresh processes, imports and compiling included.

Diabetes against the commit before ensembles ran on all cores, in a process that compiles and in one that
finds compiled programs in the cache folder; and a wide table against NGBoost as its documentation has it.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.timing import AbsentError, Contender, Job, Ratio, comparison

ROOT = Path(__file__).parent.parent
BEFORE_COMMIT = "6965ac3d4d0e"
BEFORE, FIRST, SECOND = "the commit before, first process", "first process", "second process"
NGBOOST, OURS = "NGBoost", "EnsembleRegressor"
_DIABETES = """
from sklearn.datasets import load_diabetes
from measureflow import EnsembleRegressor
EnsembleRegressor(random_state=0).fit(*load_diabetes(return_X_y=True))
"""
_WIDE = """
import json, sys
from sklearn.datasets import make_friedman1
X, y = make_friedman1(4_000, 80, noise=1.0, random_state=0)
if sys.argv[1] == "NGBoost":
    from ngboost import NGBRegressor
    law = NGBRegressor(random_state=0, verbose=False).fit(X[:3_000], y[:3_000]).pred_dist(X[3_000:])
    nll = -law.logpdf(y[3_000:]).mean()
else:
    from measureflow import EnsembleRegressor
    law = EnsembleRegressor(random_state=0).fit(X[:3_000], y[:3_000]).predict_dist(X[3_000:])
    nll = -law.log_prob(y[3_000:]).mean()
print(json.dumps(float(nll)))
"""


def jobs(*, quick: bool = False) -> list[Job]:
    """The parts of this benchmark; processes have no short form."""
    if quick:
        return []
    return [
        Job("default fit of diabetes", 3, lambda tick: diabetes(2, tick)),
        Job("default fit of 3,000 rows, 80 columns", 2, lambda tick: wide(1, tick)),
    ]


def diabetes(rounds: int, tick: Callable[[], None]) -> dict[str, Any]:
    """Ours now and before, each in a process of its own."""
    wanted = [Ratio(FIRST, BEFORE, at_most=0.4), Ratio(SECOND, BEFORE, at_most=0.25)]
    with tempfile.TemporaryDirectory() as folder:
        contenders = {
            BEFORE: Contender(lambda: _before(Path(folder)), optional=True),
            FIRST: Contender(lambda: _fit(ROOT, tempfile.mkdtemp(dir=folder))),
            SECOND: Contender(lambda: _fit(ROOT, f"{folder}/kept")),
        }
        try:
            return comparison("default fit of diabetes", contenders, wanted, rounds, tick)
        finally:
            _git("worktree", "remove", "--force", f"{folder}/before", check=False)


def wide(rounds: int, tick: Callable[[], None]) -> dict[str, Any]:
    """Friedman's first function, of 5 of 80 columns, with 3,000 rows."""
    nll: dict[str, float] = {}

    def fit(name: str) -> None:
        found = subprocess.run([sys.executable, "-c", _WIDE, name], capture_output=True, text=True)
        if found.returncode:
            raise AbsentError(found.stderr.strip().splitlines()[-1])
        nll[name] = json.loads(found.stdout)

    contenders = {
        NGBOOST: Contender(lambda: fit(NGBOOST), optional=True),
        OURS: Contender(lambda: fit(OURS)),
    }
    wanted = [Ratio(OURS, NGBOOST, at_most=5.0)]
    return comparison("default fit of 3,000 rows, 80 columns", contenders, wanted, rounds, tick, nll=nll)


def _before(folder: Path) -> None:
    source = folder / "before"
    if not source.exists():
        _git("worktree", "add", "--detach", str(source), BEFORE_COMMIT)
    _fit(source, tempfile.mkdtemp(dir=folder))


def _fit(source: Path, cache: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(source / "src"), "MEASUREFLOW_CACHE": cache}
    subprocess.run([sys.executable, "-c", _DIABETES], check=True, env=environment)


def _git(*arguments: str, check: bool = True) -> None:
    subprocess.run(["git", "-C", str(ROOT), *arguments], check=check, capture_output=True)
