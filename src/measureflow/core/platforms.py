"""What the machine is, and programs that differ from one to the next."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import PyTree

#: Compute capabilities of NVIDIA GPUs: tensor cores for TF32, and what Pallas' Mosaic needs.
AMPERE, HOPPER = 8, 9


@functools.cache
def compute_capability() -> float:
    """Of the NVIDIA GPUs that are here, the least; 0 if there are none."""
    return min(_capability(device) for device in jax.devices())


def _capability(device: Any) -> float:
    named = str(getattr(device, "compute_capability", ""))
    # Other makers' GPUs have names there, such as gfx942.
    return float(named) if named.replace(".", "", 1).isdigit() else 0.0


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def by_platform(cuda: Callable[..., PyTree], default: Callable[..., PyTree], *arguments: PyTree) -> PyTree:
    """`cuda` on NVIDIA's GPUs, `default` elsewhere: the same function, so that `default` has the derivative
    of both."""
    return jax.lax.platform_dependent(*arguments, cuda=cuda, default=default)


@by_platform.defjvp
def _by_platform_jvp(_: Callable, default: Callable, primals: tuple, tangents: tuple) -> tuple:
    return jax.jvp(default, primals, tangents)
