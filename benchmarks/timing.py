"""Times that can be compared: all contenders in one process, in turn, round after round.

Whatever else the machine does falls on all alike, so a ratio is taken within each round, and its median over
the rounds is what counts.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np


class Job(NamedTuple):
    """A part of the suite: `run(tick)` measures it, and calls `tick` `ticks` times on the way."""

    name: str
    ticks: int
    run: Callable[[Callable[[], None]], dict[str, Any]]


class Contender(NamedTuple):
    """`run()` takes `steps` steps. One that is `optional` may fail at its first run, and is then left out."""

    run: Callable[[], Any]
    steps: int = 1
    optional: bool = False


class Ratio(NamedTuple):
    """time(of) / time(over), and what it should be, where something was promised."""

    of: str
    over: str
    at_most: float | None = None
    at_least: float | None = None


class AbsentError(Exception):
    """A peer that cannot be had here. The message says why."""


def seconds(function: Callable[[], Any]) -> float:
    """The wall clock of one call, its results waited for."""
    began = time.perf_counter()
    jax.block_until_ready(function())
    return time.perf_counter() - began


def alternate(
    contenders: dict[str, Contender], rounds: int, tick: Callable[[], None]
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Seconds a step of each contender, and why some were left out.

    The first call, which compiles, is told apart. `tick` is called after it, and after each round.
    """
    first, left_out = {}, {}
    for name, contender in contenders.items():
        try:
            first[name] = seconds(contender.run)
        except Exception as error:
            if not contender.optional:
                raise
            left_out[name] = reason(error)
    tick()
    times: dict[str, list[float]] = {name: [] for name in first}
    for _ in range(rounds):
        for name, found in times.items():
            found.append(seconds(contenders[name].run) / contenders[name].steps)
        tick()
    found = {
        name: {"median": statistics.median(times[name]), "first_call": first[name], "rounds": times[name]}
        for name in times
    }
    return found, left_out


def ratios(times: dict[str, dict[str, Any]], wanted: list[Ratio]) -> list[dict[str, Any]]:
    """The median over rounds of each wanted ratio, with its quartiles, and whether a promise holds.

    Ratios with a contender that was left out are left out as well.
    """
    found = []
    for ratio in wanted:
        if ratio.of not in times or ratio.over not in times:
            continue
        rounds = np.divide(times[ratio.of]["rounds"], times[ratio.over]["rounds"])
        low, middle, high = (float(value) for value in np.quantile(rounds, (0.25, 0.5, 0.75)))
        found.append(
            ratio._asdict()
            | {"ratio": middle, "low": low, "high": high}
            | {"holds": _holds(middle, ratio.at_most, ratio.at_least)}
        )
    return found


def _holds(ratio: float, at_most: float | None, at_least: float | None) -> bool | None:
    if at_most is None and at_least is None:
        return None
    return (at_most is None or ratio <= at_most) and (at_least is None or ratio >= at_least)


def comparison(
    title: str,
    contenders: dict[str, Contender],
    wanted: list[Ratio],
    rounds: int,
    tick: Callable[[], None],
    **more: Any,
) -> dict[str, Any]:
    """What is written of one comparison; `more` goes in as it is."""
    times, left_out = alternate(contenders, rounds, tick)
    more["left_out"] = more.get("left_out", {}) | left_out
    return {"title": title, "times": times, "ratios": ratios(times, wanted), **more}


def exponent(sizes: list[int], values: list[float]) -> float:
    """The slope of log value against log size, by least squares over the larger half of the sizes: at small
    ones, what does not grow hides what does."""
    first = larger_half(sizes)
    return float(np.polyfit(np.log(sizes[first:]), np.log(values[first:]), 1)[0])


def larger_half(sizes: list[int]) -> int:
    """Where the larger half begins; it has two sizes at least."""
    return min(len(sizes) // 2, len(sizes) - 2)


def reason(error: BaseException) -> str:
    """One line of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
