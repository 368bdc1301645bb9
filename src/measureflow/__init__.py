"""State a learning problem over probability measures; measureflow derives the algorithm that solves it."""

from typing import TYPE_CHECKING, Any

from measureflow import theory
from measureflow.flows.parametric import FullRankGaussian, MeanFieldGaussian, ParametricFlow, ParametricState
from measureflow.flows.preconditioners import FixedPreconditioner, RMSPreconditioner
from measureflow.flows.wasserstein import ParticleState, WassersteinFlow
from measureflow.networks import likelihoods
from measureflow.networks.likelihoods import MeanSquaredError, NegativeLogLikelihood
from measureflow.networks.network import Network
from measureflow.numerics.interactions import ExactInteractions, RandomBatches, RandomFeatures
from measureflow.prediction import metrics
from measureflow.prediction.predictive import Mixture, Predictive
from measureflow.runs.checkpoint import Checkpoint
from measureflow.runs.loop import run
from measureflow.runs.solution import (
    DataExhaustedError,
    DivergenceError,
    History,
    Interrupted,
    Restart,
    RunError,
    Solution,
)
from measureflow.runs.solve import solve
from measureflow.saving.container import FileFormatError
from measureflow.saving.documents import load, save
from measureflow.saving.registry import saved_later
from measureflow.spaces.embeddings import NoClosedFormError, kernel_mean_embedding
from measureflow.spaces.kernels import (
    InverseMultiquadric,
    Matern,
    SquaredExponential,
    Whiten,
    median_heuristic,
)
from measureflow.spaces.measures import Empirical, Flat, FromDistribution, Gaussian, Uniform
from measureflow.statement.divergences import KL, SquaredMMD
from measureflow.statement.free_energy import FreeEnergy
from measureflow.statement.problem import (
    Problem,
    deep_ensemble,
    deep_langevin_ensemble,
    deep_repulsive_ensemble,
    deep_repulsive_langevin_ensemble,
)

if TYPE_CHECKING:
    from measureflow.tables.estimators import EnsembleClassifier, EnsembleRegressor, cross_validate

__version__ = "0.1.0"

__all__ = [
    "KL",
    "Checkpoint",
    "DataExhaustedError",
    "DivergenceError",
    "Empirical",
    "EnsembleClassifier",
    "EnsembleRegressor",
    "ExactInteractions",
    "FileFormatError",
    "FixedPreconditioner",
    "Flat",
    "FreeEnergy",
    "FromDistribution",
    "FullRankGaussian",
    "Gaussian",
    "History",
    "Interrupted",
    "InverseMultiquadric",
    "Matern",
    "MeanFieldGaussian",
    "MeanSquaredError",
    "Mixture",
    "NegativeLogLikelihood",
    "Network",
    "NoClosedFormError",
    "ParametricFlow",
    "ParametricState",
    "ParticleState",
    "Predictive",
    "Problem",
    "RMSPreconditioner",
    "RandomBatches",
    "RandomFeatures",
    "Restart",
    "RunError",
    "Solution",
    "SquaredExponential",
    "SquaredMMD",
    "Uniform",
    "WassersteinFlow",
    "Whiten",
    "cross_validate",
    "deep_ensemble",
    "deep_langevin_ensemble",
    "deep_repulsive_ensemble",
    "deep_repulsive_langevin_ensemble",
    "kernel_mean_embedding",
    "likelihoods",
    "load",
    "median_heuristic",
    "metrics",
    "run",
    "save",
    "solve",
    "theory",
]

_ESTIMATORS = ("EnsembleClassifier", "EnsembleRegressor", "cross_validate")
saved_later("measureflow.tables.estimators", *_ESTIMATORS[:2], "Shifted")


def __getattr__(name: str) -> Any:
    """The estimators, imported when they are asked for: scikit-learn takes a while."""
    if name not in _ESTIMATORS:
        raise AttributeError(f"module 'measureflow' has no attribute {name!r}")
    from measureflow.tables import estimators

    return getattr(estimators, name)
