"""The statement: L(Q) = ∫ ℓ dQ + Σₖ wₖ Dₖ(Q, Pₖ), and what follows from it."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, PyTree

from measureflow.core.pytrees import Parameters, Particles, shapes_of, shown_shapes
from measureflow.core.validation import require_count, require_particles, require_same_shape, typed_key
from measureflow.numerics.integration import Integral, integral
from measureflow.spaces.kernels import AbstractKernel
from measureflow.spaces.measures import AbstractMeasure, Empirical, Gaussian
from measureflow.statement import stationarity as stein
from measureflow.statement.describe import describe
from measureflow.statement.divergences import KL, AbstractDivergence, AbstractRegulariser, SquaredMMD
from measureflow.statement.free_energy import FreeEnergy


class Problem(eqx.Module):
    """Minimise L(Q) = ∫ ℓ dQ + Σₖ wₖ Dₖ(Q, Pₖ) over probability measures Q.

    `loss(θ)`, or `loss(θ, batch)` where the problem has data, is a scalar: the *mean* over cases, so
    that it means the same for any batch size. The Bayes posterior is KL weight 1/n for n cases. A
    loss is part of the program: arrays that vary belong in the batch, or in an `eqx.Module`.
    """

    loss: Callable[..., Float[Array, ""]]
    regulariser: AbstractRegulariser | None = None

    def __check_init__(self) -> None:
        if not callable(self.loss):
            raise TypeError(
                f"loss must be a function θ ↦ ℓ(θ), got {self.loss!r}; pass the function, not its value."
            )
        if self.regulariser is not None and not isinstance(self.regulariser, AbstractRegulariser):
            raise TypeError(
                f"regulariser must be built from KL and SquaredMMD, got {self.regulariser!r}; "
                "for example 1.0 * mf.KL(prior)."
            )
        templates = self._templates()
        if any(shapes_of(template) != shapes_of(templates[0]) for template in templates):
            shown = [shown_shapes(template) for template in templates]
            raise ValueError(
                f"the references are on different spaces, got shapes {shown}; give all the shape of θ."
            )

    def terms(self) -> tuple[tuple[Float[Array, ""], AbstractDivergence], ...]:
        """The weighted divergences of the regulariser."""
        return () if self.regulariser is None else self.regulariser.terms()

    def _templates(self) -> list[Parameters]:
        found = [divergence.reference.template() for _, divergence in self.terms()]
        return [template for template in found if template is not None]

    def template(self) -> Parameters | None:
        """A point shaped as the references say θ is; None where they leave that open."""
        return next(iter(self._templates()), None)

    def loss_energy(self, batch: PyTree = None) -> FreeEnergy:
        """∫ ℓ dQ as a free energy: V = ℓ."""
        return FreeEnergy(potential=eqx.Partial(_evaluate, self.loss, batch))

    def free_energy(self, batch: PyTree = None) -> FreeEnergy:
        """The normal form: V = ℓ − w log p − 2w′μ_P, W = 2w′κ, τ = w."""
        if self.regulariser is None:
            return self.loss_energy(batch)
        return self.loss_energy(batch) + self.regulariser.free_energy()

    def value(
        self,
        measure: AbstractMeasure,
        batch: PyTree = None,
        *,
        key: Key[Array, ""] | None = None,
        samples: int = 10_000,
    ) -> Float[Array, ""]:
        """L(Q) = ∫ ℓ dQ + Σₖ wₖ Dₖ(Q, Pₖ).

        MMD² of particles is exact. KL needs the entropy of Q: closed form for a Gaussian, a nearest-neighbour
        estimate for particles where N is large against J, else an error. ∫ ℓ dQ of a Gaussian is
        quadrature in up to two dimensions, and Monte Carlo with `samples` draws where `key` is given; so is
        its MMD² for kernels without a closed form, for which `key` is required.
        The infinite constants of a `Flat` reference are left out: KL is then −H(Q), MMD² is ∬κ dQdQ.
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
        """The summands of L(Q) by name: the loss, and each divergence times its weight."""
        if not isinstance(measure, Empirical | Gaussian):
            raise TypeError(
                f"measure must be Empirical or Gaussian, got {type(measure).__name__}; "
                "use mf.Empirical(measure.sample(key, n))."
            )
        if isinstance(measure, Empirical):
            require_particles("measure", measure.particles, self.template())
        elif self.template() is not None:
            require_same_shape("measure", measure.mean, self.template())
        samples = require_count("samples", samples, 2, "10,000 is a start.")
        key = None if key is None else typed_key(key)
        parts = _value_parts(self, measure, integral(measure, key, samples), batch)
        # Compiled functions return dictionaries in alphabetical order; this is the order of L(Q).
        return {name: parts[name] for name in ("loss", *dict.fromkeys(d.name for _, d in self.terms()))}

    def wasserstein_gradient(self, particles: PyTree, batch: PyTree = None) -> Particles:
        """∇V(θᵢ) + (1/N) Σⱼ ∇₁W(θᵢ, θⱼ) at each particle: the drift, without the entropy's part."""
        particles = require_particles("particles", particles, self.template())
        return _wasserstein_gradient(self, particles, batch)

    def stationarity(self, particles: PyTree, batch: PyTree = None) -> Float[Array, ""]:
        """How far the particles are from a stationary measure; 0 is stationary.

        For τ > 0 a kernel Stein discrepancy, whose level for N exact draws falls as 1/√N; for τ = 0
        the norm of the Wasserstein gradient.
        """
        particles = require_particles("particles", particles, self.template())
        return _stationarity(self, particles, batch)

    def describe(self) -> str:
        """Which algorithm this is, its V, W and τ, and what the theory promises here."""
        return describe(self.terms())


def _evaluate(loss: Callable[..., Any], batch: PyTree, theta: Parameters) -> Float[Array, ""]:
    value = loss(theta) if batch is None else loss(theta, batch)
    if not hasattr(value, "dtype") or not jnp.issubdtype(value.dtype, jnp.floating):
        kind = getattr(value, "dtype", type(value).__name__)
        raise TypeError(f"loss must return a floating-point scalar, got {kind}; return a JAX array.")
    if value.shape != ():
        raise ValueError(
            f"loss must return a scalar, got shape {value.shape}; "
            "take the mean over cases, and the sum over coordinates, with jnp.mean or jnp.sum."
        )
    return value


def value_parts(
    problem: Problem, measure: Empirical | Gaussian, rule: Integral, batch: PyTree
) -> dict[str, Float[Array, ""]]:
    """The summands of L(Q), with `rule` for ∫ · dQ where there is no closed form."""
    parts = {"loss": rule.mean(eqx.Partial(_evaluate, problem.loss, batch))}
    for weight, divergence in problem.terms():
        value = weight * divergence.value(measure, rule)
        parts[divergence.name] = parts.get(divergence.name, 0.0) + value
    return parts


_value_parts = eqx.filter_jit(value_parts)


@eqx.filter_jit
def _wasserstein_gradient(problem: Problem, particles: Particles, batch: PyTree) -> Particles:
    return problem.free_energy(batch).wasserstein_gradient(particles)


@eqx.filter_jit
def _stationarity(problem: Problem, particles: Particles, batch: PyTree) -> Float[Array, ""]:
    return stein.stationarity(problem.free_energy(batch), particles)


def deep_ensemble(loss: Callable) -> Problem:
    """DE: L(Q) = ∫ ℓ dQ (Lakshminarayanan et al., 2017)."""
    return Problem(loss)


def deep_langevin_ensemble(loss: Callable, prior: AbstractMeasure, *, kl: Any) -> Problem:
    """DLE: L(Q) = ∫ ℓ dQ + kl·KL(Q, P)."""
    return Problem(loss, kl * KL(prior))


def deep_repulsive_ensemble(
    loss: Callable, prior: AbstractMeasure, kernel: AbstractKernel, *, mmd: Any
) -> Problem:
    """DRE: L(Q) = ∫ ℓ dQ + mmd·MMD²(Q, P)."""
    return Problem(loss, mmd * SquaredMMD(prior, kernel))


def deep_repulsive_langevin_ensemble(
    loss: Callable, prior: AbstractMeasure, kernel: AbstractKernel, *, mmd: Any, kl: Any
) -> Problem:
    """DRLE: L(Q) = ∫ ℓ dQ + mmd·MMD²(Q, P) + kl·KL(Q, P)."""
    return Problem(loss, mmd * SquaredMMD(prior, kernel) + kl * KL(prior))
