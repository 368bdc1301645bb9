"""How the entropy's part of the gradient, τ∇log q, is realised: by noise, or by an estimate of the score.

An estimate makes the flow deterministic, so that any optimiser may take its steps.
"""

import abc
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from measureflow.core.pytrees import Particles, add, as_matrix, like_rows, particle_count
from measureflow.core.showing import one_line
from measureflow.core.validation import positive_number, require_positive
from measureflow.numerics.density_sums import density_sum, gram_matrix
from measureflow.numerics.interactions import AbstractInteractions, RandomBatches, RandomFeatures
from measureflow.numerics.pair_sums import well_conditioned
from measureflow.numerics.stein_sums import stein_sum
from measureflow.spaces.bandwidths import KernelOrBandwidth, kernel_at, require_kernel
from measureflow.spaces.kernels import AbstractKernel, PullBack

_EXACT = jax.lax.Precision.HIGHEST


class AbstractEntropy(eqx.Module):
    """How −τ∇log q moves particles."""

    def __repr__(self) -> str:
        return one_line(self)


class Noise(AbstractEntropy):
    """√(2τ) dB: the flow's law is q* as N, t → ∞ and η → 0."""


class AbstractScore(AbstractEntropy):
    """−τ∇log q̂, an estimate from the particles themselves. Of a kernel on features f, q̂ is the density of
    f(θ), and ∇log q̂ = Df(θ)ᵀ ∇log q̂_f(f(θ)): features such as `network.at(anchors)` repel functions, as the
    f-WGD of D'Angelo and Fortuin (2021) does."""

    kernel: eqx.AbstractVar[KernelOrBandwidth]

    def __check_init__(self) -> None:
        require_kernel(f"{type(self).__name__} kernel", self.kernel)

    def score(self, particles: Particles, interactions: AbstractInteractions) -> Particles:
        """∇log q̂(θᵢ) for every particle.

        Parameters
        ----------
        particles
            A pytree whose leaves share a leading axis, one row per particle.
        interactions
            How sums over pairs are made.
        """
        return self._pulled_back(kernel_at(self.kernel, particles), particles, interactions)

    def _pulled_back(
        self, kernel: AbstractKernel, particles: Particles, interactions: AbstractInteractions
    ) -> Particles:
        if not isinstance(kernel, PullBack):
            return self.estimate(kernel, particles, interactions)
        features, pull_back = jax.vjp(jax.vmap(kernel.features), particles)
        return pull_back(self._pulled_back(kernel.kernel, features, interactions))[0]

    @abc.abstractmethod
    def estimate(
        self, kernel: AbstractKernel, particles: Particles, interactions: AbstractInteractions
    ) -> Particles:
        """∇log q̂(θᵢ), for a kernel on the particles as they are."""


class KernelDensity(AbstractScore):
    """q̂ = (1/N) Σⱼ k(·, θⱼ):   ∇log q̂(θᵢ) = Σⱼ ∇₁k(θᵢ, θⱼ) / Σⱼ k(θᵢ, θⱼ)   (Liu, Zhuo, Cheng, Zhang and Zhu,
    2019; WGD-KDE of D'Angelo and Fortuin, 2021).

    q̂ is wider than the particles by the kernel: with a squared exponential of lengthscale h and the target
    N(0, σ²) their variance is σ² − h² as N → ∞.

    Parameters
    ----------
    kernel
        k: a kernel, or `MedianBandwidth()`.
    """

    kernel: KernelOrBandwidth

    def estimate(
        self, kernel: AbstractKernel, particles: Particles, interactions: AbstractInteractions
    ) -> Particles:
        density, slope = _density(kernel, particles, None, interactions)
        return _over(slope, density)


class Blob(AbstractScore):
    """The gradient of ∫ log(k ∗ q) dq, an entropy that particles have (Carrillo, Craig and Patacchini, 2019;
    Chen, Zhang, Wang, Li and Chen, 2018):

        Σⱼ ∇₁k(θᵢ, θⱼ)/Σₗ k(θᵢ, θₗ) + Σⱼ ∇₁k(θᵢ, θⱼ)/Σₗ k(θⱼ, θₗ).

    With a squared exponential of lengthscale h and the target N(0, σ²), the best Gaussian has variance s −
    h², s²/σ² − s − h² = 0: nearer to σ² than that of `KernelDensity`.

    Parameters
    ----------
    kernel
        k: a kernel, or `MedianBandwidth()`.
    """

    kernel: KernelOrBandwidth

    def estimate(
        self, kernel: AbstractKernel, particles: Particles, interactions: AbstractInteractions
    ) -> Particles:
        density, slope = _density(kernel, particles, None, interactions)
        _, of_others = _density(kernel, particles, 1 / density, interactions)
        return add(_over(slope, density), of_others)


def _ridge(value: Any) -> Float[Array, ""]:
    return positive_number("SteinGradientEstimator ridge", value, "0.01 is a start.")


class SteinGradientEstimator(AbstractScore):
    """Stein's identity E[k(·, θ)∇log q(θ) + ∇₁k(θ, ·)] = 0, solved by ridge regression (Li and Turner, 2018):

        ∇log q̂ = −(K + ηI)⁻¹ ∇K,   Kᵢⱼ = k(θᵢ, θⱼ),   (∇K)ᵢ = Σⱼ ∇₁k(θⱼ, θᵢ).

    N² numbers exist at once.

    Parameters
    ----------
    kernel
        k: a kernel, or `MedianBandwidth()`.
    ridge
        η > 0.
    """

    kernel: KernelOrBandwidth
    ridge: Float[Array, ""] = eqx.field(converter=_ridge, default=0.01)

    def estimate(
        self, kernel: AbstractKernel, particles: Particles, interactions: AbstractInteractions
    ) -> Particles:
        gram, negative_slopes = _stein_equation(kernel, particles, interactions)
        ridge = self.ridge.astype(gram.dtype) * jnp.eye(len(gram), dtype=gram.dtype)
        factor = jax.scipy.linalg.cho_factor(gram + ridge, lower=True)
        return like_rows(jax.scipy.linalg.cho_solve(factor, negative_slopes), particles)


def _share(value: Any) -> Float[Array, ""]:
    return positive_number("SpectralSteinGradientEstimator share", value, "0.99 is a start.")


class SpectralSteinGradientEstimator(AbstractScore):
    """Stein's identity in the first eigenfunctions of the kernel, ψₘ(θ) = √N/λₘ Σⱼ uₘⱼ k(θ, θⱼ) with the
    eigenpairs (λₘ, uₘ) of K (Shi, Sun and Zhu, 2018):

        ∇log q̂ = Σₘ βₘ ψₘ,   βₘ = −(1/N) Σᵢ ∇ψₘ(θᵢ),

    which at the particles is −Σₘ uₘuₘᵀ/λₘ ∇K. N² numbers exist at once.

    Parameters
    ----------
    kernel
        k: a kernel, or `MedianBandwidth()`.
    share
        As many eigenfunctions are used as hold this share of Σₘ λₘ, at most 1.
    """

    kernel: KernelOrBandwidth
    share: Float[Array, ""] = eqx.field(converter=_share, default=0.99)

    def __check_init__(self) -> None:
        require_positive(
            "SpectralSteinGradientEstimator 1 − share", 1 - self.share, "a share is < 1; 0.99 is a start."
        )

    def estimate(
        self, kernel: AbstractKernel, particles: Particles, interactions: AbstractInteractions
    ) -> Particles:
        gram, negative_slopes = _stein_equation(kernel, particles, interactions)
        values, vectors = jnp.linalg.eigh(gram)
        # The largest come last; those count that are needed to reach the share.
        above = jnp.cumsum(values[::-1])[::-1] - values
        used = above < self.share.astype(values.dtype) * jnp.sum(values)
        inverse = jnp.where(used, 1 / jnp.where(used, values, 1.0), 0.0)
        parts = jnp.matmul(vectors.T, negative_slopes, precision=_EXACT)
        return like_rows(jnp.matmul(vectors, inverse[:, None] * parts, precision=_EXACT), particles)


def _density(
    kernel: AbstractKernel,
    particles: Particles,
    weights: Float[Array, " n"] | None,
    interactions: AbstractInteractions,
) -> tuple[Float[Array, " n"], Particles]:
    """(1/N) Σⱼ wⱼ k(θᵢ, θⱼ) and (1/N) Σⱼ wⱼ ∇₁k(θᵢ, θⱼ)."""
    conditioned, n = well_conditioned(kernel, particles), particle_count(particles)
    weights = jnp.ones(n) if weights is None else weights
    return interactions.mean_over_pairs(eqx.Partial(density_sum, kernel), (conditioned, weights))


def _over(slope: Particles, density: Float[Array, " n"]) -> Particles:
    return jax.tree.map(lambda leaf: leaf / density.reshape(-1, *[1] * (leaf.ndim - 1)), slope)


def _stein_equation(
    kernel: AbstractKernel, particles: Particles, interactions: AbstractInteractions
) -> tuple[Float[Array, "n n"], Float[Array, "n J"]]:
    """K, and −∇K."""
    conditioned, n = well_conditioned(kernel, particles), particle_count(particles)
    nothing = jax.tree.map(jnp.zeros_like, particles)
    summed = eqx.Partial(stein_sum, kernel, jnp.asarray(float(n)))
    negative_slopes = interactions.mean_over_pairs(summed, (conditioned, nothing))
    return gram_matrix(kernel, particles), as_matrix(negative_slopes)


def require_entropy(flow: Any) -> None:
    """One way for the entropy to enter: noise, or an estimate from all pairs."""
    if not isinstance(flow.entropy, AbstractEntropy):
        raise TypeError(
            f"entropy must say how −τ∇log q enters, got {flow.entropy!r}; pass mf.Noise(), "
            "mf.KernelDensity(kernel) or mf.Blob(kernel)."
        )
    if isinstance(flow.entropy, Noise):
        return
    for name, given in (("integrator", flow.integrator), ("metropolis", flow.metropolis or None)):
        if given is not None:
            raise ValueError(
                f"give WassersteinFlow either {name} or entropy, got {given} and {flow.entropy}: an estimate "
                f"takes the place of noise, and both would count the entropy twice; leave {name} out, or use "
                "entropy=mf.Noise()."
            )
    some_only = isinstance(flow.interactions, RandomBatches | RandomFeatures)
    if some_only:
        raise ValueError(
            f"interactions={flow.interactions} was given with entropy={flow.entropy}: an estimate of the "
            "score from some pairs is biased; use mf.ExactInteractions(), or entropy=mf.Noise()."
        )
