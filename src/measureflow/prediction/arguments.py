"""What a metric may be given, and the words that say so."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int, Shaped
from numpyro.distributions import (
    Distribution,
    constraints,
)

from measureflow.prediction.cumulative import class_probabilities
from measureflow.prediction.labels import class_numbers, plain, warn_of_names
from measureflow.prediction.mixture import Mixture
from measureflow.prediction.quantiles import CLASSES
from measureflow.prediction.ranked_probability import (
    as_float64,
    name_of,
)
from measureflow.prediction.yeo_johnson import YeoJohnsonMixture

# How far from 1 a row of probabilities may sum: float32, and averages of it, are well inside.
_SUM_TOLERANCE = 1e-3


def first_row(wrong: Bool[np.ndarray, "..."]) -> int:
    """Where the first mistake is."""
    return int(np.argwhere(wrong)[0][0])


def require_no_nan(source: str, values: Float[np.ndarray, "..."]) -> None:
    """A score is a number."""
    if np.any(np.isnan(values)):
        raise ValueError(
            f"the distribution's {source} gives NaN in row {first_row(np.isnan(values))}; check that its "
            "parameters are finite, its scales > 0, and the targets in its support."
        )


def mean_of(source: str, values: Float[np.ndarray, "..."]) -> float:
    """The mean over rows, if all are numbers."""
    require_no_nan(source, values)
    return float(np.mean(values))


def numbers(name: str, value: Any, remedy: str) -> Shaped[np.ndarray, "..."]:
    """An array of numbers, of any library."""
    try:
        array = plain(value)
    except ValueError:
        raise ValueError(f"{name} must be an array, got rows of different lengths; {remedy}") from None
    # JAX's test knows bfloat16, too.
    if not any(jnp.issubdtype(array.dtype, kind) for kind in (jnp.floating, jnp.integer, jnp.bool_)):
        raise TypeError(f"{name} must hold numbers, got {array.dtype}; {remedy}")
    if array.ndim == 0 or array.size == 0:
        raise ValueError(f"{name} must have at least one row, got shape {array.shape}; {remedy}")
    return array


def finite(name: str, value: Any, remedy: str) -> Float[np.ndarray, "..."]:
    """Finite numbers in float64."""
    array = as_float64(numbers(name, value, remedy))
    if not np.all(np.isfinite(array)):
        row = first_row(~np.isfinite(array))
        raise ValueError(f"{name} must be finite, got {array[row]} in row {row}; {remedy}")
    return array


def require_shape(name: str, array: np.ndarray, other: str, shape: tuple[int, ...], remedy: str) -> None:
    """No broadcasting: (rows, 1) against (rows,) would be all pairs of rows."""
    if array.shape != shape:
        if array.shape == (*shape, 1):
            remedy = f"drop the last axis with {name}[..., 0]."
        raise ValueError(f"{name} has shape {array.shape}, but {other} {shape}; {remedy}")


def require_coverage(coverage: Any) -> None:
    """A probability, neither 0 nor 1."""
    if not 0 < coverage < 1:
        raise ValueError(f"coverage must be between 0 and 1, got {coverage}; 0.9 is usual.")


def targets_of(distribution: Any, targets: Any) -> Shaped[np.ndarray, "..."]:
    """As float64, or as the integers they are where the distribution is discrete."""
    if not isinstance(distribution, Distribution):
        raise TypeError(
            f"distribution must be a NumPyro distribution, got {type(distribution).__name__}; "
            "pass what predict_dist(X) returns."
        )
    shape = distribution.batch_shape + distribution.event_shape
    remedy = "pass one target per predicted row."
    whole = "drop rows without a target."
    of_classes = isinstance(components_of(distribution), CLASSES)
    if of_classes:
        whole = "pass np.searchsorted(model.classes_, y) for names, or use log_loss, which takes them."
    values = finite("targets", targets, whole)
    if shape == ():
        remedy = f"for one law of all rows, use distribution.expand({values.shape})."
    require_shape("targets", values, "the distribution", shape, remedy)
    if of_classes and values.ndim == 1 and values.min() >= 1:
        table = probabilities_of(distribution)
        if np.all(np.isin(values, np.arange(table.shape[1]))):
            warn_of_names(values.astype(int), table)
    return plain(targets) if distribution.is_discrete else values


def components_of(distribution: Any) -> Any:
    """The laws that a mixture is made of."""
    return distribution._component_distribution if isinstance(distribution, Mixture) else distribution


def probabilities_of(distribution: Any) -> Float[np.ndarray, "rows classes"]:
    """Of the classes under a law, or a mixture of laws, in float64."""
    of_components = as_float64(class_probabilities(components_of(distribution)))
    return of_components.mean(axis=-2) if isinstance(distribution, Mixture) else of_components


def in_standard_units(
    distribution: Any, values: np.ndarray
) -> tuple[Distribution, np.ndarray, Float[np.ndarray, "..."]]:
    """The law without its units, the targets in those, and their scale, for each of them."""
    if not isinstance(distribution, Mixture | YeoJohnsonMixture) or distribution.scale is None:
        return distribution, values, np.ones(values.shape)
    z = (values - as_float64(distribution.location)) / as_float64(distribution.scale)
    return distribution.standardised, z, np.broadcast_to(as_float64(distribution.scale), z.shape)


def is_of_counts(distribution: Any) -> bool:
    """Whether it is a law of 0, 1, 2, …."""
    law = components_of(distribution)
    return isinstance(distribution, Distribution) and law.support is constraints.nonnegative_integer


def continuous_targets(distribution: Any, targets: Any) -> Float[np.ndarray, "..."]:
    """Targets of a law with a density."""
    values = targets_of(distribution, targets)
    if distribution.is_discrete:
        raise TypeError(
            f"distribution must be continuous, got {name_of(distribution)}; for classes use log_loss, "
            "brier_score or expected_calibration_error, for counts negative_log_likelihood or crps."
        )
    return values


def interval_ends(low: Any, high: Any) -> tuple[Float[np.ndarray, "..."], Float[np.ndarray, "..."]]:
    """Ends may be infinite, as those of a conformal prediction with few data are."""
    low = as_float64(numbers("low", low, "pass the lower ends of the intervals."))
    high = as_float64(numbers("high", high, "pass the upper ends of the intervals."))
    require_shape("high", high, "low", low.shape, "pass one interval per row.")
    wrong = ~(low <= high)
    if np.any(wrong):
        row = first_row(wrong)
        raise ValueError(
            f"low must be ≤ high in every row, got {low[row]} and {high[row]} in row {row}; swap them, and "
            "check for NaN."
        )
    return low, high


def classification(
    probabilities: Any, labels: Any, classes: Any
) -> tuple[Float[np.ndarray, "rows classes"], Int[np.ndarray, " rows"]]:
    """Probabilities of classes, and the numbers of the labels."""
    remedy = "pass one row per case and one column per class, such as predict_proba(X)."
    table = finite("probabilities", probabilities, remedy)
    if table.ndim == 1:
        remedy = "for two classes, pass np.stack([1 - p, p], axis=1)."
    if table.ndim != 2:
        raise ValueError(f"probabilities must have shape (rows, classes), got {table.shape}; {remedy}")
    wrong = np.any(table < 0, axis=1) | (np.abs(table.sum(axis=1) - 1) > _SUM_TOLERANCE)
    if np.any(wrong):
        row = first_row(wrong)
        raise ValueError(
            f"probabilities must be ≥ 0 and sum to 1 in every row, got {table[row]} in row {row}; "
            "apply jax.nn.softmax to logits."
        )
    numbers = class_numbers(labels, table.shape, classes)
    if classes is None:
        warn_of_names(numbers, table)
    return table, numbers
