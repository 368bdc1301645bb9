"""Steps counted for flows whose states do not count them."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from measureflow.flows.flow import AbstractFlow
from measureflow.flows.training import require_carried
from measureflow.spaces.measures import AbstractMeasure
from measureflow.statement.problem import Problem


class Counted(eqx.Module):
    """A state, and the number of steps taken."""

    state: Any
    step: Int[Array, ""]


class CountedFlow(AbstractFlow):
    """The same flow; its step is called with a key of its own for every step."""

    flow: AbstractFlow

    def init(self, problem: Problem, initial: Any) -> Counted:
        return Counted(self.flow.init(problem, initial), jnp.zeros((), jnp.int32))

    def step(self, problem: Problem, state: Counted, batch: PyTree, key: Key[Array, ""]) -> Counted:
        moved = self.flow.step(problem, state.state, batch, jax.random.fold_in(key, state.step))
        return Counted(moved, state.step + 1)

    def measure(self, state: Counted) -> AbstractMeasure:
        return self.flow.measure(state.state)

    def finite(self, state: Counted) -> Bool[Array, " n"]:
        return self.flow.finite(state.state)

    def observe(
        self, problem: Problem, state: Counted, batch: PyTree, key: Key[Array, ""], sampled_share: float
    ) -> dict[str, Float[Array, ""]]:
        step_key = jax.random.fold_in(key, state.step)
        return self.flow.observe(problem, state.state, batch, step_key, sampled_share)

    def require_share(self, sampled_share: float) -> None:
        self.flow.require_share(sampled_share)

    def on(self, mesh: Mesh) -> "CountedFlow":
        return CountedFlow(self.flow.on(mesh))

    def tabulated(self, first: int, used: int, length: int) -> "CountedFlow":
        return CountedFlow(self.flow.tabulated(first, used, length))


def counted(flow: AbstractFlow, problem: Problem, initial: Any) -> AbstractFlow:
    """`flow`, or the same with its steps counted if its states, of which `initial` may be one, do not."""
    if isinstance(initial, Counted):
        return CountedFlow(flow)
    state = initial if hasattr(initial, "step") else eqx.filter_eval_shape(flow.init, problem, initial)
    return flow if hasattr(state, "step") else CountedFlow(flow)


def begun(flow: AbstractFlow, problem: Problem, initial: Any) -> tuple[AbstractFlow, Any]:
    """The flow and its state at `initial`, steps counted if its states do not count them. What has a `step`
    is a state to continue from."""
    require_carried(flow, problem)
    if isinstance(initial, Counted):
        flow = CountedFlow(flow)
    if hasattr(initial, "step"):
        return flow, flow.resume(problem, initial)
    state = flow.init(problem, initial)
    if hasattr(state, "step"):
        return flow, state
    return CountedFlow(flow), Counted(state, jnp.zeros((), jnp.int32))
