"""All pairs of particles that are cut over devices: a copy of every shard goes round the ring."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Key, PyTree

from measureflow.core.devices import PARTICLES
from measureflow.core.pytrees import Particles, add, particle_count
from measureflow.numerics.interactions import AbstractInteractions, TileSum
from measureflow.numerics.pair_sums import gradient_sum, in_tiles, value_sum, well_conditioned
from measureflow.spaces.kernels import AbstractKernel


class RingInteractions(AbstractInteractions):
    """All N² pairs of particles that are cut over devices. Every device keeps its shard; a copy of each goes
    round the ring of devices, one hop at a time, while the device sums its own particles' interactions with
    the visitors. No device ever holds more than its own shard, one visiting, and one arriving."""

    mesh: Mesh = eqx.field(static=True)

    def simple_gradient(
        self, kernel: AbstractKernel, particles: Particles, key: Key[Array, ""] | None = None
    ) -> Particles:
        n = particle_count(particles)

        def on_device(mine: Particles) -> Particles:
            summed = self._around(lambda visitors: gradient_sum(kernel, mine, visitors), mine)
            return jax.tree.map(lambda leaf: leaf / n, summed)

        return self._mapped(on_device, P(PARTICLES))(well_conditioned(kernel, particles))

    def simple_mean(
        self, kernel: AbstractKernel, particles: Particles, key: Key[Array, ""] | None = None
    ) -> Float[Array, ""]:
        n = particle_count(particles)

        def on_device(mine: Particles) -> Float[Array, ""]:
            summed = self._around(lambda visitors: value_sum(kernel, mine, visitors), mine)
            return jax.lax.psum(jnp.sum(summed), PARTICLES) / n**2

        return self._mapped(on_device, P())(well_conditioned(kernel, particles))

    def mean_over_pairs(
        self, summed: TileSum, particles: Particles, key: Key[Array, ""] | None = None
    ) -> PyTree[Float[Array, "n ..."]]:
        n = particle_count(particles)

        def on_device(mine: Particles) -> PyTree:
            found = self._around(lambda visitors: in_tiles(summed, mine, visitors), mine)
            return jax.tree.map(lambda leaf: leaf / n, found)

        return self._mapped(on_device, P(PARTICLES))(particles)

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
