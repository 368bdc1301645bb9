"""Results of a run: the measure, its history, the state to continue from; or an error that holds these."""

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np

from measureflow.core.pytrees import shapes_of
from measureflow.runs.history import History
from measureflow.saving.container import PathLike
from measureflow.saving.documents import save
from measureflow.saving.registry import require, saved
from measureflow.spaces.empirical import Empirical
from measureflow.spaces.measures import AbstractMeasure


def _require_pairs(restart: "Restart") -> None:
    step, *parts = restart
    numbers = all(isinstance(part, tuple) and all(type(i) is int for i in part) for part in parts)
    require(type(step) is int and numbers and len(parts[0]) == len(parts[1]), "its restarts are none")


@saved(check=_require_pairs)
class Restart(NamedTuple):
    """Particles that became NaN or infinite, and went on as copies of others.

    Parameters
    ----------
    step
        When.
    lost
        Which particles had become NaN or infinite.
    copied
        Which particles they are copies of since then.
    """

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
    """What `solve` returns.

    Parameters
    ----------
    measure
        Q.
    history
        What was recorded along the way.
    state
        The state to continue from: pass it to `solve` as `initial`.
    restarts
        Which particles were restarted, if `on_divergence` allowed it.
    draws
        The particles that `collect` asked for, as NumPy arrays with leading axes (particle, draw); else
        None.
    """

    measure: AbstractMeasure
    history: History
    state: Any
    restarts: tuple["Restart", ...] = ()
    draws: Any = None

    def __repr__(self) -> str:
        kept = jax.tree.leaves(self.draws)
        draws = f", {kept[0].shape[1]} draws" if kept else ""
        lost = f", {len(self.restarts)} restarts" if self.restarts else ""
        return f"Solution({self.measure!r} at step {int(self.state.step)}{draws}{lost}; {self.history!r})"

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
    """Particles became NaN or infinite: `lost` (their indices) at `step`. Those of `state` are finite, but
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
