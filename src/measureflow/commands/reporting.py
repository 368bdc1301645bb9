"""`measureflow report`: a table with targets, as a model reads it."""

import numpy as np

from measureflow.commands.errors import InputError
from measureflow.commands.files import Source
from measureflow.commands.fitting import Task
from measureflow.commands.model import TableModel, inputs_of
from measureflow.commands.targets import labelled
from measureflow.tables.columns import Number
from measureflow.tables.reading import column_of

# With fewer rows, no share has a standard error worth the name.
FEWEST = 20


def judged_table(
    model: TableModel, source: Source, *, by_name: bool, unseen: bool, skip_missing: bool
) -> tuple[Task, list[str]]:
    """Rows and targets that a model can be judged on, and what there is to say of them."""
    cut = labelled(source, model.target, model.task, skip_missing)
    if len(cut.targets) < FEWEST:
        raise InputError(
            f"{source.name}: there are {len(cut.targets)} rows, and a report needs at least {FEWEST}; pass "
            "more rows."
        )
    if model.is_classifier:
        new = sorted(set(cut.targets.tolist()) - {str(label) for label in model.estimator.classes_})
        if new:
            known = ", ".join(map(str, model.estimator.classes_))
            raise InputError(
                f"{source.name}: the target {model.target!r} holds {new[0]!r:.60}, a class that no training "
                f"row had; there were {known}. Leave out such rows, or fit again with them."
            )
    inputs, notes = inputs_of(model, Source(cut.inputs, source.name), by_name=by_name, unseen=unseen)
    # Once, and not for every shuffled column again.
    for position, column in enumerate(model.estimator.columns_.columns):
        if column.kind == "number" and inputs[column.name].dtype == object:
            assert isinstance(column, Number)
            inputs[column.name] = column.values(column_of(inputs, position, column.name))
    task = Task(cut._replace(inputs=inputs), model.target, source.name, dict(model.kinds), [])
    _require_finite(task)
    return task, notes


def _require_finite(task: Task) -> None:
    targets = task.rows.targets
    if targets.dtype.kind == "f" and not np.isfinite(targets).all():
        raise InputError(f"{task.name}: the target {task.target!r} holds an infinite number; mend it.")
