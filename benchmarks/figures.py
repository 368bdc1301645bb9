"""Results as pictures."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from benchmarks.timing import larger_half
from measureflow.prediction.colours import COLOURS

Result = dict[str, Any]
GREY = "0.55"


def draw_all(results: Result, folder: Path) -> list[Path]:
    """One picture for each part that was run, as PNG."""
    drawn = []
    for part, draw in (("overhead", overhead), ("peers", peers), ("growth", growth)):
        if results.get(part):
            path = folder / f"{part}.png"
            draw(results[part]).savefig(path)
            drawn.append(path)
    return drawn


def overhead(cases: list[Result]) -> Figure:
    """Times of all contenders as multiples of the baseline, a panel for each case."""
    figure = Figure(figsize=(10.0, 1.9 * -(-len(cases) // 2)), layout="constrained", dpi=150)
    axes = np.ravel(figure.subplots(-(-len(cases) // 2), 2))
    for axis, case in zip(axes, cases, strict=False):
        baseline, *rest = case["times"]
        times = [
            case["times"][name]["median"] / case["times"][baseline]["median"] for name in (baseline, *rest)
        ]
        names = [baseline, *rest]
        colours = [COLOURS.get(name.partition(" ")[0], GREY) for name in names]
        axis.barh(names, times, color=colours)
        axis.axvline(1.0, color="k", linewidth=0.8)
        axis.invert_yaxis()
        axis.set_title(case["title"], fontsize=9)
        axis.tick_params(labelsize=8)
    for axis in axes[len(cases) :]:
        axis.set_axis_off()
    figure.supxlabel("time of a step, as a multiple of the first bar", fontsize=9)
    return figure


def peers(cases: list[Result]) -> Figure:
    """Times faster, on a logarithmic axis, with what was promised."""
    found = [(case, ratio) for case in cases for ratio in case["ratios"]]
    figure = Figure(figsize=(10.0, 0.8 + 0.32 * max(len(found), 1)), layout="constrained", dpi=150)
    axis = figure.subplots()
    labels = [f"{ratio['of']} / {ratio['over']}\n{case['title']}" for case, ratio in found]
    places = np.arange(len(found))
    for place, (_, ratio) in zip(places, found, strict=True):
        axis.barh(place, ratio["ratio"], color=COLOURS["DRLE"] if ratio["ratio"] >= 1 else GREY, alpha=0.8)
        axis.plot([ratio["low"], ratio["high"]], [place, place], "k", linewidth=1)
        if ratio["at_least"] is not None:
            label = "target" if "target" not in axis.get_legend_handles_labels()[1] else None
            axis.plot(ratio["at_least"], place, "k|", markersize=12, markeredgewidth=2, label=label)
    axis.set_xscale("log")
    axis.axvline(1.0, color="k", linewidth=0.8)
    axis.set_yticks(places, labels, fontsize=6)
    axis.invert_yaxis()
    axis.set_xlabel("the peer's time over ours")
    if axis.get_legend_handles_labels()[1]:
        axis.legend(loc="lower right")
    return figure


def growth(axes: list[Result]) -> Figure:
    """Log-log, a panel for each axis, with the fitted slope."""
    figure = Figure(figsize=(10.0, 3.2 * -(-len(axes) // 2)), layout="constrained", dpi=150)
    panels = np.ravel(figure.subplots(-(-len(axes) // 2), 2))
    for panel, found in zip(panels, axes, strict=False):
        _growth_panel(panel, found)
    for panel in panels[len(axes) :]:
        panel.set_axis_off()
    return figure


def _growth_panel(panel: Axes, found: Result) -> None:
    sizes, values = np.array(found["sizes"], float), np.array(found["values"], float)
    panel.loglog(sizes, values, "o-", color=COLOURS["DRLE"], markersize=4)
    first = larger_half(found["sizes"])
    middle = np.exp(np.mean(np.log(values[first:]))), np.exp(np.mean(np.log(sizes[first:])))
    fitted = middle[0] * (sizes[first:] / middle[1]) ** found["exponent"]
    panel.loglog(sizes[first:], fitted, "k--", linewidth=1, label=f"slope {found['exponent']:.2f}")
    panel.set_title(found["title"], fontsize=7.5)
    panel.set_xlabel(found["axis"])
    panel.set_ylabel({"seconds": "seconds a step", "bytes": "bytes", "ratio": "ratio"}[found["unit"]])
    panel.yaxis.set_minor_formatter(NullFormatter())
    if found["unit"] == "ratio":
        panel.set_yscale("linear")
        panel.set_ylim(0.0, 1.2 * values.max())
    panel.legend()
