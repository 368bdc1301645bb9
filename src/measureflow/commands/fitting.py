"""`measureflow fit`: from a table to a model file."""

import contextlib
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from measureflow.commands.errors import InputError
from measureflow.commands.files import Source
from measureflow.commands.kinds import found_kinds, overruled, require_values, with_numbers
from measureflow.commands.limits import fit_within
from measureflow.commands.model import TableModel, table_model
from measureflow.commands.targets import Labelled, labelled, require_target
from measureflow.study.provenance import provenance
from measureflow.tables.classifier import EnsembleClassifier
from measureflow.tables.frames import Columns
from measureflow.tables.regressor import EnsembleRegressor


class Task(NamedTuple):
    """A table, ready to be fitted: its rows, what its columns are, and what the user says of them."""

    rows: Labelled
    target: str
    name: str
    kinds: dict[str, str]
    found: list[tuple[str, list[str]]]

    def estimator(self, settings: Mapping[str, Any]) -> Any:
        """With the settings of the command line; those that are None are chosen by held-out rows."""
        given = {name: value for name, value in settings.items() if value is not None}
        if self.rows.task == "regression":
            return EnsembleRegressor(**given)
        if given.pop("likelihood", None):
            raise InputError(
                f"--likelihood is for numbers, and {self.target!r} holds classes ({self.rows.reason}); leave "
                "it out, or pass --task regression."
            )
        return EnsembleClassifier(**given)


def prepared(
    source: Source,
    target: str,
    kinds: Mapping[str, str],
    task: str | None = None,
    skip_missing: bool = False,
) -> tuple[Task, list[str]]:
    """A table with its column types, and what the library warns of; raises where it cannot be fitted."""
    require_target(source, target)
    if target in kinds:
        raise InputError(f"--type and --drop are for inputs, and {target!r} is the target; see --task.")
    with told_as_input_errors(source.name), noted() as notes:
        frame = overruled(source.frame, kinds, source.name)
        cut = labelled(Source(frame, source.name), target, task, skip_missing)
        require_values(cut.inputs, source.name)
        cut = cut._replace(inputs=with_numbers(cut.inputs))
        columns = Columns.learn(cut.inputs)
    found = found_kinds(columns, cut.inputs, kinds)
    return Task(cut, target, source.name, dict(kinds), found), notes


def fit_task(
    task: Task, settings: Mapping[str, Any], seconds: float | None, seed: int, progress: bool
) -> TableModel:
    """The fitted model, with all that its file says of it."""
    estimator = task.estimator({**settings, "random_state": seed, "verbose": int(progress)})
    began = time.perf_counter()
    with told_as_input_errors(task.name), noted() as notes:
        limited = fit_within(estimator, task.rows.inputs, task.rows.targets, seconds)
    given = {name: _plain(value) for name, value in settings.items() if value is not None}
    about = provenance(seed, given | ({} if seconds is None else {"time": seconds})) | {
        "file": Path(task.name).name,
        "rows": len(task.rows.targets),
        "columns": task.rows.inputs.shape[1],
        "task_because": task.rows.reason,
        "seconds": round(time.perf_counter() - began, 1),
        "notes": [*limited, *notes],
    }
    # What a model file says of its origin is text and numbers, none of which depends on the machine it is
    # read on.
    estimator.set_params(verbose=0)
    return table_model(estimator, task.rows.inputs, task.rows.targets, task.target, task.kinds, about)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


@contextlib.contextmanager
def noted() -> Iterator[list[str]]:
    """Warnings as texts, each once, instead of on stderr between bars."""
    notes: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield notes
        finally:
            for warning in caught:
                if issubclass(warning.category, UserWarning) and str(warning.message) not in notes:
                    notes.append(str(warning.message))


@contextlib.contextmanager
def told_as_input_errors(name: str) -> Iterator[None]:
    """What estimators refuse, they refuse for what is in the file, or for an option."""
    try:
        yield
    except InputError:
        raise
    except (ValueError, TypeError, np.linalg.LinAlgError, MemoryError) as error:
        raise InputError(f"{name}: {error}") from error
