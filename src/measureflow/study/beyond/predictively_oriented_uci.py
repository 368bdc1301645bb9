"""Predictively oriented posteriors of networks on the UCI sets, beside Bayes, paired by split.

DLE is Bayes, PrO the log score of the mixture, and half is half of each; 20 networks with one layer of 50,
and a Normal law whose scale depends on x. The weight of the prior is chosen, for each split and method, among
the same six, on a fifth of the training rows that is held out, by the NLL of ensembles of the same size; the
networks that are tested have all training rows. No test row is looked at.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from measureflow.prediction.colours import COLOURS
from measureflow.statement.divergences import KL
from measureflow.statement.functionals import ExpectedLoss
from measureflow.statement.problem import Problem
from measureflow.statement.scores import LogScore
from measureflow.study.beyond.on_uci import (
    Difference,
    Fit,
    Record,
    Size,
    more_wins,
    numbers,
    origin,
    paired,
    records_of,
    scores_of,
    shown,
    wins_and_losses,
)
from measureflow.study.datasets import RegressionSet
from measureflow.study.paper.claims import Claim, Reproduction
from measureflow.study.uci_benchmark import mean_and_error
from measureflow.tables.methods import METHODS, Method, Setting

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MEMBERS, HELD_OUT, WEIGHTS = 20, 0.2, (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
QUICK = Size(("boston", "energy", "yacht"), 3, 2_000)


def _half_and_half(setting: Setting) -> Problem:
    score = 0.5 * LogScore(setting.loss) + 0.5 * ExpectedLoss(setting.loss)
    return Problem(score, setting.prior_weight * KL(setting.prior))


COMPARED = {"DLE": METHODS["DLE"], "half": Method("half", _half_and_half), "PrO": METHODS["PrO"]}


def reproduce(
    seed: int, size: Size | None = None, folder: Path | None = None, progress: bool = False
) -> Reproduction:
    """Every method with every weight, on training rows without a fifth of them, and on all of them."""
    size = size or Size()
    settings = {"members": MEMBERS, "held_out": HELD_OUT, "prior_weights": WEIGHTS}
    found = records_of(size, seed, settings, lambda data: measured(data, size, seed), folder, progress)
    return Reproduction(
        _claims(found),
        settings | size._asdict(),
        lambda figure: _draw(figure, found),
        figure_size=(10.0, 2.4 * -(-len(found) // 3) + 0.8),
        tables={
            f"Table: test NLL, mean ± standard error over splits ({size.words})": _rows(found),
            "Table: differences of NLL, paired by split": _differences(found),
        },
        summary=_summary(found),
        origin=origin(found, size),
    )


def measured(data: RegressionSet, size: Size, seed: int) -> dict[str, Any]:
    """By method and weight: the NLL of held-out rows, and NLL and RMSE of test rows. A method is one
    program."""
    outer = data.splits[: size.splits]
    inner = [_without_some(train, seed, number) for number, (train, _) in enumerate(outer)]
    fits = [Fit(*split, weight) for weight in WEIGHTS for split in (*inner, *outer)]
    found: dict[str, Any] = {}
    for name, method in COMPARED.items():
        scores = scores_of(method, data, fits, seed, (MEMBERS,), size.steps)
        nll, rmse = scores.reshape(2, len(WEIGHTS), 2, len(outer))
        found[name] = {
            f"{weight:g}": {
                "held-out NLL": nll[place, 0].tolist(),
                "NLL": nll[place, 1].tolist(),
                "RMSE": rmse[place, 1].tolist(),
            }
            for place, weight in enumerate(WEIGHTS)
        }
    return found


def _without_some(train: np.ndarray, seed: int, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Training rows, and a fifth of them held out."""
    order = np.random.default_rng([seed, number]).permutation(train)
    held_out = round(HELD_OUT * len(train))
    return np.sort(order[held_out:]), np.sort(order[:held_out])


def chosen(record: Record, method: str) -> np.ndarray:
    """The place of each split's weight: the one with the lowest NLL of held-out rows."""
    by_weight = record["scores"][method].values()
    return np.argmin([numbers(scores["held-out NLL"]) for scores in by_weight], axis=0)


def at_choice(record: Record, method: str, score: str = "NLL") -> np.ndarray:
    """The score of every split's test rows, at the weight that was chosen."""
    by_weight = np.array([numbers(scores[score]) for scores in record["scores"][method].values()])
    places = chosen(record, method)
    return by_weight[places, np.arange(len(places))]


def at_weight(record: Record, method: str, weight: float) -> np.ndarray:
    """The NLL of every split's test rows at one weight."""
    return numbers(record["scores"][method][f"{weight:g}"]["NLL"])


def _of_sets(found: dict[str, Record], method: str) -> dict[str, Difference]:
    return {
        name: paired(at_choice(record, method), at_choice(record, "DLE")) for name, record in found.items()
    }


def _claims(found: dict[str, Record]) -> list[Claim]:
    whole = "the log score's networks predict better than Bayes' (DLE)"
    half = "half of it, half of the members' own, predicts better than Bayes (DLE)"
    return [
        more_wins(whole, "PrO − DLE", _of_sets(found, "PrO")),
        more_wins(half, "half − DLE", _of_sets(found, "half")),
    ]


def _summary(found: dict[str, Record]) -> str:
    """The outcome in words."""
    told = []
    for method in ("PrO", "half"):
        wins, losses = wins_and_losses(_of_sets(found, method))
        better = f"better on {len(wins)} ({', '.join(wins)})" if wins else "better on none"
        worse = f"worse on {len(losses)} ({', '.join(losses)})" if losses else "worse on none"
        told.append(f"{method} is clearly {better} and {worse}")
    return f"The outcome, against Bayes (DLE) on {len(found)} sets: {'; '.join(told)}."


def _rows(found: dict[str, Record]) -> list[dict[str, Any]]:
    rows = []
    for name, record in found.items():
        for method in COMPARED:
            weights = np.array(WEIGHTS)[chosen(record, method)]
            values, counts = np.unique(weights, return_counts=True)
            best = min(WEIGHTS, key=lambda w: float(at_weight(record, method, w).mean()))
            rows.append(
                {
                    "set": name,
                    "method": method,
                    "splits": len(weights),
                    "NLL": shown(at_choice(record, method)),
                    "RMSE": shown(at_choice(record, method, "RMSE")),
                    "weights chosen": ", ".join(
                        f"{value:g} ({count})" for value, count in zip(values, counts, strict=True)
                    ),
                    "NLL at weight 1": shown(at_weight(record, method, 1.0)),
                    "by hindsight, on test rows": f"{shown(at_weight(record, method, best))} at {best:g}",
                }
            )
    return rows


def _differences(found: dict[str, Record]) -> list[dict[str, Any]]:
    rows = []
    for first in ("PrO", "half"):
        row = {"difference": f"{first} − DLE"}
        for name, (mean, error) in _of_sets(found, first).items():
            row[name] = f"{mean:+.3f} ± {error:.3f}"
        rows.append(row)
    return rows


def _draw(figure: "Figure", found: dict[str, Record]) -> None:
    """Test NLL against the prior's weight, and what was chosen on held-out rows, as a line."""
    colours = {"DLE": COLOURS["DLE"], "half": "#56B4E9", "PrO": "#D55E00"}
    columns = min(3, len(found))
    axes = np.ravel(figure.subplots(-(-len(found) // columns), columns, squeeze=False))
    for axis, (name, record) in zip(axes, found.items(), strict=False):
        for method, colour in colours.items():
            points = [mean_and_error(at_weight(record, method, w).tolist()) for w in WEIGHTS]
            means, errors = np.array(points).T
            axis.errorbar(WEIGHTS, means, errors, fmt="o-", color=colour, capsize=2, ms=3, lw=1, label=method)
            axis.axhline(at_choice(record, method).mean(), color=colour, linestyle=":", linewidth=1)
        axis.set(title=name, xscale="log")
        axis.grid(axis="y", alpha=0.2)
    for axis in axes[len(found) :]:
        axis.set_visible(False)
    axes[0].legend(frameon=False, fontsize=8)
    figure.supxlabel("weight of the prior (1: the posterior); dotted: chosen on held-out rows", fontsize=9)
    figure.supylabel("test NLL (lower is better)", fontsize=9)
