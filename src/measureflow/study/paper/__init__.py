"""Every figure, table and claim of Wild et al. (2023), redrawn and measured; one module each.

Each module's `reproduce(seed, quick, progress)` returns a `Reproduction`. Settings are those of the paper's
Appendix G, with its slips corrected (docs, Theory).
"""

from importlib import import_module

from measureflow.core.compiled import keep_programs
from measureflow.study.paper.claims import Claim, Reproduction

#: Names on the command line, and what each redraws.
NAMES = {
    "lifting": "Figure 1: convexification through probabilistic lifting",
    "minimisers": "Figure 2: particles over their global minimisers",
    "multimodal": "Figure 3: four modes in the plane, and FD-GVI",
    "few-particles": "Figure 5: the same with four particles",
    "many-modes": "Figure 4: more modes than particles",
    "invariant-measures": "Theorem 7: repulsion without noise has many invariant measures",
    "convergence": "Theorem 2, with rates in N, T and η",
    "uci": "Table 1: UCI regression",
}


def reproduce(name: str, seed: int, quick: bool = False, progress: bool = False) -> Reproduction:
    """Run the module called `name`."""
    if name not in NAMES:
        raise ValueError(f"unknown reproduction {name!r}; known are {', '.join(NAMES)}.")
    keep_programs()
    module = import_module(f"measureflow.study.paper.{name.replace('-', '_')}")
    return module.reproduce(seed, quick=quick, progress=progress)


__all__ = ["NAMES", "Claim", "Reproduction", "reproduce"]
