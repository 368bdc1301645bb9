"""Arrays and one text in a safetensors file: written whole or not at all, and read with suspicion.

The format is https://github.com/huggingface/safetensors, read and written by its own library, which checks
that shapes, types and places of the arrays agree with each other and with the file. Added here is what it
leaves out: bounds before anything is read, names that come twice, and a check sum, which is one more array.
The file is read, not mapped into memory, where one that shrinks ends the process.
"""

import contextlib
import hashlib
import json
import math
import os
import reprlib
import secrets
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

PathLike: TypeAlias = str | os.PathLike[str]

_FLOATS = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16}
_INTEGERS = {"I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8}
_COUNTS = {"U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8}
#: What arrays in a file may hold, by the format's names.
DTYPES = {name: np.dtype(kind) for name, kind in (_FLOATS | _INTEGERS | _COUNTS | {"BOOL": np.bool_}).items()}

NAMES = {dtype: name for name, dtype in DTYPES.items()}

# JSON takes some twenty times its size in memory once it is read.
LARGEST_HEADER = 16 * 2**20
_TEXT, _SUM = "measureflow", "sha256"
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
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_finite, parse_float=_finite)
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("its JSON has the same name twice")
    return found


def _finite(text: str) -> float:
    if not math.isfinite(float(text)):
        raise ValueError(f"its JSON holds {text[:20]}, which is not a finite number")
    return float(text)


def check_sum(text: str, arrays: Iterable[tuple[str, str, Any, Any]]) -> np.ndarray:
    """SHA-256 of the text, and of the name, dtype, shape and bytes of every array, whatever their order."""
    digest = hashlib.sha256(text.encode())
    for name, dtype, shape, content in sorted(arrays, key=lambda array: array[0]):
        digest.update(json.dumps([name, dtype, list(shape)]).encode())
        digest.update(content)
    return np.frombuffer(digest.digest(), np.uint8)


# Writing.


def write(path: PathLike, text: str, arrays: Mapping[str, Any], *, force: bool) -> None:
    """The file at `path` with this text and these arrays, NumPy's or JAX's. With `force` it takes the place
    of a file that is there."""
    held, parts = {}, []
    for name, array in arrays.items():
        dtype = np.dtype(array.dtype).newbyteorder("=")
        held[name] = np.asarray(array, dtype, order="C")
        parts.append((name, NAMES[dtype], array.shape, held[name].reshape(-1).view(np.uint8).data))
    with replacing(path, force=force) as temporary:
        held[_SUM] = check_sum(text, parts)
        content = safetensors.numpy.save(held, metadata={_TEXT: text})
        length = int.from_bytes(content[:8], "little")
        if length > LARGEST_HEADER:
            raise ValueError(
                f"what is to be saved takes {length:,} bytes to describe, and the most that is loaded are "
                f"{LARGEST_HEADER:,}; put long texts and many small arrays together in fewer arrays."
            )
        temporary.write_bytes(content)


@contextlib.contextmanager
def replacing(path: PathLike, *, force: bool) -> Iterator[Path]:
    """A path to write to, next to `path`, to which the file is then moved: it appears whole or not at all."""
    target = Path(os.path.realpath(path))
    exists = FileExistsError(f"{path} exists; pass force=True to replace it, or choose another path.")
    if not target.parent.is_dir():
        raise FileNotFoundError(
            f"{path} cannot be written: there is no folder {target.parent}; make it first."
        )
    if target.exists() and not target.is_file():
        raise FileExistsError(
            f"{path} cannot be written: there is something there that is not a file; choose another path."
        )
    if target.exists() and not force:
        raise exists
    temporary = target.with_name(f".{target.name[:100]}.{secrets.token_hex(8)}.tmp")
    try:
        yield temporary
        _synchronise(temporary)
        if force and target.exists():
            temporary.chmod(stat.S_IMODE(target.stat().st_mode))
        _move(temporary, target, force)
    except FileExistsError:
        raise exists from None
    except OSError as error:
        raise OSError(
            error.errno,
            f"{path} could not be written: {error.strerror or error}; what was there is unchanged. Make "
            "room, or choose another folder.",
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        # The folder's new entry, too, where the system can do that.
        _synchronise(target.parent)


def _synchronise(path: Path) -> None:
    """Have it on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _move(temporary: Path, target: Path, force: bool) -> None:
    if force:
        temporary.replace(target)
        return
    try:
        # Unlike a renaming, this fails where another process was faster.
        target.hardlink_to(temporary)
    except OSError:
        if target.exists():
            raise FileExistsError from None
        # The file system has no links.
        temporary.replace(target)


# Reading.


def read(path: PathLike) -> tuple[str, dict[str, np.ndarray]]:
    """The text and the arrays. They take no more memory than twice the file."""
    place = Path(path)
    if not place.exists():
        raise FileNotFoundError(
            f"there is no file {path}; check the path. The working folder is {Path.cwd()}."
        )
    if not place.is_file():
        raise FileFormatError(path, "it is not a file", "pass the path of a file that mf.save wrote.")
    try:
        return _read(place)
    except MemoryError:
        raise FileFormatError(path, "it does not fit into memory", "load it on a larger machine.") from None
    except (ValueError, OverflowError, safetensors.SafetensorError) as error:
        raise FileFormatError(path, f"its header or its arrays are wrong: {str(error)[:300]}") from None


def _read(path: Path) -> tuple[str, dict[str, np.ndarray]]:
    with path.open("rb") as file:
        size, length = os.fstat(file.fileno()).st_size, int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError("it is not a safetensors file, or only part of one")
        if length > LARGEST_HEADER:
            raise ValueError(
                f"its header has {length:,} bytes, and {LARGEST_HEADER:,} are the most there may be"
            )
        text = _text(file.read(length))
        file.seek(0)
        arrays = dict(safetensors.deserialize(file.read()))
    found = arrays.pop(_SUM, {}).get("data")
    parts = [(name, *(array[part] for part in ("dtype", "shape", "data"))) for name, array in arrays.items()]
    if found != check_sum(text, parts).tobytes():
        raise ValueError("it has been changed or damaged (its checksum differs)")
    return text, {name: _array(*array) for name, *array in parts}


def _text(header: bytes) -> str:
    # Strictly, since the library takes the last of two arrays of one name.
    described = strict_json(header.decode())
    metadata = described.get("__metadata__") if isinstance(described, dict) else None
    if not isinstance(metadata, dict) or set(metadata) != {_TEXT} or not isinstance(metadata[_TEXT], str):
        raise ValueError("it is a safetensors file, but measureflow did not write it")
    return metadata[_TEXT]


def _array(dtype: str, shape: list[int], content: bytearray) -> np.ndarray:
    if dtype not in DTYPES:
        raise ValueError(f"it has an array of the dtype {dtype}, which is not one of {', '.join(DTYPES)}")
    numbers = np.frombuffer(content, np.uint8)
    if dtype == "BOOL" and numbers.max(initial=0) > 1:
        raise ValueError("it has truth values that are neither 0 nor 1")
    return numbers.view(DTYPES[dtype]).reshape(shape)
