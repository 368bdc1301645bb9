"""The loop: step after step of a flow, as one compiled program."""

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
_BLOCK = 10


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

    `data` is a pytree of arrays with one row per case, all of which the loss sees at each step, or
    `batch_size` of them; None if the loss takes none. `steps` may be traced.
    """
    if is_concrete(steps):
        require_count("steps", steps, 0, "it counts the steps to take from `state`.")
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

    def body(_: Array, state: Any) -> Any:
        return flow.step(problem, state, batches.at(state.step, order_key), key)

    if jax.default_backend() != "gpu":
        return jax.lax.fori_loop(0, steps, body, state)
    blocks = steps // _BLOCK
    state = jax.lax.fori_loop(0, blocks, lambda _, state: jax.lax.fori_loop(0, _BLOCK, body, state), state)
    return jax.lax.fori_loop(_BLOCK * blocks, steps, body, state)
