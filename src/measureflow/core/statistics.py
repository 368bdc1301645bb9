"""Particles that carry something which no flow moves: the running statistics of BatchNorm."""

from typing import Any

import equinox as eqx
from jaxtyping import PyTree

from measureflow.core.showing import one_line


class WithStatistics(eqx.Module):
    """(θ, s): parameters, and the statistics that training carries along with them.

    A flow moves θ alone: priors, kernels, noise and optimisers do not see s, which every step replaces by
    what the network's layers make of it on the batch of that step. What predicts sees both. With a leading
    axis, N particles that carry their own; `network.sample` and `solution.measure.particles` are such, for a
    network with `training`.

    Parameters
    ----------
    parameters
        θ, a pytree.
    statistics
        s, a pytree of floating-point arrays; without any for a network that has Dropout alone.
    """

    parameters: PyTree
    statistics: PyTree

    def __repr__(self) -> str:
        return one_line(self)


def parameters_of(particles: PyTree) -> PyTree:
    """θ of particles that may carry statistics."""
    return particles.parameters if isinstance(particles, WithStatistics) else particles


def carrying(parameters: PyTree, statistics: PyTree, like: Any) -> PyTree:
    """θ with these statistics, if `like` carries any; else θ itself."""
    return WithStatistics(parameters, statistics) if isinstance(like, WithStatistics) else parameters
