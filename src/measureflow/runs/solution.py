"""What a run leaves: the measure, its history, the state to continue from; or an error that holds these."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array

from measureflow.core.pytrees import shapes_of
from measureflow.saving.container import PathLike
from measureflow.saving.documents import save
from measureflow.saving.registry import require, saved
from measureflow.spaces.measures import AbstractMeasure, Empirical


def _require_table(history: "History") -> None:
    columns = list(history.values())
    arrays = all(isinstance(column, np.ndarray) and column.ndim == 1 for column in columns)
    require(arrays and len({len(column) for column in columns}) <= 1, "its history is no table")


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


class Log:
    """The rows of history that are kept: every `record_every` steps, the first and the last."""

    def __init__(self, record_every: int):
        self.record_every = record_every
        self.rows: list[dict[str, Any]] = []

    def add(self, table: dict[str, Array], records: int, *, always: bool = False) -> None:
        columns = {name: np.asarray(column)[:records] for name, column in table.items()}
        for row in range(records):
            step = int(columns["step"][row])
            if not self.reaches(step) and (always or step % self.record_every == 0):
                self.rows.append({name: column[row] for name, column in columns.items()})

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


def _require_pairs(restart: "Restart") -> None:
    step, *parts = restart
    numbers = all(isinstance(part, tuple) and all(type(i) is int for i in part) for part in parts)
    require(type(step) is int and numbers and len(parts[0]) == len(parts[1]), "its restarts are none")


@saved(check=_require_pairs)
class Restart(NamedTuple):
    """At `step`, the particles `lost` had left the finite numbers, and became copies of those in `copied`."""

    step: int
    lost: tuple[int, ...]
    copied: tuple[int, ...]


def _require_sound(solution: "Solution") -> None:
    measure, state, restarts = solution.measure, solution.state, solution.restarts
    require(isinstance(measure, AbstractMeasure), "its measure is none")
    require(isinstance(solution.history, History), "its history is none")
    require(not isinstance(state, bool | int | float | str | list), "its state is none")
    if isinstance(measure, Empirical) and hasattr(state, "particles"):
        same = shapes_of(measure.particles) == shapes_of(state.particles)
        require(same, "its measure and its state have particles of different shapes")
    alike = isinstance(restarts, tuple) and all(isinstance(restart, Restart) for restart in restarts)
    require(alike, "its restarts are none")


@saved(check=_require_sound, optional=("state",))
@dataclasses.dataclass(frozen=True)
class Solution:
    """What `solve` returns: the measure Q, the history of the run, the state to continue from, and which
    particles were restarted, if `on_divergence` allowed it."""

    measure: AbstractMeasure
    history: History
    state: Any
    restarts: tuple["Restart", ...] = ()

    def save(self, path: PathLike, *, force: bool = False) -> None:
        """Write it to one file, for `mf.load`: see `mf.save`."""
        save(self, path, force=force)


class RunError(RuntimeError):
    """A run that could not go on. Nothing computed is lost: `state` is the last good state, to continue
    from, and `history` what was recorded."""

    def __init__(self, message: str, state: Any, history: History):
        super().__init__(message, state, history)
        self.state, self.history = state, history

    def __str__(self) -> str:
        return self.args[0]


class DivergenceError(RunError):
    """Particles left the finite numbers: `lost` (their indices) at `step`. Those of `state` are finite, but
    the lost ones are on their way out: begin again from earlier, with a smaller step."""

    def __init__(self, message: str, state: Any, history: History, step: int, lost: np.ndarray):
        super().__init__(message, state, history)
        # What it takes to make the exception again, in another process.
        self.args = (message, state, history, step, lost)
        self.step, self.lost = step, lost


class DataExhaustedError(RunError):
    """The iterator of batches ended before the steps did."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM. `solution` is the run as far as it came; with a checkpoint it is saved, too."""

    def __init__(self, message: str, solution: Solution):
        super().__init__(message, solution)
        self.solution = solution

    def __str__(self) -> str:
        return self.args[0]
