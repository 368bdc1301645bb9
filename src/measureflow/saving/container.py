"""Arrays and one text in a safetensors file: written whole or not at all, and read with suspicion.

A file is the length of a header (8 bytes), the header, which is JSON, and the arrays' bytes
(https://github.com/huggingface/safetensors). Everything in it is checked before it is believed, and what is
read can run no code. The format's own library would not do here: it takes a header of 100 MB and names that
come twice, maps the file into memory, where one that shrinks ends the process, and has no bfloat16 in NumPy.
"""

import contextlib
import hashlib
import json
import math
import os
import reprlib
import secrets
import stat
from collections.abc import Iterator, Mapping
from io import BufferedIOBase
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeAlias

import jax.numpy as jnp
import numpy as np

PathLike: TypeAlias = str | os.PathLike[str]

#: What arrays in a file may hold, by the format's names.
DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

# JSON takes some twenty times its size in memory once it is read.
LARGEST_HEADER = 16 * 2**20
_MOST_AXES, _MOST_ITEMS = 32, 2**59
_TEXT, _OF_TEXT, _OF_DATA = "measureflow", "sha256_of_description", "sha256_of_data"
_GET_IT_AGAIN = "it is damaged, or mf.save did not write it: get it again from where it came."


class FileFormatError(ValueError):
    """A file that cannot be loaded: which, why, and what to do."""

    def __init__(self, path: PathLike, what: str, remedy: str = _GET_IT_AGAIN):
        super().__init__(f"{os.fspath(path)} cannot be loaded: {what}; {remedy}")
        self.path, self.what, self.remedy = os.fspath(path), what, remedy

    def __reduce__(self) -> tuple:
        return FileFormatError, (self.path, self.what, self.remedy)


_shortened = reprlib.Repr()
_shortened.maxstring = 80


def brief(value: Any) -> str:
    """What an error shows of a value from a file, which may be long, or deep."""
    return _shortened.repr(value)


def strict_json(text: str) -> Any:
    """JSON in which no name comes twice and every number is finite; else ValueError."""
    try:
        return json.loads(
            text, object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite_number
        )
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name comes twice in its JSON")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"its JSON holds {name}")


def _finite_number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("its JSON holds a number that is too large")
    return number


class _Entry(NamedTuple):
    """Where an array lies among the arrays' bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


# Writing.


def write(path: PathLike, text: str, arrays: Mapping[str, Any], *, force: bool) -> None:
    """The file at `path` with this text and these arrays, NumPy's or JAX's. It appears whole or not at all:
    it is written next to its place, under another name, and then moved. With `force` it takes the place of
    a file that is there."""
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise FileNotFoundError(
            f"{path} cannot be written: there is no folder {target.parent}; make it first."
        )
    if target.exists() and not target.is_file():
        raise FileExistsError(
            f"{path} cannot be written: something that is no file is there; choose another."
        )
    if target.exists() and not force:
        raise _exists(path)
    temporary = target.with_name(f".{target.name[:100]}.{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("xb") as file:
            _write_to(file, text, arrays)
            file.flush()
            os.fsync(file.fileno())
        if force and target.exists():
            temporary.chmod(stat.S_IMODE(target.stat().st_mode))
        _move(temporary, target, force)
    except FileExistsError:
        raise _exists(path) from None
    except OSError as error:
        raise OSError(
            error.errno,
            f"{path} could not be written: {error.strerror or error}; what was there is as it was. Make "
            "room, or choose another folder.",
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    _keep(target.parent)


def _exists(path: PathLike) -> FileExistsError:
    return FileExistsError(f"{path} exists; pass force=True to replace it, or choose another path.")


def _move(temporary: Path, target: Path, force: bool) -> None:
    if not force:
        try:
            # Unlike a renaming, this fails where another process was faster.
            target.hardlink_to(temporary)
        except FileExistsError:
            raise
        except OSError:
            # The file system has no links.
            if target.exists():
                raise FileExistsError from None
        else:
            return
    temporary.replace(target)


def _keep(folder: Path) -> None:
    """Have the folder's new entry on the disk as well, where the system can do that."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _write_to(file: BufferedIOBase, text: str, arrays: Mapping[str, Any]) -> None:
    entries, end = [], 0
    # The largest items first, so that all are aligned.
    for name in sorted(arrays, key=lambda name: -np.dtype(arrays[name].dtype).itemsize):
        dtype, shape = np.dtype(arrays[name].dtype).newbyteorder("="), tuple(arrays[name].shape)
        size = math.prod(shape) * dtype.itemsize
        entries.append(_Entry(name, NAMES[dtype], shape, end, end + size))
        end += size
    # The sums are not known yet, but their length is.
    file.write(_header(text, entries, "0" * 64))
    of_data = hashlib.sha256()
    for entry in entries:
        # Of JAX's arrays, one at a time is copied from its device.
        array = np.asarray(arrays[entry.name], DTYPES[entry.dtype], order="C")
        content = array.reshape(-1).view(np.uint8)
        of_data.update(content.data)
        file.write(content.data)
    file.seek(0)
    file.write(_header(text, entries, of_data.hexdigest()))


def _header(text: str, entries: list[_Entry], of_data: str) -> bytes:
    metadata = {_TEXT: text, _OF_TEXT: _sum_of_description(text, entries, of_data), _OF_DATA: of_data}
    header: dict[str, Any] = {"__metadata__": metadata}
    for entry in entries:
        place = [entry.begin, entry.end]
        header[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": place}
    content = json.dumps(header, separators=(",", ":")).encode()
    content += b" " * (-len(content) % 8)
    if len(content) > LARGEST_HEADER:
        raise ValueError(
            f"what is to be saved takes {len(content):,} bytes to describe, and the most that is loaded are "
            f"{LARGEST_HEADER:,}; put long texts and many small arrays together in fewer arrays."
        )
    return len(content).to_bytes(8, "little") + content


def _sum_of_description(text: str, entries: list[_Entry], of_data: str) -> str:
    parts = [text, of_data, *([entry.name, entry.dtype, *entry.shape] for entry in entries)]
    return hashlib.sha256(json.dumps(parts, separators=(",", ":")).encode()).hexdigest()


# Reading.


class Reader:
    """An open file whose header has been checked: `text`, and the arrays when they are asked for."""

    def __init__(self, file: BufferedIOBase, path: PathLike):
        self._file, self._path = file, path
        header, self._start, size = self._header()
        metadata = header.pop("__metadata__", None)
        self._entries = sorted(
            (self._entry(name, description) for name, description in header.items()),
            key=lambda entry: (entry.begin, entry.end),
        )
        self._require_no_gaps(size)
        self.text, self._of_data = self._described(metadata)

    def arrays(self) -> dict[str, np.ndarray]:
        """All arrays by name. They take no more memory than the file has bytes."""
        found, of_data = {}, hashlib.sha256()
        for entry in self._entries:
            content = np.empty(entry.end - entry.begin, np.uint8)
            self._file.seek(self._start + entry.begin)
            if self._file.readinto(content.data) != len(content):
                raise self.error("it ended while it was being read")
            of_data.update(content.data)
            if entry.dtype == "BOOL" and content.max(initial=0) > 1:
                raise self.error(f"the array {brief(entry.name)} holds truth values that are neither 0 nor 1")
            found[entry.name] = content.view(DTYPES[entry.dtype]).reshape(entry.shape)
        if of_data.hexdigest() != self._of_data:
            raise self.error("its arrays are not those that were written (their check sum differs)")
        return found

    def error(self, what: str, **remedy: str) -> FileFormatError:
        """The error that says what is wrong with this file."""
        return FileFormatError(self._path, what, **remedy)

    def _header(self) -> tuple[dict[str, Any], int, int]:
        """The header, where the arrays' bytes begin, and how many there are."""
        size = os.fstat(self._file.fileno()).st_size
        length = int.from_bytes(self._file.read(8), "little")
        if size < 8 or length > size - 8:
            raise self.error("it is no safetensors file, or not all of one")
        if length > LARGEST_HEADER:
            raise self.error(
                f"its header has {length:,} bytes, and {LARGEST_HEADER:,} are the most there may be"
            )
        try:
            header = strict_json(self._file.read(length).decode())
        except ValueError as error:
            raise self.error(f"its header cannot be read: {error}") from None
        if not isinstance(header, dict):
            raise self.error("its header is no JSON object")
        return header, 8 + length, size - 8 - length

    def _entry(self, name: str, description: Any) -> _Entry:
        shown = brief(name)
        if not isinstance(description, dict) or set(description) != {"dtype", "shape", "data_offsets"}:
            raise self.error(f"the array {shown} is not described by its dtype, shape and data_offsets")
        dtype, shape, place = (description[key] for key in ("dtype", "shape", "data_offsets"))
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise self.error(
                f"the array {shown} has the dtype {brief(dtype)}, which is none of {', '.join(DTYPES)}"
            )
        if not _are_counts(shape) or len(shape) > _MOST_AXES or not _are_counts(place) or len(place) != 2:
            raise self.error(f"the array {shown} has a shape or a place that is none")
        # NumPy counts as if no axis were empty.
        if math.prod(max(size, 1) for size in shape) > _MOST_ITEMS:
            raise self.error(f"the array {shown} has a shape that is too large")
        if place[1] - place[0] != math.prod(shape) * DTYPES[dtype].itemsize:
            raise self.error(
                f"the array {shown} has another size than its shape {shape} and dtype {dtype} say"
            )
        return _Entry(name, dtype, tuple(shape), *place)

    def _require_no_gaps(self, size: int) -> None:
        end = 0
        for entry in self._entries:
            if entry.begin != end:
                raise self.error(f"the array {brief(entry.name)} does not begin where the one before it ends")
            end = entry.end
        if end != size:
            raise self.error(f"its arrays have {size:,} bytes, not the {end:,} that its header says")

    def _described(self, metadata: Any) -> tuple[str, str]:
        """The text, and the check sum of the data."""
        if not isinstance(metadata, dict) or set(metadata) != {_TEXT, _OF_TEXT, _OF_DATA}:
            raise self.error("it is a safetensors file, but none of measureflow")
        text, of_text, of_data = (metadata[key] for key in (_TEXT, _OF_TEXT, _OF_DATA))
        if not all(isinstance(value, str) for value in (text, of_text, of_data)):
            raise self.error("its description is no text")
        if of_text != _sum_of_description(text, self._entries, of_data):
            raise self.error("its description is not the one that was written (its check sum differs)")
        return text, of_data


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


@contextlib.contextmanager
def reading(path: PathLike) -> Iterator[Reader]:
    """The file at `path`, its header checked."""
    place = Path(path)
    if not place.exists():
        raise FileNotFoundError(
            f"there is no file {path}; check the path. The working folder is {Path.cwd()}."
        )
    if not place.is_file():
        raise FileFormatError(path, "it is no file", "pass the path of a file that mf.save wrote.")
    with place.open("rb") as file:
        try:
            yield Reader(file, path)
        except MemoryError:
            raise FileFormatError(
                path, "it does not fit into memory", "load it on a larger machine."
            ) from None
