"""Scores of what Q predicts, not of what its members do: proper scoring rules of the mixture ∫ p(y | x, θ)
dQ.

Minimised with a divergence they give predictively oriented posteriors (McLatchie, Chérief-Abdellatif, Frazier
and Knoblauch, 2025) and prediction-centric ones (Shen, Knoblauch, Power and Oates, 2024), which do not
collapse to one member where the model is wrong.
"""

import math
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax.scipy.special import erf
from jaxtyping import Array, Float, PyTree

from measureflow.core.pytrees import Parameters, weighted_mean
from measureflow.spaces.empirical import Empirical
from measureflow.spaces.kernels import AbstractKernel, SquaredExponential
from measureflow.statement.free_energy import FreeEnergy
from measureflow.statement.functionals import AbstractFunctional, applied
from measureflow.statement.words import Words, kernel_words, number


class LogScore(AbstractFunctional):
    """−(1/n) Σᵢ log ∫ p(yᵢ | xᵢ, θ) dQ(θ): convex in Q, and by Jensen at most the expected loss.

    Parameters
    ----------
    loss
        A `NegativeLogLikelihood`, or any function (θ, batch) ↦ log p of every case, shape (cases,).
    """

    loss: Callable[..., Any]
    name: ClassVar[str] = "log score"
    convexity: ClassVar[str] = "convex"

    def __check_init__(self) -> None:
        if not callable(self.loss):
            raise TypeError(
                f"LogScore takes a NegativeLogLikelihood or a function (θ, batch) ↦ log p of every case, got "
                f"{self.loss!r}; pass mf.NegativeLogLikelihood(network, likelihood)."
            )

    def value(self, measure: Empirical, batch: PyTree = None) -> Float[Array, ""]:
        densities = jax.vmap(lambda theta: self.log_likelihood(theta, batch))(measure.particles)
        mixed = _log_mixture(measure.masses(), densities)
        return -weighted_mean(mixed, _case_weights(self.loss, batch))

    def log_likelihood(self, theta: Parameters, batch: PyTree = None) -> Float[Array, " cases"]:
        """log p(yᵢ | xᵢ, θ) of every case."""
        function = getattr(self.loss, "log_likelihood", self.loss)
        found = applied("LogScore loss", function, theta, batch)
        if getattr(found, "ndim", None) != 1:
            raise ValueError(
                f"LogScore needs log p of every case, shape (cases,), got shape {jnp.shape(found)}; return "
                "one number per case, not their mean."
            )
        return found

    def words(self, weight: Float[Array, ""]) -> Words:
        formula = f"{number(weight)}·(−E log ∫ p(y | x, θ) dQ)"
        return Words(formula, rest=formula)


def _log_mixture(
    masses: Float[Array, " n"], log_densities: Float[Array, "n cases"]
) -> Float[Array, " cases"]:
    """log Σᵢ wᵢ pᵢ, differentiable in wᵢ where it is 0: the logarithm of a weight is never taken."""
    largest = jax.lax.stop_gradient(jnp.max(log_densities, axis=0))
    shares = jnp.exp(log_densities - largest[None])
    mixed = jnp.matmul(masses.astype(shares.dtype), shares, precision=jax.lax.Precision.HIGHEST)
    return jnp.log(mixed) + largest


class RankedProbabilityScore(AbstractFunctional):
    """The CRPS of the mixture, (1/n) Σᵢ ∫ E|Y_θ − yᵢ| dQ − ½ ∬ E|Y_θ − Y_θ′| dQ dQ, with Y_θ ~ p(· | xᵢ, θ):

        V = E|Y_θ − y|,   W = −E|Y_θ − Y_θ′|.

    Parameters
    ----------
    loss
        A `NegativeLogLikelihood` whose law is Normal, or any function (θ, batch) ↦ (law of every case,
        targets), the law a NumPyro Normal or Delta. Of several targets, the scores are added.
    """

    loss: Callable[..., Any]
    name: ClassVar[str] = "ranked probability score"
    convexity: ClassVar[str] = "convex"

    def value(self, measure: Empirical, batch: PyTree = None) -> Float[Array, ""]:
        return _quadratic_value(self.free_energy(batch), measure)

    def free_energy(self, batch: PyTree = None) -> FreeEnergy:
        features, weights = Laws(self.loss, batch), _case_weights(self.loss, batch)
        return FreeEnergy(
            potential=eqx.Partial(_distance_to_targets, features, weights),
            interaction=MinusDistance(weights).on(features),
        )

    def words(self, weight: Float[Array, ""]) -> Words:
        w = number(weight)
        return Words(
            f"{w}·CRPS(∫ p(y | x, θ) dQ)", potential=f"{w}·E|Y_θ − y|", interaction=f"−{w}·E|Y_θ − Y_θ′|"
        )


class KernelScore(AbstractFunctional):
    """MMD² between the mixture and each observation, (1/n) Σᵢ MMD²_κ(∫ p(· | xᵢ, θ) dQ, δ(yᵢ)):

        V = −2 E κ(Y_θ, y),   W = 2 E κ(Y_θ, Y_θ′).

    Parameters
    ----------
    loss
        As in `RankedProbabilityScore`.
    kernel
        κ, a `SquaredExponential` on the space of targets.
    """

    loss: Callable[..., Any]
    kernel: SquaredExponential
    name: ClassVar[str] = "kernel score"
    convexity: ClassVar[str] = "convex"

    def __check_init__(self) -> None:
        if not isinstance(self.kernel, SquaredExponential):
            raise TypeError(
                f"KernelScore kernel must be a SquaredExponential on the targets, got {self.kernel!r}; its "
                "mean over a Normal law has a closed form."
            )

    def value(self, measure: Empirical, batch: PyTree = None) -> Float[Array, ""]:
        return _quadratic_value(self.free_energy(batch), measure) + self.constant(batch)

    def constant(self, batch: PyTree = None) -> Float[Array, ""]:
        """κ(y, y)."""
        weights = _case_weights(self.loss, batch)
        return jnp.ones(()) if weights is None else jnp.mean(weights)

    def free_energy(self, batch: PyTree = None) -> FreeEnergy:
        features, weights = Laws(self.loss, batch), _case_weights(self.loss, batch)
        mean_kernel = MeanKernel(self.kernel, weights)
        return FreeEnergy(
            potential=eqx.Partial(_minus_twice_at_targets, mean_kernel, features),
            interaction=2.0 * mean_kernel.on(features),
        )

    def words(self, weight: Float[Array, ""]) -> Words:
        w, kernel = number(2 * weight), kernel_words(self.kernel)
        return Words(
            f"{number(weight)}·MMD²(∫ p(y | x, θ) dQ, y)",
            potential=f"− {w}·E {kernel}(Y_θ, y)",
            interaction=f"{w}·E {kernel}(Y_θ, Y_θ′)",
        )


def _quadratic_value(energy: FreeEnergy, measure: Empirical) -> Float[Array, ""]:
    """∫ V dQ + ½ ∬ W dQ dQ of a weighted measure."""
    potential, kernel, masses = energy.potential, energy.interaction, measure.masses()
    assert potential is not None
    assert kernel is not None
    if measure.weights is None:
        return energy.potential_energy(measure.particles) + energy.interaction_energy(measure.particles)

    def against_all(theta: Parameters) -> Float[Array, ""]:
        return jnp.sum(masses * jax.vmap(lambda other: kernel(theta, other))(measure.particles))

    pairs = jnp.sum(masses * jax.vmap(against_all)(measure.particles))
    return measure.integrate(potential) + 0.5 * pairs


class Laws(eqx.Module):
    """θ ↦ location and scale of the predictive law of every case in a batch: features, so that a kernel on
    them costs one evaluation of the network per particle."""

    loss: Callable[..., Any]
    batch: PyTree

    def __call__(self, theta: Parameters) -> tuple[Float[Array, " cases k"], Float[Array, " cases k"]]:
        law, _ = self.predicted(theta)
        base = law.base_dist if isinstance(law, dist.Independent) else law
        if isinstance(base, dist.Normal):
            location, deviation = map(jnp.asarray, (base.loc, base.scale))
        elif isinstance(base, dist.Delta):
            location, deviation = jnp.asarray(base.v), jnp.zeros_like(base.v)
        else:
            raise TypeError(
                f"this score has a closed form for Normal and Delta laws, got {type(base).__name__}; use "
                "mf.LogScore(loss), which takes any law."
            )
        shape = law.batch_shape + law.event_shape
        rows = [jnp.broadcast_to(x, shape).reshape(shape[0], -1) for x in (location, deviation)]
        return rows[0], rows[1]

    def targets(self, theta: Parameters) -> Float[Array, " cases k"]:
        law, targets = self.predicted(theta)
        return jnp.asarray(targets).reshape(law.batch_shape[0], -1)

    def predicted(self, theta: Parameters) -> tuple[dist.Distribution, Array]:
        law, targets = applied("score loss", getattr(self.loss, "predicted", self.loss), theta, self.batch)
        return law, targets


def _case_weights(loss: Any, batch: PyTree) -> Float[Array, " cases"] | None:
    return loss.case_weights(batch) if hasattr(loss, "case_weights") else None


def _mean_absolute(location: Array, variance: Array) -> Array:
    """E|N(m, v)| = √(2v/π) exp(−m²/2v) + m erf(m/√2v), and |m| where v = 0."""
    spread_out = variance > 0
    deviation = jnp.sqrt(jnp.where(spread_out, variance, 1.0))
    ratio = location / deviation
    smooth = deviation * math.sqrt(2 / math.pi) * jnp.exp(-0.5 * ratio**2) + location * erf(
        ratio / math.sqrt(2)
    )
    return jnp.where(spread_out, smooth, jnp.abs(location))


def _distance_to_targets(features: Laws, weights: Array | None, theta: Parameters) -> Float[Array, ""]:
    location, deviation = features(theta)
    distances = _mean_absolute(location - features.targets(theta), deviation**2)
    return weighted_mean(jnp.sum(distances, axis=1), weights)


class MinusDistance(AbstractKernel):
    """−(1/n) Σᵢ E|Yᵢ − Y′ᵢ| of two lists of Normal laws: conditionally positive definite."""

    weights: Float[Array, " cases"] | None

    def __call__(self, x: PyTree, y: PyTree) -> Float[Array, ""]:
        distances = _mean_absolute(x[0] - y[0], x[1] ** 2 + y[1] ** 2)
        return -weighted_mean(jnp.sum(distances, axis=1), self.weights)


class MeanKernel(AbstractKernel):
    """(1/n) Σᵢ E κ(Yᵢ, Y′ᵢ) = (1/n) Σᵢ Π (1 + v/σ²)^−½ exp(−d²/2(σ² + v)), d and v the difference of the
    means and the sum of the variances."""

    kernel: SquaredExponential
    weights: Float[Array, " cases"] | None

    def __call__(self, x: PyTree, y: PyTree) -> Float[Array, ""]:
        square = self.kernel.lengthscale**2
        difference, variance = x[0] - y[0], x[1] ** 2 + y[1] ** 2
        logarithms = -0.5 * (jnp.log1p(variance / square) + difference**2 / (square + variance))
        return weighted_mean(jnp.exp(jnp.sum(logarithms, axis=1)), self.weights)


def _minus_twice_at_targets(mean_kernel: MeanKernel, features: Laws, theta: Parameters) -> Float[Array, ""]:
    targets = features.targets(theta)
    return -2 * mean_kernel(features(theta), (targets, jnp.zeros_like(targets)))
