"""What may train an ensemble on a table: each method's problem, its flow, where it begins, and what held-out
rows may choose for it. One table has them all by name; one's own is another `Method`."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Key, PyTree

from measureflow.core.pytrees import Parameters, Particles, dimension
from measureflow.flows.flow import AbstractFlow
from measureflow.flows.parametric import MeanFieldGaussian, ParametricFlow
from measureflow.flows.preconditioners import RMSPreconditioner
from measureflow.flows.schedules import CosineDecay
from measureflow.flows.wasserstein import WassersteinFlow
from measureflow.networks.losses import NegativeLogLikelihood
from measureflow.spaces.kernels import SquaredExponential, Whiten
from measureflow.spaces.measures import Gaussian
from measureflow.statement.divergences import KL
from measureflow.statement.problem import (
    Problem,
    deep_ensemble,
    deep_langevin_ensemble,
    deep_repulsive_ensemble,
    deep_repulsive_langevin_ensemble,
)
from measureflow.statement.scores import LogScore


class Candidate(NamedTuple):
    """The prior's weight in multiples of 1/n (1 is the Bayes posterior), and the share of all steps taken."""

    prior_weight: float
    steps: float = 1.0


#: In order of caution: of candidates that held-out rows cannot tell apart, the first is taken. With an
#: entropy, the prior's weight is a temperature, and the length of a run does not regularise; without, it is
#: weight decay, and stopping early does.
WITH_ENTROPY = (Candidate(1.0), Candidate(0.3), Candidate(0.03))
WITHOUT_ENTROPY = (Candidate(1.0, 0.25), Candidate(0.03, 0.25), Candidate(1.0), Candidate(0.03))
# Members that are scored together specialise, and learn rows by heart: caution is a heavier prior.
SCORED_TOGETHER = (Candidate(10.0), Candidate(3.0), Candidate(1.0))
# Of one particle, in multiples of what all had lately. On large tables single networks met batches with
# drifts of 10¹⁰, which threw them away and, by the preconditioner that they share, stopped all others.
_LARGEST_DRIFT = 2.0


class Setting(NamedTuple):
    """What a method is told. All numbers may be traced: many tables and candidates are one program.

    Attributes
    ----------
    loss
        ℓ(θ, batch), the mean negative log-likelihood of a batch (inputs, targets, weights).
    prior
        P, Gaussian with the fan-in of each layer.
    prior_weight
        λ/n: the candidate's weight over the number of cases.
    mmd
        The weight of MMD²: the estimator's `mmd` times J λ/n.
    step_size, momentum
        Of the first step, and the estimator's.
    steps
        How many steps there will be.
    particles
        How many particles to begin with.
    """

    loss: NegativeLogLikelihood
    prior: Gaussian
    prior_weight: Float[Array, ""]
    mmd: Float[Array, ""]
    step_size: Float[Array, ""]
    momentum: Float[Array, ""]
    steps: Float[Array, ""]
    particles: int


class Penalised(eqx.Module):
    """ℓ(θ) − w log p(θ): weight decay, which is all that a prior is without an entropy."""

    loss: Callable
    prior: Gaussian
    weight: Float[Array, ""]

    def __call__(self, theta: Parameters, batch: PyTree) -> Float[Array, ""]:
        return self.loss(theta, batch) - self.weight * self.prior.log_density(theta)


def penalised(setting: Setting) -> Penalised:
    """The loss with the weight decay of a prior."""
    return Penalised(setting.loss, setting.prior, setting.prior_weight)


def repulsive_kernel(prior: Gaussian) -> Any:
    """Repulsion acts in coordinates whitened by the prior, where two of its draws are √(2J) apart: σ = √J is
    the median heuristic there."""
    return SquaredExponential(math.sqrt(dimension(prior.mean))).on(Whiten(prior))


def annealed(setting: Setting) -> WassersteinFlow:
    """Preconditioned steps with momentum, their size a cosine from `step_size` to 0. The preconditioner
    adapts to the end: no part of the run samples a fixed law."""
    # min(1, 100/fan-in) for every weight: where every weight moves by η, the output of a unit with many
    # inputs moves by η times their number. The prior's variance, 2/fan-in, knows the fan-in.
    scales = jax.tree.map(lambda deviation: jnp.minimum(1.0, 50 * deviation**2), setting.prior.deviations())
    preconditioner = RMSPreconditioner(np.iinfo(np.int32).max, scale=scales, largest=_LARGEST_DRIFT)
    schedule = CosineDecay(setting.step_size, setting.steps)
    return WassersteinFlow(schedule, preconditioner, momentum=setting.momentum)


def draws_of_the_prior(setting: Setting, key: Key[Array, ""]) -> Particles:
    """Q₀ = P."""
    return setting.prior.sample(key, setting.particles)


@dataclasses.dataclass(frozen=True)
class Method:
    """A way to train an ensemble: pass one of your own as `method=` of an estimator.

    For example, half of the log score of the mixture and half of its members' ("PrO" is all of the first):

        score = lambda s: 0.5 * mf.LogScore(s.loss) + 0.5 * mf.ExpectedLoss(s.loss)
        Method("half", lambda s: mf.Problem(score(s), s.prior_weight * mf.KL(s.prior)))

    Functions of a module can be pickled, a lambda cannot. A new function is a new program: make a method
    once, and use it again.

    Parameters
    ----------
    name
        What progress bars and messages call it.
    problem
        Setting ↦ `Problem`: what is minimised, on batches (inputs, targets, weights). The `Setting` has
        `loss`, `prior`, `prior_weight`, `mmd`, `step_size`, `momentum`, `steps` and `particles`.
    flow
        Setting ↦ flow: how. By default preconditioned steps with momentum, annealed by a cosine.
    start
        (Setting, key) ↦ where the flow begins. By default draws from the prior.
    candidates
        What held-out rows choose from where `prior_weight` is None, the most cautious first.
    """

    name: str
    problem: Callable[[Setting], Problem]
    flow: Callable[[Setting], AbstractFlow] = annealed
    start: Callable[[Setting, Key[Array, ""]], Any] = draws_of_the_prior
    candidates: tuple[Candidate, ...] = WITH_ENTROPY

    def __post_init__(self) -> None:
        for part in ("problem", "flow", "start"):
            if not callable(getattr(self, part)):
                raise TypeError(
                    f"Method {part} must be a function of a Setting, got {getattr(self, part)!r}; for "
                    "example problem=lambda setting: mf.Problem(setting.loss)."
                )
        if not self.candidates or not all(isinstance(one, Candidate) for one in self.candidates):
            raise TypeError(
                f"Method candidates must be a tuple of Candidates, got {self.candidates!r}; for example "
                "(Candidate(1.0),)."
            )


def _deep_ensemble(setting: Setting) -> Problem:
    return deep_ensemble(penalised(setting))


def _deep_repulsive_ensemble(setting: Setting) -> Problem:
    kernel = repulsive_kernel(setting.prior)
    return deep_repulsive_ensemble(penalised(setting), setting.prior, kernel, mmd=setting.mmd)


def _deep_langevin_ensemble(setting: Setting) -> Problem:
    return deep_langevin_ensemble(setting.loss, setting.prior, kl=setting.prior_weight)


def _deep_repulsive_langevin_ensemble(setting: Setting) -> Problem:
    kernel, weight = repulsive_kernel(setting.prior), setting.prior_weight
    return deep_repulsive_langevin_ensemble(setting.loss, setting.prior, kernel, mmd=setting.mmd, kl=weight)


def _predictively_oriented(setting: Setting) -> Problem:
    """McLatchie, Chérief-Abdellatif, Frazier and Knoblauch (2025)."""
    return Problem(LogScore(setting.loss), setting.prior_weight * KL(setting.prior))


def _mean_field(setting: Setting) -> ParametricFlow:
    schedule: Any = CosineDecay(jnp.asarray(1e-2, setting.steps.dtype), setting.steps)
    return ParametricFlow(MeanFieldGaussian(), optax.adam(schedule), samples=10)


def _narrow_gaussian(setting: Setting, key: Key[Array, ""]) -> Gaussian:
    """Around a network as it is initialised."""
    narrow = jax.tree.map(lambda deviation: 0.1 * deviation, setting.prior.deviations())
    return Gaussian(setting.loss.network.init(key), narrow)


#: By the names that `method=` takes.
METHODS = {
    method.name: method
    for method in (
        Method("DRLE", _deep_repulsive_langevin_ensemble),
        Method("DRE", _deep_repulsive_ensemble, candidates=WITHOUT_ENTROPY),
        Method("DLE", _deep_langevin_ensemble),
        Method("DE", _deep_ensemble, candidates=WITHOUT_ENTROPY),
        Method("FD-GVI", _deep_langevin_ensemble, _mean_field, _narrow_gaussian),
        Method("PrO", _predictively_oriented, candidates=SCORED_TOGETHER),
        # Drawn by the sampler in the place of a flow: see `tables.posterior`.
        Method("posterior", _deep_langevin_ensemble, candidates=(Candidate(1.0),)),
    )
}


def method_of(given: Any) -> Method:
    """A method, or the one of this name."""
    if isinstance(given, Method):
        return given
    if not isinstance(given, str) or given not in METHODS:
        names = ", ".join(METHODS)
        raise ValueError(f"method must be one of {names}, got {given!r}; or pass an mf.Method of your own.")
    return METHODS[given]
