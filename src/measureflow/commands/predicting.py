"""`measureflow predict`: a law for every row, as the columns of a table."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from measureflow.commands.errors import InputError
from measureflow.commands.files import Source, pandas_or_remedy
from measureflow.commands.kinds import listed
from measureflow.commands.model import TableModel

# Rows whose laws are in memory at a time.
_BLOCK = 1_024


class Wanted(NamedTuple):
    """What to predict: quantiles at these levels, P(y > t) at these thresholds, and columns to copy."""

    quantiles: tuple[float, ...] = (0.05, 0.95)
    above: tuple[float, ...] = ()
    keep: tuple[str, ...] = ()


def blocks(estimator: Any, frame: Any) -> Iterator[tuple[slice, Any]]:
    """Rows, and their laws."""
    for start in range(0, len(frame), _BLOCK):
        rows = slice(start, min(start + _BLOCK, len(frame)))
        yield rows, estimator.predict_dist(frame.iloc[rows])


def in_blocks(estimator: Any, frame: Any, function: Callable[[Any], dict[str, Any]]) -> dict[str, np.ndarray]:
    """Numbers of every row's law, by name."""
    found = [function(law) for _, law in blocks(estimator, frame)]
    return {name: np.concatenate([np.asarray(part[name], np.float64) for part in found]) for name in found[0]}


def checked(wanted: Wanted, model: TableModel, source: Source) -> None:
    """That a model can predict this."""
    if model.is_classifier and wanted.above:
        raise InputError("--above is for numbers, and this model predicts classes; leave it out.")
    if wrong := [level for level in wanted.quantiles if not 1e-4 <= level <= 1 - 1e-4]:
        raise InputError(
            f"--quantiles must be between 0.0001 and 0.9999, got {wrong[0]:g}; 0.5 is the median."
        )
    if gone := [column for column in wanted.keep if column not in source.frame.columns]:
        raise InputError(
            f"{source.name}: there is no column {gone[0]!r}, which --keep names; there are "
            f"{listed(source.frame.columns)}."
        )


def predictions(model: TableModel, rows: Any, source: Source, wanted: Wanted) -> Any:
    """A frame with a row for each row, in their order."""
    pandas = pandas_or_remedy()
    kept = {column: source.frame[column].to_numpy() for column in wanted.keep}
    found = _classes(model, rows) if model.is_classifier else _numbers(model, rows, wanted)
    distance = {"distance": model.distance(rows)}
    # What is kept may have any name, also that of a prediction.
    names = [*kept, *(f"predicted_{name}" if name in kept else name for name in (*found, *distance))]
    columns = [*kept.values(), *found.values(), *distance.values()]
    frame = pandas.DataFrame(dict(enumerate(columns)))
    frame.columns = names
    return frame


def _numbers(model: TableModel, rows: Any, wanted: Wanted) -> dict[str, np.ndarray]:
    def of(law: Any) -> dict[str, Any]:
        variance = np.maximum(np.asarray(law.variance, np.float64), np.finfo(np.float64).tiny)
        found = {"mean": law.mean, "standard_deviation": np.sqrt(variance), "median": law.median}
        if wanted.quantiles:
            levels = np.asarray(law.quantile(list(wanted.quantiles)), np.float64)
            found |= {f"quantile_{q:g}": row for q, row in zip(wanted.quantiles, levels, strict=True)}
        found |= {f"above_{t:g}": 1 - np.asarray(law.cdf(t), np.float64) for t in wanted.above}
        return found | {"epistemic_share": np.asarray(law.epistemic_variance, np.float64) / variance}

    return in_blocks(model.estimator, rows, of)


def _classes(model: TableModel, rows: Any) -> dict[str, np.ndarray]:
    classes = [str(label) for label in model.estimator.classes_]

    def of(law: Any) -> dict[str, Any]:
        table, entropy = np.asarray(law.probs, np.float64), np.asarray(law.entropy(), np.float64)
        found = {f"probability_{label}": table[:, i] for i, label in enumerate(classes)}
        share = np.asarray(law.mutual_information(), np.float64) / np.maximum(entropy, 1e-12)
        return found | {"entropy": entropy, "epistemic_share": np.clip(share, 0.0, 1.0)}

    found = in_blocks(model.estimator, rows, of)
    best = np.argmax([found[f"probability_{label}"] for label in classes], axis=0)
    return {"class": np.array(classes, object)[best]} | found
