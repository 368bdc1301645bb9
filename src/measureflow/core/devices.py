"""Where arrays lie on a mesh of devices.

A mesh has an axis named "particles", over which the particles are cut, and may have one named "batch", over
which the cases of a batch are. All else is on every device. The rest is JAX's: programs are written for all
particles, and partitioned by the compiler.
"""

from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

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


def agreed(value: int) -> int:
    """The largest value of all processes: what a clock or a signal decides must be the same in all."""
    if jax.process_count() == 1:
        return value
    return int(np.max(multihost_utils.process_allgather(np.int32(value))))


def together(name: str) -> None:
    """Wait until all processes have come here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)
