"""The statement: L(Q) = G(Q) + Σₖ wₖ Dₖ(Q, Pₖ), and what follows from it."""

import warnings
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, PyTree

from measureflow.core.pytrees import Parameters, Particles, shapes_of, shown_shapes
from measureflow.core.showing import or_fields
from measureflow.core.validation import (
    require_count,
    require_particles,
    require_representable,
    require_same_shape,
    typed_key,
)
from measureflow.numerics.integration import Points, draws, quadrature, require_agreement
from measureflow.spaces.empirical import Empirical
from measureflow.spaces.kernels import AbstractKernel
from measureflow.spaces.measures import AbstractMeasure, Gaussian
from measureflow.statement.certificate import Certificate, certify
from measureflow.statement.describe import describe, formula
from measureflow.statement.divergences import KL, SquaredMMD
from measureflow.statement.free_energy import FreeEnergy
from measureflow.statement.functionals import AbstractFunctional, ExpectedLoss, Sum, evaluated
from measureflow.statement.stationarity import stationarity
from measureflow.statement.training import AbstractTrainedLoss

# Functions with such a name are to be maximised.
_LOG_DENSITIES = (
    "log_density",
    "logdensity",
    "log_prob",
    "logprob",
    "logp",
    "logpdf",
    "log_posterior",
    "log_joint",
)


def _objective(given: Any) -> AbstractFunctional:
    return given if isinstance(given, AbstractFunctional) else ExpectedLoss(given)


class Problem(eqx.Module):
    """Minimise L(Q) = G(Q) + Σₖ wₖ Dₖ(Q, Pₖ) over probability measures Q.

    Parameters
    ----------
    objective
        G: a functional of Q, such as `LogScore`, or a function ℓ: then G(Q) = ∫ ℓ dQ. `ℓ(θ)`, or `ℓ(θ,
        batch)` where the problem has data, is a scalar: the *mean* over cases, so that it means the same for
        any batch size. The Bayes posterior is KL weight 1/n for n cases. A loss is part of the program:
        arrays that vary belong in the batch, or in an `eqx.Module`.
    regulariser
        A weighted sum of functionals, such as `0.5 * SquaredMMD(prior, kernel) + 1.0 * KL(prior)`.
    """

    objective: AbstractFunctional = eqx.field(converter=_objective)
    regulariser: AbstractFunctional | None = None

    @or_fields
    def __repr__(self) -> str:
        return f"Problem(L(Q) = {formula(self.terms())})"

    def __check_init__(self) -> None:
        if self.regulariser is not None and not isinstance(self.regulariser, AbstractFunctional):
            raise TypeError(
                "regulariser must be built from functionals such as KL and SquaredMMD, got "
                f"{self.regulariser!r}; for example 1.0 * mf.KL(prior)."
            )
        templates = self._templates()
        if any(shapes_of(template) != shapes_of(templates[0]) for template in templates):
            shown = [shown_shapes(template) for template in templates]
            raise ValueError(
                f"the references are on different spaces, got shapes {shown}; give all the shape of θ."
            )
        _warn_of_a_log_density(self.objective)

    def terms(self) -> tuple[tuple[Float[Array, ""], AbstractFunctional], ...]:
        """All summands with their weights: those of the objective, then those of the regulariser."""
        return self.objective.terms() + self._regularisers()

    def _regularisers(self) -> tuple[tuple[Float[Array, ""], AbstractFunctional], ...]:
        return () if self.regulariser is None else self.regulariser.terms()

    def _templates(self) -> list[Parameters]:
        found = [functional.template() for _, functional in self.terms()]
        return [template for template in found if template is not None]

    def template(self) -> Parameters | None:
        """A point shaped as the references say θ is; None where they leave that open."""
        return next(iter(self._templates()), None)

    def objective_energy(self, batch: PyTree = None) -> FreeEnergy:
        """The objective's normal form: V = ℓ for a loss."""
        return self.objective.free_energy(batch)

    def regulariser_energy(self, batch: PyTree = None) -> FreeEnergy:
        """The regulariser's normal form: V = −w log p − 2w′μ_P, W = 2w′κ, τ = w."""
        terms = self._regularisers()
        return Sum(*terms).free_energy(batch) if terms else FreeEnergy()

    def free_energy(self, batch: PyTree = None) -> FreeEnergy:
        """The normal form of the whole problem."""
        if self.regulariser is None:
            return self.objective_energy(batch)
        return self.objective_energy(batch) + self.regulariser_energy(batch)

    def trained_loss(self) -> tuple[AbstractTrainedLoss, Float[Array, ""]] | None:
        """The loss and its weight, where its particles carry statistics (BatchNorm) or keys (Dropout)."""
        terms = self.objective.terms()
        losses = [(getattr(functional, "loss", None), weight) for weight, functional in terms]
        found = [
            (loss, weight)
            for loss, weight in losses
            if isinstance(loss, AbstractTrainedLoss) and loss.statistics() is not None
        ]
        if not found:
            return None
        if len(terms) > 1 or not all(isinstance(functional, ExpectedLoss) for _, functional in terms):
            names = " + ".join(functional.name for _, functional in terms)
            raise ValueError(
                f"a network that is trained with BatchNorm or Dropout was given in the objective {names}: "
                "its statistics are carried for ∫ ℓ dQ alone; use it as Problem(loss, regulariser), or a "
                "network without training-time state (GroupNorm for BatchNorm)."
            )
        return found[0]

    def temperature(self) -> Float[Array, ""] | None:
        """τ; None if there is none."""
        return self.regulariser_energy().temperature

    def value(
        self,
        measure: AbstractMeasure,
        batch: PyTree = None,
        *,
        key: Key[Array, ""] | None = None,
        samples: int = 10_000,
    ) -> Float[Array, ""]:
        """L(Q) = G(Q) + Σₖ wₖ Dₖ(Q, Pₖ).

        MMD² of particles is exact. KL needs the entropy of Q: closed form for a Gaussian, a nearest-neighbour
        estimate for particles where N is large against J, else an error. Integrals over a Gaussian without a
        closed form are quadrature in up to two dimensions, by two rules that must agree, or Monte Carlo with
        `samples` draws where `key` is given; ∬κ dQdQ without a closed form takes a `key`.
        The infinite constants of a `Flat` reference are left out: KL is then −H(Q), MMD² is ∬κ dQdQ.

        Parameters
        ----------
        measure
            Q: `Empirical`, or `Gaussian`.
        batch
            The data that the objective sees.
        key
            For Monte Carlo, where Q is a Gaussian.
        samples
            The number of draws of Monte Carlo.
        """
        return sum(self.value_parts(measure, batch, key=key, samples=samples).values(), start=jnp.zeros(()))

    def value_parts(
        self,
        measure: AbstractMeasure,
        batch: PyTree = None,
        *,
        key: Key[Array, ""] | None = None,
        samples: int = 10_000,
    ) -> dict[str, Float[Array, ""]]:
        """The summands of L(Q) by name, each times its weight."""
        samples = require_count("samples", samples, 2, "10,000 is a start.")
        batch = require_representable("batch", batch)
        if isinstance(measure, Empirical):
            require_particles("measure", measure.particles, self.template())
            parts = _particle_parts(self, measure, batch)
        elif isinstance(measure, Gaussian):
            if self.template() is not None:
                require_same_shape("measure", measure.mean, self.template())
            parts = self._gaussian_parts(measure, batch, key, samples)
        else:
            raise TypeError(
                f"measure must be Empirical or Gaussian, got {type(measure).__name__}; "
                "use mf.Empirical(measure.sample(key, n))."
            )
        # Compiled functions return dictionaries in alphabetical order; this is the order of L(Q).
        return {name: parts[name] for name in dict.fromkeys(f.name for _, f in self.terms())}

    def _gaussian_parts(
        self, measure: Gaussian, batch: PyTree, key: Key[Array, ""] | None, samples: int
    ) -> dict[str, Float[Array, ""]]:
        if key is not None:
            return _gaussian_parts(self, measure, draws(measure, typed_key(key), samples), batch)
        parts, other = (_gaussian_parts(self, measure, rule, batch) for rule in quadrature(measure))
        for name, value in parts.items():
            require_agreement(f"the {name}", value, other[name])
        return parts

    def wasserstein_gradient(self, particles: PyTree, batch: PyTree = None) -> Particles:
        """∇V(θᵢ) + (1/N) Σⱼ ∇₁W(θᵢ, θⱼ) + ∇_W R(θᵢ) at each particle: the drift, without the entropy's
        part.

        Parameters
        ----------
        particles
            A pytree whose leaves share a leading axis, one row per particle.
        batch
            The data that the objective sees.
        """
        particles = require_particles("particles", particles, self.template())
        return _wasserstein_gradient(self, particles, require_representable("batch", batch))

    def stationarity(self, particles: PyTree, batch: PyTree = None) -> Float[Array, ""]:
        """How far the particles are from a stationary measure; 0 is stationary.

        For τ > 0 a kernel Stein discrepancy in coordinates that the particles whiten, also known as a kernel
        gradient discrepancy (Chazal, Kanagawa, Shen, Korba, Oates, 2025), whose level for N exact draws falls
        as 1/√N; for τ = 0 the norm of the Wasserstein gradient. It compares ensembles; `certify` says whether
        one is stationary.

        Parameters
        ----------
        particles
            A pytree whose leaves share a leading axis, one row per particle.
        batch
            The data that the objective sees.
        """
        particles = require_particles("particles", particles, self.template())
        return _stationarity(self, particles, require_representable("batch", batch))

    def certify(self, particles: PyTree, batch: PyTree = None) -> Certificate:
        """Whether the particles are stationary, in standard errors: for τ > 0, at the price of one gradient.

        At stationarity q has the score −∇U, U = (V + ∫W dQ + δR/δQ)/τ, so that E[∇U] = 0 and E[z ∂U/∂zᵀ] = I
        in any coordinates z. Both are tested in coordinates that the particles whiten themselves: for every
        coordinate of θ, along the principal axes, and in the directions that look worst. Exact draws pass
        with probability 0.999, whatever their number and dimension. With 1,000 particles in 50 dimensions a
        mean that is off by 0.3 standard deviations, or a standard deviation that is off by a fifth, is
        noticed in any coordinate or principal axis; with fewer than 50 particles only what is grossly wrong.

        It is local: it does not see whether modes have the right masses, or whether any were missed. With a
        `batch` it is the law of *that batch* that is tested: pass all of the data. Where particles interact,
        the score is their own, and standard errors come from leaving out blocks of them.
        """
        particles = require_particles("particles", particles, self.template())
        energy = self.free_energy(batch)
        return certify(energy, lambda sets: _wasserstein_gradients(self, sets, batch), particles)

    def describe(self) -> str:
        """Which algorithm this is, its V, W, τ and rest, and what the theory promises here."""
        return describe(self.terms())


def _warn_of_a_log_density(objective: AbstractFunctional) -> None:
    for _, term in objective.terms():
        name = getattr(getattr(term, "loss", None), "__name__", "")
        if isinstance(term, ExpectedLoss) and name.strip("_").lower() in _LOG_DENSITIES:
            warnings.warn(
                f"loss is a function called {name}, and a loss is minimised: to draw from that density "
                "pass its negative, with regulariser mf.KL(mf.Flat()); if it is a loss, rename it.",
                stacklevel=5,
            )


def value_parts(
    problem: Problem, measure: Empirical | Gaussian, points: Points | None, batch: PyTree
) -> dict[str, Float[Array, ""]]:
    """The summands of L(Q) by name; for a Gaussian with `points` for ∫ · dQ where there is no closed form."""
    parts: dict[str, Any] = {}
    for weight, functional in problem.terms():
        if isinstance(measure, Gaussian):
            assert points is not None
            value = functional.gaussian_value(measure, points, batch)
        else:
            value = evaluated(functional, measure, batch)
        parts[functional.name] = parts.get(functional.name, 0.0) + weight * value
    return parts


_gaussian_parts = eqx.filter_jit(value_parts)


@eqx.filter_jit
def _particle_parts(problem: Problem, measure: Empirical, batch: PyTree) -> dict[str, Float[Array, ""]]:
    return value_parts(problem, measure, None, batch)


@eqx.filter_jit
def _wasserstein_gradient(problem: Problem, particles: Particles, batch: PyTree) -> Particles:
    return problem.free_energy(batch).wasserstein_gradient(particles)


@eqx.filter_jit
def _wasserstein_gradients(problem: Problem, sets: PyTree, batch: PyTree) -> PyTree:
    """Of several sets of particles, one after the other: no more memory than for one."""
    return jax.lax.map(problem.free_energy(batch).wasserstein_gradient, sets)


@eqx.filter_jit
def _stationarity(problem: Problem, particles: Particles, batch: PyTree) -> Float[Array, ""]:
    return stationarity(problem.free_energy(batch), particles)


def deep_ensemble(loss: Callable) -> Problem:
    """DE: L(Q) = ∫ ℓ dQ (Lakshminarayanan et al., 2017).

    Parameters
    ----------
    loss
        ℓ(θ), or ℓ(θ, batch): a scalar, the mean over cases.
    """
    return Problem(loss)


def deep_langevin_ensemble(loss: Callable, prior: AbstractMeasure, *, kl: Any) -> Problem:
    """DLE: L(Q) = ∫ ℓ dQ + kl·KL(Q, P).

    Parameters
    ----------
    loss
        ℓ(θ), or ℓ(θ, batch): a scalar, the mean over cases.
    prior
        The reference P.
    kl
        The weight of KL, which is τ; 1/n for the Bayes posterior of n cases.
    """
    return Problem(loss, kl * KL(prior))


def deep_repulsive_ensemble(
    loss: Callable, prior: AbstractMeasure, kernel: AbstractKernel, *, mmd: Any
) -> Problem:
    """DRE: L(Q) = ∫ ℓ dQ + mmd·MMD²(Q, P).

    Parameters
    ----------
    loss
        ℓ(θ), or ℓ(θ, batch): a scalar, the mean over cases.
    prior
        The reference P.
    kernel
        κ.
    mmd
        The weight of MMD².
    """
    return Problem(loss, mmd * SquaredMMD(prior, kernel))


def deep_repulsive_langevin_ensemble(
    loss: Callable, prior: AbstractMeasure, kernel: AbstractKernel, *, mmd: Any, kl: Any
) -> Problem:
    """DRLE: L(Q) = ∫ ℓ dQ + mmd·MMD²(Q, P) + kl·KL(Q, P).

    Parameters
    ----------
    loss
        ℓ(θ), or ℓ(θ, batch): a scalar, the mean over cases.
    prior
        The reference P.
    kernel
        κ.
    mmd
        The weight of MMD².
    kl
        The weight of KL, which is τ; 1/n for the Bayes posterior of n cases.
    """
    return Problem(loss, mmd * SquaredMMD(prior, kernel) + kl * KL(prior))
