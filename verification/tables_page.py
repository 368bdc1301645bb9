"""Writes docs/tables.md and its picture from one or more folders of `measureflow tables` results.

python -m verification.tables_page RESULTS …
python -m verification.tables_page RESULTS … --page shifted

Results on gap and tail splits alone have a page of their own, docs/shifted.md: name it with --page. Folders
may come from several machines; their records are joined, and of two of the same fit the first counts. --keep
writes them to an archive, which can stand for a folder: so ours can be run again without the rivals, as in

    python -m verification.tables_page build/tables verification/tables.json.gz

What the page says is in these files, but for what others published, which is marked.
"""

import argparse
import shutil
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measureflow.study.figures import save_figure
from measureflow.study.tables.laws import COVERAGE
from measureflow.study.tables.published import RERUN, SHIFTED
from measureflow.study.tables.records import Record, read_records, write_archive
from measureflow.study.tables.running import OURS
from measureflow.study.tables.summary import BEYOND, CRPS, NLL, Scores, draw, mean_ranks, verdicts
from measureflow.study.uci_benchmark import PROTOTYPE, PUBLISHED, SETS

DOCS = Path(__file__).parent.parent / "docs"
MAIN, MOVED = ("uci", "numeric", "mixed"), ("gap", "tail")

TITLE, OF_SHIFTED = "# Tables, beside rivals\n", "# Tables under shift, beside rivals\n"
INTRODUCTION = """\
`EnsembleRegressor()` and `EnsembleClassifier()` with their defaults beside other learners on many tables, as
`measureflow tables` ran them. Each rival has its documentation's recipe, and stops early on a fifth of the
training rows where its documentation does so. LightGBM, XGBoost, RealMLP and TabM predict a mean: their law
is a Gaussian whose deviation is the error of held-out rows. A law that is only known by quantiles has no
density, hence no NLL; its CRPS is that of the law that interpolates them. Scores are on test rows, in the
units of the targets, mean ± standard error over splits; Δ is ours minus theirs, paired by split, so that
below 0 ours is better. Training rows of the splits overlap, so that standard errors are rather too small.
"""


def page(folders: Sequence[Path]) -> str:
    """The whole page."""
    records = read_records(folders)
    scores = Scores(records)
    if not scores.records:
        raise ValueError(f"{', '.join(map(str, folders))}: no scores there; run `measureflow tables` first.")
    main, moved = scores.tables(MAIN), scores.tables(MOVED)
    parts = [TITLE if main else OF_SHIFTED, INTRODUCTION]
    if main:
        parts += [_in_short(scores, main), _by_table(scores, main)]
    if moved:
        parts += [
            "## Shifted splits\n",
            "For each input, the rows are sorted by it; tested is the middle third (gap) or the two outer "
            "sixths (tail), as in the nnuncert collection.\n",
            _in_short(scores, moved, "###"),
            _by_table(scores, moved, "###"),
        ]
    return "\n".join([*parts, _published(scores), _left_out(records), _origins(records)]) + "\n"


def _in_short(scores: Scores, tables: list[str], level: str = "##") -> str:
    lines = [f"{level} In short\n", _ranks(scores, tables), ""]
    lines += [
        f"On how many tables ours is better, neither, worse, by more than {BEYOND:g} standard errors; and, "
        f"each over the tables that a competitor has, the mean coverage of {COVERAGE:.0%} intervals and the "
        "mean seconds of a fit.\n",
        _table([_competitor(scores, tables, name) for name in _names(scores, tables)]),
        "",
    ]
    return "\n".join(lines)


def _ranks(scores: Scores, tables: list[str]) -> str:
    """Mean ranks in NLL and CRPS."""
    lines = []
    for score, short in ((NLL, "NLL (log loss for classes)"), (CRPS, "CRPS")):
        ranks, where = mean_ranks(scores, tables, score)
        if len(ranks) < 2:
            continue
        shown = ", ".join(f"{name} {rank:.2f}" for name, rank in ranks.items())
        lines.append(
            f"Mean rank in {short} over {len(where)} tables, 1 the best, of those who have it on all of "
            f"them: {shown}.\n"
        )
    return "\n".join(lines)


def _names(scores: Scores, tables: Sequence[str]) -> list[str]:
    names = dict.fromkeys(name for table in tables for name in scores.competitors(table))
    return sorted(names, key=lambda name: (not name.startswith(OURS), name.lower()))


def _competitor(scores: Scores, tables: list[str], name: str) -> dict[str, Any]:
    theirs = [table for table in tables if name in scores.competitors(table)]
    covered = [scores.mean(table, name, "coverage")[0] for table in theirs]
    covered = [value for value in covered if value == value]
    seconds = [scores.seconds(table, name) for table in theirs]
    row: dict[str, Any] = {"competitor": name, "tables": len(theirs)}
    for score, short in ((NLL, "NLL"), (CRPS, "CRPS")):
        found = verdicts(scores, theirs, name, score)
        row[f"ours in {short}"] = "" if name == OURS or not sum(found) else " / ".join(map(str, found))
    row["coverage"] = f"{sum(covered) / len(covered):.1%}" if covered else ""
    row["seconds"] = f"{sum(seconds) / len(seconds):.1f}"
    return row


def _by_table(scores: Scores, tables: list[str], level: str = "##") -> str:
    lines = [f"{level} Scores\n"]
    for table in tables:
        one = next(record for record in scores.records if record["table"] == table)
        rows = f"{one['train_rows']:,} training and {one['test_rows']:,} test rows"
        lines += [f"{level}# {table}\n", f"{one['columns']} inputs, {rows}.\n"]
        make = _regression_row if scores.kind(table) == "regression" else _class_row
        lines += [_table([make(scores, table, name) for name in scores.competitors(table)]), ""]
    return "\n".join(lines)


def _regression_row(scores: Scores, table: str, name: str) -> dict[str, Any]:
    return {
        "competitor": name,
        "splits": len(scores.of(table, name, CRPS)),
        "NLL": _shown(scores, table, name, NLL),
        "Δ NLL": _difference(scores, table, name, NLL),
        "CRPS": _shown(scores, table, name, CRPS),
        "Δ CRPS": _difference(scores, table, name, CRPS),
        "RMSE": _shown(scores, table, name, "root_mean_square_error"),
        "coverage": _share(scores, table, name, "coverage"),
        "width": _shown(scores, table, name, "width"),
        "seconds": f"{scores.seconds(table, name):.1f}",
    }


def _class_row(scores: Scores, table: str, name: str) -> dict[str, Any]:
    return {
        "competitor": name,
        "splits": len(scores.of(table, name, "accuracy")),
        "log loss": _shown(scores, table, name, NLL),
        "Δ log loss": _difference(scores, table, name, NLL),
        "Brier": _shown(scores, table, name, "brier_score"),
        "Δ Brier": _difference(scores, table, name, "brier_score"),
        "calibration error": _share(scores, table, name, "expected_calibration_error"),
        "accuracy": _share(scores, table, name, "accuracy"),
        "seconds": f"{scores.seconds(table, name):.1f}",
    }


def _shown(scores: Scores, table: str, name: str, score: str) -> str:
    mean, error = scores.mean(table, name, score)
    if mean != mean:
        return ""
    return f"{mean:.4g}" if error != error else f"{mean:.4g} ± {error:.2g}"


def _share(scores: Scores, table: str, name: str, score: str) -> str:
    mean, _ = scores.mean(table, name, score)
    return "" if mean != mean else f"{mean:.1%}"


def _difference(scores: Scores, table: str, name: str, score: str) -> str:
    found = None if name == OURS else scores.difference(table, name, score)
    if found is None:
        return ""
    return f"{found.mean:+.3g}" if found.error != found.error else f"{found.mean:+.3g} ± {found.error:.2g}"


def _published(scores: Scores) -> str:
    """Ours beside what others published on the same splits."""
    lines = []
    if uci := scores.tables(("uci",)):
        known = {name: dict(zip(SETS, row, strict=True)) for name, row in PUBLISHED.items()}
        known |= {f"{name}, by a public rerun": row for name, row in RERUN.items()}
        known |= {"a first DRLE, tuned on these very test scores": dict(zip(SETS, PROTOTYPE, strict=True))}
        ours = {table: _shown(scores, table, OURS, NLL) for table in uci}
        rows = [{"": OURS} | ours]
        rows += [{"": name} | {table: row.get(table, "") for table in uci} for name, row in known.items()]
        lines += ["## What others published on UCI\n", "Mean test NLL; not run here.\n", _table(rows), ""]
    if moved := scores.tables(MOVED):
        rows = [
            {"table": table, OURS: _shown(scores, table, OURS, NLL), "best published": SHIFTED[table]}
            for table in moved
        ]
        lines += [
            "## What others published on shifted splits\n",
            "Mean test NLL of the nnuncert collection.\n",
        ]
        lines += [_table(rows), ""]
    return "\n".join(lines)


def _left_out(records: list[Record]) -> str:
    """What has no scores, and why."""
    counted = Counter(
        (record["competitor"], record["table"], record["status"], record["reason"])
        for record in records
        if record["status"] != "scored"
    )
    if not counted:
        return ""
    rows = [
        {"competitor": name, "table": table, "splits": number, "": f"{status}: {reason}".replace("|", "\\|")}
        for (name, table, status, reason), number in sorted(counted.items())
    ]
    return "\n".join(["## Without scores\n", _table(rows), ""])


def _origins(records: list[Record]) -> str:
    """Where each competitor ran, and with which settings."""
    found: dict[str, dict[str, set[str]]] = {}
    for record in records:
        of = found.setdefault(record["competitor"], {})
        parts = {
            "version": record.get("version") or f"measureflow {record['measureflow']}",
            "settings": ", ".join(f"{key} {value}" for key, value in (record.get("settings") or {}).items()),
            "device": record["device"],
            "threads": str(record.get("threads", "")),
            "fits at a time": str(record.get("jobs", "")),
            "commit": str(record["commit"] or ""),
            "seed": str(record["seed"]),
        }
        for key, value in parts.items():
            of.setdefault(key, set()).add(value)
    rows = [
        {"competitor": name}
        | {key: "; ".join(sorted(value for value in values if value)) for key, values in parts.items()}
        for name, parts in sorted(found.items(), key=lambda item: item[0].lower())
    ]
    return "\n".join(["## Settings and machines\n", _table(rows)])


def _table(rows: list[dict[str, Any]]) -> str:
    head = list(dict.fromkeys(name for row in rows for name in row))
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    lines += [f"| {' | '.join(str(row.get(name, '')) for name in head)} |" for row in rows]
    return "\n".join(lines)


def picture(folders: Sequence[Path], path: Path) -> bool:
    """Whether there was something to draw."""
    scores = Scores(read_records(folders))
    tables = [table for table in scores.tables() if scores.best_rival(table, NLL)]
    if not tables:
        return False
    with tempfile.TemporaryDirectory() as folder:
        size = (10.0, 1.5 + 0.32 * len(tables))
        save_figure(lambda figure: draw(figure, scores, tables), size, Path(folder))
        shutil.copy(Path(folder) / "figure.png", path)
    return True


PICTURE = (
    "![For each table: the difference in NLL between ours and the best rival, and the ratio of CRPS, with "
    "bars of two standard errors.](assets/tables.png)\n\nEach point is ours against the best rival of that "
    "table, which is named there; bars are two standard errors of the paired difference.\n"
)


def main(
    folders: Sequence[Path],
    docs: Path = DOCS,
    note: str = "",
    name: str = "tables",
    keep: Path | None = None,
) -> None:
    """The page of this name and its picture, with a note on how it was run; all records in an archive."""
    text = page(folders)
    if keep is not None:
        write_archive(keep, read_records(folders))
    first = text[: text.index(" In short\n")].rpartition("\n")[2] + " In short\n"
    if note:
        text = text.replace(first, f"{note}\n\n{first}", 1)
    if picture(folders, docs / "assets" / f"{name}.png"):
        text = text.replace(first, f"{PICTURE.replace('tables.png', f'{name}.png')}\n{first}", 1)
    (docs / f"{name}.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--note", default="", help="What there is to say about these runs.")
    parser.add_argument("--page", default="tables", choices=("tables", "shifted"), help="Which page it is.")
    parser.add_argument("--keep", type=Path, help="An archive to write: all of these records in one file.")
    asked = parser.parse_args()
    main(asked.results, note=asked.note, name=asked.page, keep=asked.keep)
