"""Early stopping: the best that was seen on validation rows."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from measureflow.core.pytrees import Particles
from measureflow.tables.table import Table

# Forty looks at a run, and no more than one in so many steps.
_LOOKS, _FEWEST_STEPS = 40, 500
# How many looks without a gain are enough.
PATIENCE = 10


class Best:
    """For every table, the members that were best on its validation rows. A callback of the driver, which
    ends the run once no table has gained for `PATIENCE` looks."""

    def __init__(self, trials: Any, tables: list[Table], end: int):
        self.trials, self.tables, self.end = trials, tables, end
        self.members: Particles | None = None
        self.scores, self.steps = np.full(len(tables), -np.inf), [0] * len(tables)
        self.interval = max(end // (_LOOKS * _FEWEST_STEPS), 1) * _FEWEST_STEPS
        self.last_gain = 0

    def __call__(self, step: int, record: dict[str, Any], state: Any) -> bool:
        if step % self.interval == 0 or step == self.end:
            self._look(step)
        return self.is_over(step)

    def is_over(self, step: int) -> bool:
        """Whether it has waited long enough."""
        return step - self.last_gain >= PATIENCE * self.interval

    def _look(self, step: int) -> None:
        members = self.trials.members()
        densities = zip(self.trials.log_densities(members, self.tables), self.tables, strict=True)
        scores = np.array([np.average(d[0, 0], weights=table.weights) for d, table in densities])
        better = np.nan_to_num(scores, nan=-np.inf) > self.scores
        mask, before = jnp.asarray(better), members if self.members is None else self.members
        self.members = jax.tree.map(
            lambda new, old: jnp.where(mask.reshape(-1, *[1] * (new.ndim - 1)), new, old), members, before
        )
        self.scores = np.where(better, scores, self.scores)
        self.steps = [step if gained else old for gained, old in zip(better, self.steps, strict=True)]
        self.last_gain = step if better.any() else self.last_gain

    # For checkpoints.

    def members_or(self, others: Callable[[], Particles]) -> Particles:
        """The best members, or others while there are none."""
        return others() if self.members is None else self.members

    def notes(self) -> dict[str, Any]:
        """All but the members, as JSON."""
        scores = [score if np.isfinite(score) else None for score in self.scores.tolist()]
        looked = self.members is not None
        return {"scores": scores, "steps": self.steps, "last_gain": self.last_gain, "looked": looked}

    def resume(self, members: Particles, notes: dict[str, Any]) -> None:
        """As it was when these were noted."""
        self.members = members if notes["looked"] else None
        self.scores = np.array([-np.inf if score is None else score for score in notes["scores"]])
        self.steps, self.last_gain = list(notes["steps"]), notes["last_gain"]
