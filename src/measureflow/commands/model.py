"""A model file of the command line: the estimator, and what is known of the table that it was fitted to."""

import dataclasses
import hashlib
from typing import Any

import numpy as np

from measureflow.commands.errors import InputError
from measureflow.commands.files import Source
from measureflow.commands.kinds import listed, overruled, require_values
from measureflow.commands.surroundings import Surroundings
from measureflow.saving.documents import load
from measureflow.saving.registry import require, saved
from measureflow.tables.classifier import EnsembleClassifier
from measureflow.tables.columns import Category, Ordered
from measureflow.tables.inputs import numbers
from measureflow.tables.reading import column_of
from measureflow.tables.regressor import EnsembleRegressor
from measureflow.tables.scaling import standardised


def _sound(model: "TableModel") -> None:
    estimator = model.estimator
    require(isinstance(estimator, EnsembleRegressor | EnsembleClassifier), "estimator is none")
    require(estimator.columns_ is not None, "the estimator has not learned from a frame")
    require(type(model.target) is str, "target is no name")
    kinds = model.kinds.items() if type(model.kinds) is dict else [(0, 0)]
    require(all(type(text) is str for pair in kinds for text in pair), "kinds are no texts")
    require(type(model.seen) is np.ndarray and model.seen.dtype == np.uint64, "seen are no check sums")
    require(type(model.about) is dict, "about is no dictionary")
    around = model.surroundings
    require(isinstance(around, Surroundings), "surroundings are none")
    require(around.root.shape[-1] == len(estimator.input_mean_), "surroundings are of other columns")


@saved(check=_sound)
@dataclasses.dataclass(frozen=True)
class TableModel:
    """What `measureflow fit` writes, and `mf.load` reads.

    Attributes
    ----------
    estimator
        The fitted `EnsembleRegressor` or `EnsembleClassifier`, which takes frames.
    target
        The name of its column.
    kinds
        Columns whose type the user gave, and those left out.
    surroundings
        How far a row is from the rows of training.
    seen
        Check sums of the training rows, by which a report tells rows that the model knows.
    about
        The file's name, its number of rows, settings, seed, seconds, versions, and what was warned of.
    """

    estimator: Any
    target: str
    kinds: dict[str, str]
    surroundings: Surroundings
    seen: np.ndarray
    about: dict[str, Any]

    @property
    def is_classifier(self) -> bool:
        """Whether it predicts classes."""
        return isinstance(self.estimator, EnsembleClassifier)

    @property
    def task(self) -> str:
        """By the name that `--task` takes."""
        return "classification" if self.is_classifier else "regression"

    @property
    def inputs(self) -> list[str]:
        """The columns that it reads, in their order."""
        return [str(name) for name in self.estimator.feature_names_in_]

    def distance(self, frame: Any) -> np.ndarray:
        """How far every row is from the rows of training."""
        return self.surroundings.distance(_standardised(self.estimator, frame))

    def knows(self, frame: Any, targets: np.ndarray) -> np.ndarray:
        """Which rows, with these targets, it was trained on."""
        return np.isin(check_sums(self.estimator, frame, targets), self.seen)


def table_model(
    estimator: Any, frame: Any, targets: np.ndarray, target: str, kinds: dict[str, str], about: dict[str, Any]
) -> TableModel:
    """Of a fitted estimator, and the rows that it was fitted to."""
    around = Surroundings.learn(_standardised(estimator, frame))
    return TableModel(estimator, target, kinds, around, check_sums(estimator, frame, targets), about)


def _standardised(estimator: Any, frame: Any) -> np.ndarray:
    return standardised(numbers(estimator, frame), estimator.input_mean_, estimator.input_scale_)


def check_sums(estimator: Any, frame: Any, targets: np.ndarray) -> np.ndarray:
    """64 bits of each row, as the networks read it, with its target."""
    rows = np.ascontiguousarray(numbers(estimator, frame), np.float64)
    labels = [repr(value).encode() for value in targets.tolist()]
    sums = [
        hashlib.blake2b(row.tobytes() + label, digest_size=8).digest()
        for row, label in zip(rows, labels, strict=True)
    ]
    return np.frombuffer(b"".join(sums), "<u8").astype(np.uint64)


def load_model(path: str) -> TableModel:
    """From a file; what is wrong with it is a FileFormatError, and what it is not an InputError."""
    model = load(path)
    if not isinstance(model, TableModel):
        raise InputError(
            f"{path} holds a {type(model).__name__}, which measureflow fit did not write; pass a file that "
            "it wrote with --out, or use this one from Python with mf.load."
        )
    return model


def inputs_of(model: TableModel, source: Source, *, by_name: bool, unseen: bool) -> tuple[Any, list[str]]:
    """The columns that a model reads, of new rows; and what there is to say of them."""
    frame, name = source
    notes = []
    if gone := [column for column in model.inputs if column not in frame.columns]:
        raise InputError(
            f"{name}: column {gone[0]!r} is missing, which the model reads; it reads {listed(model.inputs)}."
        )
    present = [column for column in frame.columns if column in set(model.inputs)]
    if present != model.inputs and not by_name:
        place = next(
            i for i, pair in enumerate(zip(present, model.inputs, strict=True)) if len(set(pair)) > 1
        )
        raise InputError(
            f"{name}: the columns are in another order than in training, where {model.inputs[place]!r} stood "
            f"in the place of {present[place]!r}; put them in that order, or pass --by-name to take each by "
            "its name."
        )
    more = [
        c for c in frame.columns if c not in {*model.inputs, model.target} and model.kinds.get(c) != "drop"
    ]
    if more:
        notes.append(f"{name}: not read, since the model has not seen them: {listed(more)}.")
    kinds = {column: kind for column, kind in model.kinds.items() if kind != "drop"}
    rows = overruled(frame[model.inputs].copy(), kinds, name)
    rows = _with_booleans(model, rows)
    if not unseen:
        require_values(rows, name, model.estimator.columns_)
        _require_known_levels(model, rows, name)
    return rows, notes


def _with_booleans(model: TableModel, rows: Any) -> Any:
    """Where training had booleans, the texts true and false are some."""
    found = {}
    for position, column in enumerate(model.estimator.columns_.columns):
        raw = column_of(rows, position, column.name)
        if column.kind == "boolean" and raw.kind == "text":
            truth = {"true": 1.0, "false": 0.0, "1": 1.0, "0": 0.0}
            values = [
                np.nan if no else truth.get(text.lower(), text) for text, no in zip(*raw[2:4], strict=True)
            ]
            if all(isinstance(value, float) for value in values):
                found[column.name] = values
    return rows.assign(**found) if found else rows


def _require_known_levels(model: TableModel, rows: Any, name: str) -> None:
    """Where training had rare levels, a new one counts with them; elsewhere nothing like it was ever seen."""
    for position, column in enumerate(model.estimator.columns_.columns):
        if not isinstance(column, Category | Ordered) or not column.parts:
            continue
        raw = column_of(rows, position, column.name)
        if raw.kind not in ("text", "category"):
            continue
        unseen = column.unseen(raw)
        if unseen.any():
            row = int(np.argmax(unseen))
            raise InputError(
                f"{name}: column {column.name!r} holds {raw.values[row]!r:.60} in row {row + 1}, a category "
                f"that no training row had; there were {listed(column.levels)}. Mend it, or pass "
                "--unseen to let such rows pass as none of these."
            )
