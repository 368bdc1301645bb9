"""Plots as SVG, without a library: axes, lines, bands, dots and bars, coloured by the classes of a style
sheet.

All are 360 wide: a phone shows one in a row at its own size, a desktop two or three. What colours mean is a
matter of the page: light, dark, and paper have their own.
"""

import math
from collections.abc import Sequence
from html import escape

WIDTH = 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 20, 10, 40
# So wide is a letter of the labels, about.
_LETTER = 6.2


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers between two others."""
    span = high - low
    if not span > 0:
        return [low]
    power = 10 ** math.floor(math.log10(span / most))
    step = next(power * factor for factor in (1, 2, 5, 10) if span / (power * factor) <= most)
    first = math.ceil(low / step - 1e-9)
    return [round(step * k, 12) for k in range(first, math.floor(high / step + 1e-9) + 1)]


def number(value: float) -> str:
    """For people: three digits, thousands as k, millions as M."""
    size = abs(value)
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= unit:
            return f"{value / (1e3 if name == 'k' else unit):.3g}{name}"
    return f"{value:.4g}" if size >= 1000 else f"{value:.3g}"


class Plot:
    """One pair of axes; what is drawn is collected in the order of the calls."""

    def __init__(
        self,
        x: tuple[float, float],
        y: tuple[float, float],
        *,
        title: str,
        x_name: str = "",
        y_name: str = "",
        height: int = 240,
        left: int = _LEFT,
        percent: bool = False,
    ):
        self.height, self.left, self.title, self.percent = height, left, title, percent
        self.x, self.y = _widened(x), _widened(y)
        self.x_name, self.y_name = x_name, y_name
        self.parts: list[str] = []

    def across(self, value: float) -> float:
        """Where a number of the x axis is."""
        share = (value - self.x[0]) / (self.x[1] - self.x[0])
        return round(self.left + share * (WIDTH - self.left - _RIGHT), 1)

    def up(self, value: float) -> float:
        """Where a number of the y axis is."""
        share = (value - self.y[0]) / (self.y[1] - self.y[0])
        return round(self.height - _BOTTOM - share * (self.height - _TOP - _BOTTOM), 1)

    def line(self, x: Sequence[float], y: Sequence[float], kind: str = "one") -> None:
        """Through points."""
        points = " ".join(f"{self.across(a)},{self.up(b)}" for a, b in zip(x, y, strict=True))
        self.parts.append(f'<polyline class="line {kind}" points="{points}"/>')

    def band(self, x: Sequence[float], low: Sequence[float], high: Sequence[float]) -> None:
        """Between two lines."""
        there = [f"{self.across(a)},{self.up(b)}" for a, b in zip(x, high, strict=True)]
        back = [f"{self.across(a)},{self.up(b)}" for a, b in zip(x, low, strict=True)]
        self.parts.append(f'<polygon class="band" points="{" ".join(there + back[::-1])}"/>')

    def segment(self, start: tuple[float, float], end: tuple[float, float], kind: str = "bar") -> None:
        """A straight line, in the units of the axes."""
        x1, y1, x2, y2 = self.across(start[0]), self.up(start[1]), self.across(end[0]), self.up(end[1])
        self.parts.append(f'<line class="{kind}" x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"/>')

    def dot(self, x: float, y: float, kind: str = "one", *, row: int | None = None, said: str = "") -> None:
        """A point; with `row`, one whose law is shown where it is pointed at."""
        hit = f' data-i="{row}"' if row is not None else ""
        title = f"<title>{escape(said)}</title>" if said else ""
        place = f'cx="{self.across(x)}" cy="{self.up(y)}" r="{4 if row is None else 3.4}"'
        self.parts.append(f'<circle class="dot {kind}"{hit} {place}>{title}</circle>')

    def text(self, x: float, y: float, said: str, kind: str = "note", anchor: str = "start") -> None:
        """Words, in the units of the axes, a little above that place."""
        self.parts.append(_text(said, self.across(x), max(self.up(y) - 7, _TOP), kind, anchor))

    def svg(self, *, x_ticks: Sequence[tuple[float, str]] | None = None, y_axis: bool = True) -> str:
        """The picture; names of ticks that would overlap are left out."""
        known = x_ticks if x_ticks is not None else [(v, self._named(v)) for v in ticks(*self.x)]
        bottom, right = self.height - _BOTTOM, WIDTH - _RIGHT
        parts = []
        for value in ticks(*self.y) if y_axis else ():
            up = self.up(value)
            parts.append(f'<line class="grid" x1="{self.left}" y1="{up}" x2="{right}" y2="{up}"/>')
            parts.append(_text(self._named(value), self.left - 6, up + 4, anchor="end"))
        end = -math.inf
        for value, name in known:
            across, half = self.across(value), len(name) * _LETTER / 2
            parts.append(f'<line class="axis" x1="{across}" y1="{bottom}" x2="{across}" y2="{bottom + 4}"/>')
            if across - half > end and across + half < WIDTH + 4:
                parts.append(_text(name, across, bottom + 16))
                end = across + half + 4
        parts.append(f'<line class="axis" x1="{self.left}" y1="{bottom}" x2="{right}" y2="{bottom}"/>')
        if self.x_name:
            parts.append(_text(self.x_name, (self.left + right) / 2, self.height - 6, "name"))
        if self.y_name:
            turned = f'transform="translate(11 {(_TOP + bottom) / 2}) rotate(-90)"'
            parts.append(f'<text class="name" text-anchor="middle" {turned}>{escape(self.y_name)}</text>')
        inner = "".join(parts + self.parts)
        return (
            f'<svg viewBox="0 0 {WIDTH} {self.height}" role="img" aria-label="{escape(self.title)}">'
            f"<title>{escape(self.title)}</title>{inner}</svg>"
        )

    def _named(self, value: float) -> str:
        return f"{value:.0%}" if self.percent else number(value)


def _text(said: str, x: float, y: float, kind: str = "tick", anchor: str = "middle") -> str:
    return f'<text class="{kind}" text-anchor="{anchor}" x="{x}" y="{y}">{escape(said)}</text>'


def listed(
    rows: Sequence[tuple[str, float, float]],
    *,
    title: str,
    x_name: str,
    marks: Sequence[float] | None = None,
    percent: bool = False,
    bars: bool = False,
    x: tuple[float, float] | None = None,
) -> str:
    """(name, value, standard error), one below the other: dots or bars, with two standard errors either side,
    and a mark at what each should be."""
    names = [short(name, 24) for name, _, _ in rows]
    left = int(max(_LEFT, 16 + _LETTER * max(map(len, names))))
    ends = [value + sign * 2 * error for _, value, error in rows for sign in (-1, 1)]
    spread = x or (min([*ends, *(marks or ()), *([0.0] if bars else [])]), max([*ends, *(marks or ())]))
    plot = Plot(
        spread, (-0.5, len(rows) - 0.5), title=title, x_name=x_name, left=left, percent=percent,
        height=_TOP + _BOTTOM + 22 * len(rows),
    )  # fmt: skip
    for place, (name, (full, value, error)) in enumerate(zip(names, rows, strict=True)):
        up = len(rows) - 1 - place
        plot.parts.append(
            f'<text class="tick" text-anchor="end" x="{left - 8}" y="{plot.up(up) + 4}">{escape(name)}'
            f"<title>{escape(full)}</title></text>"
        )
        low, high = (min(max(value + sign * 2 * error, plot.x[0]), plot.x[1]) for sign in (-1, 1))
        if bars:
            plot.segment((max(0.0, plot.x[0]), up), (value, up), "wide")
        if marks is not None:
            plot.segment((marks[place], up - 0.4), (marks[place], up + 0.4), "mark")
        plot.segment((low, up), (high, up), "bar")
        if not bars:
            plot.dot(min(max(value, plot.x[0]), plot.x[1]), up)
    return plot.svg(y_axis=False)


def padded(low: float, high: float) -> tuple[float, float]:
    """Ends with room for the outermost points."""
    room = 0.04 * (high - low)
    return low - room, high + room


def short(text: str, most: int) -> str:
    """A text that has room."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _widened(ends: tuple[float, float]) -> tuple[float, float]:
    low, high = float(ends[0]), float(ends[1])
    if not (math.isfinite(low) and math.isfinite(high)):
        return 0.0, 1.0
    return (low, high) if high > low else (low - max(abs(low), 1.0) / 2, high + max(abs(high), 1.0) / 2)
