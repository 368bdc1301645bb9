"""Sets of classes: the most probable ones, until together they are probable enough."""

import numpy as np
from jaxtyping import Bool, Float


def mass_before(probabilities: Float[np.ndarray, "rows classes"]) -> Float[np.ndarray, "rows classes"]:
    """Of every class, Σ p(c′) over the classes c′ that are more probable: 0 for the most probable one.

    The smallest set of classes with probability ≥ a is the set of those with less than a before them."""
    order = np.argsort(-probabilities, axis=-1, kind="stable")
    falling = np.take_along_axis(probabilities, order, axis=-1)
    before = np.cumsum(falling, axis=-1) - falling
    # Classes of equal probability are in the set together, or not at all.
    equal = np.concatenate([np.zeros_like(order[:, :1], bool), falling[:, 1:] == falling[:, :-1]], axis=-1)
    before = np.maximum.accumulate(np.where(equal, 0.0, before), axis=-1)
    found = np.empty_like(before)
    np.put_along_axis(found, order, before, axis=-1)
    return found


def smallest_sets(
    probabilities: Float[np.ndarray, "rows classes"], coverage: float
) -> Bool[np.ndarray, "rows classes"]:
    """Whether each class is among the most probable ones that have probability ≥ `coverage` together."""
    return mass_before(probabilities) < coverage
