"""What a reproduction says: claims, each measured and judged."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure


#: A claim of kind `theory` follows from the mathematics and must hold: its test rejects a correct library
#: with at most this probability. A claim of kind `paper` is what the paper reports.
SIZE = 1e-3


class Claim(NamedTuple):
    """One statement, what it expects, what was measured, and the verdict."""

    claim: str
    kind: Literal["theory", "paper"]
    expected: Any
    measured: Any
    tolerance: Any
    holds: bool
    note: str = ""


class Reproduction(NamedTuple):
    """What a module of this folder returns: claims, settings, and how to draw its figure; the outcome in
    words, and where its numbers come from, if that was an earlier run."""

    claims: list[Claim]
    settings: dict[str, Any]
    draw: "Callable[[Figure], None]"
    figure_size: tuple[float, float] = (10.0, 3.2)
    tables: dict[str, list[dict[str, Any]]] | None = None
    summary: str = ""
    origin: dict[str, Any] | None = None


def near(claim: str, expected: float, measured: float, tolerance: float, note: str = "") -> Claim:
    """A theory claim: measured = expected ± tolerance."""
    holds = bool(abs(measured - expected) <= tolerance)
    return Claim(claim, "theory", float(expected), float(measured), f"± {tolerance:.3g}", holds, note)


def at_most(claim: str, bound: float, measured: float, note: str = "") -> Claim:
    """A theory claim: measured ≤ bound."""
    return Claim(claim, "theory", f"≤ {bound:.3g}", float(measured), 0.0, bool(measured <= bound), note)


def greater(claim: str, bound: float, measured: float, note: str = "") -> Claim:
    """A theory claim: measured > bound."""
    return Claim(claim, "theory", f"> {bound:.3g}", float(measured), 0.0, bool(measured > bound), note)


def not_rejected(claim: str, p_value: float, note: str = "") -> Claim:
    """A theory claim that is a hypothesis test of size `SIZE`: its p-value."""
    holds = bool(np.isfinite(p_value) and p_value >= SIZE)
    return Claim(claim, "theory", f"p ≥ {SIZE:g}", float(p_value), 0.0, holds, note)
