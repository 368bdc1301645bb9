"""State a learning problem over probability measures; measureflow derives the algorithm that solves it."""

import importlib
from typing import TYPE_CHECKING, Any

from measureflow import theory
from measureflow.core.statistics import WithStatistics
from measureflow.flows.birth_death import BirthDeath
from measureflow.flows.bures_wasserstein import BuresWassersteinFlow, GaussianState
from measureflow.flows.ensembles import EnsemblePreconditioner
from measureflow.flows.entropies import (
    AbstractEntropy,
    AbstractScore,
    Blob,
    KernelDensity,
    Noise,
    SpectralSteinGradientEstimator,
    SteinGradientEstimator,
)
from measureflow.flows.families import LowRankGaussian, MixtureOfGaussians
from measureflow.flows.flow import AbstractFlow
from measureflow.flows.integrators import EulerMaruyama, LeimkuhlerMatthews
from measureflow.flows.kinetic import KineticFlow, KineticState
from measureflow.flows.parametric import (
    AbstractFamily,
    FullRankGaussian,
    MeanFieldGaussian,
    ParametricFlow,
    ParametricState,
)
from measureflow.flows.preconditioners import (
    AbstractPreconditioner,
    FixedPreconditioner,
    RMSPreconditioner,
)
from measureflow.flows.stein import SteinFlow
from measureflow.flows.wasserstein import ParticleState, WassersteinFlow
from measureflow.networks import likelihoods
from measureflow.networks.likelihoods import AbstractLikelihood
from measureflow.networks.losses import MeanSquaredError, NegativeLogLikelihood
from measureflow.networks.network import Network
from measureflow.networks.training import Training
from measureflow.numerics.interactions import (
    AbstractInteractions,
    ExactInteractions,
    RandomBatches,
    RandomFeatures,
)
from measureflow.prediction import metrics
from measureflow.prediction.conformal import Conformal
from measureflow.prediction.predictive import LogMixture, Mixture, Predictive
from measureflow.prediction.spread import Spread
from measureflow.runs.checkpoint import Checkpoint
from measureflow.runs.draws import Draws
from measureflow.runs.history import History
from measureflow.runs.loop import run
from measureflow.runs.solution import (
    DataExhaustedError,
    DivergenceError,
    Interrupted,
    Restart,
    RunError,
    Solution,
)
from measureflow.runs.solve import solve
from measureflow.sampling.result import Sample, SamplingWarning
from measureflow.sampling.sample import sample
from measureflow.sampling.thinning import thin
from measureflow.saving.container import FileFormatError
from measureflow.saving.documents import load, save
from measureflow.saving.registry import saved_later
from measureflow.spaces.bandwidths import MedianBandwidth
from measureflow.spaces.embeddings import NoClosedFormError, kernel_mean_embedding
from measureflow.spaces.empirical import Empirical
from measureflow.spaces.kernels import (
    AbstractKernel,
    AbstractRadialKernel,
    InverseMultiquadric,
    Matern,
    SquaredExponential,
    Whiten,
    median_heuristic,
)
from measureflow.spaces.measures import AbstractMeasure, Flat, FromDistribution, Gaussian, Uniform
from measureflow.spaces.mixtures import GaussianMixture
from measureflow.spaces.projections import RandomProjection
from measureflow.statement.certificate import Certificate, NotStationaryWarning
from measureflow.statement.divergences import KL, AbstractRegulariser, SquaredMMD
from measureflow.statement.free_energy import FreeEnergy
from measureflow.statement.functionals import AbstractFunctional, ExpectedLoss
from measureflow.statement.moments import Moment
from measureflow.statement.numpyro_models import NumpyroModel, from_numpyro
from measureflow.statement.orders import AlphaDivergence, Renyi
from measureflow.statement.problem import (
    Problem,
    deep_ensemble,
    deep_langevin_ensemble,
    deep_repulsive_ensemble,
    deep_repulsive_langevin_ensemble,
)
from measureflow.statement.scores import KernelScore, LogScore, RankedProbabilityScore
from measureflow.statement.training import AbstractTrainedLoss

if TYPE_CHECKING:
    from measureflow.prediction import plots
    from measureflow.study import datasets
    from measureflow.tables.classifier import EnsembleClassifier
    from measureflow.tables.crossvalidation import cross_validate
    from measureflow.tables.methods import Candidate, Method
    from measureflow.tables.pipelines import through
    from measureflow.tables.regressor import EnsembleRegressor

__version__ = "0.1.0"

__all__ = [
    "KL",
    "AbstractEntropy",
    "AbstractFamily",
    "AbstractFlow",
    "AbstractFunctional",
    "AbstractInteractions",
    "AbstractKernel",
    "AbstractLikelihood",
    "AbstractMeasure",
    "AbstractPreconditioner",
    "AbstractRadialKernel",
    "AbstractRegulariser",
    "AbstractScore",
    "AbstractTrainedLoss",
    "AlphaDivergence",
    "BirthDeath",
    "Blob",
    "BuresWassersteinFlow",
    "Candidate",
    "Certificate",
    "Checkpoint",
    "Conformal",
    "DataExhaustedError",
    "DivergenceError",
    "Draws",
    "Empirical",
    "EnsembleClassifier",
    "EnsemblePreconditioner",
    "EnsembleRegressor",
    "EulerMaruyama",
    "ExactInteractions",
    "ExpectedLoss",
    "FileFormatError",
    "FixedPreconditioner",
    "Flat",
    "FreeEnergy",
    "FromDistribution",
    "FullRankGaussian",
    "Gaussian",
    "GaussianMixture",
    "GaussianState",
    "History",
    "Interrupted",
    "InverseMultiquadric",
    "KernelDensity",
    "KernelScore",
    "KineticFlow",
    "KineticState",
    "LeimkuhlerMatthews",
    "LogMixture",
    "LogScore",
    "LowRankGaussian",
    "Matern",
    "MeanFieldGaussian",
    "MeanSquaredError",
    "MedianBandwidth",
    "Method",
    "Mixture",
    "MixtureOfGaussians",
    "Moment",
    "NegativeLogLikelihood",
    "Network",
    "NoClosedFormError",
    "Noise",
    "NotStationaryWarning",
    "NumpyroModel",
    "ParametricFlow",
    "ParametricState",
    "ParticleState",
    "Predictive",
    "Problem",
    "RMSPreconditioner",
    "RandomBatches",
    "RandomFeatures",
    "RandomProjection",
    "RankedProbabilityScore",
    "Renyi",
    "Restart",
    "RunError",
    "Sample",
    "SamplingWarning",
    "Solution",
    "SpectralSteinGradientEstimator",
    "Spread",
    "SquaredExponential",
    "SquaredMMD",
    "SteinFlow",
    "SteinGradientEstimator",
    "Training",
    "Uniform",
    "WassersteinFlow",
    "Whiten",
    "WithStatistics",
    "cross_validate",
    "datasets",
    "deep_ensemble",
    "deep_langevin_ensemble",
    "deep_repulsive_ensemble",
    "deep_repulsive_langevin_ensemble",
    "from_numpyro",
    "kernel_mean_embedding",
    "likelihoods",
    "load",
    "median_heuristic",
    "metrics",
    "plots",
    "run",
    "sample",
    "save",
    "solve",
    "theory",
    "thin",
    "through",
]

# Imported when they are asked for: scikit-learn and matplotlib take a while.
_LATER = {
    "EnsembleClassifier": "measureflow.tables.classifier",
    "EnsembleRegressor": "measureflow.tables.regressor",
    "Candidate": "measureflow.tables.methods",
    "Method": "measureflow.tables.methods",
    "cross_validate": "measureflow.tables.crossvalidation",
    "datasets": "measureflow.study.datasets",
    "plots": "measureflow.prediction.plots",
    "through": "measureflow.tables.pipelines",
}
saved_later("measureflow.commands.model", "Surroundings", "TableModel")
saved_later("measureflow.tables.classifier", "EnsembleClassifier")
saved_later(
    "measureflow.tables.regressor", "Columns", "EnsembleRegressor", "PiecewiseLinear", "Shape", "Shifted"
)


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'measureflow' has no attribute {name!r}")
    module = importlib.import_module(_LATER[name])
    return module if module.__name__.endswith(f".{name}") else getattr(module, name)
