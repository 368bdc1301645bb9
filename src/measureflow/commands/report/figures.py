"""The figures of a report, each from its findings."""

import numpy as np

from measureflow.commands.report.drawing import Plot, listed, number, padded, short
from measureflow.commands.report.effects import Effect
from measureflow.commands.report.findings import Findings

# Rows of the figure of intervals, and bars of the one of importance.
_INTERVALS, _BARS = 60, 14


def observed_and_predicted(findings: Findings) -> str:
    """Each row a point: what was predicted, and what came out."""
    mean, y = findings.laws["mean"][findings.shown], findings.targets[findings.shown]
    ends = padded(float(min(mean.min(), y.min())), float(max(mean.max(), y.max())))
    plot = Plot(
        ends, ends, title="Observed against predicted", x_name="predicted mean", y_name="observed", height=300
    )
    plot.segment((ends[0], ends[0]), (ends[1], ends[1]), "mark")
    for place in findings.shown.tolist():
        _point(plot, findings, place, float(findings.laws["mean"][place]), float(findings.targets[place]))
    return plot.svg()


def _point(plot: Plot, findings: Findings, place: int, x: float, y: float) -> None:
    laws = findings.laws
    if findings.model.is_classifier:
        inside, said = bool(laws["right"][place]), f"probability of what it was: {laws['own'][place]:.1%}"
    else:
        inside = bool(laws["low"][place] <= findings.targets[place] <= laws["high"][place])
        said = (
            f"observed {number(findings.targets[place])}, predicted {number(laws['mean'][place])}, 90% from "
            f"{number(laws['low'][place])} to {number(laws['high'][place])}"
        )
    plot.dot(x, y, "one" if inside else "two", row=place, said=f"row {findings.numbers[place]}: {said}")


def intervals(findings: Findings) -> str:
    """90% intervals of some rows, in the order of their medians, and what came out."""
    order = findings.shown[np.argsort(findings.laws["median"][findings.shown], kind="stable")]
    order = order[np.unique(np.linspace(0, len(order) - 1, _INTERVALS).round().astype(int))]
    low, high = findings.laws["low"][order], findings.laws["high"][order]
    y = findings.targets[order]
    ends = padded(float(min(low.min(), y.min())), float(max(high.max(), y.max())))
    title = f"90% intervals of {len(order)} rows"
    plot = Plot((-1, len(order)), ends, title=title, x_name="rows, by their median", height=300)
    for x, place in enumerate(order.tolist()):
        plot.segment((x, float(findings.laws["low"][place])), (x, float(findings.laws["high"][place])), "bar")
    for x, place in enumerate(order.tolist()):
        _point(plot, findings, place, x, float(findings.targets[place]))
    return plot.svg(x_ticks=[])


def reliability(findings: Findings) -> str:
    """What was promised, and what was found, with two standard errors."""
    shares = findings.reliability
    promised = [share.promised for share in shares]
    of_classes = findings.model.is_classifier
    low = max(min(promised) - 0.1, 0.0) if of_classes else 0.0
    names = ("confidence", "share that is right") if of_classes else ("level", "targets below the quantile")
    plot = Plot(
        (low, 1), (low, 1), title="Reliability", x_name=names[0], y_name=names[1], height=300, percent=True
    )
    usual = [2 * np.sqrt(share.promised * (1 - share.promised) / share.rows) for share in shares]
    plot.band(
        promised,
        [max(p - u, low) for p, u in zip(promised, usual, strict=True)],
        [min(p + u, 1) for p, u in zip(promised, usual, strict=True)],
    )
    plot.segment((low, low), (1, 1), "mark")
    found = [max(share.found, low) for share in shares]
    plot.line(promised, found)
    for share, y in zip(shares, found, strict=True):
        plot.dot(
            share.promised, y, said=f"{share.name} promised, {share.found:.1%} found, of {share.rows} rows"
        )
    return plot.svg()


def coverage(findings: Findings) -> str:
    """Shares of targets within central intervals."""
    rows = [(f"{share.name} intervals", share.found, share.error) for share in findings.coverage]
    marks = [share.promised for share in findings.coverage]
    return listed(
        rows, title="Coverage by level", x_name="targets inside", marks=marks, percent=True, x=_ends(rows)
    )


def _ends(rows: list[tuple[str, float, float]]) -> tuple[float, float]:
    return max(min(0.4, *(value - 2 * error for _, value, error in rows)), 0.0), 1.0


def groups(findings: Findings) -> list[tuple[str, str]]:
    """(column, figure): the same, within groups, all on the same axis."""
    name = "share that is right" if findings.model.is_classifier else "targets inside 90% intervals"
    shares = [share for group in findings.groups for share in group.shares]
    low = min((min(share.found - 2 * share.error, share.promised, 0.8) for share in shares), default=0.0)
    found = []
    for group in findings.groups:
        rows = [(f"{share.name} ({share.rows})", share.found, share.error) for share in group.shares]
        marks, ends = [share.promised for share in group.shares], (max(low, 0.0), 1.0)
        title = f"By {group.column}"
        svg = listed(rows, title=title, x_name=name, marks=marks, percent=True, x=ends)
        found.append((group.column, svg))
    return found


def importance(findings: Findings) -> str:
    """What the log score loses without an input."""
    rows = [(one.column, one.loss, one.error) for one in findings.importances[:_BARS]]
    return listed(rows, title="Importance", x_name="loss in log score, nats a row", bars=True)


def effects(findings: Findings) -> list[tuple[str, str, str]]:
    """(column, means, spread) of some inputs, all on the same axes: so that effects can be compared."""
    of_classes = findings.model.is_classifier
    name = "probability" if of_classes else f"mean of {short(findings.model.target, 20)}"
    spread = "entropy" if of_classes else "standard deviation"
    tops = [value for one in findings.effects for line in one.lines.values() for value in line]
    widths = [value for one in findings.effects for value in one.spread]
    found = []
    for one in findings.effects:
        mean = _curve(one, one.lines, padded(min(tops), max(tops)), name, f"{name} by {one.column}")
        ends = padded(0.0, max(widths))
        wide = _curve(one, {"": one.spread}, ends, spread, f"{spread} by {one.column}", "three")
        found.append((one.column, mean, wide))
    return found


def _curve(
    one: Effect,
    lines: dict[str, list[float]],
    ends: tuple[float, float],
    name: str,
    title: str,
    kind: str | None = None,
) -> str:
    places = one.places or [float(i) for i in range(len(one.values))]
    pad = 0.3 if one.places is None else 0.03 * (max(places) - min(places))
    plot = Plot(
        (min(places) - pad, max(places) + pad),
        ends,
        title=title,
        x_name=short(one.column, 40),
        y_name=name,
        height=200,
    )
    kinds = ("one", "two", "three", "four")
    for place, (label, values) in enumerate(list(lines.items())[:8]):
        which = kind or kinds[place % len(kinds)]
        if one.places is not None:
            plot.line(places, values, which)
        for x, y, value in zip(places, values, one.values, strict=True):
            plot.dot(
                x,
                y,
                which,
                said=f"{one.column} {value}: {number(y)}" + (f" ({label})" if len(lines) > 1 else ""),
            )
        if len(lines) > 1:
            plot.text(places[-1], values[-1], short(label, 12), f"note {which}", "end")
    if one.places is None or not _are_numbers(one):
        return plot.svg(x_ticks=[(x, short(value, 10)) for x, value in zip(places, one.values, strict=True)])
    return plot.svg()


def _are_numbers(one: Effect) -> bool:
    return one.places is not None and all(
        f"{place:g}" == name for place, name in zip(one.places, one.values, strict=True)
    )


def own_probability(findings: Findings) -> str:
    """How many rows gave the class that came out which probability, in tenths."""
    counts = np.histogram(findings.laws["own"], np.linspace(0, 1, 11))[0]
    rows = [(f"{10 * i}% to {10 * i + 10}%", float(count), 0.0) for i, count in enumerate(counts)]
    return listed(rows, title="The probability of what came out", x_name="rows", bars=True)


def ignorance(findings: Findings) -> str:
    """Noise against disagreement, row by row."""
    laws, shown = findings.laws, findings.shown
    names = ("aleatoric: noise", "epistemic: disagreement")
    right, top = (max(float(laws[part][shown].max()), 1e-12) for part in ("aleatoric", "epistemic"))
    unit = "entropy, nats" if findings.model.is_classifier else "standard deviation"
    plot = Plot(
        (0, right),
        (0, top),
        title=f"What is not known ({unit})",
        x_name=names[0],
        y_name=names[1],
        height=300,
    )
    for place in shown.tolist():
        _point(plot, findings, place, float(laws["aleatoric"][place]), float(laws["epistemic"][place]))
    return plot.svg()


def training(findings: Findings) -> str:
    """The loss of the final training, as a network and as their mixture."""
    history = findings.model.estimator.history_
    steps = [float(step) for step in history["step"]]
    lines = {"networks": history["loss"], "mixture": history["mixture_loss"]}
    # What a fit begins with is far above all else.
    known = np.concatenate([np.asarray(line)[len(steps) // 10 :] for line in lines.values()])
    top = float(np.quantile(known, 0.98)) if len(known) else 1.0
    low = float(np.min(known)) if len(known) else 0.0
    top = top if top > low else low + 1
    plot = Plot(
        (0, max(steps[-1], 1)), (low, top), title="Training", x_name="step", y_name="loss, nats a row"
    )
    for (label, line), kind in zip(lines.items(), ("one", "two"), strict=True):
        values = [min(float(value), top) for value in line]
        plot.line(steps, values, kind)
        plot.text(steps[len(steps) * 2 // 3], values[len(steps) * 2 // 3], label, f"note {kind}")
    return plot.svg()
