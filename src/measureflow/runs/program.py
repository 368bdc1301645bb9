"""The compiled calls of one run: steps and records, and what is asked of a state in between."""

import dataclasses
import math
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
from measureflow.runs.loop import STEPS_OF_A_TURN, repeat
from measureflow.spaces.empirical import Empirical
from measureflow.statement.problem import Problem

# The shapes of one compiled call: how many records and scheduled step sizes it can hold. Fixed, so that
# any number of steps is one program.
RECORDS = 512
SCHEDULED = 4096
# On a GPU, so many turns are a loop of fixed length; and up to so many turns may lie between two records for
# that to be worth it.
_TURNS_OF_A_CHUNK, _MOST_TURNS = 8, 4


@dataclasses.dataclass(frozen=True)
class Layout:
    """What decides the program beside the shapes: the devices, which leaves of a state are cut over them,
    which particles are kept, and whether steps are taken in turns of fixed length."""

    mesh: Mesh | None
    rows: tuple[bool, ...]
    collect: Draws | None
    in_turns: bool = False

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


class Table(eqx.Module):
    """Records as they are made: the numbers of a kind are a row, so that a record is written at once."""

    rows: dict[str, Array]
    names: tuple[tuple[str, tuple[str, ...]], ...] = eqx.field(static=True)

    @classmethod
    def empty(cls, record: dict[str, Any], length: int) -> "Table":
        """For so many records like this one."""
        kinds: dict[str, list[str]] = {}
        for name, value in record.items():
            kinds.setdefault(str(value.dtype), []).append(name)
        rows = {kind: jnp.zeros((length, len(names)), kind) for kind, names in kinds.items()}
        return cls(rows, tuple((kind, tuple(names)) for kind, names in kinds.items()))

    def recorded(self, slot: Array, record: dict[str, Array]) -> "Table":
        """With a record in a slot; one beyond the end is dropped."""
        stacked = {kind: jnp.stack([record[name] for name in names]) for kind, names in self.names}
        rows = {kind: self.rows[kind].at[slot].set(row, mode="drop") for kind, row in stacked.items()}
        return Table(rows, self.names)

    def columns(self) -> dict[str, Array]:
        """By name."""
        return {name: self.rows[kind][:, k] for kind, names in self.names for k, name in enumerate(names)}


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
        self.layout = Layout(mesh, rows, collect, _waits_for_the_host())
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
        counts = (records, steps, _chunks(records, steps) if self.layout.in_turns else 0)
        arrays = tuple(jnp.asarray(count, jnp.int32) for count in counts)
        flow, (times, each, chunks) = place(self.mesh, (flow, arrays))
        return _call(self.problem, flow, state, batches, self.key, times, each, buffer, self.layout, chunks)

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


def _waits_for_the_host() -> bool:
    """Whether the device waits for the host after every turn of a loop whose length is data: a GPU does, for
    as long as two steps of a small network take."""
    return jax.default_backend() == "gpu"


def _chunks(records: int, steps: int) -> int:
    """How many chunks of turns, loops of fixed length, the call begins with: where a record has one turn, or
    a few, since one is observed at each."""
    turns, left = divmod(steps, STEPS_OF_A_TURN)
    if left or not 1 <= turns <= _MOST_TURNS:
        return 0
    # A chunk does not end between two records.
    unit = turns // math.gcd(turns, _TURNS_OF_A_CHUNK)
    return records * turns // _TURNS_OF_A_CHUNK // unit * unit


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
    chunks: Int[Array, ""] | int = 0,
) -> tuple[Any, dict[str, Array], Buffer | None]:
    """All counts are data: of records, of steps after each, and of chunks of turns."""
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
        return *repeat(step, (state, buffer), steps), table.recorded(slot, observe(state))

    turns = jnp.maximum(steps // STEPS_OF_A_TURN, 1)

    def turn(number: Array, carry: tuple) -> tuple:
        state, buffer, table = carry
        # What is observed between two records falls off the table's end.
        slot = jnp.where(number % turns == 0, number // turns, RECORDS)
        table = table.recorded(slot, observe(state))
        # The first step is outside of the loop: it has its gradients in common with the record.
        moved = step((state, buffer))
        moved = jax.lax.fori_loop(1, STEPS_OF_A_TURN, lambda _, moving: step(moving), moved)
        return *moved, table

    def chunk(number: Array, carry: tuple) -> tuple:
        first = number * _TURNS_OF_A_CHUNK
        return jax.lax.fori_loop(0, _TURNS_OF_A_CHUNK, lambda k, now: turn(first + k, now), carry)

    carry, done = (state, buffer, Table.empty(jax.eval_shape(observe, state), RECORDS)), 0
    if layout.in_turns:
        carry = jax.lax.fori_loop(0, chunks, chunk, carry)
        done = chunks * _TURNS_OF_A_CHUNK // turns
    state, buffer, table = jax.lax.fori_loop(done, records, body, carry)
    return layout.placed(state), place(layout.mesh, table.columns()), buffer


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
