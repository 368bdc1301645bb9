"""How much wider predictive laws are to be than the particles say: calibration by held-out rows."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from measureflow.core.validation import positive_number
from measureflow.saving.registry import saved

# A law is taken to be no more than so many times as wide, or as narrow, as the typical one.
_FARTHEST = 1e3


def _power(value: Any) -> Float[Array, ""]:
    number = jnp.asarray(value, jnp.result_type(float))
    if number.ndim or not bool(0 <= number <= 1):
        raise ValueError(f"power must be a number from 0 to 1, got {value!r}; 1 is one factor for all rows.")
    return number


@saved
class Spread(eqx.Module):
    """A row whose law has standard deviation s gets the deviation

        factor · typical · (s/typical)^power:

    with power 1 all are widened by one factor; with power 0 all become equally wide, which is right where
    the network has learned its training rows by heart, and what it says about noise is not to be believed.

    Parameters
    ----------
    factor
        That of a row which is as wide as the typical one.
    power
        From 0 to 1: how far differences between rows are believed.
    typical
        The geometric mean of deviations, in the units that the network sees.
    """

    factor: Float[Array, ""] = eqx.field(converter=lambda v: positive_number("factor", v, "1 is none."))
    power: Float[Array, ""] = eqx.field(default=1.0, converter=_power)
    typical: Float[Array, ""] = eqx.field(
        default=1.0, converter=lambda v: positive_number("typical", v, "it is a deviation.")
    )

    def of(self, deviations: Float[Array, "..."]) -> Float[Array, "..."]:
        """The factor of every row."""
        return spread_factors(jnp.log(self.factor), self.power, self.typical, deviations)


def spread_factors(log_factor: Array, power: Array, typical: Array, deviations: Array) -> Array:
    """factor · (s/typical)^(power − 1), for numbers that may be traced."""
    ratio = jnp.clip(deviations / typical, 1 / _FARTHEST, _FARTHEST)
    return jnp.exp(log_factor + (power - 1) * jnp.log(ratio))
