"""Writes docs/uci.md and its picture from one or more folders of `measureflow uci` results.

python -m verification.uci_page RESULTS … [--note TEXT]

Folders may hold different methods of the same run; results are joined, and drawn again together. The note
goes under the table of times.
"""

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from measureflow.study.figures import save_figure
from measureflow.study.uci_benchmark import (
    COVERAGE,
    METHODS,
    PROTOTYPE,
    PUBLISHED,
    SETS,
    Result,
    comparison_rows,
    draw,
    mean_and_error,
    score_rows,
)

DOCS = Path(__file__).parent.parent / "docs"

INTRODUCTION = """\
# The UCI benchmark

Nine regression sets on the splits that PBP, MC dropout and deep ensembles are compared on (20 random splits
of 90% and 10%; 5 for protein), as `measureflow uci` produced them. One setting for all sets, the default of
`EnsembleRegressor`; what it chooses (the prior's weight, the spread of predictions, and for DE and DRE how
long to train), it chooses on rows of each training split. Scores are on test rows, in the units of the
targets, mean ± standard error over splits.
"""


def page(folders: list[Path], note: str = "") -> str:
    """The whole page."""
    records = [json.loads((folder / "results.json").read_text(encoding="utf-8")) for folder in folders]
    found = [Result(**result) for record in records for result in record["results"]]
    found.sort(key=lambda result: (SETS.index(result.set), METHODS.index(result.method)))
    with tempfile.TemporaryDirectory() as folder:
        save_figure(lambda figure: draw(figure, found), (10.0, 9.0), Path(folder))
        shutil.copy(Path(folder) / "figure.png", DOCS / "assets" / "uci.png")
    parts = [
        INTRODUCTION,
        "![Nine panels, one a set: mean test NLL of each method, with published ones as lines.]"
        "(assets/uci.png)\n",
        "## In short\n",
        f"The mean NLL against the best published row and the prototype's, and the coverage of "
        f"{COVERAGE:.0%} intervals.\n",
        _table(_in_short(found)),
        "\n## Scores\n",
        _table(score_rows(found)),
        "\n## Methods against each other\n",
        "NLL, paired by split: mean difference ± standard error. A win or a loss is a difference of more "
        "than one standard error.\n",
        _table(comparison_rows(found)),
        "\n## What others published\n",
        "Mean test NLL. One hidden layer of 50 units (protein: 100), but for the last row but one.\n",
        _table(_published()),
        "\n## Time\n",
        _table(_seconds(found)),
        f"\n{note}\n",
        *(_origin(record) for record in records),
    ]
    return "\n".join(parts) + "\n"


def _in_short(found: list[Result]) -> list[dict[str, Any]]:
    rows = []
    for method in [method for method in METHODS if any(result.method == method for result in found)]:
        mine = [result for result in found if result.method == method]
        scores = {result.set: mean_and_error(result.scores["negative_log_likelihood"])[0] for result in mine}
        best = {name: min(row[SETS.index(name)] for row in PUBLISHED.values()) for name in scores}
        covered = [mean_and_error(result.scores["coverage"])[0] for result in mine]
        rows.append(
            {
                "method": method,
                "sets": len(mine),
                "below all published": sum(scores[name] < best[name] for name in scores),
                "below the prototype": sum(scores[name] < PROTOTYPE[SETS.index(name)] for name in scores),
                "mean coverage": f"{sum(covered) / len(covered):.1%}",
                "least and most": f"{min(covered):.1%}, {max(covered):.1%}",
            }
        )
    return rows


def _published() -> list[dict[str, Any]]:
    rows = PUBLISHED | {"a first DRLE, tuned on these very test scores": PROTOTYPE}
    return [{"": name} | dict(zip(SETS, row, strict=True)) for name, row in rows.items()]


def _seconds(found: list[Result]) -> list[dict[str, Any]]:
    """Of a whole method: all sets, all splits, choosing and compiling included."""
    methods = [method for method in METHODS if any(result.method == method for result in found)]
    return [
        {
            "method": method,
            "sets": len([result for result in found if result.method == method]),
            "seconds": round(sum(result.seconds for result in found if result.method == method)),
        }
        for method in methods
    ]


def _origin(record: dict[str, Any]) -> str:
    methods = ", ".join(record["settings"]["methods"])
    return (
        f"*{methods}: on {record['device']}, seed {record['seed']}, measureflow {record['measureflow']}, JAX "
        f"{record['jax']}.*\n"
    )


def _table(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return "Only one method was run."
    head = list(rows[0])
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    lines += [f"| {' | '.join(str(row.get(name, '')) for name in head)} |" for row in rows]
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--note", default="", help="a sentence about the times")
    asked = parser.parse_args()
    (DOCS / "uci.md").write_text(page(asked.results, asked.note), encoding="utf-8")
