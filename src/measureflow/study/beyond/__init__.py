"""What other papers claim, redrawn and measured in the manner of `study.paper`; one module each.

Each module's `reproduce(seed, quick, progress)` returns a `Reproduction`. Those that need data have
`reproduce(seed, size, folder, progress)` in its place, and keep a record of every set in the folder.
"""

from importlib import import_module
from pathlib import Path
from typing import Any

from measureflow.study.beyond.on_uci import Size
from measureflow.study.paper.claims import Reproduction

#: Names on the command line, and what each measures.
NAMES = {
    "predictively-oriented": "The log score: predictively oriented posteriors",
    "predictively-oriented-uci": "Predictively oriented posteriors of networks, on the UCI sets",
    "second-order-bounds": "PAC²-Bayes: between Bayes and the log score",
    "prediction-centric": "CRPS and MMD scores: prediction-centric posteriors",
    "mean-field-langevin": "Mean-field Langevin: a two-layer network of infinite width",
    "gradient-discrepancy": "Kernel gradient discrepancy: how far from optimal",
    "repulsive-ensembles": "Repulsive ensembles: regression in 1-D, classes in 2-D",
    "shifted-splits": "Deep ensembles against Bayesian ones, under shift",
}
#: They need data, and are no part of "all".
NEED_DATA = ("predictively-oriented-uci", "shifted-splits")


def reproduce(name: str, seed: int, quick: bool = False, progress: bool = False) -> Reproduction:
    """Run the module called `name`."""
    if name in NEED_DATA:
        return reproduce_on_data(name, seed, quick=quick, progress=progress)
    return _module(name).reproduce(seed, quick=quick, progress=progress)


def reproduce_on_data(
    name: str,
    seed: int,
    quick: bool = False,
    folder: Path | None = None,
    progress: bool = False,
    sets: tuple[str, ...] | None = None,
    splits: int | None = None,
    steps: int | None = None,
) -> Reproduction:
    """Run the module called `name` on UCI sets; a set whose record lies in `folder` is not computed again.
    What is None goes by the size of a whole, or of a quick run."""
    module = _module(name)
    size = module.QUICK if quick else Size()
    asked = {"sets": sets, "splits": splits, "steps": steps}
    size = size._replace(**{key: value for key, value in asked.items() if value is not None})
    return module.reproduce(seed, size, folder, progress)


def _module(name: str) -> Any:
    return import_module(f"measureflow.study.beyond.{name.replace('-', '_')}")
