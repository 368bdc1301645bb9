"""Networks on splits of the UCI sets: fitted side by side, scored on rows that they have not seen, and
kept in one file for each set, so that a run resumes and several may share a folder."""

import copy
import json
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from tqdm import tqdm

from measureflow.study.datasets import RegressionSet, load_uci
from measureflow.study.files import valid, write_json
from measureflow.study.paper.claims import Claim
from measureflow.study.provenance import provenance
from measureflow.study.tables.records import ResumeError
from measureflow.study.uci_benchmark import SETS, mean_and_error
from measureflow.tables.methods import Method

#: One hidden layer, a Normal law whose scale depends on x.
NETWORKS: dict[str, Any] = {"hidden": (50,), "encoding": 0, "likelihood": "heteroscedastic"}

Record = dict[str, Any]
Difference = tuple[float, float]


class Size(NamedTuple):
    """Which sets; how many splits of each kind, and at most how many steps, where these are limited."""

    sets: tuple[str, ...] = SETS
    splits: int | None = None
    steps: int | None = None

    @property
    def options(self) -> str:
        """As the command has them."""
        sets = "" if self.sets == SETS else f" --sets {','.join(self.sets)}"
        splits = "" if self.splits is None else f" --splits {self.splits}"
        return sets + splits + ("" if self.steps is None else f" --steps {self.steps}")

    @property
    def words(self) -> str:
        """For the heading of a table."""
        splits = "all splits" if self.splits is None else f"at most {self.splits} splits of a kind"
        return splits + ("" if self.steps is None else f", at most {self.steps:,} steps")


def records_of(
    size: Size,
    seed: int,
    settings: dict[str, Any],
    measure: Callable[[RegressionSet], dict[str, Any]],
    folder: Path | None = None,
    progress: bool = False,
) -> dict[str, Record]:
    """What `measure` finds on every set, with its origin: from FOLDER/<set>.json where that lies there, else
    computed, and written there."""
    settings = json.loads(json.dumps(settings | {"splits": size.splits, "steps": size.steps}))
    # All of them first: what is missing, or cannot be resumed, should not be noticed after hours.
    loaded = {name: load_uci(name, progress=progress) for name in size.sets}
    found = {name: _known(folder, name, seed, settings) for name in size.sets}
    for name in tqdm([name for name in size.sets if found[name] is None], "sets", disable=not progress):
        began = time.perf_counter()
        scores = measure(loaded[name])
        seconds = round(time.perf_counter() - began, 1)
        record = provenance(seed, settings) | {"set": name, "seconds": seconds, "scores": scores}
        if folder is not None:
            write_json(folder / f"{name}.json", record, indent=1)
        found[name] = json.loads(json.dumps(valid(record)))
    return {name: record for name, record in found.items() if record is not None}


def _known(folder: Path | None, name: str, seed: int, settings: dict[str, Any]) -> Record | None:
    path = None if folder is None else folder / f"{name}.json"
    if path is None or not path.exists():
        return None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        before = record["settings"] | {"seed": record["seed"]}
    except (ValueError, KeyError, TypeError):
        raise ResumeError(f"{path} is no record of a set; remove it, or pass --force.") from None
    now = settings | {"seed": seed}
    if changed := [key for key in now if before.get(key) != now[key]]:
        told = ", ".join(f"{key} {before.get(key)!r}" for key in changed)
        raise ResumeError(
            f"{path} was run with {told}, and now that is {', '.join(repr(now[key]) for key in changed)}; "
            "pass another --out, or --force to compute it again."
        )
    return record


def origin(records: dict[str, Record], size: Size) -> dict[str, Any]:
    """Where records come from, all of them together; their seconds are added up."""
    told = {
        key: ", ".join(sorted({str(record[key]) for record in records.values()}))
        for key in ("measureflow", "commit", "jax", "python", "device")
    }
    seconds = round(sum(record["seconds"] for record in records.values()), 1)
    return told | {"seconds": seconds, "options": size.options}


class Fit(NamedTuple):
    """Rows to train on, rows to score, and the weight of the prior in multiples of 1/n."""

    train: np.ndarray
    test: np.ndarray
    prior_weight: float = 1.0


def scores_of(
    method: Method,
    data: RegressionSet,
    fits: Sequence[Fit],
    seed: int,
    members: Sequence[int],
    most_steps: int | None = None,
) -> np.ndarray:
    """NLL and RMSE of every fit (score, number of members, fit), for ensembles of the first few members and
    of all. One program: fits with fewer rows are filled up with rows of weight 0."""
    from measureflow.runs.solution import DivergenceError
    from measureflow.tables.crossvalidation import fit_splits
    from measureflow.tables.recipe import steps_for
    from measureflow.tables.regressor import EnsembleRegressor

    steps = steps_for(max(len(fit.train) for fit in fits), 1, classes=False)
    estimator = EnsembleRegressor(
        method,
        **NETWORKS,
        particles=max(members),
        prior_weight=1.0,
        steps=min(steps, most_steps or steps),
        random_state=seed,
    )
    # Rows of weight 1/w are so many cases that the prior weighs w/n: fits with any weights are one program.
    weights = [np.full(len(fit.train), 1 / fit.prior_weight) for fit in fits]
    with warnings.catch_warnings():
        # Members that go on specialising never come to rest; the score says what became of it.
        warnings.filterwarnings("ignore", "(.* fits: )?not converged")
        try:
            trained = [fit.train for fit in fits]
            fitted = fit_splits(estimator, data.inputs, data.targets, trained, weights)
        except DivergenceError:
            if len(fits) == 1:
                return np.full((2, len(members), 1), np.inf)
            # Those that do not diverge have scores.
            halves = fits[: len(fits) // 2], fits[len(fits) // 2 :]
            both = [scores_of(method, data, half, seed, members, most_steps) for half in halves]
            return np.concatenate(both, axis=-1)
    found = [
        [_scored(one, number, data, fit.test) for one, fit in zip(fitted, fits, strict=True)]
        for number in members
    ]
    return np.moveaxis(np.array(found), -1, 0)


def _scored(fitted: Any, members: int, data: RegressionSet, test: np.ndarray) -> tuple[float, float]:
    few = copy.copy(fitted)
    few.particles_ = jax.tree.map(lambda leaf: leaf[:members], fitted.particles_)
    # Of all rows, of which every split has as many: one program predicts for all of them.
    law = few.predict_dist(data.inputs)
    densities = np.asarray(law.log_prob(data.targets), np.float64)[test]
    errors = np.asarray(data.targets - law.mean)[test]
    return float(-densities.mean()), float(np.sqrt(np.square(errors).mean()))


def numbers(values: Sequence[float | None]) -> np.ndarray:
    """Of a record, where null is what was not finite."""
    return np.array([np.inf if value is None else value for value in values], np.float64)


def paired(first: np.ndarray, second: np.ndarray) -> Difference:
    """The mean difference over splits, and its standard error."""
    return mean_and_error((first - second).tolist())


def wins_and_losses(differences: dict[str, Difference]) -> tuple[list[str], list[str]]:
    """Where a difference is below 0, and where it is above, by more than one standard error."""
    wins = [name for name, (mean, error) in differences.items() if mean < -error]
    return wins, [name for name, (mean, error) in differences.items() if mean > error]


def more_wins(claim: str, what: str, differences: dict[str, Difference]) -> Claim:
    """Whether differences are below 0 more often than above it, each by more than one standard error."""
    wins, losses = wins_and_losses(differences)
    shown = ", ".join(f"{name} {mean:+.3f} ± {error:.3f}" for name, (mean, error) in differences.items())
    return Claim(
        claim,
        "paper",
        "more clear wins than losses",
        f"{len(wins)} wins, {len(losses)} losses of {len(differences)}",
        "a paired difference of NLL of more than one standard error",
        len(wins) > len(losses),
        f"{what}: {shown}.",
    )


def shown(values: np.ndarray) -> str:
    """Mean ± standard error over splits."""
    mean, error = mean_and_error(values.tolist())
    return f"{mean:.3f} ± {error:.3f}"
