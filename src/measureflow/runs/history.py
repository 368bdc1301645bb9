"""What a run records along the way."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Array

from measureflow.saving.registry import require, saved

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def _require_table(history: "History") -> None:
    columns = list(history.values())
    arrays = all(isinstance(column, np.ndarray) and column.ndim == 1 for column in columns)
    require(arrays and len({len(column) for column in columns}) <= 1, "its history is not a table")


@saved(
    build=lambda columns: History(columns),
    describe=lambda history: {"columns": dict(history)},
    check=_require_table,
)
class History(dict[str, np.ndarray]):
    """Arrays by name, one entry per record: `history["loss"]` or `history.loss`."""

    def __getattr__(self, name: str) -> np.ndarray:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"history has no {name!r}; it has {', '.join(self)}.") from None

    def __repr__(self) -> str:
        if not self.get("step", np.empty(0)).size:
            return "History(no records)"
        steps, others = self["step"], ", ".join(name for name in self if name != "step")
        return f"History({len(steps)} records, steps {steps[0]} to {steps[-1]}: {others})"

    def plot(self, *names: str, axis: "Axes | None" = None) -> "Axes":
        """Draw columns against the step: the loss, if none are named.

        Parameters
        ----------
        names
            Which columns.
        axis
            An axis of matplotlib to draw on; a new figure's if there is none.
        """
        from matplotlib import pyplot

        axis = pyplot.figure(layout="constrained").add_subplot() if axis is None else axis
        for name in names or [name for name in ("loss", "value") if name in self][:1]:
            axis.plot(self.step, getattr(self, name), label=name)
        axis.set_xlabel("step")
        axis.legend(frameon=False)
        return axis


class Log:
    """The rows of history that are kept: every `record_every` steps, the first and the last."""

    def __init__(self, record_every: int):
        self.record_every = record_every
        self.rows: list[dict[str, Any]] = []

    def add(
        self, table: Mapping[str, Array | np.ndarray], records: int, *, always: bool = False
    ) -> list[dict[str, Any]]:
        """Keep what is to be kept of some records; returned is what was."""
        columns = {name: np.asarray(column)[:records] for name, column in table.items()}
        first = len(self.rows)
        for row in range(records):
            step = int(columns["step"][row])
            if not self.reaches(step) and (always or step % self.record_every == 0):
                self.rows.append({name: column[row] for name, column in columns.items()})
        return self.rows[first:]

    def resume(self, columns: dict[str, np.ndarray], step: int, *, goes_on: bool) -> None:
        """The rows of an earlier part of the run, up to `step`. If it goes on, one at `step` was made because
        the run ended there: if its turn has come, it will be made again."""
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        self.rows = rows[:1] + [row for row in rows[1:] if not goes_on or int(row["step"]) < step]

    def reaches(self, step: int) -> bool:
        """Whether there is a row of this step."""
        return bool(self.rows) and int(self.rows[-1]["step"]) == step

    def history(self) -> History:
        names = ["step", *(name for name in self.rows[0] if name != "step")] if self.rows else []
        return History({name: np.array([row[name] for row in self.rows]) for name in names})


def default_record_every(steps: int) -> int:
    """About 1,000 records in a long run. A record costs some steps, so in a short one no more than every
    tenth step has one, and at least a hundred are made."""
    return max(1, steps // 1000, min(10, steps // 100))
