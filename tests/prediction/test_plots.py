"""Plots show the numbers that the metrics give: what is drawn is read back from the axes."""

import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from matplotlib.figure import Figure

from measureflow.prediction import metrics
from measureflow.prediction.plots import interval_plot, reliability_plot

pytestmark = pytest.mark.standard_promotion  # NumPyro is not written for the strict one

N = 400
RNG = np.random.default_rng(0)
MEAN = RNG.normal(size=N).astype(np.float32)
TARGETS = MEAN + RNG.normal(size=N)
LAW = dist.Normal(MEAN, jnp.ones(N))
NARROW = dist.Normal(MEAN, 0.5 * jnp.ones(N))
PROBABILITIES = RNG.dirichlet(np.ones(3), size=N)
LABELS = (RNG.uniform(size=(N, 1)) > PROBABILITIES.cumsum(axis=1)).sum(axis=1).clip(0, 2)


@pytest.fixture
def axis():
    return Figure(figsize=(4, 4)).subplots()


def line(axis, text):
    """The points of the one line whose label holds `text`."""
    found = [each for each in axis.get_lines() if text in each.get_label()]
    assert len(found) == 1
    return np.asarray(found[0].get_xdata()), np.asarray(found[0].get_ydata())


def legend(axis):
    return [text.get_text() for text in axis.get_legend().get_texts()]


def test_reliability_of_quantiles(axis):
    reliability_plot(axis, LAW, TARGETS)
    levels, observed = line(axis, "calibration error")
    checked = np.array(metrics.LEVELS)
    error = np.mean(np.abs(np.interp(checked, levels, observed) - checked))
    assert error == pytest.approx(metrics.quantile_calibration_error(LAW, TARGETS), abs=1e-9)
    assert legend(axis) == [f"95% band of chance, {N} targets", f"calibration error {error:.3f}"]
    axis.figure.draw_without_rendering()


def band(axis):
    """Levels, and the lower and upper edge of the filled band."""
    (filled,) = axis.collections
    vertices = filled.get_paths()[0].vertices
    levels = np.unique(vertices[:, 0])
    edges = np.array([[f(vertices[vertices[:, 0] == x, 1]) for f in (np.min, np.max)] for x in levels])
    return levels, edges[:, 0], edges[:, 1]


def test_band_holds_what_chance_allows(axis):
    """Simulated: about 95% of calibrated shares at each level, and few of overconfident ones."""
    reliability_plot(axis, LAW, TARGETS, label="wide")
    levels, low, high = band(axis)
    at = np.searchsorted(levels, 0.3 - 1e-9)
    shares = RNG.binomial(N, 0.3, size=20_000) / N
    assert np.mean((low[at] <= shares) & (shares <= high[at])) == pytest.approx(0.955, abs=0.015)
    reliability_plot(axis, NARROW, TARGETS, label="narrow")
    for text, inside in (("narrow", False), ("wide", True)):
        share = np.interp([0.2, 0.8], *line(axis, text))
        bounds = np.interp([0.2, 0.8], levels, low), np.interp([0.2, 0.8], levels, high)
        assert np.all((bounds[0] <= share) & (share <= bounds[1])) == inside


def test_second_predictions_join_the_first(axis):
    reliability_plot(axis, LAW, TARGETS, label="wide", colour="#009E73")
    drawn = len(axis.collections), len(axis.get_lines())
    reliability_plot(axis, NARROW, TARGETS, label="narrow", colour="#E69F00")
    assert (len(axis.collections), len(axis.get_lines())) == (drawn[0], drawn[1] + 1)
    assert [text.split(":")[0] for text in legend(axis)[1:]] == ["wide", "narrow"]
    # Overconfident predictions start above the diagonal and end below it.
    levels, observed = line(axis, "narrow")
    assert np.interp(0.1, levels, observed) > 0.15
    assert np.interp(0.9, levels, observed) < 0.85


def test_reliability_of_confidence(axis):
    reliability_plot(axis, PROBABILITIES, LABELS, bins=10, label="ensemble")
    table = metrics.confidence_bins(PROBABILITIES, LABELS, bins=10)
    filled = table.counts > 0
    confidence, right = line(axis, "ensemble")
    np.testing.assert_allclose(confidence, table.confidence[filled])
    np.testing.assert_allclose(right, table.accuracy[filled])
    error = metrics.expected_calibration_error(PROBABILITIES, LABELS, bins=10)
    assert legend(axis)[1] == f"ensemble: calibration error {error:.3f}"
    heights = np.array([bar.get_height() for bar in axis.patches])
    np.testing.assert_allclose(heights, 0.2 * table.counts / table.counts.max())
    assert [text.get_text() for text in axis.texts] == [str(count) for count in table.counts[filled]]
    (chance,) = axis.collections
    for bar, count, mean in zip(chance.get_segments(), table.counts[filled], confidence, strict=True):
        shares = RNG.binomial(count, mean, size=4000) / count
        assert np.mean((bar[0, 1] - 1e-9 <= shares) & (shares <= bar[1, 1] + 1e-9)) > 0.93
        assert bar[1, 1] - bar[0, 1] <= 4.5 * np.sqrt(mean * (1 - mean) / count) + 1 / count
    before = len(axis.patches)
    reliability_plot(axis, PROBABILITIES, LABELS, label="again")
    assert len(axis.patches) == before
    axis.figure.draw_without_rendering()


def test_certain_predictions_have_a_band(axis):
    """Also where rounding makes a certain class a little more than certain."""
    reliability_plot(axis, np.array([[1 + 1e-7, 0.0]] * 5), [0, 0, 0, 0, 1])
    (chance,) = axis.collections
    np.testing.assert_array_equal(chance.get_segments()[0][:, 1], [1, 1])


@pytest.mark.parametrize(
    ("rows", "shown"), [(999, "999"), (1250, "1.2k"), (99_999, "99k"), (120_000, "120k")]
)
def test_long_counts_are_shortened(axis, rows, shown):
    reliability_plot(axis, np.tile([0.7, 0.3], (rows, 1)), np.zeros(rows, int), bins=1)
    assert [text.get_text() for text in axis.texts] == [shown]


@pytest.mark.parametrize(("n", "most", "drawn"), [(30, 150, 30), (400, 150, 150), (400, 7, 7), (1, 150, 1)])
def test_intervals(axis, n, most, drawn):
    mean, targets = MEAN[:n], TARGETS[:n]
    interval_plot(axis, mean, mean - 1, mean + 1.5, targets, most=most)
    x, centre = line(axis, "predictive mean")
    assert len(x) == drawn
    assert np.all(np.diff(centre) >= 0)
    assert {centre[0], centre[-1]} <= {mean.min().astype(float), mean.max().astype(float)}
    (bars,) = axis.collections
    ends = np.array([segment[:, 1] for segment in bars.get_segments()])
    np.testing.assert_allclose(ends, np.stack([centre - 1, centre + 1.5], axis=1), atol=1e-6)
    # Every target is drawn once, as what it is, in the column of its own mean.
    target_of = {float(m): t for m, t in zip(mean, targets, strict=True)}
    (inside, low), (outside, high) = line(axis, "inside"), line(axis, "outside")
    assert sorted([*inside, *outside]) == list(range(drawn))
    for place, value in [*zip(inside, low, strict=True), *zip(outside, high, strict=True)]:
        assert value == target_of[float(centre[place])]
    assert np.all((low >= centre[inside] - 1) & (low <= centre[inside] + 1.5))
    assert not np.any((high >= centre[outside] - 1) & (high <= centre[outside] + 1.5))
    share = metrics.coverage(mean - 1, mean + 1.5, targets)
    assert f"target inside: {share:.1%} of all" in legend(axis)
    assert "interval, mean width 2.5" in legend(axis)
    axis.figure.draw_without_rendering()


def test_mistakes_are_named(axis):
    with pytest.raises(ValueError, match=r"mean has shape \(399,\), but targets \(400,\); pass vectors"):
        interval_plot(axis, MEAN[1:], MEAN - 1, MEAN + 1, TARGETS)
    with pytest.raises(ValueError, match="most must be at least 1, got 0"):
        interval_plot(axis, MEAN, MEAN - 1, MEAN + 1, TARGETS, most=0)
    with pytest.raises(ValueError, match="one target at a time"):
        interval_plot(axis, *(np.ones((3, 2)) * factor for factor in (1, 0, 2, 1)))
    with pytest.raises(ValueError, match="mean must be finite, got"):
        interval_plot(axis, MEAN * np.nan, MEAN - 1, MEAN + 1, TARGETS)
    with pytest.raises(ValueError, match="low must be ≤ high"):
        interval_plot(axis, MEAN, MEAN + 1, MEAN - 1, TARGETS)
    with pytest.raises(ValueError, match="sum to 1"):
        reliability_plot(axis, 2 * PROBABILITIES, LABELS)
    with pytest.raises(ValueError, match="targets has shape"):
        reliability_plot(axis, LAW, TARGETS[1:])
    assert not axis.has_data()
