"""The compiled calls of one run: steps and records, and what is asked of a state in between."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Key

from measureflow.core.devices import PARTICLES, place
from measureflow.flows.flow import AbstractFlow, particle_leaves, rearranged
from measureflow.runs.batches import AbstractBatches, data_key
from measureflow.runs.draws import Buffer, Draws
from measureflow.runs.loop import repeat
from measureflow.runs.turns import Parts, sent_ahead
from measureflow.spaces.empirical import Empirical
from measureflow.statement.problem import Problem

# The shapes of one compiled call: how many records and scheduled step sizes it can hold. Fixed, so that
# any number of steps is one program.
RECORDS = 512
SCHEDULED = 4096


@dataclasses.dataclass(frozen=True)
class Layout:
    """What decides the program beside the shapes: the devices, which leaves of a state are cut over them, and
    which particles are kept."""

    mesh: Mesh | None
    rows: tuple[bool, ...]
    collect: Draws | None

    def placed(self, state: Any) -> Any:
        """The state on the mesh: what belongs to single particles cut over it, all else on every device."""
        if self.mesh is None:
            return state
        leaves, structure = jax.tree.flatten(state)
        each, all_of_it = PartitionSpec(PARTICLES), PartitionSpec()
        placed = [
            place(self.mesh, leaf, each if has_rows else all_of_it)
            for leaf, has_rows in zip(leaves, self.rows, strict=True)
        ]
        return jax.tree.unflatten(structure, placed)


class Program:
    """One run of `solve`: its problem, flow and key, where they lie, and its compiled calls."""

    def __init__(
        self,
        problem: Problem,
        flow: AbstractFlow,
        key: Key[Array, ""],
        state: Any,
        mesh: Mesh | None,
        collect: Draws | None,
    ):
        # Only a mesh asks which leaves belong to particles, and finding that traces the flow's beginning.
        rows = () if mesh is None else particle_leaves(flow, problem, state)
        self.layout = Layout(mesh, rows, collect)
        on_mesh = flow if mesh is None else flow.on(mesh)
        self.problem, self.flow, self.key = place(mesh, (problem, on_mesh, key))
        self.order_key = data_key(self.key)

    @property
    def mesh(self) -> Mesh | None:
        """The devices."""
        return self.layout.mesh

    def call(
        self, state: Any, batches: AbstractBatches, records: int, steps: int, buffer: Buffer | None = None
    ) -> tuple[Any, dict[str, Array], Buffer | None]:
        """`records` times: record the state, then take `steps` steps."""
        flow = self.flow.tabulated(int(state.step), max(records * steps, 1), SCHEDULED)
        counts = jnp.asarray(records, jnp.int32), jnp.asarray(steps, jnp.int32)
        flow, (times, each) = place(self.mesh, (flow, counts))
        if self.mesh is None and _runs_ahead():
            arguments = (self.problem, flow, batches, self.key, self.order_key, self.layout.collect)
            moved, table = sent_ahead(_PARTS, arguments, (state, buffer), records, steps, RECORDS)
            return moved[0], table, moved[1]
        return _call(self.problem, flow, state, batches, self.key, times, each, buffer, self.layout)

    def finite(self, state: Any) -> Bool[Array, " n"]:
        """Which of what moves is finite."""
        return _finite(self.flow, state, self.mesh)

    def losses(self, state: Any, batches: AbstractBatches) -> Float[Array, " n"]:
        """The objective's first variation at every particle, ℓ(θᵢ) for a loss, on the batch of its step."""
        return _losses(self.problem, self.flow, state, batches, self.key, self.mesh)

    def rearranged(self, state: Any, sources: Any) -> Any:
        """The state in which particle i is what particle sources[i] was."""
        rows = self.layout.rows or particle_leaves(self.flow, self.problem, state)
        return self.layout.placed(rearranged(state, rows, place(self.mesh, jnp.asarray(sources))))


def _runs_ahead() -> bool:
    """Whether the device waits for the host in loops whose length is data."""
    return jax.default_backend() == "gpu"


def _observed(arguments: tuple, carry: tuple) -> dict[str, Array]:
    """The record of a state."""
    (problem, flow, batches, key, order_key, _), (state, _) = arguments, carry
    batch = batches.at(state.step, order_key)
    return flow.observe(problem, state, batch, key, batches.sampled_share()) | {"step": state.step}


def _moved(arguments: tuple, carry: tuple) -> tuple:
    """The state after a step, and what was kept of it."""
    (problem, flow, batches, key, order_key, collect), (state, buffer) = arguments, carry
    flow.require_share(batches.sampled_share())
    state = flow.step(problem, state, batches.at(state.step, order_key), key)
    if collect is None:
        return state, None
    measure = flow.measure(state)
    assert isinstance(measure, Empirical)
    return state, buffer.keeping(collect, state.step, measure.particles)


_PARTS = Parts(_observed, _moved)


@eqx.filter_jit
def _call(
    problem: Problem,
    flow: AbstractFlow,
    state: Any,
    batches: AbstractBatches,
    key: Key[Array, ""],
    records: Int[Array, ""],
    steps: Int[Array, ""],
    buffer: Buffer | None,
    layout: Layout,
) -> tuple[Any, dict[str, Array], Buffer | None]:
    """All counts are data."""
    arguments = (problem, flow, batches, key, data_key(key), layout.collect)

    def observe(state: Any) -> dict[str, Array]:
        return _observed(arguments, (state, None))

    def body(slot: Array, carry: tuple) -> tuple:
        state, buffer, table = carry
        table = jax.tree.map(lambda column, value: column.at[slot].set(value), table, observe(state))
        return *repeat(lambda moving: _moved(arguments, moving), (state, buffer), steps), table

    table = jax.tree.map(lambda leaf: jnp.zeros((RECORDS,), leaf.dtype), jax.eval_shape(observe, state))
    state, buffer, table = jax.lax.fori_loop(0, records, body, (state, buffer, table))
    return layout.placed(state), place(layout.mesh, table), buffer


@eqx.filter_jit
def _finite(flow: AbstractFlow, state: Any, mesh: Mesh | None) -> Bool[Array, " n"]:
    return place(mesh, flow.finite(state))


@eqx.filter_jit
def _losses(
    problem: Problem,
    flow: AbstractFlow,
    state: Any,
    batches: AbstractBatches,
    key: Key[Array, ""],
    mesh: Mesh | None,
) -> Float[Array, " n"]:
    measure = flow.measure(state)
    assert isinstance(measure, Empirical)
    energy = problem.objective_energy(batches.at(state.step, data_key(key)))
    return place(mesh, energy.first_variation(measure))
