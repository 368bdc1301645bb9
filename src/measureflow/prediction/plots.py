"""Pictures of predictions and of runs, each on an axis of matplotlib."""

from typing import Any

import numpy as np
import scipy.stats
from matplotlib.axes import Axes
from numpyro.distributions import Distribution

from measureflow.core.validation import require_count
from measureflow.prediction import metrics
from measureflow.prediction.colours import COLOURS
from measureflow.prediction.labels import class_numbers


def reliability_plot(
    axis: Axes,
    predictions: Any,
    targets: Any,
    *,
    label: str | None = None,
    colour: str = COLOURS["DLE"],
    bins: int = 15,
    classes: Any = None,
) -> None:
    """What was predicted against what was observed: the diagonal is calibration.

    Of a continuous distribution: the share of targets below each predicted quantile. Overconfident
    predictions start above the diagonal and end below it. Of an array of class probabilities, with labels as
    targets: the share of right answers against confidence, the probability of the most probable class, in
    `bins` bins of equal width; overconfident predictions lie below the diagonal. Grey columns count the rows.

    The grey band is where 95% of calibrated predictions would be, at each level or bin by itself, if targets
    are independent. A second call on the same axis adds predictions, to compare; band and counts stay
    those of the first.

    Parameters
    ----------
    axis
        An axis of matplotlib.
    predictions
        A distribution with one law per row, or an array of class probabilities (rows, classes).
    targets
        One per row; labels for classes.
    label
        What the legend calls these predictions.
    colour
        Of the curve.
    bins
        How many bins of confidence, for classes.
    classes
        The names of the labels, as in `metrics`.
    """
    first = not axis.has_data()
    if isinstance(predictions, Distribution):
        _quantile_reliability(axis, predictions, targets, label, colour, first)
    else:
        columns = np.shape(predictions)
        numbers = targets if len(columns) != 2 else class_numbers(targets, columns, classes)
        _confidence_reliability(axis, predictions, numbers, label, colour, first, bins)
    if first:
        axis.plot([0, 1], [0, 1], color="0.35", linewidth=0.9, linestyle="--", zorder=1.5)
        axis.set(xlim=(0, 1), ylim=(0, 1), xticks=np.linspace(0, 1, 6), yticks=np.linspace(0, 1, 6))
        axis.set_aspect("equal")
    _finish(axis)


def _finish(axis: Axes) -> None:
    axis.legend(loc="upper left", fontsize=7, frameon=True, framealpha=0.8, edgecolor="none")
    axis.spines[["top", "right"]].set_visible(False)


def _error_label(label: str | None, error: float) -> str:
    return f"calibration error {error:.3f}" if label is None else f"{label}: calibration error {error:.3f}"


def _quantile_reliability(
    axis: Axes, distribution: Distribution, targets: Any, label: str | None, colour: str, first: bool
) -> None:
    transform = np.sort(metrics.probability_integral_transform(distribution, targets), axis=None)
    number, levels = len(transform), np.linspace(0, 1, 201)
    if first:
        low, high = scipy.stats.binom.interval(0.95, number, levels)
        what = f"95% band of chance, {number:,} targets"
        axis.fill_between(levels, low / number, high / number, color="0.85", linewidth=0, label=what)
        axis.set(xlabel="level of the predicted quantile", ylabel="share of targets below it")
    observed = np.searchsorted(transform, levels, side="right") / number
    name = _error_label(label, metrics.quantile_calibration_error(distribution, targets))
    axis.plot(levels, observed, color=colour, linewidth=1.6, label=name)


def _confidence_reliability(
    axis: Axes, probabilities: Any, labels: Any, label: str | None, colour: str, first: bool, bins: int
) -> None:
    table = metrics.confidence_bins(probabilities, labels, bins)
    filled = table.counts > 0
    counts, confidence = table.counts[filled], table.confidence[filled]
    if first:
        # Columns stay in the lowest fifth, below what is to be read.
        width, heights = 1 / bins, 0.2 * table.counts / table.counts.max()
        axis.bar(table.edges[:-1], heights, width, align="edge", color="0.9", edgecolor="white", zorder=0.5)
        for left, height, count in zip(table.edges[:-1][filled], heights[filled], counts, strict=True):
            where = (left + width / 2, height + 0.008)
            axis.text(
                *where, _short(int(count)), ha="center", va="bottom", fontsize=5.5, color="0.4", zorder=1.2
            )
        # Rounding may put the mean of float32 confidences above 1.
        low, high = scipy.stats.binom.interval(0.95, counts, np.minimum(confidence, 1))
        what = f"95% band of chance, {counts.sum():,} rows"
        band = {"colors": "0.8", "linewidth": 6, "zorder": 1, "label": what}
        axis.vlines(confidence, low / counts, high / counts, **band)
        axis.set(xlabel="confidence", ylabel="share of right answers")
    name = _error_label(label, metrics.expected_calibration_error(probabilities, labels, bins))
    style = {"color": colour, "linewidth": 1, "markersize": 4, "clip_on": False, "label": name}
    axis.plot(confidence, table.accuracy[filled], "o-", **style)


def _short(count: int) -> str:
    if count < 1000:
        return f"{count}"
    return f"{count / 1000:.1f}k" if count < 10_000 else f"{count // 1000}k"


def interval_plot(axis: Axes, mean: Any, low: Any, high: Any, targets: Any, *, most: int = 150) -> None:
    """Predicted intervals in the order of their means, the targets, and which of these lie outside.

    Parameters
    ----------
    axis
        An axis of matplotlib.
    mean, low, high
        Of every row: the predictive mean, and the ends of its interval.
    targets
        One per row.
    most
        How many rows to draw, evenly from all; coverage and width in the legend are those of all.
    """
    most = require_count("most", most, 1, "it counts the intervals to draw; 150 can be told apart.")
    share, width = metrics.coverage(low, high, targets), metrics.width(low, high)
    mean, low, high, targets = (np.asarray(array, np.float64) for array in (mean, low, high, targets))
    if mean.ndim != 1 or mean.shape != targets.shape:
        raise ValueError(
            f"mean has shape {mean.shape}, but targets {targets.shape}; pass vectors, one target at a time."
        )
    if not np.all(np.isfinite(mean)):
        raise ValueError(f"mean must be finite, got {mean}; check the predictions for NaN.")
    order = np.argsort(mean, kind="stable")
    drawn = order[np.unique(np.linspace(0, len(order) - 1, min(most, len(order))).round().astype(int))]
    mean, low, high, targets = mean[drawn], low[drawn], high[drawn], targets[drawn]
    place, inside = np.arange(len(drawn)), (low <= targets) & (targets <= high)
    thickness = np.clip(250 / len(drawn), 0.8, 5)
    colour, missed = COLOURS["DLE"], COLOURS["FD-GVI"]
    bars = {"colors": colour, "linewidth": thickness, "alpha": 0.3}
    axis.vlines(place, low, high, **bars, label=f"interval, mean width {width:.3g}")
    axis.plot(place, mean, color=colour, linewidth=1.2, label="predictive mean")
    dots = {"linestyle": "none", "marker": "o", "markersize": 2.5, "color": "0.2"}
    axis.plot(place[inside], targets[inside], **dots, label=f"target inside: {share:.1%} of all")
    crosses = {"linestyle": "none", "marker": "x", "markersize": 5, "markeredgewidth": 1.3, "color": missed}
    axis.plot(place[~inside], targets[~inside], **crosses, label=f"target outside: {1 - share:.1%} of all")
    rows = f"{len(order):,} rows" if len(drawn) == len(order) else f"{len(drawn):,} of {len(order):,} rows"
    axis.set(xlabel=f"{rows}, by predictive mean", ylabel="target", xlim=(-1, len(drawn)), xticks=[])
    _finish(axis)
