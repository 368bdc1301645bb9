"""Particles on many devices: where things lie on a mesh, and interactions across it.

A mesh has an axis named "particles", over which the particles are cut, and may have one named "batch", over
which the cases of a batch are. All else is on every device. The rest is JAX's: programs are written for all
particles, and partitioned by the compiler.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, Key, PyTree

from measureflow.batches import AbstractBatches, Whole
from measureflow.interactions import AbstractInteractions
from measureflow.kernels import AbstractKernel
from measureflow.pair_sums import gradient_sum, value_sum, well_conditioned
from measureflow.pytrees import Particles, add, particle_count, shown_shapes

PARTICLES, BATCH = "particles", "batch"


def require_mesh(mesh: Any, particles: int) -> Mesh:
    """A mesh over which so many particles can be cut."""
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh must be a jax.sharding.Mesh, got {mesh!r}; {_example(particles)}")
    if PARTICLES not in mesh.axis_names or not set(mesh.axis_names) <= {PARTICLES, BATCH}:
        raise ValueError(
            f"mesh must have an axis {PARTICLES!r}, and may have one {BATCH!r}, got axes {mesh.axis_names}; "
            f"{_example(particles)}"
        )
    explicit = [
        name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if "Auto" not in str(kind)
    ]
    if explicit:
        raise ValueError(f"mesh axes must be of type Auto, got others for {explicit}; {_example(particles)}")
    if particles % mesh.shape[PARTICLES]:
        raise ValueError(
            f"mesh cuts the particles over {mesh.shape[PARTICLES]} devices, got {particles} of them; use a "
            f"multiple of {mesh.shape[PARTICLES]}."
        )
    return mesh


def _example(particles: int) -> str:
    return (
        f'pass jax.make_mesh((devices,), ("{PARTICLES}",), axis_types=(jax.sharding.AxisType.Auto,)), with a '
        f"number of devices that divides the {particles} particles."
    )


_EVERYWHERE = P()


def place(mesh: Mesh | None, tree: PyTree, spec: P = _EVERYWHERE) -> PyTree:
    """The arrays of `tree` on the mesh; on all of its devices, if `spec` says nothing else. Without a mesh,
    the tree as it is."""
    return tree if mesh is None else eqx.filter_shard(tree, NamedSharding(mesh, spec))


class RingInteractions(AbstractInteractions):
    """All N² pairs of particles that are cut over devices. Every device keeps its shard; a copy of each goes
    round the ring of devices, one hop at a time, while the device sums its own particles' interactions with
    the visitors. No device ever holds more than its own shard, one visiting, and one arriving."""

    mesh: Mesh = eqx.field(static=True)

    def gradient(
        self, kernel: AbstractKernel, particles: Particles, key: Key[Array, ""] | None = None
    ) -> Particles:
        n = particle_count(particles)

        def on_device(mine: Particles) -> Particles:
            summed = self._around(lambda visitors: gradient_sum(kernel, mine, visitors), mine)
            return jax.tree.map(lambda leaf: leaf / n, summed)

        return self._mapped(on_device, P(PARTICLES))(well_conditioned(kernel, particles))

    def mean(
        self, kernel: AbstractKernel, particles: Particles, key: Key[Array, ""] | None = None
    ) -> Float[Array, ""]:
        n = particle_count(particles)

        def on_device(mine: Particles) -> Float[Array, ""]:
            summed = self._around(lambda visitors: value_sum(kernel, mine, visitors), mine)
            return jax.lax.psum(jnp.sum(summed), PARTICLES) / n**2

        return self._mapped(on_device, P())(well_conditioned(kernel, particles))

    def _mapped(self, function: Any, result: P) -> Any:
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=P(PARTICLES), out_specs=result, axis_names={PARTICLES}
        )

    def _around(self, meet: Any, mine: Particles) -> PyTree:
        """The sum of meet(visitors) over all shards."""
        devices = self.mesh.shape[PARTICLES]
        ring = [(device, (device + 1) % devices) for device in range(devices)]

        def sent_on(visitors: Particles) -> Particles:
            return jax.tree.map(lambda leaf: jax.lax.ppermute(leaf, PARTICLES, ring), visitors)

        def hop(_: Array, carry: tuple) -> tuple:
            visitors, summed = carry
            # The two do not wait for each other: shards travel while pairs are summed.
            return sent_on(visitors), add(summed, meet(visitors))

        summed = meet(mine)
        if devices == 1:
            return summed
        visitors, summed = jax.lax.fori_loop(0, devices - 2, hop, (sent_on(mine), summed))
        return add(summed, meet(visitors))


class ShardedBatches(AbstractBatches):
    """The cases of every batch cut over the axis "batch"."""

    batches: AbstractBatches
    mesh: Mesh = eqx.field(static=True)

    def at(self, step: Int[Array, ""], key: Key[Array, ""]) -> PyTree:
        return place(self.mesh, self.batches.at(step, key), P(BATCH))

    def sampled_share(self) -> float:
        return self.batches.sampled_share()


def place_batches(mesh: Mesh | None, batches: AbstractBatches) -> AbstractBatches:
    """Data on every device, and what is computed of a batch cut over the axis "batch", if there is one."""
    if mesh is None or BATCH not in mesh.axis_names:
        return place(mesh, batches)
    parts = mesh.shape[BATCH]
    batch = jax.eval_shape(batches.at, jnp.zeros((), jnp.int32), jax.random.key(0))
    cases = {leaf.shape[:1] for leaf in jax.tree.leaves(batch)}
    if any(number == () or number[0] % parts for number in cases):
        raise ValueError(
            f"mesh cuts a batch over {parts} devices, got batches of shapes {shown_shapes(batch)}; use a "
            f"batch_size that is a multiple of {parts}, or a mesh without the axis {BATCH!r}."
        )
    # All cases at every step need not be on every device.
    placed = place(mesh, batches, P(BATCH) if isinstance(batches, Whole) else P())
    return ShardedBatches(placed, mesh)


def agreed(value: int) -> int:
    """The largest value of all processes: what a clock or a signal decides, all must decide alike."""
    if jax.process_count() == 1:
        return value
    return int(np.max(multihost_utils.process_allgather(np.int32(value))))


def together(name: str) -> None:
    """Wait until all processes have come here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)
