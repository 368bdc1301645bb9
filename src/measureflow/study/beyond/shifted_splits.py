"""Deep ensembles against ensembles of Bayesian networks (Jordahn, Jensen, Schmidt and Andersen, 2025): large
deep ensembles win in distribution, Bayesian ones under shift.

UCI sets on random splits, and on gap and tail splits, on which for each input the middle third or the two
outer sixths of its range are held out (Foong, Li, Hernández-Lobato and Turner, 2019). The Bayesian ensemble
is the deep Langevin ensemble, the posterior with particles from independent starts; the deep ensemble has the
same prior as weight decay, with weight 1/n both. NLL is paired by split.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from measureflow.prediction.colours import COLOURS
from measureflow.study.beyond.predictively_oriented_uci import SETTINGS, more_wins, paired, scores_of_splits
from measureflow.study.datasets import load_uci
from measureflow.study.paper.claims import Claim, Reproduction
from measureflow.study.tables.tasks import SHIFTED, Split, shifted_splits
from measureflow.study.uci_benchmark import mean_and_error
from measureflow.tables.methods import METHODS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SMALL, SIZES = ("yacht",), (5, 40)
KINDS, COMPARED = ("random", "gap", "tail"), ("DE", "DLE")
#: Of each kind, in a quick run.
FEW_SPLITS = 3


def reproduce(seed: int, quick: bool = False, progress: bool = False) -> Reproduction:
    """Both methods with few and with many members, on every kind of split; quick: one set, three splits."""
    names, most = (SMALL, FEW_SPLITS) if quick else (SHIFTED, None)
    loaded = {name: load_uci(name, progress=progress) for name in names}
    fits = [(k, s, m, p) for k in KINDS for s in names for m in COMPARED for p in SIZES]
    scores: dict[Any, np.ndarray] = {}
    for kind, name, method, size in tqdm(fits, desc="fits", disable=not progress):
        data = loaded[name]
        splits: list[Split] = data.splits if kind == "random" else shifted_splits(data.inputs, kind)
        scores[kind, name, method, size], _ = scores_of_splits(
            METHODS[method], data.inputs, data.targets, splits[:most], seed, particles=size, prior_weight=1.0
        )
    return Reproduction(
        _claims(scores, names),
        {"sets": names, "splits": most, "members": SIZES, **SETTINGS},
        lambda figure: _draw(figure, scores, names),
        figure_size=(10.0, 3.4),
        tables={"Table: test NLL, mean ± standard error over splits": _rows(scores, names)},
    )


def _claims(scores: dict[Any, np.ndarray], names: tuple[str, ...]) -> list[Claim]:
    many = SIZES[-1]
    within = f"in distribution, {many} networks of a deep ensemble beat as many Bayesian ones"
    shifted = f"under shift, {many} Bayesian networks beat those of a deep ensemble"
    return [
        _judged(within, scores, names, ["random"], ("DE", "DLE")),
        _judged(shifted, scores, names, ["gap", "tail"], ("DLE", "DE")),
    ]


def _judged(
    claim: str,
    scores: dict[Any, np.ndarray],
    names: tuple[str, ...],
    kinds: list[str],
    methods: tuple[str, str],
) -> Claim:
    """Who is better on more of the sets, by more than one standard error."""
    first, second = methods
    differences = {
        f"{name} {kind}": paired(scores, (kind, name, first, SIZES[-1]), (kind, name, second, SIZES[-1]))
        for kind in kinds
        for name in names
    }
    return more_wins(claim, f"{first} − {second}", differences)


def _rows(scores: dict[Any, np.ndarray], names: tuple[str, ...]) -> list[dict[str, Any]]:
    rows = []
    for kind in KINDS:
        for name in names:
            row: dict[str, Any] = {"splits": kind, "set": name}
            for method in COMPARED:
                for size in SIZES:
                    mean, error = mean_and_error(scores[kind, name, method, size][0].tolist())
                    row[f"{method}, {size}"] = f"{mean:.3f} ± {error:.3f}"
            rows.append(row)
    return rows


def _draw(figure: "Figure", scores: dict[Any, np.ndarray], names: tuple[str, ...]) -> None:
    """How much better the Bayesian ensemble is, by kind of split and number of members."""
    axes = np.atleast_1d(figure.subplots(1, len(KINDS)))
    for axis, kind in zip(axes, KINDS, strict=True):
        for shift, size in zip((-0.12, 0.12), SIZES, strict=True):
            found = [paired(scores, (kind, name, "DLE", size), (kind, name, "DE", size)) for name in names]
            means, errors = np.array(found).T
            colour = COLOURS["DLE"] if size == SIZES[-1] else "0.6"
            at = np.arange(len(names)) + shift
            axis.errorbar(at, means, errors, fmt="o", color=colour, capsize=3, label=f"{size} members")
        axis.axhline(0, color="k", linewidth=0.8)
        axis.set_xticks(range(len(names)), names)
        axis.set_yscale("symlog", linthresh=0.1)
        axis.set(title=f"{kind} splits", xlim=(-0.5, len(names) - 0.5))
        axis.grid(axis="y", alpha=0.2)
    axes[0].set_ylabel("NLL, DLE − DE (below 0: DLE is better)")
    axes[0].legend(frameon=False, fontsize=8)
