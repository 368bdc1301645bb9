"""Laws of positive numbers: exp(Y), for the mixture over particles Y that a network predicts of log y."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpyro.distributions import constraints

from measureflow.core.pytrees import is_concrete
from measureflow.prediction.mixture import Mixture, Numbers
from measureflow.prediction.ranked_probability import as_float64, log_normal_mixture_crps, normal_components
from measureflow.prediction.transformed import TransformedMixture, mixed_moments, normal_of


class LogMixture(TransformedMixture):
    """The law of exp(Y), for a mixture Y of Normals: (1/N) Σᵢ Σₖ πᵢₖ LogNormal(mᵢₖ, sᵢₖ), of numbers > 0.

    It has the methods of `Mixture`. Its density has the Jacobian of the logarithm, p(y) = p_Y(log y)/y, and
    its quantiles are those of Y, through exp.

    Parameters
    ----------
    logarithm
        The law of Y = log y: Normals, or mixtures of Normals, in units or without.
    """

    pytree_data_fields = ("logarithm",)

    def __init__(self, logarithm: Mixture, *, validate_args: bool | None = None):
        normal_of("logarithm", logarithm, "other laws of log y have no finite mean of y.")
        self.logarithm = logarithm
        super().__init__(logarithm.batch_shape, (), validate_args=validate_args)

    @property
    def support(self) -> Any:
        """Numbers > 0."""
        return constraints.positive

    @property
    def inner(self) -> Mixture:
        """The law of log y."""
        return self.logarithm

    def there(self, value: Any) -> Any:
        """log y, −∞ for y ≤ 0."""
        return _log(value)

    def back(self, value: Any) -> Any:
        """exp(Y)."""
        return _exp(value)

    def log_slope(self, value: Any, transformed: Any) -> Any:
        """−log y."""
        return -transformed

    def _moments(self) -> tuple[Float[Array, "*batch n"], Float[Array, "*batch n"]]:
        """Mean and variance of every particle's law, but for the units' location. A LogNormal has

            E = exp(m + s²/2),   Var = E² (exp(s²) − 1),

        which loses no digits where s is small, as the difference of E[Y²] and E[Y]² would."""
        unit = self.logarithm.scale
        scale = jnp.asarray(1.0 if unit is None else unit, jnp.result_type(float))
        normal, shares = normal_of("logarithm", self.logarithm, "")
        scale = scale if shares is None else scale[..., None]
        square = jnp.square(scale * jnp.asarray(normal.scale))
        means = jnp.exp(scale * jnp.asarray(normal.loc) + square / 2)
        return mixed_moments(shares, means, jnp.square(means) * jnp.expm1(square))

    def _in_units(self, value: Float[Array, "..."], power: int) -> Numbers:
        """Times exp(p·location)."""
        location = self.logarithm.location
        if location is None:
            return value
        if is_concrete((value, location)):
            with np.errstate(over="ignore"):
                return np.asarray(np.exp(power * np.asarray(location)) * np.asarray(value, np.float64))
        return jnp.exp(jnp.asarray(power * location, value.dtype)) * value

    @property
    def mean(self) -> Any:
        """E[exp(Y)] = (1/N) Σᵢ exp(mᵢ + sᵢ²/2)."""
        return self._in_units(jnp.mean(self._moments()[0], axis=-1), 1)

    @property
    def aleatoric_variance(self) -> Numbers:
        """(1/N) Σᵢ Var[exp(Yᵢ)]: the noise that every particle expects."""
        return self._in_units(jnp.mean(self._moments()[1], axis=-1), 2)

    @property
    def epistemic_variance(self) -> Numbers:
        """How far the particles' means disagree."""
        return self._in_units(jnp.var(self._moments()[0], axis=-1), 2)


def _exp(values: Any) -> Any:
    if isinstance(values, jax.Array):
        return jnp.exp(values)
    with np.errstate(over="ignore"):
        return np.exp(values)


def _log(values: Any) -> Any:
    """log y, −∞ for y ≤ 0."""
    if isinstance(values, jax.Array):
        return jnp.where(values > 0, jnp.log(jnp.maximum(values, jnp.finfo(values.dtype).tiny)), -jnp.inf)
    values = np.asarray(values, np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(values > 0, np.log(values), -np.inf)


def log_mixture_crps(law: LogMixture, targets: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    """The continuous ranked probability score of every row."""
    components = normal_components(law.logarithm.standardised, targets.shape)
    assert components is not None, "they are Normals"
    weights, loc, scale = components
    location, unit = law.logarithm.location, law.logarithm.scale
    if unit is not None:
        loc, scale = as_float64(location) + as_float64(unit) * loc, as_float64(unit) * scale
    # Laws of numbers > 0 give none below: there y is as far away as its distance to 0 makes it.
    inside = np.maximum(targets, np.finfo(np.float64).tiny)
    return log_normal_mixture_crps(weights, loc, scale, inside) + (inside - targets)
