"""State a learning problem over probability measures; measureflow derives the algorithm that solves it."""

import importlib
from typing import TYPE_CHECKING, Any

from measureflow.saving.registry import saved_later

if TYPE_CHECKING:
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
    from measureflow.prediction import metrics, plots
    from measureflow.prediction.conformal import Conformal
    from measureflow.prediction.predictive import (
        LogMixture,
        Mixture,
        Predictive,
        YeoJohnson,
        YeoJohnsonMixture,
    )
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
    "YeoJohnson",
    "YeoJohnsonMixture",
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

# Where each name is. It is imported when it is first asked for: JAX, SciPy, NumPyro, scikit-learn and
# matplotlib take a while. Type checkers read the imports above.
_PLACES = {
    "KL": "measureflow.statement.divergences",
    "AbstractEntropy": "measureflow.flows.entropies",
    "AbstractFamily": "measureflow.flows.parametric",
    "AbstractFlow": "measureflow.flows.flow",
    "AbstractFunctional": "measureflow.statement.functionals",
    "AbstractInteractions": "measureflow.numerics.interactions",
    "AbstractKernel": "measureflow.spaces.kernels",
    "AbstractLikelihood": "measureflow.networks.likelihoods",
    "AbstractMeasure": "measureflow.spaces.measures",
    "AbstractPreconditioner": "measureflow.flows.preconditioners",
    "AbstractRadialKernel": "measureflow.spaces.kernels",
    "AbstractRegulariser": "measureflow.statement.divergences",
    "AbstractScore": "measureflow.flows.entropies",
    "AbstractTrainedLoss": "measureflow.statement.training",
    "AlphaDivergence": "measureflow.statement.orders",
    "BirthDeath": "measureflow.flows.birth_death",
    "Blob": "measureflow.flows.entropies",
    "BuresWassersteinFlow": "measureflow.flows.bures_wasserstein",
    "Candidate": "measureflow.tables.methods",
    "Certificate": "measureflow.statement.certificate",
    "Checkpoint": "measureflow.runs.checkpoint",
    "Conformal": "measureflow.prediction.conformal",
    "DataExhaustedError": "measureflow.runs.solution",
    "DivergenceError": "measureflow.runs.solution",
    "Draws": "measureflow.runs.draws",
    "Empirical": "measureflow.spaces.empirical",
    "EnsembleClassifier": "measureflow.tables.classifier",
    "EnsemblePreconditioner": "measureflow.flows.ensembles",
    "EnsembleRegressor": "measureflow.tables.regressor",
    "EulerMaruyama": "measureflow.flows.integrators",
    "ExactInteractions": "measureflow.numerics.interactions",
    "ExpectedLoss": "measureflow.statement.functionals",
    "FileFormatError": "measureflow.saving.container",
    "FixedPreconditioner": "measureflow.flows.preconditioners",
    "Flat": "measureflow.spaces.measures",
    "FreeEnergy": "measureflow.statement.free_energy",
    "FromDistribution": "measureflow.spaces.measures",
    "FullRankGaussian": "measureflow.flows.parametric",
    "Gaussian": "measureflow.spaces.measures",
    "GaussianMixture": "measureflow.spaces.mixtures",
    "GaussianState": "measureflow.flows.bures_wasserstein",
    "History": "measureflow.runs.history",
    "Interrupted": "measureflow.runs.solution",
    "InverseMultiquadric": "measureflow.spaces.kernels",
    "KernelDensity": "measureflow.flows.entropies",
    "KernelScore": "measureflow.statement.scores",
    "KineticFlow": "measureflow.flows.kinetic",
    "KineticState": "measureflow.flows.kinetic",
    "LeimkuhlerMatthews": "measureflow.flows.integrators",
    "LogMixture": "measureflow.prediction.predictive",
    "LogScore": "measureflow.statement.scores",
    "LowRankGaussian": "measureflow.flows.families",
    "Matern": "measureflow.spaces.kernels",
    "MeanFieldGaussian": "measureflow.flows.parametric",
    "MeanSquaredError": "measureflow.networks.losses",
    "MedianBandwidth": "measureflow.spaces.bandwidths",
    "Method": "measureflow.tables.methods",
    "Mixture": "measureflow.prediction.predictive",
    "MixtureOfGaussians": "measureflow.flows.families",
    "Moment": "measureflow.statement.moments",
    "NegativeLogLikelihood": "measureflow.networks.losses",
    "Network": "measureflow.networks.network",
    "NoClosedFormError": "measureflow.spaces.embeddings",
    "Noise": "measureflow.flows.entropies",
    "NotStationaryWarning": "measureflow.statement.certificate",
    "NumpyroModel": "measureflow.statement.numpyro_models",
    "ParametricFlow": "measureflow.flows.parametric",
    "ParametricState": "measureflow.flows.parametric",
    "ParticleState": "measureflow.flows.wasserstein",
    "Predictive": "measureflow.prediction.predictive",
    "Problem": "measureflow.statement.problem",
    "RMSPreconditioner": "measureflow.flows.preconditioners",
    "RandomBatches": "measureflow.numerics.interactions",
    "RandomFeatures": "measureflow.numerics.interactions",
    "RandomProjection": "measureflow.spaces.projections",
    "RankedProbabilityScore": "measureflow.statement.scores",
    "Renyi": "measureflow.statement.orders",
    "Restart": "measureflow.runs.solution",
    "RunError": "measureflow.runs.solution",
    "Sample": "measureflow.sampling.result",
    "SamplingWarning": "measureflow.sampling.result",
    "Solution": "measureflow.runs.solution",
    "SpectralSteinGradientEstimator": "measureflow.flows.entropies",
    "Spread": "measureflow.prediction.spread",
    "SquaredExponential": "measureflow.spaces.kernels",
    "SquaredMMD": "measureflow.statement.divergences",
    "SteinFlow": "measureflow.flows.stein",
    "SteinGradientEstimator": "measureflow.flows.entropies",
    "Training": "measureflow.networks.training",
    "Uniform": "measureflow.spaces.measures",
    "WassersteinFlow": "measureflow.flows.wasserstein",
    "Whiten": "measureflow.spaces.kernels",
    "WithStatistics": "measureflow.core.statistics",
    "YeoJohnson": "measureflow.prediction.predictive",
    "YeoJohnsonMixture": "measureflow.prediction.predictive",
    "cross_validate": "measureflow.tables.crossvalidation",
    "datasets": "measureflow.study.datasets",
    "deep_ensemble": "measureflow.statement.problem",
    "deep_langevin_ensemble": "measureflow.statement.problem",
    "deep_repulsive_ensemble": "measureflow.statement.problem",
    "deep_repulsive_langevin_ensemble": "measureflow.statement.problem",
    "from_numpyro": "measureflow.statement.numpyro_models",
    "kernel_mean_embedding": "measureflow.spaces.embeddings",
    "likelihoods": "measureflow.networks.likelihoods",
    "load": "measureflow.saving.documents",
    "median_heuristic": "measureflow.spaces.kernels",
    "metrics": "measureflow.prediction.metrics",
    "plots": "measureflow.prediction.plots",
    "run": "measureflow.runs.loop",
    "sample": "measureflow.sampling.sample",
    "save": "measureflow.saving.documents",
    "solve": "measureflow.runs.solve",
    "theory": "measureflow.theory",
    "thin": "measureflow.sampling.thinning",
    "through": "measureflow.tables.pipelines",
}

_ROOMS = {place.split(".")[1] for place in _PLACES.values()}

# Files name classes. The module of each is imported when a file with one is loaded.
for _module, _names in {
    "spaces.empirical": ("Empirical", "WithStatistics"),
    "spaces.measures": ("Flat", "Gaussian", "Uniform"),
    "spaces.mixtures": ("GaussianMixture",),
    "flows.bures_wasserstein": ("GaussianState",),
    "flows.parametric": ("ParametricState",),
    "flows.wasserstein": ("ParticleState",),
    "runs.history": ("History",),
    "runs.solution": ("Restart", "Solution"),
    "networks.adapters": ("EquinoxApply", "EquinoxInit", "NnxApply", "NnxInit"),
    "networks.functions": (
        "CastApply",
        "ConstantsApply",
        "ConstantsInit",
        "PerceptronApply",
        "PerceptronInit",
        "RowsOfOutputs",
    ),
    "networks.likelihoods": (
        "Beta",
        "Gamma",
        "Heteroscedastic",
        "Homoscedastic",
        "NormalMixture",
        "StudentT",
    ),
    "networks.likelihoods_of_classes": ("Bernoulli", "Categorical", "Ordinal"),
    "networks.likelihoods_of_counts": (
        "HurdleNegativeBinomial",
        "NegativeBinomial",
        "Poisson",
        "ZeroInflatedNegativeBinomial",
    ),
    "networks.network": ("Network",),
    "prediction.predictive": ("Predictive",),
    "prediction.spread": ("Spread",),
    "prediction.yeo_johnson": ("YeoJohnson",),
    "tables.classifier": ("EnsembleClassifier",),
    "tables.encoding": ("PiecewiseLinear",),
    "tables.frames": ("Columns",),
    "tables.models": ("Shape",),
    "tables.posterior": ("Verdict",),
    "tables.regressor": ("EnsembleRegressor",),
    "tables.smoother": ("Smoother",),
    "tables.targets": ("Shifted",),
    "commands.model": ("TableModel",),
    "commands.surroundings": ("Surroundings",),
}.items():
    saved_later(f"measureflow.{_module}", *_names)


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"measureflow.{name}")
    if name not in _PLACES:
        raise AttributeError(f"module 'measureflow' has no attribute {name!r}")
    module = importlib.import_module(_PLACES[name])
    is_module = module.__name__.endswith(f".{name}") and not hasattr(module, name)
    found = module if is_module else getattr(module, name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
