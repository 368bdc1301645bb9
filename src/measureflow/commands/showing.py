"""Texts for a terminal: tables whose columns line up, and lines that are folded."""

import shutil
import textwrap
from collections.abc import Sequence
from typing import Any


def table(rows: Sequence[dict[str, str]], left: Sequence[str] = ()) -> str:
    """Columns aligned right, but for those of `left`, under their names."""
    names = list(rows[0])
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in names}

    def line(cells: dict[str, str]) -> str:
        aligned = [f"{cells[n]:<{widths[n]}}" if n in left else f"{cells[n]:>{widths[n]}}" for n in names]
        return "  ".join(aligned).rstrip()

    return "\n".join([line({name: name for name in names}), *map(line, rows)])


def pairs(lines: Sequence[tuple[str, str]]) -> str:
    """What, and how it is: the second folded to the width of the terminal."""
    width = max(len(name) for name, _ in lines)
    room = max(shutil.get_terminal_size((100, 24)).columns - width - 2, 30)
    return "\n".join(
        f"{name:<{width}}  " + f"\n{'':<{width}}  ".join(textwrap.wrap(text, room) or [""])
        for name, text in lines
    )


def kinds(found: Sequence[tuple[str, list[str]]]) -> str:
    """Columns by their type."""
    return pairs([(f"{len(names)} {kind}", ", ".join(names)) for kind, names in found])


def leaderboard(lines: Sequence[dict[str, Any]]) -> str:
    """Scores with their standard errors."""
    shown = []
    for place, line in enumerate(lines):
        behind = f"{line['behind']:.3f} ± {line['behind_error']:.3f}" if place else "best"
        row = {"model": line["model"], "log score": _pair(line, "nll"), "behind, paired": behind}
        if "crps" in line:
            row |= {"CRPS": _pair(line, "crps"), "RMSE": f"{line['rmse']:.4g}"}
            row |= {"90% holds": f"{line['coverage_90']:.1%}", "width": f"{line['width_90']:.4g}"}
        else:
            row |= {"Brier": _pair(line, "brier"), "accuracy": _pair(line, "accuracy")}
        shown.append(row | {"seconds": f"{line['seconds']:.1f}"})
    return table(shown, left=("model",))


def _pair(line: dict[str, Any], name: str) -> str:
    return f"{line[name]:.4g} ± {line[f'{name}_error']:.2g}"
