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
    """Of every row: the mean, and the deviation, where it is asked for; and how much of the law is below the
    mean, and within a deviation of it, where targets are seen through a function, whose inverse stretches
    tails."""

    mean: Any
    deviation: Any = None
    below: Any = None
    within: Any = None


def mean_of(law: Mixture | TransformedMixture) -> Moments:
    """Of a predictive law, without its deviation, which some laws do not have."""
    below = law.cdf(law.mean) if isinstance(law, TransformedMixture) else None
    return Moments(law.mean, below=below)


def moments_of(law: Mixture | TransformedMixture) -> Moments:
    """All of them."""
    found = mean_of(law)._replace(deviation=jnp.sqrt(law.variance))
    if found.below is None:
        return found
    return found._replace(
        within=law.cdf(found.mean + found.deviation) - law.cdf(found.mean - found.deviation)
    )


def warn_of_tails(moments: Moments, mean: np.ndarray) -> None:
    """Where so little of the law makes a mean or a deviation that it misleads; or all of it, so that `mean`,
    that in the units of the targets, is infinite."""
    remedy = "use predict_interval(X), or predict_dist(X).median"
    if len(rows := _rows(~np.isfinite(mean))):
        _warn(
            f"the mean of {counted(len(rows), 'row')} is infinite, of row {rows[0]} first: so far from the "
            f"training rows, a law of a function of y has no mean that is a number; {remedy}."
        )
        return
    cases = (("mean", "below it", moments.below), ("deviation", "within one of the mean", moments.within))
    for name, where, share in cases:
        if share is not None and len(rows := _rows(share > _MOST)):
            _warn(
                f"the {name} of {counted(len(rows), 'row')} is made by a far tail, of row {rows[0]} first: "
                f"more than {_MOST:.0%} of the law lies {where}; {remedy}, which tails hardly move."
            )


def _rows(of_targets: np.ndarray) -> np.ndarray:
    """The rows of which something is true of a target."""
    return np.flatnonzero(of_targets.reshape(len(of_targets), -1).any(axis=1))


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=at_the_users_line())
