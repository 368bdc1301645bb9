"""Kernel mean embeddings μ_P(θ) = ∫ κ(θ, θ′) dP(θ′), and their means ∬ κ dP dQ, in closed form.

Where no closed form exists there is no hidden randomness either: the error points to
`Empirical(prior.sample(key, m))`, whose exact embedding is the Monte-Carlo one.
"""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jax.interpreters import partial_eval
from jax.scipy.special import erf
from jaxtyping import Array, Float, PyTree

from measureflow.core.pytrees import Parameters, dimension, is_concrete, squared_distances, subtract, total
from measureflow.spaces.empirical import Empirical
from measureflow.spaces.kernels import (
    AbstractKernel,
    AbstractRadialKernel,
    KernelCombination,
    Matern,
    PullBack,
    RadialCombination,
    SquaredExponential,
    Whiten,
    radial,
)
from measureflow.spaces.measures import AbstractMeasure, Flat, Gaussian, Uniform
from measureflow.spaces.projections import RandomProjection

# A push-forward through unnamed affine features builds its matrix; beyond this many entries that is
# no longer a detail.
_LARGEST_MATRIX = 10_000_000


class NoClosedFormError(ValueError):
    """There is no closed form for this kernel and measure; the message names a way around it."""


class SquaredExponentialOfGaussian(eqx.Module):
    """∫ exp(−‖θ−θ′‖²/2σ²) dN(m, Σ)(θ′) = |I + Σ/σ²|^-½ exp(−½ (θ−m)ᵀ(Σ + σ²I)⁻¹(θ−m)).

    As N(m, Σ + σ²I), up to its normalisation: a Gaussian bump, kept as one.
    """

    bump: Gaussian
    log_height: Float[Array, ""]

    def __init__(self, kernel: SquaredExponential, reference: Gaussian):
        variance = kernel.lengthscale**2
        if reference.full_rank:
            covariance = reference.covariance()
            identity = jnp.eye(covariance.shape[0], dtype=covariance.dtype)
            factor = jnp.linalg.cholesky(identity + covariance / variance)
            self.bump = Gaussian(reference.mean, kernel.lengthscale * factor)
            self.log_height = -jnp.sum(jnp.log(jnp.diagonal(factor)))
        else:
            scale = jax.tree.map(lambda s: jnp.sqrt(s**2 + variance), reference.scale)
            self.bump = Gaussian(reference.mean, scale)
            # log1p, not a difference of logarithms: in many dimensions that would cancel.
            logarithms = jax.tree.map(
                lambda m, s: jnp.broadcast_to(jnp.log1p(s**2 / variance), m.shape),
                reference.mean,
                reference.scale,
            )
            self.log_height = -0.5 * total(logarithms)

    def __call__(self, theta: Parameters) -> Float[Array, ""]:
        squares = jax.tree.map(jnp.square, self.bump.to_standard(theta))
        return jnp.exp(self.log_height - 0.5 * total(squares))


class SquaredExponentialOfUniform(eqx.Module):
    """∏_d σ√(π/2)/(b_d−a_d) · (erf((b_d−θ_d)/√2σ) − erf((a_d−θ_d)/√2σ))."""

    kernel: SquaredExponential
    reference: Uniform

    def __call__(self, theta: Parameters) -> Float[Array, ""]:
        width = jnp.sqrt(2.0) * self.kernel.lengthscale
        factors = jax.tree.map(
            lambda x, a, b: jnp.prod(
                jnp.sqrt(jnp.pi) / 2 * width / (b - a) * (erf((b - x) / width) - erf((a - x) / width))
            ),
            theta,
            self.reference.low,
            self.reference.high,
        )
        return jnp.prod(jnp.stack(jax.tree.leaves(factors)))


class EmpiricalEmbedding(eqx.Module):
    """Σⱼ wⱼ κ(θ, θⱼ): exact for the empirical measure of M atoms."""

    kernel: AbstractKernel
    reference: Empirical

    def __call__(self, theta: Parameters) -> Float[Array, ""]:
        atoms = self.reference.particles
        if isinstance(self.kernel, AbstractRadialKernel):
            one = jax.tree.map(lambda leaf: leaf[None], theta)
            return self._mean(radial(self.kernel, squared_distances(one, atoms))[0])
        return self._mean(jax.vmap(self.kernel, in_axes=(None, 0))(theta, atoms))

    def _mean(self, values: Float[Array, " m"]) -> Float[Array, ""]:
        return jnp.average(values, weights=self.reference.weights)


class ComposedEmbedding(eqx.Module):
    """The embedding of a pull-back: μ_{f#P}(f(θ)), with f#P the push-forward of P."""

    embedding: Callable[[PyTree], Float[Array, ""]]
    features: Callable[[Parameters], PyTree]

    def __call__(self, theta: Parameters) -> Float[Array, ""]:
        return self.embedding(self.features(theta))


class CombinedEmbedding(eqx.Module):
    """Σₖ wₖ μₖ."""

    weights: tuple[Float[Array, ""], ...]
    embeddings: tuple[Callable[[Parameters], Float[Array, ""]], ...]

    def __call__(self, theta: Parameters) -> Float[Array, ""]:
        values = [w * mu(theta) for w, mu in zip(self.weights, self.embeddings, strict=True)]
        return sum(values[1:], start=values[0])


def kernel_mean_embedding(
    kernel: AbstractKernel, reference: AbstractMeasure
) -> Callable[[Parameters], Float[Array, ""]] | None:
    """μ_P(θ) = ∫ κ(θ, θ′) dP(θ′) as a function of θ, or None where it is constant (a flat reference). Raises
    `NoClosedFormError` where there is no closed form.

    Parameters
    ----------
    kernel
        κ.
    reference
        P.
    """
    if isinstance(reference, Flat):
        if not _integrates_to_a_constant(kernel):
            raise NoClosedFormError(
                f"the embedding of a Flat reference is constant only for translation-invariant "
                f"integrable kernels, got {type(kernel).__name__}; use SquaredExponential or Matern, "
                "or a proper reference."
            )
        return None
    match kernel, reference:
        case AbstractRadialKernel(), Empirical():
            return EmpiricalEmbedding(kernel, reference)
        case ((RadialCombination() | KernelCombination()), _):
            embeddings = tuple(_embedded(k, reference) for k in kernel.kernels)
            return CombinedEmbedding(kernel.weights, embeddings)
        case PullBack(), _:
            pushed = push_forward(kernel.features, reference)
            return ComposedEmbedding(_embedded(kernel.kernel, pushed), kernel.features)
        case SquaredExponential(), Gaussian():
            return SquaredExponentialOfGaussian(kernel, reference)
        case SquaredExponential(), Uniform():
            return SquaredExponentialOfUniform(kernel, reference)
        case _, Empirical():
            return EmpiricalEmbedding(kernel, reference)
    raise NoClosedFormError(
        f"no closed-form kernel mean embedding for {type(kernel).__name__} and "
        f"{type(reference).__name__}; use reference=mf.Empirical(prior.sample(key, 1000)), whose "
        "embedding is exact, or SquaredExponential with a Gaussian or Uniform reference."
    )


def _integrates_to_a_constant(kernel: AbstractKernel) -> bool:
    """Whether ∫ κ(θ, θ′) dθ′ is finite and the same for all θ."""
    if isinstance(kernel, RadialCombination):
        return all(map(_integrates_to_a_constant, kernel.kernels))
    return isinstance(kernel, SquaredExponential | Matern)


def _embedded(kernel: AbstractKernel, reference: AbstractMeasure) -> Callable[[Parameters], Array]:
    embedding = kernel_mean_embedding(kernel, reference)
    assert embedding is not None, "flat references are dealt with before kernels are taken apart"
    return embedding


def mean_kernel(kernel: AbstractKernel, p: AbstractMeasure, q: AbstractMeasure) -> Float[Array, ""]:
    """∬ κ dP dQ; raises `NoClosedFormError` where none is known."""
    if isinstance(kernel, RadialCombination | KernelCombination):
        values = [w * mean_kernel(k, p, q) for w, k in zip(kernel.weights, kernel.kernels, strict=True)]
        return sum(values[1:], start=values[0])
    if isinstance(kernel, PullBack):
        return mean_kernel(kernel.kernel, push_forward(kernel.features, p), push_forward(kernel.features, q))
    if isinstance(p, Empirical):
        # In blocks of atoms, so that N² numbers never exist at once.
        values = jax.lax.map(_embedded(kernel, q), p.particles, batch_size=256)
        return jnp.average(values, weights=p.weights)
    if isinstance(q, Empirical):
        return mean_kernel(kernel, q, p)
    match kernel, p, q:
        case SquaredExponential(), Gaussian(), Gaussian():
            return _gaussian_overlap(kernel, p, q)
        case SquaredExponential(), Uniform(), Uniform() if p is q:
            return _uniform_self_overlap(kernel, p)
    raise NoClosedFormError(
        f"no closed form for the mean of {type(kernel).__name__} over {type(p).__name__} and "
        f"{type(q).__name__}; use mf.Empirical(measure.sample(key, n)) for one of them."
    )


def _gaussian_overlap(kernel: SquaredExponential, p: Gaussian, q: Gaussian) -> Float[Array, ""]:
    """∬ κ dP dQ = ∫ κ(0, ·) dN(m_Q − m_P, Σ_P + Σ_Q): the embedding of a difference."""
    if p.full_rank or q.full_rank:
        scale: PyTree = jnp.linalg.cholesky(p.covariance() + q.covariance())
    else:
        scale = jax.tree.map(lambda a, b: jnp.sqrt(a**2 + b**2), p.scale, q.scale)
    difference = Gaussian(subtract(q.mean, p.mean), scale)
    return SquaredExponentialOfGaussian(kernel, difference)(jax.tree.map(jnp.zeros_like, p.mean))


def _uniform_self_overlap(kernel: SquaredExponential, p: Uniform) -> Float[Array, ""]:
    """∏_d with L = b_d−a_d:  √(2π)σ/L · erf(L/√2σ) − 2σ²/L² · (1 − exp(−L²/2σ²))."""
    sigma = kernel.lengthscale

    def factor(low: Array, high: Array) -> Array:
        ratio = (high - low) / (jnp.sqrt(2.0) * sigma)
        return jnp.prod(jnp.sqrt(jnp.pi) * erf(ratio) / ratio + jnp.expm1(-(ratio**2)) / ratio**2)

    return jnp.prod(jnp.stack(jax.tree.leaves(jax.tree.map(factor, p.low, p.high))))


def push_forward(features: Callable[[Parameters], PyTree], measure: AbstractMeasure) -> AbstractMeasure:
    """f#P: the law of f(θ) for θ ~ P. Known for empirical measures, and for affine f of Gaussians."""
    if isinstance(measure, Empirical):
        return Empirical(jax.vmap(features)(measure.particles), measure.weights)
    if isinstance(measure, Gaussian):
        if isinstance(features, Whiten) and not (features.prior.full_rank or measure.full_rank):
            scale = jax.tree.map(jnp.divide, measure.scale, features.prior.scale)
            return Gaussian(features(measure.mean), scale)
        if isinstance(features, RandomProjection) and not measure.full_rank:
            variances = features.summed(jax.tree.map(jnp.square, measure.deviations()), signed=False)
            return Gaussian(features(measure.mean), jnp.sqrt(variances))
        if is_affine(features, measure.mean):
            return _affine_push_forward(features, measure)
    raise NoClosedFormError(
        f"the law of these features under a {type(measure).__name__} has no closed form (they are not "
        "affine, or it is not Gaussian); use reference=mf.Empirical(prior.sample(key, 1000))."
    )


def is_affine(features: Callable[[Parameters], PyTree], at: Parameters) -> bool:
    """Whether f is affine: its derivative, read off its program, does not depend on θ, and f(θ) is
    f(0) + Df·θ at points far apart, which tells steps like sign and floor from constants."""
    leaves = len(jax.tree.leaves(at))
    jaxpr = jax.make_jaxpr(lambda x, v: jax.jvp(features, (x,), (v,))[1])(at, at).jaxpr
    _, used = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    return not any(used[:leaves]) and _is_its_linearisation(features, at)


def _is_its_linearisation(features: Callable[[Parameters], PyTree], at: Parameters) -> bool:
    flat, unravel = ravel_pytree(at)
    origin = jnp.zeros_like(flat)
    for point in (10 * jnp.cos(jnp.arange(1.0, flat.size + 1)), -7 * jnp.sin(jnp.arange(1.0, flat.size + 1))):
        theta = point.astype(flat.dtype)
        constant, linear = jax.jvp(lambda x: ravel_pytree(features(unravel(x)))[0], (origin,), (theta,))
        value = ravel_pytree(features(unravel(theta)))[0]
        size = jnp.max(jnp.abs(constant)) + jnp.max(jnp.abs(linear))
        # Values under a transformation cannot be looked at; there the program alone decides.
        if is_concrete(value) and not jnp.all(jnp.abs(value - constant - linear) <= 1e-3 * size):
            return False
    return True


def _affine_push_forward(features: Callable[[Parameters], PyTree], measure: Gaussian) -> Gaussian:
    """N(f(m), A Σ Aᵀ)."""
    flat, unravel = ravel_pytree(measure.mean)
    mean = features(measure.mean)
    if flat.size * dimension(mean) > _LARGEST_MATRIX:
        raise NoClosedFormError(
            f"these affine features map {flat.size} coordinates to {dimension(mean)}: their matrix is "
            "too large to build; use mf.Whiten(prior), or reference=mf.Empirical(prior.sample(key, 1000))."
        )
    matrix = jax.jacfwd(lambda x: ravel_pytree(features(unravel(x)))[0])(flat)
    if is_concrete(matrix) and not jnp.any(matrix):
        raise ValueError("these features are constant: they tell no two particles apart; use others.")
    if measure.full_rank:
        factor = matrix @ measure.scale
    else:
        factor = matrix * ravel_pytree(measure.deviations())[0][None, :]
    covariance = factor @ factor.T
    # Features may be linearly dependent. The covariance is known up to rounding, so a ridge of that
    # size changes nothing and makes the factor exist.
    ridge = 8 * covariance.shape[0] * jnp.finfo(covariance.dtype).eps * jnp.max(jnp.diagonal(covariance))
    identity = jnp.eye(covariance.shape[0], dtype=covariance.dtype)
    return Gaussian(mean, jnp.linalg.cholesky(covariance + ridge * identity))
