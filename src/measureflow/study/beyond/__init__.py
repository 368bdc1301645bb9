"""What other papers claim, redrawn and measured in the manner of `study.paper`; one module each.

Each module's `reproduce(seed, quick, progress)` returns a `Reproduction`.
"""

from importlib import import_module

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
    module = import_module(f"measureflow.study.beyond.{name.replace('-', '_')}")
    return module.reproduce(seed, quick=quick, progress=progress)
