"""Deep ensembles against ensembles of Bayesian networks (Jordahn, Jensen, Schmidt and Andersen, 2025): large
deep ensembles win in distribution, Bayesian ones under shift.

UCI sets on random splits, and on gap and tail splits, on which for each input the middle third or the two
outer sixths of its range are held out (Foong, Li, Hernández-Lobato and Turner, 2019). The Bayesian ensemble
is the deep Langevin ensemble, the posterior with particles from independent starts; the deep ensemble has the
same prior as weight decay, with weight 1/n both. Networks have one layer of 50, and a Normal law whose scale
depends on x. Few members are the first of many, and NLL is paired by split.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from measureflow.prediction.colours import COLOURS
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
from measureflow.study.tables.tasks import Split, shifted_splits
from measureflow.tables.methods import METHODS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MEMBERS, SHIFTS, COMPARED = (5, 40), ("gap", "tail"), ("DE", "DLE")
KINDS = ("random", *SHIFTS)
QUICK = Size(("yacht",), 3, 2_000)


def reproduce(
    seed: int, size: Size | None = None, folder: Path | None = None, progress: bool = False
) -> Reproduction:
    """Both methods with few and with many members, on every kind of split."""
    size = size or Size()
    settings = {"members": MEMBERS, "prior_weight": 1.0}
    found = records_of(size, seed, settings, lambda data: measured(data, size, seed), folder, progress)
    return Reproduction(
        _claims(found),
        settings | size._asdict(),
        lambda figure: _draw(figure, found),
        figure_size=(12.0, 3.6),
        tables={f"Table: test NLL, mean ± standard error over splits ({size.words})": _rows(found)},
        summary=_summary(found),
        origin=origin(found, size),
    )


def measured(data: RegressionSet, size: Size, seed: int) -> dict[str, Any]:
    """Scores by kind of split, method and number of members; all splits of a method are one program."""
    splits: dict[str, list[Split]] = {"random": data.splits[: size.splits]}
    splits |= {kind: shifted_splits(data.inputs, kind)[: size.splits] for kind in SHIFTS}
    fits = [Fit(*split) for kind in KINDS for split in splits[kind]]
    ends = np.cumsum([len(splits[kind]) for kind in KINDS])
    found: dict[str, Any] = {kind: {} for kind in KINDS}
    for method in COMPARED:
        nll, rmse = scores_of(METHODS[method], data, fits, seed, MEMBERS, size.steps)
        for kind, of_kind in zip(KINDS, np.split(np.arange(len(fits)), ends[:-1]), strict=True):
            found[kind][method] = {
                str(members): {"NLL": nll[place, of_kind].tolist(), "RMSE": rmse[place, of_kind].tolist()}
                for place, members in enumerate(MEMBERS)
            }
    return found


def _nll(record: Record, kind: str, method: str, members: int) -> np.ndarray:
    return numbers(record["scores"][kind][method][str(members)]["NLL"])


def _differences(
    found: dict[str, Record], kinds: tuple[str, ...], first: str, second: str, members: int = MEMBERS[-1]
) -> dict[str, Difference]:
    return {
        f"{name} {kind}": paired(_nll(record, kind, first, members), _nll(record, kind, second, members))
        for kind in kinds
        for name, record in found.items()
    }


def _claims(found: dict[str, Record]) -> list[Claim]:
    many = MEMBERS[-1]
    within = f"in distribution, {many} networks of a deep ensemble beat as many Bayesian ones"
    shifted = f"under shift, {many} Bayesian networks beat those of a deep ensemble"
    return [
        more_wins(within, "DE − DLE", _differences(found, ("random",), "DE", "DLE")),
        more_wins(shifted, "DLE − DE", _differences(found, SHIFTS, "DLE", "DE")),
    ]


def _summary(found: dict[str, Record]) -> str:
    """The outcome in words."""
    parts = []
    for kind in KINDS:
        bayes, deep = wins_and_losses(_differences(found, (kind,), "DLE", "DE"))
        parts.append(f"{len(bayes)} against {len(deep)} on {kind} splits")
    return (
        f"The outcome, with {MEMBERS[-1]} members on {', '.join(found)}: clear wins of the Bayesian ensemble "
        f"(DLE) against clear wins of the deep one (DE), {', '.join(parts)}."
    )


def _rows(found: dict[str, Record]) -> list[dict[str, Any]]:
    rows = []
    for kind in KINDS:
        for name, record in found.items():
            row: dict[str, Any] = {"splits": kind, "set": name}
            row["number"] = len(_nll(record, kind, "DE", MEMBERS[-1]))
            for method in COMPARED:
                for members in MEMBERS:
                    row[f"{method}, {members}"] = shown(_nll(record, kind, method, members))
            rows.append(row)
    return rows


def _draw(figure: "Figure", found: dict[str, Record]) -> None:
    """How much better the Bayesian ensemble is, by kind of split and number of members."""
    axes = np.atleast_1d(figure.subplots(1, len(KINDS)))
    for axis, kind in zip(axes, KINDS, strict=True):
        for shift, members in zip((-0.12, 0.12), MEMBERS, strict=True):
            differences = _differences(found, (kind,), "DLE", "DE", members)
            means, errors = np.array(list(differences.values())).T
            colour = COLOURS["DLE"] if members == MEMBERS[-1] else "0.6"
            at = np.arange(len(found)) + shift
            axis.errorbar(at, means, errors, fmt="o", color=colour, capsize=3, label=f"{members} members")
        axis.axhline(0, color="k", linewidth=0.8)
        axis.set_xticks(range(len(found)), list(found), rotation=45, ha="right", fontsize=8)
        axis.set_yscale("symlog", linthresh=0.1)
        axis.set(title=f"{kind} splits", xlim=(-0.5, len(found) - 0.5))
        axis.grid(axis="y", alpha=0.2)
    axes[0].set_ylabel("NLL, DLE − DE (below 0: DLE is better)")
    axes[0].legend(frameon=False, fontsize=8)
