"""Kernels whose lengthscale follows the particles."""

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from measureflow.core.medians import median_of_pairs
from measureflow.core.pytrees import (
    Parameters,
    Particles,
    from_first,
    near_squared_distances,
    particle_count,
)
from measureflow.core.showing import shown
from measureflow.spaces.kernels import AbstractKernel, SquaredExponential

# Among so many particles the median is sought: it is a lengthscale, and needs no more.
_MOST = 256


def _squared_exponential_or(kernel: Any) -> Any:
    return SquaredExponential if kernel is None else kernel


class MedianBandwidth(eqx.Module):
    """A kernel whose lengthscale is that of the particles at every step (Liu and Wang, 2016):

        σ² = median over pairs of ‖θᵢ − θⱼ‖² / (2 log N),

    so that, were all distances the median, Σⱼ κ(θᵢ, θⱼ) of a squared exponential kernel would be about 2: as
    much from all others as from itself. Of more than 256 particles, 128 to 256 of them are asked.

    Parameters
    ----------
    kernel
        A function of a lengthscale, such as `InverseMultiquadric`, the class itself; None is
        `SquaredExponential`.
    features
        Where they are given, the kernel is one on features of θ, and the median that of features.
    """

    kernel: Callable[[Any], AbstractKernel] = eqx.field(converter=_squared_exponential_or, default=None)
    features: Callable[[Parameters], PyTree] | None = None

    def __check_init__(self) -> None:
        if isinstance(self.kernel, AbstractKernel) or not callable(self.kernel):
            raise TypeError(
                f"MedianBandwidth kernel must be a function of a lengthscale, got {self.kernel!r}; pass the "
                "class, as in mf.MedianBandwidth(mf.SquaredExponential), or the kernel itself in its place."
            )

    def __repr__(self) -> str:
        name = getattr(self.kernel, "__name__", repr(self.kernel))
        return f"MedianBandwidth({name})" + ("" if self.features is None else f".on({shown(self.features)})")

    def on(self, features: Callable[[Parameters], PyTree]) -> "MedianBandwidth":
        """The same on features f(θ), as `AbstractKernel.on`."""
        return MedianBandwidth(self.kernel, features)

    def at(self, particles: Particles) -> AbstractKernel:
        """The kernel of this step."""
        n = particle_count(particles)
        some = particles if n <= _MOST else jax.tree.map(lambda leaf: leaf[:: -(-n // _MOST)], particles)
        some = some if self.features is None else jax.vmap(self.features)(some)
        kernel = self.kernel(jnp.ones(()) if n == 1 else _lengthscale(some, n))
        return kernel if self.features is None else kernel.on(self.features)


def _lengthscale(some: Particles, n: int) -> Float[Array, ""]:
    # As sums over pairs have them, so that of few particles they are computed once.
    some = from_first(some)
    median = median_of_pairs(jax.lax.stop_gradient(near_squared_distances(some, some)))
    # Collapsed particles have no scale of their own.
    return jnp.sqrt(jnp.where(median > 0, median, 1.0) / (2 * math.log(n)))


#: A kernel, or one whose lengthscale follows the particles.
KernelOrBandwidth: TypeAlias = AbstractKernel | MedianBandwidth


def kernel_at(kernel: KernelOrBandwidth, particles: Particles) -> AbstractKernel:
    """The kernel of this step."""
    return kernel.at(particles) if isinstance(kernel, MedianBandwidth) else kernel


def require_kernel(name: str, kernel: Any) -> None:
    """A kernel, or one whose lengthscale follows the particles."""
    if not isinstance(kernel, AbstractKernel | MedianBandwidth):
        raise TypeError(
            f"{name} must be a kernel, got {kernel!r}; for example mf.SquaredExponential(1.0), or "
            "mf.MedianBandwidth(), whose lengthscale follows the particles."
        )
