"""The loop: step after step of a flow, as one compiled program."""

from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array, Int, Key, PyTree

from measureflow.core.pytrees import is_concrete
from measureflow.core.validation import require_count
from measureflow.flows.flow import AbstractFlow
from measureflow.runs.batches import AbstractBatches, data_key, on_device
from measureflow.statement.problem import Problem

# A GPU waits for the host after every turn of a loop whose length is data; so there a turn has some steps, as
# many as lie between two records of a run of some thousand, at the price of compiling a step twice.
STEPS_OF_A_TURN = 10


def run(
    problem: Problem,
    flow: AbstractFlow,
    state: Any,
    data: PyTree,
    key: Key[Array, ""],
    steps: int | Int[Array, ""],
    *,
    batch_size: int | None = None,
) -> Any:
    """The state after `steps` more steps: pure, to be jitted and vmapped.

    Parameters
    ----------
    problem, flow
        What is minimised, and how.
    state
        `flow.init(problem, initial)`, or the state of an earlier run.
    data
        A pytree of arrays with one row per case, all of which the loss sees at each step, or `batch_size` of
        them; None if the loss takes none.
    key
        The same key and the same state give the same result.
    steps
        May be traced.
    """
    if is_concrete(steps):
        require_count("steps", steps, 0, "it counts the steps to take from `state`.")
    if not hasattr(state, "step"):
        raise TypeError(
            f"state has no `step`, got {type(state).__name__}: run could not tell which batch and which "
            "noise come next; give the flow's state a field step that every step raises by one, or use "
            "mf.solve, which counts."
        )
    return advance(problem, flow, state, on_device(data, batch_size), key, steps)


def advance(
    problem: Problem,
    flow: AbstractFlow,
    state: Any,
    batches: AbstractBatches,
    key: Key[Array, ""],
    steps: int | Int[Array, ""],
) -> Any:
    """The same, with batches from anywhere."""
    order_key = data_key(key)
    flow.require_share(batches.sampled_share())

    def step(state: Any) -> Any:
        return flow.step(problem, state, batches.at(state.step, order_key), key)

    return repeat(step, state, steps)


def repeat(step: Callable[[Any], Any], carry: Any, steps: int | Int[Array, ""]) -> Any:
    """step(step(…(carry))), so many times."""

    def body(_: Array, carry: Any) -> Any:
        return step(carry)

    if jax.default_backend() != "gpu":
        return jax.lax.fori_loop(0, steps, body, carry)
    turns = steps // STEPS_OF_A_TURN
    carry = jax.lax.fori_loop(
        0, turns, lambda _, carry: jax.lax.fori_loop(0, STEPS_OF_A_TURN, body, carry), carry
    )
    return jax.lax.fori_loop(STEPS_OF_A_TURN * turns, steps, body, carry)
