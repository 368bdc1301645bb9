"""State a learning problem over probability measures; measureflow derives the algorithm that solves it."""

from measureflow import theory
from measureflow.embeddings import NoClosedFormError, kernel_mean_embedding
from measureflow.flows import ParticleState, WassersteinFlow
from measureflow.free_energy import FreeEnergy
from measureflow.kernels import InverseMultiquadric, Matern, SquaredExponential, Whiten, median_heuristic
from measureflow.measures import Empirical, Flat, FromDistribution, Gaussian, Uniform
from measureflow.parametric import FullRankGaussian, MeanFieldGaussian, ParametricFlow, ParametricState
from measureflow.preconditioners import FixedPreconditioner, RMSPreconditioner
from measureflow.problem import (
    Problem,
    deep_ensemble,
    deep_langevin_ensemble,
    deep_repulsive_ensemble,
    deep_repulsive_langevin_ensemble,
)
from measureflow.regularisers import KL, SquaredMMD
from measureflow.solve import DataExhaustedError, DivergenceError, History, RunError, Solution, run, solve

__version__ = "0.1.0"

__all__ = [
    "KL",
    "DataExhaustedError",
    "DivergenceError",
    "Empirical",
    "FixedPreconditioner",
    "Flat",
    "FreeEnergy",
    "FromDistribution",
    "FullRankGaussian",
    "Gaussian",
    "History",
    "InverseMultiquadric",
    "Matern",
    "MeanFieldGaussian",
    "NoClosedFormError",
    "ParametricFlow",
    "ParametricState",
    "ParticleState",
    "Problem",
    "RMSPreconditioner",
    "RunError",
    "Solution",
    "SquaredExponential",
    "SquaredMMD",
    "Uniform",
    "WassersteinFlow",
    "Whiten",
    "deep_ensemble",
    "deep_langevin_ensemble",
    "deep_repulsive_ensemble",
    "deep_repulsive_langevin_ensemble",
    "kernel_mean_embedding",
    "median_heuristic",
    "run",
    "solve",
    "theory",
]
