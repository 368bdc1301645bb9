"""Tables in files: CSV, Parquet and Feather, read strictly, and written whole or not at all.

Cells of a CSV file are texts here. What they stand for is decided by the rules for frames, which know that
007 is a code and 2024-12-31 a date; so a column means the same in a file of ten rows as in one of a million.
"""

import csv
import importlib
import importlib.util
import io
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from measureflow.commands.errors import InputError
from measureflow.saving.container import replacing

#: By the end of a file's name.
FORMATS = {".csv": "csv", ".tsv": "csv", ".txt": "csv", ".parquet": "parquet", ".feather": "feather"}
FORMATS |= {".pq": "parquet", ".arrow": "feather"}
#: Networks read every column at once: beyond this, most of them would be noise.
MOST_COLUMNS = 5_000
#: Cells that say that there is no value.
MISSING = ("", "NA", "N/A", "n/a", "NaN", "nan", "null", "NULL", "#N/A")
_SEPARATORS = (",", ";", "\t", "|")
# How files of other programs begin.
_MAGIC = {
    b"PK\x03\x04": "a zip archive, such as an Excel workbook; save the sheet as CSV",
    b"\x1f\x8b": "compressed with gzip; unpack it with gunzip",
    b"PAR1": "a Parquet file; pass --format parquet, or let its name end in .parquet",
    b"ARROW1": "a Feather file; pass --format feather, or let its name end in .feather",
    b"\xd0\xcf\x11\xe0": "an old Excel workbook; save the sheet as CSV",
    b"SQLite format 3": "an SQLite database; export the table as CSV",
    b"%PDF": "a PDF; export the table as CSV",
    b"\x89PNG": "a picture",
    b"\x93NUMPY": "an array of NumPy; save it as CSV with a line of column names",
}


class Source(NamedTuple):
    """A frame of pandas, and what messages call the file that it came from."""

    frame: Any
    name: str


def pandas_or_remedy() -> Any:
    """pandas, which is optional."""
    try:
        return importlib.import_module("pandas")
    except ImportError:
        raise InputError(
            "tables are read with pandas, which is not installed; run pip install 'measureflow[tables]'."
        ) from None


def read_table(
    path: str, *, separator: str | None = None, form: str | None = None, missing: Iterable[str] = ()
) -> Source:
    """The table in a file, or `-` for what is piped in: at least one row, names that stand once each."""
    name = "standard input" if path == "-" else path
    kind = form or ("csv" if path == "-" else _format_of(path))
    frame = _read(path, name, kind, separator, {*MISSING, *missing})
    names = [str(column) for column in frame.columns]
    if twice := sorted(
        {one for one in names if names.count(one) > 1} if len(set(names)) < len(names) else ()
    ):
        raise InputError(
            f"{name}: column {twice[0]!r} stands there {names.count(twice[0])} times; rename it."
        )
    frame.columns = names
    if not len(frame):
        raise InputError(f"{name}: there are column names, but no rows; pass a file with at least one row.")
    return Source(frame, name)


def _format_of(path: str) -> str:
    suffix = Path(path).suffix.lower()
    if suffix not in FORMATS:
        raise InputError(
            f"{path}: the end of its name, {suffix or 'none'}, is none of {', '.join(FORMATS)}; say what it "
            "is with --format csv, parquet or feather."
        )
    return FORMATS[suffix]


def _read(path: str, name: str, kind: str, separator: str | None, missing: set[str]) -> Any:
    pandas = pandas_or_remedy()
    content = _bytes(path)
    if not content.strip():
        raise InputError(f"{name}: the file is empty; pass a table with a line of column names and rows.")
    if kind == "csv":
        return _frame_of_csv(pandas, content, name, separator, missing)
    if kind not in ("parquet", "feather"):
        raise InputError(f"{name}: --format must be csv, parquet or feather, got {kind!r}.")
    _require_pyarrow(name, kind)
    try:
        frame = getattr(pandas, f"read_{kind}")(io.BytesIO(content))
    except Exception as error:
        raise InputError(
            f"{name}: this is no {kind.capitalize()} file that can be read ({str(error)[:200]}); check what "
            "wrote it, or pass --format."
        ) from None
    _require_width(name, frame.shape[1])
    return frame


def _bytes(path: str) -> bytes:
    if path == "-":
        return sys.stdin.buffer.read()
    place = Path(path)
    if not place.exists():
        raise InputError(f"there is no file {path}; check the path.")
    if not place.is_file():
        raise InputError(f"{path} is not a file; pass the path of a table.")
    try:
        return place.read_bytes()
    except OSError as error:
        raise InputError(
            f"{path} cannot be read: {error.strerror or error}; check its permissions."
        ) from None


def _require_pyarrow(name: str, kind: str) -> None:
    if importlib.util.find_spec("pyarrow") is None:
        raise InputError(
            f"{name}: {kind.capitalize()} files need pyarrow, which is not installed; run pip install "
            "pyarrow, or use CSV."
        )


def _require_width(name: str, columns: int) -> None:
    if columns > MOST_COLUMNS:
        raise InputError(
            f"{name}: there are {columns:,} columns, and at most {MOST_COLUMNS:,} are read; keep those that "
            "say something of the target, or their principal components."
        )


def _frame_of_csv(pandas: Any, content: bytes, name: str, separator: str | None, missing: set[str]) -> Any:
    for magic, what in _MAGIC.items():
        if content.startswith(magic):
            raise InputError(f"{name}: this is no CSV file, but {what}.")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InputError(
            f"{name}: line {line} is no text in UTF-8; convert the file with iconv -f latin1 -t utf-8, or "
            "check that it is a CSV file."
        ) from None
    if "\0" in text[:4096]:
        raise InputError(
            f"{name}: this is no CSV file: it has bytes in it that no text has; export it as CSV."
        )
    lines = _cells(name, text, separator or _separator_of(text))
    _, header = next(lines)
    names = [cell.strip() or f"column {number}" for number, cell in enumerate(header, 1)]
    _require_width(name, len(names))
    rows = []
    for line, cells in lines:
        if len(cells) != len(names):
            raise InputError(
                f"{name}: line {line} has {len(cells)} cells, and the line of column names {len(names)}; "
                f"mend that line, put texts that hold {separator or _separator_of(text)!r} in quotes, or "
                "pass --separator."
            )
        rows.append([None if (value := cell.strip()) in missing else value for cell in cells])
    columns = zip(*rows, strict=True) if rows else [() for _ in names]
    series = [pandas.Series(column, dtype=object) for column in columns]
    # By position first: names may stand twice, which is told with better words later.
    frame = pandas.concat(series, axis=1) if series else pandas.DataFrame()
    frame.columns = names
    return frame


def _separator_of(text: str) -> str:
    """The one that the line of column names has most of."""
    header = text.lstrip().partition("\n")[0]
    return max(_SEPARATORS, key=header.count)


def _cells(name: str, text: str, separator: str) -> Iterator[tuple[int, list[str]]]:
    """Lines that are not blank, by their numbers."""
    if len(separator) != 1:
        raise InputError(f"{name}: --separator must be one character, got {separator!r}.")
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    try:
        for cells in reader:
            if cells:
                yield reader.line_num, cells
    except csv.Error as error:
        raise InputError(
            f"{name}: line {reader.line_num} cannot be read ({error}); mend its quotes, or pass --separator."
        ) from None


def require_writable(path: str, force: bool) -> None:
    """A result can be written there: found out before anything is computed."""
    place = Path(path)
    if path == "-":
        return
    if place.is_dir():
        raise InputError(f"{path} is a folder; pass the path of a file with --out.")
    if place.exists() and not force:
        raise InputError(f"{path} exists; pass --force to overwrite it, or another --out.")
    if not place.resolve().parent.is_dir():
        raise InputError(f"{path} cannot be written: there is no folder {place.parent}; make it first.")


def write_text(text: str, path: str, force: bool) -> None:
    """A text, whole or not at all; `-` is standard output."""
    if path == "-":
        sys.stdout.write(text)
        return
    with replacing(path, force=force) as temporary:
        temporary.write_text(text, encoding="utf-8")


def require_table_format(path: str) -> None:
    """That a table can be written there, by the end of its name."""
    kind = "csv" if path == "-" else _format_of(path)
    if kind != "csv":
        _require_pyarrow(path, kind)


def write_table(frame: Any, path: str, force: bool) -> None:
    """A frame, by the end of the file's name; numbers of predictions have the digits of single precision."""
    kind = "csv" if path == "-" else _format_of(path)
    if kind == "csv":
        separator = "\t" if path.lower().endswith(".tsv") else ","
        write_text(frame.to_csv(index=False, float_format="%.9g", sep=separator), path, force)
        return
    with replacing(path, force=force) as temporary:
        getattr(frame, f"to_{kind}")(temporary)
