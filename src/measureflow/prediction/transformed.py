"""Laws of numbers y of which a network predicts a function: of log y, or of a power."""

import abc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpyro.distributions import Distribution, MixtureSameFamily, Normal

from measureflow.core.showing import counted
from measureflow.prediction.cumulative import class_probabilities
from measureflow.prediction.mixture import Mixture, Numbers


class TransformedMixture(Distribution):
    """The law of y = ψ⁻¹(Y), for a mixture Y of Normals and an increasing function ψ.

    It has the methods of `Mixture`. Its density has the Jacobian of ψ, p(y) = p_Y(ψ(y)) ψ′(y), and its
    quantiles are those of Y, through ψ⁻¹.
    """

    @property
    @abc.abstractmethod
    def inner(self) -> Mixture:
        """The law of Y = ψ(y)."""

    @abc.abstractmethod
    def there(self, value: Any) -> Any:
        """ψ(y), in float64 for arrays of NumPy."""

    @abc.abstractmethod
    def back(self, value: Any) -> Any:
        """ψ⁻¹(Y)."""

    @abc.abstractmethod
    def log_slope(self, value: Any, transformed: Any) -> Any:
        """log ψ′(y), of y and ψ(y)."""

    @property
    @abc.abstractmethod
    def aleatoric_variance(self) -> Numbers:
        """(1/N) Σᵢ Var[ψ⁻¹(Yᵢ)]: the noise that every particle expects."""

    @property
    @abc.abstractmethod
    def epistemic_variance(self) -> Numbers:
        """How far the particles' means disagree."""

    def __repr__(self) -> str:
        size = counted(self.inner.mixture_size, "particle")
        return f"{type(self).__name__}({size}, batch shape {self.batch_shape})"

    @property
    def variance(self) -> Any:
        """Aleatoric + epistemic variance."""
        return self.aleatoric_variance + self.epistemic_variance

    @property
    def std(self) -> Numbers:
        """√Var."""
        variance = self.variance
        return np.sqrt(variance) if isinstance(variance, np.ndarray) else jnp.sqrt(variance)

    @property
    def stddev(self) -> Numbers:
        """`std`, by PyTorch's name."""
        return self.std

    @property
    def median(self) -> Numbers:
        """The ½-quantile."""
        return self.quantile(0.5)

    @property
    def marginals(self) -> Any:
        """Itself: there is one target."""
        return self

    def sample(self, key: Any, sample_shape: tuple[int, ...] = ()) -> Any:
        """Draws."""
        return self.back(self.inner.sample(key, sample_shape))

    def log_prob(self, value: Any, intermediates: Any = None) -> Any:
        """log p_Y(ψ(y)) + log ψ′(y); −∞ where ψ(y) is."""
        del intermediates
        transformed = self.there(value)
        inside = transformed > -np.inf
        transformed = (jnp if isinstance(transformed, jax.Array) else np).where(inside, transformed, 0.0)
        density = self.inner.log_prob(transformed)
        slope = jnp.asarray(self.log_slope(value, transformed), density.dtype)
        return jnp.where(inside, density + slope, -jnp.inf)

    def cdf(self, value: Any) -> Float[Array, "..."]:
        """P(y ≤ value)."""
        return self.inner.cdf(self.there(value))

    def quantile(self, q: Any) -> Numbers:
        """The smallest y with P(Y ≤ ψ(y)) ≥ q: see `Mixture.quantile`."""
        return self.back(self.inner.quantile(q))

    def icdf(self, q: Any) -> Any:
        """`quantile`, by NumPyro's name and rules."""
        return self.back(self.inner.icdf(q))

    def interval(self, coverage: Any) -> tuple[Numbers, Numbers]:
        """The central interval (low, high)."""
        low, high = self.inner.interval(coverage)
        return self.back(low), self.back(high)

    def between_tails(self, tail: Any) -> tuple[Numbers, Numbers]:
        """(low, high) with P(Y ≤ low) = P(Y > high) = tail."""
        low, high = self.inner.between_tails(tail)
        return self.back(low), self.back(high)


def normal_of(name: str, mixture: Mixture, why: str) -> tuple[Normal, Float[Array, "..."] | None]:
    """The Normals that every particle's law is made of, and their shares, where these are several."""
    component: Any = mixture._component_distribution
    is_mixture = isinstance(component, MixtureSameFamily)
    normal = component.component_distribution if is_mixture else component
    if not isinstance(normal, Normal):
        raise TypeError(f"{name} must be a mixture of Normals, got {type(normal).__name__}; {why}")
    return normal, class_probabilities(component.mixing_distribution) if is_mixture else None


def mixed_moments(
    shares: Float[Array, "..."] | None, means: Float[Array, "..."], variances: Float[Array, "..."]
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Mean and variance of every particle's law, from those of its components."""
    if shares is None:
        return means, variances
    mean = jnp.sum(shares * means, axis=-1)
    apart = jnp.square(means - mean[..., None])
    return mean, jnp.sum(shares * (variances + apart), axis=-1)
