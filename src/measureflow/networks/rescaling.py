"""The law of location + scale·Y: predictions for standardised targets get their units back."""

import functools
from typing import Any

import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array, Float
from numpyro.distributions import Distribution, MixtureSameFamily

from measureflow.core.pytrees import strong
from measureflow.core.validation import require_positive
from measureflow.networks.censoring import Censored


@functools.singledispatch
def _rescaled(
    distribution: Distribution, location: Float[Array, "..."], scale: Float[Array, "..."]
) -> Distribution:
    raise _without_units(distribution)


def _without_units(distribution: Distribution) -> TypeError:
    return TypeError(
        f"the law of location + scale·Y is not known for {type(distribution).__name__}; only Normal, "
        "StudentT and mixtures of Normals can be rescaled: leave location and scale out, and do not "
        "standardise the targets."
    )


@_rescaled.register
def _rescaled_normal(
    distribution: dist.Normal, location: Float[Array, "..."], scale: Float[Array, "..."]
) -> Distribution:
    loc, deviation = map(jnp.asarray, (distribution.loc, distribution.scale))
    return dist.Normal(location + scale * loc, scale * deviation)


@_rescaled.register
def _rescaled_student(
    distribution: dist.StudentT, location: Float[Array, "..."], scale: Float[Array, "..."]
) -> Distribution:
    loc, deviation = map(jnp.asarray, (distribution.loc, distribution.scale))
    return dist.StudentT(distribution.df, location + scale * loc, scale * deviation)


@_rescaled.register
def _rescaled_mixture(
    distribution: MixtureSameFamily, location: Float[Array, "..."], scale: Float[Array, "..."]
) -> Distribution:
    components = _rescaled(distribution.component_distribution, location[..., None], scale[..., None])
    return MixtureSameFamily(distribution.mixing_distribution, components)


@_rescaled.register
def _rescaled_events(
    distribution: dist.Independent, location: Float[Array, "..."], scale: Float[Array, "..."]
) -> Distribution:
    return _rescaled(distribution.base_dist, location, scale).to_event(distribution.reinterpreted_batch_ndims)


@_rescaled.register
def _rescaled_bounds(
    distribution: Censored, location: Float[Array, "..."], scale: Float[Array, "..."]
) -> Distribution:
    return Censored(_rescaled(distribution.base_dist, location[..., 0], scale[..., 0]))


def _of_one_target(distribution: Distribution) -> Distribution:
    while isinstance(distribution, dist.Independent | Censored):
        distribution = distribution.base_dist
    return distribution


def is_rescalable(distribution: Distribution) -> bool:
    """Whether location + scale·Y is of Y's own family: Normal, StudentT, or a mixture of Normals; or several
    of these."""
    law = _of_one_target(distribution)
    if isinstance(law, MixtureSameFamily):
        return isinstance(law.component_distribution, dist.Normal)
    return isinstance(law, dist.Normal | dist.StudentT)


def require_rescalable(distribution: Distribution, location: Any, scale: Any) -> None:
    """location + scale·Y is known, and `location` and `scale` are numbers, or one per target."""
    if not is_rescalable(distribution):
        raise _without_units(_of_one_target(distribution))
    for name, value in (("location", location), ("scale", scale)):
        if jnp.shape(value) not in ((), distribution.event_shape):
            raise ValueError(
                f"{name} has shape {jnp.shape(value)}, but an event of the distribution "
                f"{distribution.event_shape}; pass one number, or one per target."
            )


def rescaled(distribution: Distribution, location: Any, scale: Any) -> Distribution:
    """The law of location + scale·Y, for Y Normal, StudentT or a mixture of Normals, or several of them: so
    predictions for standardised targets get their units back.

    Parameters
    ----------
    distribution
        The law of Y.
    location
        A number, or one per target; or one for each case, with the axes of the distribution.
    scale
        A number > 0, or one per target.
    """
    location, scale = strong(location), strong(scale)
    require_positive("scale", scale, "pass the standard deviation of the targets.")
    whole = distribution.batch_shape + distribution.event_shape
    per_target = (1,) * len(distribution.batch_shape) + distribution.event_shape
    per_case = location.ndim == len(whole) and _broadcasts(location.shape, whole)
    require_rescalable(distribution, 0.0 if per_case else location, scale)
    location = location if per_case else jnp.broadcast_to(location, per_target)
    return _rescaled(distribution, location, jnp.broadcast_to(scale, per_target))


def widened(distribution: Distribution, centre: Any, factor: Any) -> Distribution:
    """The law of centre + factor·(Y − centre), where both broadcast against the distribution's own axes."""
    if not is_rescalable(distribution):
        raise _without_units(_of_one_target(distribution))
    return _rescaled(distribution, (1 - factor) * centre, factor)


def _broadcasts(shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    return all(size in (1, full) for size, full in zip(shape, whole, strict=True))
