"""Result files: one for each table, competitor and split, so that runs resume and can be joined.

OUT/<table>/<competitor>/<split>.json, written whole or not at all. A record's `status` is

    scored      it has scores and seconds
    unsuited    this competitor cannot be fitted to this table; `reason` says why
    stopped     the fit took longer than `seconds_per_fit`
    failed      it raised an error, or its process died; it is tried again by the next run

All records of a study fit into one archive, which is small: with it ours can be run again alone.
"""

import gzip
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from measureflow.study.files import valid, write_json

Record = dict[str, Any]
FINAL = ("scored", "unsuited")


class ResumeError(Exception):
    """Results that a run cannot go on from; the message says what to do."""


def record_path(out: Path, table: str, competitor: str, split: int) -> Path:
    """Where the record of a fit lies."""
    return out / table / re.sub(r"[^\w.=,-]", "_", competitor) / f"{split}.json"


def write_record(out: Path, record: Record) -> Path:
    """To its place."""
    path = record_path(out, record["table"], record["competitor"], record["split"])
    write_json(path, record, indent=1)
    return path


def is_done(
    out: Path, table: str, competitor: str, split: int, seed: int, seconds_per_fit: float | None
) -> bool:
    """Whether a run that resumes leaves it. What was stopped is tried again where more time is allowed."""
    path = record_path(out, table, competitor, split)
    record = read_record(path)
    if record is None:
        return False
    if record["seed"] != seed:
        raise ResumeError(
            f"{path} was run with seed {record['seed']}, and now the seed is {seed}; pass another --out, or "
            f"--seed {record['seed']} to go on."
        )
    if record["status"] == "stopped":
        return seconds_per_fit is not None and seconds_per_fit <= record["seconds_per_fit"]
    return record["status"] in FINAL


def read_record(path: Path) -> Record | None:
    """None where there is none, or a damaged one."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    keys = ("table", "competitor", "split", "status", "seed")
    return record if isinstance(record, dict) and all(key in record for key in keys) else None


def read_records(sources: Iterable[Path]) -> list[Record]:
    """Those of all folders and archives, joined: of two, what was scored counts, else that of the first."""
    joined: dict[tuple[str, str, int], Record] = {}
    for source in sources:
        for record in _archived(source) if source.is_file() else _in_folder(source):
            key = (record["table"], record["competitor"], record["split"])
            if key not in joined or (record["status"] == "scored" != joined[key]["status"]):
                joined[key] = record
    return list(joined.values())


def _in_folder(folder: Path) -> list[Record]:
    found = []
    for path in sorted(folder.glob("*/*/*.json")):
        record = read_record(path)
        if record is None:
            raise ValueError(f"{path} is not a result of the study on tables; remove it and run it again.")
        found.append(record)
    return found


def _archived(path: Path) -> list[Record]:
    try:
        return json.loads(gzip.decompress(path.read_bytes()))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is no archive of records: {error}; name a folder of results.") from error


def write_archive(path: Path, records: Iterable[Record]) -> None:
    """In an order of their own: equal records are equal files."""
    ordered = sorted(records, key=lambda one: (one["table"], one["competitor"], one["split"]))
    lines = ",\n".join(json.dumps(valid(record), ensure_ascii=False) for record in ordered)
    path.write_bytes(gzip.compress(f"[{lines}]\n".encode(), mtime=0))
