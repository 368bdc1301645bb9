"""Laws of skewed numbers of any sign: of y whose Yeo–Johnson transform a network predicts."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import scipy.optimize
from jaxtyping import Array, Float
from numpyro.distributions import constraints

from measureflow.core.pytrees import is_concrete
from measureflow.prediction.mixture import Mixture, Numbers
from measureflow.prediction.transformed import TransformedMixture, mixed_moments, normal_of
from measureflow.prediction.units import unit
from measureflow.saving.registry import saved

# Between 0 and 2, ψ takes all numbers to all numbers, as Normal laws need it; at the ends it is a logarithm.
_POWERS = (1e-3, 2 - 1e-3)
# Gauss–Hermite: ∫ f(x) exp(−x²/2)/√2π dx.
_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(32)
_WEIGHTS = _WEIGHTS / _WEIGHTS.sum()


def _power(value: Any) -> Float[Array | np.ndarray, ""]:
    number = unit("power", value)
    if is_concrete(number) and (np.shape(number) != () or not _POWERS[0] <= number <= _POWERS[1]):
        raise ValueError(
            f"power must be a number from {_POWERS[0]:g} to {_POWERS[1]:g}, got {value!r}; 1 changes "
            "nothing, and beyond these not all numbers are transforms of some number."
        )
    return number


def _scale(value: Any) -> Float[Array | np.ndarray, ""]:
    number = unit("scale", value)
    if is_concrete(number) and not np.all(number > 0):
        raise ValueError(f"scale must be > 0, got {value!r}; pass the standard deviation of the targets.")
    return number


@saved
class YeoJohnson(eqx.Module):
    """ψ(u) for u = (y − location)/scale (Yeo and Johnson, 2000):

        ((1 + u)^λ − 1)/λ for u ≥ 0,   −((1 − u)^(2 − λ) − 1)/(2 − λ) for u < 0.

    λ = 1 changes nothing, less draws large numbers in, more the small ones.

    Parameters
    ----------
    power
        λ, between 0 and 2.
    location, scale
        Of y, what is transformed: so the transform of y does not depend on its units.
    """

    power: Float[Array | np.ndarray, ""] = eqx.field(converter=_power)
    location: Float[Array | np.ndarray, ""] = eqx.field(default=0.0, converter=lambda v: unit("location", v))
    scale: Float[Array | np.ndarray, ""] = eqx.field(default=1.0, converter=_scale)

    @classmethod
    def learn(
        cls, y: Float[np.ndarray, " rows"], weights: Float[np.ndarray, " rows"], location: Any, scale: Any
    ) -> "YeoJohnson":
        """With the power of highest likelihood, where ψ(u) is Normal:

        −½ log Var[ψ(u)] + (λ − 1) E[sign(u) log(1 + |u|)].
        """
        u = (y - location) / scale
        slopes = np.average(np.sign(u) * np.log1p(np.abs(u)), weights=weights)

        def loss(power: float) -> float:
            values = _transformed(u, power, np)
            variance = np.average((values - np.average(values, weights=weights)) ** 2, weights=weights)
            return 0.5 * np.log(max(variance, np.finfo(np.float64).tiny)) - (power - 1) * slopes

        if np.all(y == y[0]):
            return cls(1.0, location, scale)
        found: Any = scipy.optimize.minimize_scalar(loss, bounds=_POWERS, method="bounded")
        return cls(float(found.x), location, scale)

    @property
    def standardised(self) -> "YeoJohnson":
        """The transform of u itself."""
        return YeoJohnson(self.power)

    def __call__(self, y: Any) -> Any:
        """ψ((y − location)/scale)."""
        y, xp = self._array(y)
        return _transformed(self._standard(y, xp), self._number(self.power, y), xp)

    def inverse(self, z: Any) -> Any:
        """location + scale·ψ⁻¹(z)."""
        z, xp = self._array(z)
        power = self._number(self.power, z)
        size, side = xp.abs(z), xp.where(z >= 0, power, 2 - power)
        with np.errstate(over="ignore"):
            u = xp.where(z >= 0, 1.0, -1.0) * xp.expm1(xp.log1p(side * size) / side)
        return self._number(self.location, z) + self._number(self.scale, z) * u

    def log_slope(self, y: Any) -> Any:
        """log |dψ/dy| = (λ − 1) sign(u) log(1 + |u|) − log scale."""
        y, xp = self._array(y)
        u = self._standard(y, xp)
        slope = (self._number(self.power, y) - 1) * xp.sign(u) * xp.log1p(xp.abs(u))
        return slope - xp.log(self._number(self.scale, y))

    def _array(self, values: Any) -> tuple[Any, Any]:
        """In float64 of NumPy wherever numbers can be looked at."""
        if is_concrete((values, self.power, self.location, self.scale)):
            return np.asarray(values, np.float64), np
        return jnp.asarray(values), jnp

    def _number(self, number: Any, like: Any) -> Any:
        return np.asarray(number) if isinstance(like, np.ndarray) else jnp.asarray(number, like.dtype)

    def _standard(self, y: Any, xp: Any) -> Any:
        location, scale = self._number(self.location, y), self._number(self.scale, y)
        return (y - location) / scale


def _transformed(u: Any, power: Any, xp: Any) -> Any:
    """ψ(u), where both sides are one function: ψ_λ(−u) = −ψ_(2 − λ)(u)."""
    side = xp.where(u >= 0, power, 2 - power)
    with np.errstate(over="ignore"):
        return xp.where(u >= 0, 1.0, -1.0) * xp.expm1(side * xp.log1p(xp.abs(u))) / side


class YeoJohnsonMixture(TransformedMixture):
    """The law of ψ⁻¹(Y), for a mixture Y of Normals and Yeo and Johnson's ψ.

    It has the methods of `Mixture`. Its density has the Jacobian of ψ, and its quantiles are those of Y,
    through ψ⁻¹: both exact. Mean and variance are by Gauss–Hermite rules of 32 nodes for every Normal.

    Parameters
    ----------
    transformed
        The law of Y = ψ(y): Normals, or mixtures of Normals, in units or without.
    transform
        ψ, with the units of y.
    """

    pytree_data_fields = ("transformed", "transform")

    def __init__(self, transformed: Mixture, transform: YeoJohnson, *, validate_args: bool | None = None):
        normal_of("transformed", transformed, "use likelihood='yeo_johnson_mixture'.")
        self.transformed, self.transform = transformed, transform
        super().__init__(transformed.batch_shape, (), validate_args=validate_args)

    @property
    def support(self) -> Any:
        """All numbers."""
        return constraints.real

    @property
    def inner(self) -> Mixture:
        """The law of ψ(y)."""
        return self.transformed

    @property
    def standardised(self) -> "YeoJohnsonMixture":
        """The law of (y − location)/scale."""
        return YeoJohnsonMixture(self.transformed, self.transform.standardised)

    @property
    def location(self) -> Any:
        """What is added to the standardised law, in float64."""
        return self.transform.location

    @property
    def scale(self) -> Any:
        """What multiplies the standardised law, in float64."""
        return self.transform.scale

    def there(self, value: Any) -> Any:
        """ψ(y)."""
        return self.transform(value)

    def back(self, value: Any) -> Any:
        """ψ⁻¹(Y)."""
        return self.transform.inverse(value)

    def log_slope(self, value: Any, transformed: Any) -> Any:
        """log ψ′(y)."""
        return self.transform.log_slope(value)

    def _moments(self) -> tuple[Float[Array, "*batch n"], Float[Array, "*batch n"]]:
        """Mean and variance of every particle's law, in standard units."""
        inner, dtype = self.transformed, jnp.result_type(float)
        normal, shares = normal_of("transformed", inner, "")
        loc, scale = jnp.asarray(normal.loc), jnp.asarray(normal.scale)
        if inner.scale is not None:
            unit = jnp.asarray(inner.scale, dtype)
            loc, scale = jnp.asarray(inner.location, dtype) + unit * loc, unit * scale
        nodes, weights = (
            jnp.asarray(numbers, dtype).reshape((1,) * loc.ndim + (-1,)) for numbers in (_NODES, _WEIGHTS)
        )
        values = jnp.asarray(
            self.transform.standardised.inverse(loc[..., None] + scale[..., None] * nodes), dtype
        )
        means = jnp.sum(weights * values, axis=-1)
        variances = jnp.sum(weights * jnp.square(values - means[..., None]), axis=-1)
        return mixed_moments(shares, means, variances)

    def _times(self, value: Float[Array, "..."], power: int, shift: bool = False) -> Numbers:
        location, scale = self.transform.location, self.transform.scale
        if is_concrete((value, location, scale)):
            number = np.asarray(value, np.float64)
            return np.asarray(scale**power * number + (location if shift else 0.0))
        location, scale = (jnp.asarray(number, value.dtype) for number in (location, scale))
        return scale**power * value + (location if shift else 0.0)

    @property
    def mean(self) -> Any:
        """E[ψ⁻¹(Y)]."""
        return self._times(jnp.mean(self._moments()[0], axis=-1), 1, shift=True)

    @property
    def aleatoric_variance(self) -> Numbers:
        """(1/N) Σᵢ Var[ψ⁻¹(Yᵢ)]: the noise that every particle expects."""
        return self._times(jnp.mean(self._moments()[1], axis=-1), 2)

    @property
    def epistemic_variance(self) -> Numbers:
        """How far the particles' means disagree."""
        return self._times(jnp.var(self._moments()[0], axis=-1), 2)
