"""What is known exactly: minimisers and limits on grids, and how far particles are from them."""

from measureflow.theory.laws import AtomicLaw, GridLaw
from measureflow.theory.limits import deep_ensemble_limit
from measureflow.theory.losses import four_modes_loss, many_modes_loss, quartic_loss
from measureflow.theory.minimisers import log_score_certificate, minimiser, stationarity_residual, value

__all__ = [
    "AtomicLaw",
    "GridLaw",
    "deep_ensemble_limit",
    "four_modes_loss",
    "log_score_certificate",
    "many_modes_loss",
    "minimiser",
    "quartic_loss",
    "stationarity_residual",
    "value",
]
