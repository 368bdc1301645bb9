"""How good predictions with uncertainty are: proper scores, calibration, coverage.

Every metric is one Python float, a mean over rows taken in float64; each looks at concrete values, so none
can be jitted. Where rows have several targets, marginal metrics average over these, too; the negative
log-likelihood is that of all targets of a row together.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import scipy.special
import scipy.stats
from jaxtyping import Bool, Float, Int, Shaped
from numpyro.distributions import (
    Distribution,
    ExpandedDistribution,
    Independent,
    MixtureSameFamily,
    Normal,
    StudentT,
)

from measureflow.validation import require_count

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

# A Gauss–Legendre rule on (0, 1), for CRPS without a closed form.
_RULE = np.polynomial.legendre.leggauss(64)
_NODES, _WEIGHTS = (_RULE[0] + 1) / 2, _RULE[1] / 2

# How far from 1 a row of probabilities may sum: float32, and averages of it, are well inside.
_SUM_TOLERANCE = 1e-3


def negative_log_likelihood(distribution: Distribution, targets: Any) -> float:
    """−mean log p(y), the logarithmic score: lower is better. p is the mixture, not one particle's law.

    Several targets of one row that are an event of the distribution count together: log p is that of the
    row. The unit of y matters: with y/c in place of y, log c is subtracted for every target.
    """
    values = _targets(distribution, targets)
    support: Any = distribution.support
    outside = ~np.asarray(support(jnp.asarray(values)))
    if np.any(outside):
        row = _first_row(outside)
        raise ValueError(
            f"targets must be possible under the distribution, got {values[row]} in row {row}, outside its "
            f"support {support}; check labels and units, or choose another likelihood."
        )
    return _mean("log_prob", -_float64(distribution.log_prob(jnp.asarray(values))))


def root_mean_square_error(distribution: Distribution, targets: Any) -> float:
    """√ mean (y − E[Y])², of the predictive mean; over rows and targets."""
    values = _targets(distribution, targets)
    try:
        mean = _float64(distribution.mean)
    except NotImplementedError:
        raise TypeError(
            f"the distribution {_name(distribution)} has no mean; use negative_log_likelihood, "
            "which needs none, or accuracy for classes."
        ) from None
    return float(np.sqrt(_mean("mean", np.square(values - mean))))


def crps(distribution: Distribution, targets: Any) -> float:
    """The continuous ranked probability score, mean ∫ (F(x) − 1{x ≥ y})² dx: lower is better, in units of y.

    For a Normal or a mixture of Normals it is exact, in O(N²) operations per row for N particles
    (Grimit et al., 2006): with A(μ, σ²) = E|X|, X ~ N(μ, σ²),

        Σᵢ wᵢ A(y − μᵢ, σᵢ²) − ½ Σᵢⱼ wᵢwⱼ A(μᵢ − μⱼ, σᵢ² + σⱼ²).

    For any other continuous distribution it is quadrature on its `cdf`, three Gauss–Legendre rules of 64
    nodes per row. Relative to the row's score its error is below 1e-6 for smooth laws with one peak, however
    heavy the tails and far away y; 1e-4 where the density jumps or is very skew; up to 3% where peaks are
    narrow and far apart. Several targets are scored one by one, by their marginals.
    """
    values = _continuous_targets(distribution, targets)
    components = _normal_components(distribution, values.shape)
    if components is None:
        return _mean("cdf", _quadrature_crps(distribution, values))
    return _mean("parameters", _normal_mixture_crps(*components, values))


def coverage(low: Any, high: Any, targets: Any) -> float:
    """The share of targets with low ≤ y ≤ high. To be read together with `width`."""
    low, high = _interval(low, high)
    targets = _finite("targets", targets, "drop rows without a target.")
    _require_shape("targets", targets, "the interval", low.shape, "pass one target per interval.")
    return float(np.mean((low <= targets) & (targets <= high)))


def width(low: Any, high: Any) -> float:
    """The mean of high − low, in units of y."""
    low, high = _interval(low, high)
    return float(np.mean(high - low))


def probability_integral_transform(distribution: Distribution, targets: Any) -> Float[np.ndarray, "..."]:
    """u = F(y) for every target, by marginals: uniform on (0, 1) where predictions are calibrated."""
    values = _continuous_targets(distribution, targets)
    below = _cdf(distribution, values)
    _require_no_nan("cdf", below)
    return np.clip(below, 0.0, 1.0)


def quantile_calibration_error(distribution: Distribution, targets: Any, levels: Any = LEVELS) -> float:
    """mean over levels q of |share of targets below their predicted q-quantile − q|.

    The mean *absolute* error of the reliability curve of Kuleshov et al. (2018), whose own score sums
    squares. Chance alone gives n independent, calibrated rows about 0.32/√n, for the default levels.
    """
    levels = _finite("levels", levels, "such as (0.05, 0.5, 0.95).")
    if levels.ndim != 1 or np.any((levels <= 0) | (levels >= 1)):
        raise ValueError(f"levels must lie between 0 and 1, got {levels}; such as (0.05, 0.5, 0.95).")
    below = probability_integral_transform(distribution, targets).reshape(-1, 1) <= levels
    return float(np.mean(np.abs(below.mean(axis=0) - levels)))


def accuracy(probabilities: Any, labels: Any) -> float:
    """The share of rows whose most probable class is the label; of equals, the first counts."""
    probabilities, labels = _classification(probabilities, labels)
    return float(np.mean(probabilities.argmax(axis=1) == labels))


def log_loss(probabilities: Any, labels: Any) -> float:
    """−mean log p(label). Probabilities are clipped to the machine epsilon of their type from below, as in
    scikit-learn: an impossible label costs 15.9 in float32, 36.0 in float64, and not ∞."""
    kind = np.asarray(probabilities).dtype
    least = float(jnp.finfo(kind if jnp.issubdtype(kind, jnp.floating) else np.float64).eps)
    probabilities, labels = _classification(probabilities, labels)
    of_label = np.take_along_axis(probabilities, labels[:, None], axis=1)
    return float(-np.mean(np.log(np.maximum(of_label, least))))


def brier_score(probabilities: Any, labels: Any) -> float:
    """mean Σ_c (p_c − 1{c = label})², the sum over classes, between 0 and 2 (Brier, 1950).

    For two classes it is twice scikit-learn's `brier_score_loss`, which looks at one of them.
    """
    probabilities, labels = _classification(probabilities, labels)
    errors = probabilities - np.eye(probabilities.shape[1])[labels]
    return float(np.mean(np.sum(np.square(errors), axis=1)))


class ConfidenceBins(NamedTuple):
    """Rows by the probability of their most probable class: how many a bin holds, their mean confidence, and
    the share of them that is right. NaN in empty bins. Bins are (edges[k], edges[k + 1]]."""

    edges: Float[np.ndarray, " bins_and_1"]
    counts: Int[np.ndarray, " bins"]
    confidence: Float[np.ndarray, " bins"]
    accuracy: Float[np.ndarray, " bins"]


def confidence_bins(probabilities: Any, labels: Any, bins: int = 15) -> ConfidenceBins:
    """Confidence and accuracy of the most probable class, in `bins` bins of equal width."""
    bins = require_count("bins", bins, 1, "it counts the bins of equal width on (0, 1]; 15 is usual.")
    probabilities, labels = _classification(probabilities, labels)
    confidence, right = probabilities.max(axis=1), probabilities.argmax(axis=1) == labels
    edges = np.linspace(0.0, 1.0, bins + 1)
    place = np.searchsorted(edges[1:-1], confidence)
    counts = np.bincount(place, minlength=bins)

    def mean(quantity: np.ndarray) -> np.ndarray:
        totals = np.bincount(place, weights=quantity, minlength=bins)
        return np.divide(totals, counts, out=np.full(bins, np.nan), where=counts > 0)

    return ConfidenceBins(edges, counts, mean(confidence), mean(right))


def expected_calibration_error(probabilities: Any, labels: Any, bins: int = 15) -> float:
    """Σ_b (n_b/n) |accuracy_b − confidence_b| of the most probable class, in bins of equal width (Guo et al.,
    2017). Never negative, so finite samples push it above 0 also where predictions are calibrated."""
    table = confidence_bins(probabilities, labels, bins)
    return float(np.nansum(table.counts * np.abs(table.accuracy - table.confidence)) / table.counts.sum())


def auroc(scores_in: Any, scores_out: Any) -> float:
    """P(a score outside > a score inside), ties half: how well a score of uncertainty (entropy, variance, …)
    tells inputs from outside the training distribution. ½ is chance, 1 perfect."""
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


# Continuous ranked probability score


def _normal_components(
    distribution: Distribution, shape: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Weights, means and deviations of the Normals that are mixed, particles last; None for other laws."""
    if not isinstance(distribution, MixtureSameFamily):
        normal = _base(distribution)
        if not isinstance(normal, Normal):
            return None
        loc, scale = (np.broadcast_to(_float64(p), shape)[..., None] for p in (normal.loc, normal.scale))
        return np.ones(1), loc, scale
    normal = _base(distribution.component_distribution)
    if not isinstance(normal, Normal):
        return None
    particles = len(distribution.batch_shape)
    whole = (*shape[:particles], distribution.mixture_size, *shape[particles:])
    loc, scale = (
        np.moveaxis(np.broadcast_to(_float64(p), whole), particles, -1) for p in (normal.loc, normal.scale)
    )
    weights = _float64(distribution.mixing_distribution.probs)
    weights = weights / weights.sum(axis=-1, keepdims=True)
    between = (1,) * len(distribution.event_shape)
    return weights.reshape(*weights.shape[:-1], *between, weights.shape[-1]), loc, scale


def _expected_absolute(loc: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """A(μ, σ²) = E|X| = 2σφ(μ/σ) + μ(2Φ(μ/σ) − 1)."""
    z = loc / scale
    density = np.exp(-0.5 * np.square(z)) / np.sqrt(2 * np.pi)
    return 2 * scale * density + loc * scipy.special.erf(z / np.sqrt(2))


def _normal_mixture_crps(
    weights: np.ndarray, loc: np.ndarray, scale: np.ndarray, targets: np.ndarray
) -> np.ndarray:
    weights = np.broadcast_to(weights, loc.shape)
    score = np.sum(weights * _expected_absolute(targets[..., None] - loc, scale), axis=-1)
    # A particle with itself: ½ A(0, 2σ²) = σ/√π.
    score -= np.sum(np.square(weights) * scale, axis=-1) / np.sqrt(np.pi)
    # One particle at a time with those after it, so that memory is rows × particles.
    for i in range(loc.shape[-1] - 1):
        one, others = slice(i, i + 1), slice(i + 1, None)
        spread = np.hypot(scale[..., one], scale[..., others])
        pairs = _expected_absolute(loc[..., one] - loc[..., others], spread)
        score -= np.sum(weights[..., one] * weights[..., others] * pairs, axis=-1)
    return score


def _quadrature_crps(distribution: Distribution, targets: np.ndarray) -> np.ndarray:
    """With any centre m, the tails T±(r) = P(±(X − m) > r), d = |y − m| and the sign ± of y − m,

        CRPS = ∫₀^∞ T₊² dr + ∫₀^∞ T₋² dr + d − 2 ∫₀^d T±(r) dr:

    smooth integrands, whose variable r = s·v/(1 − v) puts 0 < r < ∞ on 0 < v < 1. The last two terms are
    what moving y away from m adds, so that a distant y is as exact as a near one.
    """
    centre, spread = _centre_and_spread(distribution, targets.shape)
    # That of single targets, where several are an event.
    support: Any = getattr(distribution.support, "base_constraint", distribution.support)

    def tail(sign: Any, r: np.ndarray) -> np.ndarray:
        x = centre + sign * r
        below = _cdf(distribution, x)
        # NumPyro's formulas for F hold inside the support only.
        return np.where(support(jnp.asarray(x)), np.where(sign > 0, 1 - below, below), 0.0)

    def integral(function: Callable[[np.ndarray], np.ndarray], end: Any) -> np.ndarray:
        """∫ over 0 < v < end, one node at a time."""
        total = np.zeros(targets.shape)
        for node, weight in zip(_NODES, _WEIGHTS, strict=True):
            v = end * node
            total += weight * end * function(spread * v / (1 - v)) * spread / np.square(1 - v)
        return total

    distance, side = np.abs(targets - centre), np.where(targets < centre, -1.0, 1.0)
    tails = sum(integral(lambda r, sign=sign: np.square(tail(sign, r)), 1.0) for sign in (1.0, -1.0))
    return tails + distance - 2 * integral(lambda r: tail(side, r), distance / (distance + spread))


def _centre_and_spread(distribution: Distribution, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Median and interquartile range, or mean and deviation where there is no quantile function."""
    try:
        quartiles = [
            np.broadcast_to(_float64(distribution.icdf(jnp.full(shape, level))), shape)
            for level in (0.25, 0.5, 0.75)
        ]
        centre, spread = quartiles[1], quartiles[2] - quartiles[0]
    # NumPyro's quantiles of Beta, Gamma and StudentT need a library that is not required.
    except (NotImplementedError, ImportError):
        try:
            centre, variance = _float64(distribution.mean), _float64(distribution.variance)
        except NotImplementedError:
            raise TypeError(
                f"crps of {_name(distribution)} needs icdf, or mean and variance, which it does not have; "
                "use negative_log_likelihood, or a likelihood such as Normal, StudentT or Laplace."
            ) from None
        centre, spread = np.broadcast_to(centre, shape), np.broadcast_to(np.sqrt(variance), shape)
    if not np.all(np.isfinite(centre) & np.isfinite(spread) & (spread > 0)):
        raise ValueError(
            f"crps of {_name(distribution)} needs a finite mean and variance, or finite quartiles; check its "
            "parameters for NaN, or give Student tails more than 2 degrees of freedom."
        )
    return centre, spread


# Distributions


def _name(distribution: Distribution) -> str:
    return type(distribution).__name__


def _base(distribution: Distribution) -> Distribution:
    """The law of single numbers under what NumPyro wraps around it; axes at the end stay where they are."""
    while isinstance(distribution, Independent | ExpandedDistribution):
        distribution = distribution.base_dist
    return distribution


def _cdf(distribution: Distribution, values: np.ndarray) -> np.ndarray:
    """F of every target by its marginal; also of events, for which NumPyro has none."""
    if isinstance(distribution, MixtureSameFamily):
        below = _cdf(distribution.component_distribution, np.expand_dims(values, distribution.mixture_dim))
        weights = _float64(distribution.mixing_distribution.probs)
        weights = weights.reshape(*weights.shape, *(1,) * len(distribution.event_shape))
        return np.sum(weights * below, axis=distribution.mixture_dim)
    base = _base(distribution)
    if isinstance(base, StudentT):
        # NumPyro's is slow, and loses digits in float32 where there are many degrees of freedom.
        df, loc, scale = (_float64(parameter) for parameter in (base.df, base.loc, base.scale))
        return scipy.special.stdtr(df, (values - loc) / scale)
    try:
        return _float64(base.cdf(jnp.asarray(values)))
    except NotImplementedError:
        raise TypeError(
            f"this metric needs the cdf of {_name(base)}, which NumPyro does not have; use "
            "negative_log_likelihood, or a likelihood with a cdf such as Normal, StudentT or Laplace."
        ) from None


# What a user may pass


def _float64(array: Any) -> Float[np.ndarray, "..."]:
    return np.asarray(array, dtype=np.float64)


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
        array = np.asarray(value)
    except ValueError:
        raise ValueError(f"{name} must be an array, got rows of different lengths; {remedy}") from None
    # JAX's test knows bfloat16, too.
    if not any(jnp.issubdtype(array.dtype, kind) for kind in (jnp.floating, jnp.integer, jnp.bool_)):
        raise TypeError(f"{name} must hold numbers, got {array.dtype}; {remedy}")
    if array.ndim == 0 or array.size == 0:
        raise ValueError(f"{name} must have at least one row, got shape {array.shape}; {remedy}")
    return array


def _finite(name: str, value: Any, remedy: str) -> Float[np.ndarray, "..."]:
    array = _float64(_numbers(name, value, remedy))
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
    values = _finite("targets", targets, "drop rows without a target.")
    if shape == ():
        remedy = f"for one law of all rows, use distribution.expand({values.shape})."
    _require_shape("targets", values, "the distribution", shape, remedy)
    return np.asarray(targets) if distribution.is_discrete else values


def _continuous_targets(distribution: Any, targets: Any) -> Float[np.ndarray, "..."]:
    values = _targets(distribution, targets)
    if distribution.is_discrete:
        raise TypeError(
            f"distribution must be continuous, got {_name(distribution)}; for classes use log_loss, "
            "brier_score or expected_calibration_error, for counts negative_log_likelihood."
        )
    return values


def _interval(low: Any, high: Any) -> tuple[Float[np.ndarray, "..."], Float[np.ndarray, "..."]]:
    """Ends may be infinite, as those of a conformal prediction with few data are."""
    low = _float64(_numbers("low", low, "pass the lower ends of the intervals."))
    high = _float64(_numbers("high", high, "pass the upper ends of the intervals."))
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
    probabilities: Any, labels: Any
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
    remedy = f"pass the number of each row's class, 0 to {table.shape[1] - 1}."
    classes = _numbers("labels", labels, remedy)
    _require_shape("labels", classes, "one class per row is", table.shape[:1], remedy)
    if jnp.issubdtype(classes.dtype, jnp.floating):
        raise TypeError(f"labels must be integers, got {classes.dtype}; {remedy}")
    classes = classes.astype(np.int64)
    unknown = (classes < 0) | (classes >= table.shape[1])
    if np.any(unknown):
        row = _first_row(unknown)
        raise ValueError(f"labels must be classes, got {classes[row]} in row {row}; {remedy}")
    return table, classes
