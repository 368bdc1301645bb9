"""Means and deviations of predictive laws, and a warning where a far tail makes them."""

import warnings
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from measureflow.core.showing import counted
from measureflow.core.warned import at_the_users_line
from measureflow.prediction.predictive import Mixture
from measureflow.prediction.transformed import TransformedMixture

# A mean, or a deviation, that leaves no more than the rest of the law on its far side misleads: of a Normal,
# half is below the mean, and 68% within a deviation of it.
_MOST = 0.99


class Moments(NamedTuple):
    """Of every row: the mean and the deviation; and how much of the law is below the mean, and within a
    deviation of it, where targets are seen through a function, whose inverse stretches tails."""

    mean: Any
    deviation: Any
    below: Any = None
    within: Any = None


def moments_of(law: Mixture | TransformedMixture) -> Moments:
    """Those of a predictive law."""
    mean, deviation = law.mean, jnp.sqrt(law.variance)
    if not isinstance(law, TransformedMixture):
        return Moments(mean, deviation)
    within = law.cdf(mean + deviation) - law.cdf(mean - deviation)
    return Moments(mean, deviation, law.cdf(mean), within)


def warn_of_tails(moments: Moments, mean: np.ndarray, *, with_deviation: bool) -> None:
    """Where so little of the law makes a mean or a deviation that it misleads; or all of it, so that `mean`,
    that in the units of the targets, is infinite."""
    remedy = "use predict_interval(X), or predict_dist(X).median"
    if len(rows := np.flatnonzero(~np.isfinite(mean))):
        _warn(
            f"the mean of {counted(len(rows), 'row')} is infinite, of row {rows[0]} first: so far from the "
            f"training rows, a law of log y has no mean that is a number; {remedy}."
        )
        return
    below, within = moments.below, moments.within if with_deviation else None
    for name, where, share in (("mean", "below it", below), ("deviation", "within one of the mean", within)):
        if share is not None and len(rows := np.flatnonzero(share > _MOST)):
            _warn(
                f"the {name} of {counted(len(rows), 'row')} is made by a far tail, of row {rows[0]} first: "
                f"more than {_MOST:.0%} of the law lies {where}; {remedy}, which tails hardly move."
            )
            return


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=at_the_users_line())
