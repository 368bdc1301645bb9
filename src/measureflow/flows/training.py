"""Drifts of particles that carry statistics: the loss is that of training, all else sees θ alone."""

from typing import Any

import jax
from jaxtyping import Array, Float, Key, PyTree

from measureflow.core.pytrees import Particles, add
from measureflow.core.statistics import WithStatistics
from measureflow.flows.drifts import drift
from measureflow.numerics.interactions import AbstractInteractions
from measureflow.statement.problem import Problem
from measureflow.statement.training import trained

# Apart from the noise, and from sums over pairs, which have 1.
_TRAINING = 2


def require_carried(flow: Any, problem: Problem) -> None:
    """A flow that carries statistics, for a problem whose particles have some."""
    if problem.trained_loss() is not None and not flow.carries_statistics:
        raise ValueError(
            f"{type(flow).__name__} does not carry the statistics of a network that is trained with "
            "BatchNorm or Dropout; use mf.WassersteinFlow, or a network without training-time state: "
            "GroupNorm for BatchNorm, or frozen statistics (leave `training` out)."
        )


def training_key(step_key: Key[Array, ""]) -> Key[Array, ""]:
    """For what is random in a network while it is trained."""
    return jax.random.fold_in(step_key, _TRAINING)


def drift_in_training(
    problem: Problem,
    particles: Any,
    batch: PyTree,
    interactions: AbstractInteractions,
    step_key: Key[Array, ""],
) -> tuple[Particles, PyTree]:
    """∇V(θᵢ) + (1/N) Σⱼ ∇₁W(θᵢ, θⱼ) + ∇_W R(θᵢ), and the statistics after this step, where there are any."""
    if not isinstance(particles, WithStatistics):
        return drift(problem.free_energy(batch), particles, interactions, step_key), None
    _, gradient, after = objective_in_training(problem, particles, batch, step_key)
    if problem.regulariser is None:
        return gradient, after
    regulariser = problem.regulariser_energy(batch)
    return add(gradient, drift(regulariser, particles.parameters, interactions, step_key)), after


def objective_in_training(
    problem: Problem, particles: WithStatistics, batch: PyTree, step_key: Key[Array, ""]
) -> tuple[Float[Array, " n"], Particles, PyTree]:
    """ℓ of each particle, ∇_θ ℓ, and the statistics after this step."""
    found = problem.trained_loss()
    assert found is not None
    return trained(*found, particles, batch, training_key(step_key))


def objective_gradient(
    problem: Problem, particles: Any, batch: PyTree, step_key: Key[Array, ""]
) -> Particles:
    """The objective's part of the drift alone."""
    if isinstance(particles, WithStatistics):
        return objective_in_training(problem, particles, batch, step_key)[1]
    return problem.objective_energy(batch).wasserstein_gradient(particles)
