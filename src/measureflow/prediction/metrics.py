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
import scipy
from jaxtyping import Float, Int
from numpyro.distributions import (
    Distribution,
)

from measureflow.core.validation import require_count, require_representable
from measureflow.prediction.arguments import (
    classification,
    continuous_targets,
    finite,
    first_row,
    in_standard_units,
    interval_ends,
    is_of_counts,
    mean_of,
    require_no_nan,
    require_shape,
    targets_of,
)
from measureflow.prediction.censoring import bounds_of, censored_log_likelihoods
from measureflow.prediction.logarithmic import LogMixture, log_mixture_crps
from measureflow.prediction.ranked_probability import (
    as_float64,
    count_crps,
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


def negative_log_likelihood(distribution: Distribution, targets: Any, censoring: Any = None) -> float:
    """−mean log p(y), the logarithmic score: lower is better. p is the mixture, not one particle's law.

    Several targets of one row that are an event of the distribution count together: log p is that of the
    row. The unit of y matters: with y/c in place of y, log c is subtracted for every target.

    Parameters
    ----------
    distribution
        A NumPyro distribution with one law per row, such as `predict_dist(X)`.
    targets
        One per row, or an event of the distribution.
    censoring
        1 where the target is larger than the number given, −1 where it is smaller, 0 where it is that number;
        or "interval", with lower and upper bounds as two columns of `targets`. Such rows count with the
        logarithm of a probability, log P(Y > y) for example, in place of that of a density. As in
        `EnsembleRegressor.fit`.
    """
    if censoring is not None:
        scores = censored_log_likelihoods(distribution, bounds_of(targets, censoring))
        return mean_of("cdf", scores)
    values = targets_of(distribution, targets)
    law, z, scale = in_standard_units(distribution, values)
    support: Any = law.support
    points = jnp.asarray(require_representable("targets", z))
    outside = ~np.asarray(support(points))
    if np.any(outside):
        row = first_row(outside)
        raise ValueError(
            f"targets must be possible under the distribution, got {values[row]} in row {row}, outside its "
            f"support {support}; check labels and units, or choose another likelihood."
        )
    densities = as_float64(law.log_prob(points))
    volume = np.log(scale).reshape(*densities.shape, -1).sum(axis=-1)
    return mean_of("log_prob", volume - densities)


def root_mean_square_error(distribution: Distribution, targets: Any) -> float:
    """√ mean (y − E[Y])², of the predictive mean; over rows and targets.

    Parameters
    ----------
    distribution
        A NumPyro distribution with one law per row, such as `predict_dist(X)`.
    targets
        One per row, or an event of the distribution.
    """
    law, z, scale = in_standard_units(distribution, targets_of(distribution, targets))
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
    return float(largest * np.sqrt(mean_of("mean", np.square(errors / largest))))


def crps(distribution: Distribution, targets: Any) -> float:
    """The continuous ranked probability score, mean ∫ (F(x) − 1{x ≥ y})² dx: lower is better, in units of y.

    For a Normal or a mixture of Normals it is exact, in O(N²) operations per row for N particles
    (Grimit et al., 2006): with A(μ, σ²) = E|X|, X ~ N(μ, σ²),

        Σᵢ wᵢ A(y − μᵢ, σᵢ²) − ½ Σᵢⱼ wᵢwⱼ A(μᵢ − μⱼ, σᵢ² + σⱼ²).

    For counts it is the sum Σₖ (F(k) − 1{k ≥ y})². For a `LogMixture` it is exact, too, with E|Xᵢ − Xⱼ| of
    log-normal laws. For any other continuous distribution it is quadrature on its `cdf`, three
    Gauss–Legendre rules of 64 nodes per row. Relative to the row's score, its error is below 1e-6 for smooth
    laws with one peak, however heavy the tails and far away y; 1e-4 where the density jumps or is very skew;
    up to 3% where peaks are narrow and far apart. Several targets are scored one by one, by their marginals.

    Parameters
    ----------
    distribution
        A NumPyro distribution with one law per row, such as `predict_dist(X)`.
    targets
        One per row, or an event of the distribution.
    """
    if is_of_counts(distribution):
        return mean_of("cdf", count_crps(distribution, as_float64(targets_of(distribution, targets))))
    values = continuous_targets(distribution, targets)
    if isinstance(distribution, LogMixture):
        return mean_of("parameters", log_mixture_crps(distribution, values))
    law, z, scale = in_standard_units(distribution, values)
    components = normal_components(law, z.shape)
    if components is None:
        return mean_of("cdf", scale * quadrature_crps(law, z))
    return mean_of("parameters", scale * normal_mixture_crps(*components, z))


def coverage(low: Any, high: Any, targets: Any) -> float:
    """The share of targets with low ≤ y ≤ high. To be read together with `width`.

    Parameters
    ----------
    low, high
        The ends of the intervals, one per row.
    targets
        One per row.
    """
    low, high = interval_ends(low, high)
    targets = finite("targets", targets, "drop rows without a target.")
    require_shape("targets", targets, "the interval", low.shape, "pass one target per interval.")
    return float(np.mean((low <= targets) & (targets <= high)))


def width(low: Any, high: Any) -> float:
    """The mean of high − low, in units of y.

    Parameters
    ----------
    low, high
        The ends of the intervals, one per row.
    """
    low, high = interval_ends(low, high)
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
    law, z, _ = in_standard_units(distribution, continuous_targets(distribution, targets))
    below = marginal_cdf(law, z)
    require_no_nan("cdf", below)
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
    levels = finite("levels", levels, "such as (0.05, 0.5, 0.95).")
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
    probabilities, labels = classification(probabilities, labels, classes)
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
    probabilities, labels = classification(probabilities, labels, classes)
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
    probabilities, labels = classification(probabilities, labels, classes)
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
    probabilities, labels = classification(probabilities, labels, classes)
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
        finite(name, scores, "pass one uncertainty per input.")
        for name, scores in (("scores_in", scores_in), ("scores_out", scores_out))
    )
    for name, scores in (("scores_in", inside), ("scores_out", outside)):
        if scores.ndim != 1:
            raise ValueError(f"{name} must be a vector, got shape {scores.shape}; pass one score per input.")
    ranks = scipy.stats.rankdata(np.concatenate([inside, outside]))
    m, n = len(inside), len(outside)
    return float((ranks[m:].sum() - n * (n + 1) / 2) / (m * n))


# What a user may pass
