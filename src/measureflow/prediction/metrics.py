"""How good predictions with uncertainty are: proper scores, calibration, coverage.

Every metric is one Python float, a mean over rows taken in float64; each looks at concrete values, so none
can be jitted. Where rows have several targets, marginal metrics average over these, too; the negative
log-likelihood is that of all targets of a row together. Mixtures with units are scored in standardised ones,
and the scores get their units afterwards: so targets far from 0 keep their digits.

Labels are the numbers of the columns, 0, 1, …; or names, such as strings: `classes` says which column is
whose, in the order of `classes_`, and may be left out where every class is among the labels.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import scipy.special
import scipy.stats
from jaxtyping import Bool, Float, Int, Shaped
from numpyro.distributions import (
    Distribution,
)

from measureflow.core.validation import require_count, require_representable
from measureflow.prediction.labels import class_numbers, plain
from measureflow.prediction.mixture import Mixture
from measureflow.prediction.quantiles import CLASSES
from measureflow.prediction.ranked_probability import (
    as_float64,
    marginal_cdf,
    name_of,
    normal_components,
    normal_mixture_crps,
    quadrature_crps,
)

__all__ = [
    "LEVELS",
    "ConfidenceBins",
    "accuracy",
    "auroc",
    "brier_score",
    "confidence_bins",
    "coverage",
    "crps",
    "expected_calibration_error",
    "log_loss",
    "negative_log_likelihood",
    "probability_integral_transform",
    "quantile_calibration_error",
    "root_mean_square_error",
    "width",
]

#: The levels at which quantiles are checked: 5%, 10%, …, 95%.
LEVELS = tuple(percent / 100 for percent in range(5, 100, 5))

# How far from 1 a row of probabilities may sum: float32, and averages of it, are well inside.
_SUM_TOLERANCE = 1e-3


def negative_log_likelihood(distribution: Distribution, targets: Any) -> float:
    """−mean log p(y), the logarithmic score: lower is better. p is the mixture, not one particle's law.

    Several targets of one row that are an event of the distribution count together: log p is that of the
    row. The unit of y matters: with y/c in place of y, log c is subtracted for every target.

    Parameters
    ----------
    distribution
        A NumPyro distribution with one law per row, such as `predict_dist(X)`.
    targets
        One per row, or an event of the distribution.
    """
    values = _targets(distribution, targets)
    law, z, scale = _standardised(distribution, values)
    support: Any = law.support
    points = jnp.asarray(require_representable("targets", z))
    outside = ~np.asarray(support(points))
    if np.any(outside):
        row = _first_row(outside)
        raise ValueError(
            f"targets must be possible under the distribution, got {values[row]} in row {row}, outside its "
            f"support {support}; check labels and units, or choose another likelihood."
        )
    densities = as_float64(law.log_prob(points))
    volume = np.log(scale).reshape(*densities.shape, -1).sum(axis=-1)
    return _mean("log_prob", volume - densities)


def root_mean_square_error(distribution: Distribution, targets: Any) -> float:
    """√ mean (y − E[Y])², of the predictive mean; over rows and targets.

    Parameters
    ----------
    distribution
        A NumPyro distribution with one law per row, such as `predict_dist(X)`.
    targets
        One per row, or an event of the distribution.
    """
    law, z, scale = _standardised(distribution, _targets(distribution, targets))
    try:
        mean = as_float64(law.mean)
    except NotImplementedError:
        raise TypeError(
            f"the distribution {name_of(distribution)} has no mean; use negative_log_likelihood, "
            "which needs none, or accuracy for classes."
        ) from None
    errors = scale * np.abs(z - mean)
    # Relative to the largest, whose square may not be a number.
    largest = np.nanmax(errors, initial=np.finfo(np.float64).tiny)
    return float(largest * np.sqrt(_mean("mean", np.square(errors / largest))))


def crps(distribution: Distribution, targets: Any) -> float:
    """The continuous ranked probability score, mean ∫ (F(x) − 1{x ≥ y})² dx: lower is better, in units of y.

    For a Normal or a mixture of Normals it is exact, in O(N²) operations per row for N particles
    (Grimit et al., 2006): with A(μ, σ²) = E|X|, X ~ N(μ, σ²),

        Σᵢ wᵢ A(y − μᵢ, σᵢ²) − ½ Σᵢⱼ wᵢwⱼ A(μᵢ − μⱼ, σᵢ² + σⱼ²).

    For any other continuous distribution it is quadrature on its `cdf`, three Gauss–Legendre rules of 64
    nodes per row. Relative to the row's score its error is below 1e-6 for smooth laws with one peak, however
    heavy the tails and far away y; 1e-4 where the density jumps or is very skew; up to 3% where peaks are
    narrow and far apart. Several targets are scored one by one, by their marginals.

    Parameters
    ----------
    distribution
        A NumPyro distribution with one law per row, such as `predict_dist(X)`.
    targets
        One per row, or an event of the distribution.
    """
    law, z, scale = _standardised(distribution, _continuous_targets(distribution, targets))
    components = normal_components(law, z.shape)
    if components is None:
        return _mean("cdf", scale * quadrature_crps(law, z))
    return _mean("parameters", scale * normal_mixture_crps(*components, z))


def coverage(low: Any, high: Any, targets: Any) -> float:
    """The share of targets with low ≤ y ≤ high. To be read together with `width`.

    Parameters
    ----------
    low, high
        The ends of the intervals, one per row.
    targets
        One per row.
    """
    low, high = _interval(low, high)
    targets = _finite("targets", targets, "drop rows without a target.")
    _require_shape("targets", targets, "the interval", low.shape, "pass one target per interval.")
    return float(np.mean((low <= targets) & (targets <= high)))


def width(low: Any, high: Any) -> float:
    """The mean of high − low, in units of y.

    Parameters
    ----------
    low, high
        The ends of the intervals, one per row.
    """
    low, high = _interval(low, high)
    return float(np.mean(high - low))


def probability_integral_transform(distribution: Distribution, targets: Any) -> Float[np.ndarray, "..."]:
    """u = F(y) for every target, by marginals: uniform on (0, 1) where predictions are calibrated.

    Parameters
    ----------
    distribution
        A NumPyro distribution with one law per row, such as `predict_dist(X)`.
    targets
        One per row, or an event of the distribution.
    """
    law, z, _ = _standardised(distribution, _continuous_targets(distribution, targets))
    below = marginal_cdf(law, z)
    _require_no_nan("cdf", below)
    return np.clip(below, 0.0, 1.0)


def quantile_calibration_error(distribution: Distribution, targets: Any, levels: Any = LEVELS) -> float:
    """mean over levels q of |share of targets below their predicted q-quantile − q|.

    The mean *absolute* error of the reliability curve of Kuleshov et al. (2018), whose own score sums
    squares. Chance alone gives n independent, calibrated rows about 0.32/√n, for the default levels.

    Parameters
    ----------
    distribution
        A NumPyro distribution with one law per row, such as `predict_dist(X)`.
    targets
        One per row, or an event of the distribution.
    levels
        Which q, between 0 and 1.
    """
    levels = _finite("levels", levels, "such as (0.05, 0.5, 0.95).")
    if levels.ndim != 1 or np.any((levels <= 0) | (levels >= 1)):
        raise ValueError(f"levels must lie between 0 and 1, got {levels}; such as (0.05, 0.5, 0.95).")
    below = probability_integral_transform(distribution, targets).reshape(-1, 1) <= levels
    return float(np.mean(np.abs(below.mean(axis=0) - levels)))


def accuracy(probabilities: Any, labels: Any, classes: Any = None) -> float:
    """The share of rows whose most probable class is the label; of equals, the first counts.

    Parameters
    ----------
    probabilities
        One row per case, one column per class, such as `predict_proba(X)`.
    labels
        The number of the class of every row, or its name.
    classes
        The names of the columns, such as `model.classes_`; needed for labels that are names.
    """
    probabilities, labels = _classification(probabilities, labels, classes)
    return float(np.mean(probabilities.argmax(axis=1) == labels))


def log_loss(probabilities: Any, labels: Any, classes: Any = None) -> float:
    """−mean log p(label). Probabilities are clipped to the machine epsilon of their type from below, as in
    scikit-learn: an impossible label costs 15.9 in float32, 36.0 in float64, and not ∞.

    Parameters
    ----------
    probabilities
        One row per case, one column per class, such as `predict_proba(X)`.
    labels
        The number of the class of every row, or its name.
    classes
        The names of the columns, such as `model.classes_`; needed for labels that are names.
    """
    kind = np.asarray(probabilities).dtype
    least = float(jnp.finfo(kind if jnp.issubdtype(kind, jnp.floating) else np.float64).eps)
    probabilities, labels = _classification(probabilities, labels, classes)
    of_label = np.take_along_axis(probabilities, labels[:, None], axis=1)
    return float(-np.mean(np.log(np.maximum(of_label, least))))


def brier_score(probabilities: Any, labels: Any, classes: Any = None) -> float:
    """mean Σ_c (p_c − 1{c = label})², the sum over classes, between 0 and 2 (Brier, 1950).

    For two classes it is twice scikit-learn's `brier_score_loss`, which looks at one of them.

    Parameters
    ----------
    probabilities
        One row per case, one column per class, such as `predict_proba(X)`.
    labels
        The number of the class of every row, or its name.
    classes
        The names of the columns, such as `model.classes_`; needed for labels that are names.
    """
    probabilities, labels = _classification(probabilities, labels, classes)
    errors = probabilities - np.eye(probabilities.shape[1])[labels]
    return float(np.mean(np.sum(np.square(errors), axis=1)))


class ConfidenceBins(NamedTuple):
    """Rows by the probability of their most probable class: how many a bin holds, their mean confidence, and
    the share of them that is right. NaN in empty bins. Bins are (edges[k], edges[k + 1]]."""

    edges: Float[np.ndarray, " bins_and_1"]
    counts: Int[np.ndarray, " bins"]
    confidence: Float[np.ndarray, " bins"]
    accuracy: Float[np.ndarray, " bins"]


def confidence_bins(probabilities: Any, labels: Any, bins: int = 15, classes: Any = None) -> ConfidenceBins:
    """Confidence and accuracy of the most probable class, in `bins` bins of equal width.

    Parameters
    ----------
    probabilities
        One row per case, one column per class, such as `predict_proba(X)`.
    labels
        The number of the class of every row, or its name.
    bins
        How many bins of equal width.
    classes
        The names of the columns, such as `model.classes_`; needed for labels that are names.
    """
    bins = require_count("bins", bins, 1, "it counts the bins of equal width on (0, 1]; 15 is usual.")
    probabilities, labels = _classification(probabilities, labels, classes)
    confidence, right = probabilities.max(axis=1), probabilities.argmax(axis=1) == labels
    edges = np.linspace(0.0, 1.0, bins + 1)
    place = np.searchsorted(edges[1:-1], confidence)
    counts = np.bincount(place, minlength=bins)

    def mean(quantity: np.ndarray) -> np.ndarray:
        totals = np.bincount(place, weights=quantity, minlength=bins)
        return np.divide(totals, counts, out=np.full(bins, np.nan), where=counts > 0)

    return ConfidenceBins(edges, counts, mean(confidence), mean(right))


def expected_calibration_error(probabilities: Any, labels: Any, bins: int = 15, classes: Any = None) -> float:
    """Σ_b (n_b/n) |accuracy_b − confidence_b| of the most probable class, in bins of equal width (Guo et al.,
    2017). Never negative, so finite samples push it above 0 also where predictions are calibrated.

    Parameters
    ----------
    probabilities
        One row per case, one column per class, such as `predict_proba(X)`.
    labels
        The number of the class of every row, or its name.
    bins
        How many bins of equal width.
    classes
        The names of the columns, such as `model.classes_`; needed for labels that are names.
    """
    table = confidence_bins(probabilities, labels, bins, classes)
    return float(np.nansum(table.counts * np.abs(table.accuracy - table.confidence)) / table.counts.sum())


def auroc(scores_in: Any, scores_out: Any) -> float:
    """P(a score outside > a score inside), ties half: how well a score of uncertainty (entropy, variance, …)
    tells inputs from outside the training distribution. ½ is chance, 1 perfect.

    Parameters
    ----------
    scores_in
        Of inputs like those of the training: one uncertainty per input.
    scores_out
        Of inputs from outside.
    """
    inside, outside = (
        _finite(name, scores, "pass one uncertainty per input.")
        for name, scores in (("scores_in", scores_in), ("scores_out", scores_out))
    )
    for name, scores in (("scores_in", inside), ("scores_out", outside)):
        if scores.ndim != 1:
            raise ValueError(f"{name} must be a vector, got shape {scores.shape}; pass one score per input.")
    ranks = scipy.stats.rankdata(np.concatenate([inside, outside]))
    m, n = len(inside), len(outside)
    return float((ranks[m:].sum() - n * (n + 1) / 2) / (m * n))


# What a user may pass


def _first_row(wrong: Bool[np.ndarray, "..."]) -> int:
    return int(np.argwhere(wrong)[0][0])


def _require_no_nan(source: str, values: Float[np.ndarray, "..."]) -> None:
    if np.any(np.isnan(values)):
        raise ValueError(
            f"the distribution's {source} gives NaN in row {_first_row(np.isnan(values))}; check that its "
            "parameters are finite, its scales > 0, and the targets in its support."
        )


def _mean(source: str, values: Float[np.ndarray, "..."]) -> float:
    _require_no_nan(source, values)
    return float(np.mean(values))


def _numbers(name: str, value: Any, remedy: str) -> Shaped[np.ndarray, "..."]:
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


def _finite(name: str, value: Any, remedy: str) -> Float[np.ndarray, "..."]:
    array = as_float64(_numbers(name, value, remedy))
    if not np.all(np.isfinite(array)):
        row = _first_row(~np.isfinite(array))
        raise ValueError(f"{name} must be finite, got {array[row]} in row {row}; {remedy}")
    return array


def _require_shape(name: str, array: np.ndarray, other: str, shape: tuple[int, ...], remedy: str) -> None:
    """No broadcasting: (rows, 1) against (rows,) would be all pairs of rows."""
    if array.shape != shape:
        if array.shape == (*shape, 1):
            remedy = f"drop the last axis with {name}[..., 0]."
        raise ValueError(f"{name} has shape {array.shape}, but {other} {shape}; {remedy}")


def _targets(distribution: Any, targets: Any) -> Shaped[np.ndarray, "..."]:
    """As float64, or as the integers they are where the distribution is discrete."""
    if not isinstance(distribution, Distribution):
        raise TypeError(
            f"distribution must be a NumPyro distribution, got {type(distribution).__name__}; "
            "pass what predict_dist(X) returns."
        )
    shape = distribution.batch_shape + distribution.event_shape
    remedy = "pass one target per predicted row."
    whole = "drop rows without a target."
    if isinstance(_components(distribution), CLASSES):
        whole = "pass np.searchsorted(model.classes_, y) for names, or use log_loss, which takes them."
    values = _finite("targets", targets, whole)
    if shape == ():
        remedy = f"for one law of all rows, use distribution.expand({values.shape})."
    _require_shape("targets", values, "the distribution", shape, remedy)
    return plain(targets) if distribution.is_discrete else values


def _components(distribution: Any) -> Any:
    return distribution._component_distribution if isinstance(distribution, Mixture) else distribution


def _standardised(
    distribution: Any, values: np.ndarray
) -> tuple[Distribution, np.ndarray, Float[np.ndarray, "..."]]:
    """The law without its units, the targets in those, and their scale, for each of them."""
    if not isinstance(distribution, Mixture) or distribution.scale is None:
        return distribution, values, np.ones(values.shape)
    z = (values - as_float64(distribution.location)) / as_float64(distribution.scale)
    return distribution.standardised, z, np.broadcast_to(as_float64(distribution.scale), z.shape)


def _continuous_targets(distribution: Any, targets: Any) -> Float[np.ndarray, "..."]:
    values = _targets(distribution, targets)
    if distribution.is_discrete:
        raise TypeError(
            f"distribution must be continuous, got {name_of(distribution)}; for classes use log_loss, "
            "brier_score or expected_calibration_error, for counts negative_log_likelihood."
        )
    return values


def _interval(low: Any, high: Any) -> tuple[Float[np.ndarray, "..."], Float[np.ndarray, "..."]]:
    """Ends may be infinite, as those of a conformal prediction with few data are."""
    low = as_float64(_numbers("low", low, "pass the lower ends of the intervals."))
    high = as_float64(_numbers("high", high, "pass the upper ends of the intervals."))
    _require_shape("high", high, "low", low.shape, "pass one interval per row.")
    wrong = ~(low <= high)
    if np.any(wrong):
        row = _first_row(wrong)
        raise ValueError(
            f"low must be ≤ high in every row, got {low[row]} and {high[row]} in row {row}; swap them, and "
            "check for NaN."
        )
    return low, high


def _classification(
    probabilities: Any, labels: Any, classes: Any
) -> tuple[Float[np.ndarray, "rows classes"], Int[np.ndarray, " rows"]]:
    remedy = "pass one row per case and one column per class, such as predict_proba(X)."
    table = _finite("probabilities", probabilities, remedy)
    if table.ndim == 1:
        remedy = "for two classes, pass np.stack([1 - p, p], axis=1)."
    if table.ndim != 2:
        raise ValueError(f"probabilities must have shape (rows, classes), got {table.shape}; {remedy}")
    wrong = np.any(table < 0, axis=1) | (np.abs(table.sum(axis=1) - 1) > _SUM_TOLERANCE)
    if np.any(wrong):
        row = _first_row(wrong)
        raise ValueError(
            f"probabilities must be ≥ 0 and sum to 1 in every row, got {table[row]} in row {row}; "
            "apply jax.nn.softmax to logits."
        )
    return table, class_numbers(labels, table.shape, classes)
