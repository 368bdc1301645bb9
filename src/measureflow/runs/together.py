"""Many runs side by side, as one program: the same experiment over many seeds or splits."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from measureflow.runs.driver import AbstractRun, drive


class Together(AbstractRun):
    """Runs that are all at the same step. Nothing is recorded.

    Parameters
    ----------
    advance
        (states, steps) ↦ states so many steps later: one compiled program for any number of steps.
    state
        The states at step 0.
    """

    def __init__(self, advance: Callable[[Any, Int[Array, ""]], Any], state: Any):
        self.program, self.state = advance, state
        self.step, self.record, self.most = 0, {}, np.iinfo(np.int32).max

    def advance(self, budget: int, end: int) -> None:
        steps = min(budget, end - self.step)
        self.state = jax.block_until_ready(self.program(self.state, jnp.asarray(steps, jnp.int32)))
        self.step += steps

    def to(self, end: int, progress: str | None = None) -> Any:
        """The states at step `end`, with a progress bar of this name if there is one."""
        signal = drive(self, end, progress=progress)
        if signal is not None:
            raise KeyboardInterrupt(f"{signal} at step {self.step} of {end}.")
        return self.state
