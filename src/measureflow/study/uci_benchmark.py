"""The nine UCI sets on their canonical splits: every method, with one setting for all sets, against what
others published.

The setting is the default of `EnsembleRegressor`: what it chooses, it chooses on rows of each training split,
and every method has as many candidates or more. Scores are on test rows, in the units of the targets.
"""

import math
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from measureflow.prediction.colours import COLOURS
from measureflow.study.datasets import NAMES, load_uci

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SETS = tuple(NAMES)
METHODS = ("DE", "DLE", "DRE", "DRLE")
#: Mean test NLL. One hidden layer of 50 (protein: 100), but for the last row, the best of a library's own.
PUBLISHED = {
    "PBP (Hernández-Lobato and Adams, 2015)": (2.57, 3.16, 2.04, -0.90, -3.73, 2.84, 2.97, 0.97, 1.63),
    "Deep ensembles (Lakshminarayanan et al., 2017)": (
        2.41,
        3.06,
        1.38,
        -1.20,
        -5.63,
        2.79,
        2.83,
        0.94,
        1.18,
    ),
    "MC dropout, tuned (Gal, 2018)": (2.40, 2.93, 1.21, -1.14, -4.45, 2.80, 2.87, 0.93, 1.25),
    "Uncertainty Baselines, best": (2.94, 3.08, 0.61, -1.17, -6.33, 2.83, 2.92, 0.97, 0.73),
}
#: A first implementation of DRLE, whose settings were chosen while looking at these very scores.
PROTOTYPE = (2.28, 2.85, 0.60, -1.34, -7.20, 2.73, 2.72, 0.86, 0.10)
COVERAGE = 0.9


class Result(NamedTuple):
    """One method on one set: scores by name, one number per split; the prior weight that each split chose;
    and seconds, compiling included."""

    set: str
    method: str
    scores: dict[str, list[float]]
    prior_weights: list[float]
    seconds: float


def run_uci(
    sets: Sequence[str], methods: Sequence[str], splits: int | None, seed: int, progress: bool
) -> Iterator[Result]:
    """Fit and score every method on every set, all splits of a set as one program."""
    from measureflow.tables.crossvalidation import cross_validate
    from measureflow.tables.regressor import EnsembleRegressor

    # All of them first: a set that is missing should not be noticed after hours.
    loaded = {name: load_uci(name, progress=progress) for name in sets}
    for name, data in loaded.items():
        for method in methods:
            began = time.perf_counter()
            estimator = EnsembleRegressor(method, random_state=seed, verbose=int(progress))
            found = cross_validate(
                estimator,
                data.inputs,
                data.targets,
                cv=data.splits[:splits],
                coverage=COVERAGE,
                return_estimator=True,
            )
            weights = [fitted.prior_weight_ for fitted in found.pop("estimator")]
            scores = {score: values.tolist() for score, values in found.items()}
            yield Result(name, method, scores, weights, time.perf_counter() - began)


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean over splits and its standard error."""
    array = np.asarray(values, np.float64)
    error = array.std(ddof=1) / np.sqrt(len(array)) if len(array) > 1 else np.nan
    return float(array.mean()), float(error)


def score_rows(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Mean ± standard error over splits, a row per set and method, next to the best published NLL."""
    rows = []
    for result in results:
        row: dict[str, Any] = {"set": result.set, "method": result.method}
        for score, short in _SHORT.items():
            row[short] = _shown(*mean_and_error(result.scores[score]))
        position = SETS.index(result.set)
        row["best published NLL"] = min(published[position] for published in PUBLISHED.values())
        row["prototype NLL"] = PROTOTYPE[position]
        row["prior weights chosen"] = _counted(result.prior_weights)
        row["seconds"] = round(result.seconds, 1)
        rows.append(row)
    return rows


_SHORT = {
    "negative_log_likelihood": "NLL",
    "root_mean_square_error": "RMSE",
    "crps": "CRPS",
    "coverage": "coverage of 90%",
}


def _shown(mean: float, error: float) -> str:
    """Three decimals, or two digits of the standard error where it is smaller than that."""
    decimals = 3 if not 0 < error < 1e-3 else 1 - math.floor(math.log10(error))
    return f"{mean:.{decimals}f} ± {error:.{decimals}f}"


def _counted(weights: Sequence[float]) -> str:
    values, counts = np.unique(weights, return_counts=True)
    return ", ".join(f"{value:g}: {count}" for value, count in zip(values[::-1], counts[::-1], strict=True))


def comparison_rows(results: Sequence[Result]) -> list[dict[str, Any]]:
    """NLL of each pair of methods, paired by split: mean difference ± standard error. A win needs more than
    one of them."""
    scores = {(result.set, result.method): result.scores["negative_log_likelihood"] for result in results}
    methods = [method for method in reversed(METHODS) if any(result.method == method for result in results)]
    rows = []
    for first, second in [(a, b) for i, a in enumerate(methods) for b in methods[i + 1 :]]:
        row: dict[str, Any] = {"difference": f"{first} − {second}"}
        wins = losses = 0
        for name in dict.fromkeys(result.set for result in results):
            if (name, first) not in scores or (name, second) not in scores:
                continue
            mean, error = mean_and_error(
                np.subtract(scores[name, first], scores[name, second], dtype=np.float64).tolist()
            )
            wins, losses = wins + (mean < -error), losses + (mean > error)
            row[name] = f"{mean:+.3f} ± {error:.3f}"
        rows.append(row | {"wins": wins, "losses": losses})
    return rows


def draw(figure: "Figure", results: Sequence[Result]) -> None:
    """A panel per set: mean test NLL ± standard error of each method, and what others published."""
    names = list(dict.fromkeys(result.set for result in results))
    columns = min(len(names), 3)
    axes = np.atleast_1d(figure.subplots(-(-len(names) // columns), columns, squeeze=False)).ravel()
    for axis, name in zip(axes, names, strict=False):
        mine = [result for result in results if result.set == name]
        for at, result in enumerate(mine):
            mean, error = mean_and_error(result.scores["negative_log_likelihood"])
            axis.errorbar(at, mean, error, fmt="o", color=COLOURS[result.method], capsize=3)
        position = SETS.index(name)
        for style, (label, published) in zip(("-", "--", "-.", ":"), PUBLISHED.items(), strict=True):
            axis.axhline(published[position], color="0.6", linestyle=style, linewidth=1, label=label)
        axis.set_title(name)
        axis.set_xticks(range(len(mine)), [result.method for result in mine])
        axis.set_xlim(-0.6, len(mine) - 0.4)
        axis.grid(axis="y", alpha=0.2)
    for axis in axes[len(names) :]:
        axis.set_visible(False)
    axes[0].set_ylabel("test NLL (lower is better)")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
