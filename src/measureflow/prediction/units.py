"""The units of targets: y = location + scale·z, in double precision wherever numbers can be looked at."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from measureflow.core.pytrees import is_concrete, strong
from measureflow.core.validation import require_real

# Compiled functions may shift a number by so much of its standard deviation, and no more.
_SHIFT = 1e-3
_REMEDY = "pass the mean and the standard deviation of the targets."


class Units(eqx.Module):
    """y = location + scale·z, for the z that a network sees.

    Seconds since 1970 are known to a minute in float32, whose numbers are 128 apart there. So location and
    scale are kept as float64, and numbers come in and go out as float64 of NumPy. Within `jax.jit` they
    cannot: there, units in which float32 would lose more than a thousandth of a standard deviation raise.
    """

    location: Float[Array | np.ndarray, "..."]
    scale: Float[Array | np.ndarray, "..."]
    #: Whether compiled functions can compute in these units.
    fit: bool = eqx.field(static=True)

    def __init__(self, location: Any = None, scale: Any = None, *, fit: bool | None = None):
        self.location = unit("location", 0.0 if location is None else location)
        self.scale = unit("scale", 1.0 if scale is None else scale)
        if is_concrete(self.scale) and not np.all(self.scale > 0):
            raise ValueError(f"scale must be > 0, got {shown(self.scale)}; {_REMEDY}")
        self.fit = _fit(self.location, self.scale) if fit is None else fit

    def standardised(self, value: Any) -> Float[Array | np.ndarray, "..."]:
        """z = (y − location)/scale."""
        if is_concrete((value, self.location, self.scale)):
            return np.asarray((np.asarray(value, np.float64) - self.location) / self.scale)
        value, location, scale = self._compiled(value)
        return (value - location) / scale

    def restored(self, z: Any) -> Float[Array | np.ndarray, "..."]:
        """y = location + scale·z."""
        if is_concrete((z, self.location, self.scale)):
            return np.asarray(self.location + self.scale * np.asarray(z, np.float64))
        z, location, scale = self._compiled(z)
        return location + scale * z

    def times(self, z: Any, power: int = 1) -> Float[Array | np.ndarray, "..."]:
        """scaleᵖ·z, the units of a difference, or of a variance."""
        if is_concrete((z, self.scale)):
            return np.asarray(self.scale**power * np.asarray(z, np.float64))
        z, _, scale = self._compiled(z)
        return scale**power * z

    def log_volume(self, event_shape: tuple[int, ...]) -> Float[Array | np.ndarray, "..."]:
        """log |dy/dz|, of all targets of an event together."""
        events = tuple(range(-len(event_shape), 0))
        if is_concrete(self.scale):
            scale = np.broadcast_to(self.scale, np.broadcast_shapes(np.shape(self.scale), event_shape))
            return np.asarray(np.sum(np.log(scale), axis=events))
        scale = jnp.broadcast_to(self.scale, jnp.broadcast_shapes(self.scale.shape, event_shape))
        return jnp.sum(jnp.log(scale), axis=events)

    def require_fit(self) -> None:
        """Single precision can compute in these units."""
        if not self.fit:
            dtype = jnp.result_type(float)
            raise ValueError(
                f"{dtype} cannot hold the units of these targets, location {shown(self.location)} and scale "
                f"{shown(self.scale)}: it would round them by more than a thousandth of their standard "
                "deviation; call the mixture's methods outside jax.jit, jax.vmap and Predictive.map, where "
                "they compute in float64, use mixture.standardised, or set jax_enable_x64."
            )

    def _compiled(self, value: Any) -> tuple[Array, Array, Array]:
        self.require_fit()
        value = strong(value)
        location, scale = (jnp.asarray(number, value.dtype) for number in (self.location, self.scale))
        value, location, scale = jnp.broadcast_arrays(value, location, scale)
        return value, location, scale


def unit(name: str, value: Any) -> Float[Array | np.ndarray, "..."]:
    """Finite numbers, in float64; as they are where they cannot be looked at."""
    require_real(name, value)
    if not is_concrete(value):
        return strong(value)
    number = np.asarray(value, np.float64)
    if not np.all(np.isfinite(number)):
        raise ValueError(f"{name} must be finite, got {shown(number)}; {_REMEDY}")
    return number


def _fit(location: Any, scale: Any) -> bool:
    """Whether JAX's precision tells numbers in these units apart, as far as can be seen."""
    if not is_concrete((location, scale)):
        return True
    kind = jnp.finfo(jnp.result_type(float))
    # Squares of them, too.
    least, most = np.sqrt(float(kind.tiny)), np.sqrt(float(kind.max))
    held = (np.abs(location) < most) & (least < scale) & (scale < most)
    return bool(np.all(held & (float(kind.eps) * np.abs(location) <= _SHIFT * scale)))


def shown(number: Any) -> Any:
    """One number as such, several as an array; what is traced has no value to show."""
    if not is_concrete(number):
        return "(traced)"
    return number.item() if np.ndim(number) == 0 else number


def as_jax_has_it(values: Any) -> Float[Array, "..."]:
    """In JAX's precision; what is too large for that is infinite there."""
    if not isinstance(values, np.ndarray | np.generic):
        return values
    with np.errstate(over="ignore", under="ignore"):
        return jnp.asarray(np.asarray(values).astype(jnp.result_type(float)))
