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
from measureflow.spaces.empirical import Empirical
from measureflow.statement.problem import Problem

# The shapes of one compiled call: how many records and scheduled step sizes it can hold. Fixed, so that
# any number of steps is one program.
RECORDS = 128
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
        self.layout = Layout(mesh, particle_leaves(flow, problem, state), collect)
        on_mesh = flow if mesh is None else flow.on(mesh)
        self.problem, self.flow, self.key = place(mesh, (problem, on_mesh, key))

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
        return _call(self.problem, flow, state, batches, self.key, times, each, buffer, self.layout)

    def finite(self, state: Any) -> Bool[Array, " n"]:
        """Which of what moves is finite."""
        return _finite(self.flow, state, self.mesh)

    def losses(self, state: Any, batches: AbstractBatches) -> Float[Array, " n"]:
        """The objective's first variation at every particle, ℓ(θᵢ) for a loss, on the batch of its step."""
        return _losses(self.problem, self.flow, state, batches, self.key, self.mesh)

    def rearranged(self, state: Any, sources: Any) -> Any:
        """The state in which particle i is what particle sources[i] was."""
        return self.layout.placed(rearranged(state, self.layout.rows, place(self.mesh, jnp.asarray(sources))))


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
    order_key, collect = data_key(key), layout.collect
    flow.require_share(batches.sampled_share())

    def observe(state: Any) -> dict[str, Array]:
        batch = batches.at(state.step, order_key)
        return flow.observe(problem, state, batch, key, batches.sampled_share()) | {"step": state.step}

    def step(carry: tuple) -> tuple:
        state, buffer = carry
        state = flow.step(problem, state, batches.at(state.step, order_key), key)
        if collect is None:
            return state, None
        measure = flow.measure(state)
        assert isinstance(measure, Empirical)
        return state, buffer.keeping(collect, state.step, measure.particles)

    def body(slot: Array, carry: tuple) -> tuple:
        state, buffer, table = carry
        table = jax.tree.map(lambda column, value: column.at[slot].set(value), table, observe(state))
        return *repeat(step, (state, buffer), steps), table

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
