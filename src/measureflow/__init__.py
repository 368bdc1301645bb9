"""State a learning problem over probability measures; measureflow derives the algorithm that solves it."""

from typing import TYPE_CHECKING, Any

from measureflow import likelihoods, metrics, theory
from measureflow.checkpoint import Checkpoint
from measureflow.embeddings import NoClosedFormError, kernel_mean_embedding
from measureflow.flows import ParticleState, WassersteinFlow
from measureflow.free_energy import FreeEnergy
from measureflow.interactions import ExactInteractions, RandomBatches, RandomFeatures
from measureflow.kernels import InverseMultiquadric, Matern, SquaredExponential, Whiten, median_heuristic
from measureflow.likelihoods import MeanSquaredError, NegativeLogLikelihood
from measureflow.loop import run
from measureflow.measures import Empirical, Flat, FromDistribution, Gaussian, Uniform
from measureflow.models import Network
from measureflow.parametric import FullRankGaussian, MeanFieldGaussian, ParametricFlow, ParametricState
from measureflow.preconditioners import FixedPreconditioner, RMSPreconditioner
from measureflow.predictive import Mixture, Predictive
from measureflow.problem import (
    Problem,
    deep_ensemble,
    deep_langevin_ensemble,
    deep_repulsive_ensemble,
    deep_repulsive_langevin_ensemble,
)
from measureflow.regularisers import KL, SquaredMMD
from measureflow.saving.kinds import FileFormatError, load, save
from measureflow.solution import (
    DataExhaustedError,
    DivergenceError,
    History,
    Interrupted,
    Restart,
    RunError,
    Solution,
)
from measureflow.solve import solve

if TYPE_CHECKING:
    from measureflow.estimators import EnsembleClassifier, EnsembleRegressor, cross_validate

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


def __getattr__(name: str) -> Any:
    """The estimators, imported when they are asked for: scikit-learn takes a while."""
    if name not in _ESTIMATORS:
        raise AttributeError(f"module 'measureflow' has no attribute {name!r}")
    from measureflow import estimators

    return getattr(estimators, name)
