"""Preconditioners g: θ ← θ − ηg·∇_W F + √(2ητg) Z.

The same g scales drift and noise, so once it stands still the invariant law is that of g = 1.
"""

import abc
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from measureflow.core.pytrees import (
    Parameters,
    Particles,
    dimension,
    is_concrete,
    shown_shapes,
    strong_tree,
    total,
)
from measureflow.core.showing import one_line
from measureflow.core.validation import positive_number, require_count, require_positive
from measureflow.flows.scalings import AbstractScaling, Diagonal


class AbstractPreconditioner(eqx.Module):
    """g, a positive definite matrix over θ, shared by all particles."""

    #: Whether g depends on the particles and drifts it has seen.
    adaptive: ClassVar[bool]

    def __repr__(self) -> str:
        return one_line(self)

    @abc.abstractmethod
    def init(self, particles: Particles) -> PyTree:
        """Its memory before the first step."""

    @property
    def limits(self) -> bool:
        """Whether `limited` changes any drift."""
        return False

    def limited(self, memory: PyTree, gradient: Particles, step: Int[Array, ""]) -> Particles:
        """The drift of this step as far as it is believed, before the update: all of it, by default."""
        return gradient

    @abc.abstractmethod
    def update(
        self, memory: PyTree, particles: Particles, gradient: Particles, step: Int[Array, ""]
    ) -> PyTree:
        """Its memory after it has seen the particles and the drift of this step."""

    @abc.abstractmethod
    def scaling(self, memory: PyTree, step: Int[Array, ""]) -> AbstractScaling:
        """g at this step, after the update."""


class AbstractDiagonalPreconditioner(AbstractPreconditioner):
    """g, one number per coordinate of θ."""

    @abc.abstractmethod
    def diagonal(self, memory: PyTree, step: Int[Array, ""]) -> Parameters:
        """g at this step, after the update."""

    def scaling(self, memory: PyTree, step: Int[Array, ""]) -> Diagonal:
        return Diagonal(self.diagonal(memory, step))


def _fitted(name: str, scale: Parameters, theta: Parameters) -> Parameters:
    """`scale` as a pytree like θ, whose leaves may be scalars."""
    leaves, structure = jax.tree.flatten(theta)
    if isinstance(scale, jax.Array) and scale.shape == ():
        return jax.tree.unflatten(structure, [scale.astype(leaf.dtype) for leaf in leaves])
    fits = jax.tree.structure(scale) == structure and all(
        g.shape in ((), x.shape) for g, x in zip(jax.tree.leaves(scale), leaves, strict=True)
    )
    if not fits:
        raise ValueError(
            f"{name} has shapes {shown_shapes(scale)}, one particle {shown_shapes(theta)}; pass a number, or "
            "a pytree like one particle, with one number per coordinate."
        )
    return jax.tree.map(lambda g, x: g.astype(x.dtype), scale, theta)


def _require_scale(name: str, scale: Parameters) -> None:
    """Numbers > 0, one per coordinate."""
    for leaf in jax.tree.leaves(scale) if is_concrete(scale) else []:
        square = leaf.ndim == 2 and leaf.shape[0] == leaf.shape[1] > 1
        if square and np.any(leaf <= 0) and np.all(np.diagonal(leaf) > 0):
            raise ValueError(
                f"{name} is a matrix of shape {leaf.shape}, but g has one number per coordinate; pass the "
                "diagonal, jnp.diagonal(matrix)."
            )
    require_positive(name, scale, "it multiplies the step size.")


class FixedPreconditioner(AbstractDiagonalPreconditioner):
    """A constant g > 0.

    Parameters
    ----------
    scale
        g: a number, or a pytree like θ whose leaves may be scalars.
    """

    scale: Parameters = eqx.field(converter=strong_tree)
    adaptive: ClassVar[bool] = False

    def __check_init__(self) -> None:
        _require_scale("FixedPreconditioner scale", self.scale)

    def init(self, particles: Particles) -> Parameters:
        return _fitted("FixedPreconditioner scale", self.scale, jax.tree.map(lambda leaf: leaf[0], particles))

    def update(
        self, memory: Parameters, particles: Particles, gradient: Particles, step: Int[Array, ""]
    ) -> Parameters:
        return memory

    def diagonal(self, memory: Parameters, step: Int[Array, ""]) -> Parameters:
        return memory


def _adapt_steps(value: Any) -> Int[Array, ""]:
    if is_concrete(value):
        value = require_count("RMSPreconditioner adapt_steps", value, 1, "it freezes after them.")
    return jnp.asarray(value, jnp.int32)


def _decay(value: Any) -> Float[Array, ""]:
    return positive_number("RMSPreconditioner decay", value, "0.99 averages over 100 steps.")


def _epsilon(value: Any) -> Float[Array, ""]:
    return positive_number("RMSPreconditioner epsilon", value, "it bounds g by 1/ε.")


def _largest(value: Any) -> Float[Array, ""] | None:
    remedy = "2 is a start; None believes every drift."
    return None if value is None else positive_number("RMSPreconditioner largest", value, remedy)


class RMSPreconditioner(AbstractDiagonalPreconditioner):
    """g = s/(√v + ε), v the running mean of squared drifts over particles and steps.

    g adapts for `adapt_steps` steps and then freezes. While it adapts the chain has no invariant law, so
    nothing before `adapt_steps` is a sample of q*.

    Parameters
    ----------
    adapt_steps
        How many steps it adapts for, before it freezes.
    decay
        Of the running mean: 0.99 averages over 100 steps.
    epsilon
        ε, which bounds g by s/ε.
    scale
        s: a number, or a pytree like θ whose leaves may be scalars, where some coordinates should move
        less than others.
    largest
        With a number c, the drift of a particle whose root mean square in units of √v, for v of the steps
        before, is above c is scaled down to that: a batch that nothing led to expect then neither throws a
        particle far away nor, through v, stops all others. It is for training: with noise, q* is the law
        only where no drift is scaled down. None believes every drift.
    """

    adapt_steps: Int[Array, ""] = eqx.field(converter=_adapt_steps)
    decay: Float[Array, ""] = eqx.field(converter=_decay, default=0.99)
    epsilon: Float[Array, ""] = eqx.field(converter=_epsilon, default=1e-6)
    scale: Parameters = eqx.field(converter=strong_tree, default=1.0)
    largest: Float[Array, ""] | None = eqx.field(converter=_largest, default=None)
    adaptive: ClassVar[bool] = True

    def __check_init__(self) -> None:
        require_positive("RMSPreconditioner 1 − decay", 1 - self.decay, "0.99 averages over 100 steps.")
        _require_scale("RMSPreconditioner scale", self.scale)

    def init(self, particles: Particles) -> Parameters:
        memory = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape[1:], leaf.dtype), particles)
        _fitted("RMSPreconditioner scale", self.scale, memory)
        return memory

    @property
    def limits(self) -> bool:
        return self.largest is not None

    def limited(self, memory: Parameters, gradient: Particles, step: Int[Array, ""]) -> Particles:
        if self.largest is None:
            return gradient
        mean_squares = self._mean_squares(memory, jnp.minimum(step, self.adapt_steps))
        floor, largest = jnp.square(self.epsilon), self.largest

        def of_particle(drift: Parameters) -> Parameters:
            # Where a coordinate has not moved yet, nothing is known of it.
            relative = jax.tree.map(
                lambda d, v: jnp.where(v > 0, jnp.square(d) / (v + floor.astype(v.dtype)), 0.0),
                drift,
                mean_squares,
            )
            size = jnp.sqrt(total(relative) / dimension(memory))
            factor = jnp.where(size > largest, largest / size, 1.0)
            return jax.tree.map(lambda d: d * factor.astype(d.dtype), drift)

        return jax.vmap(of_particle)(gradient)

    def _mean_squares(self, memory: Parameters, updates: Int[Array, ""]) -> Parameters:
        """v, which does not remember that it started at zero."""
        started_at_zero = 1 - self.decay ** updates.astype(self.decay.dtype)
        safe = jnp.where(updates > 0, started_at_zero, 1.0)
        return jax.tree.map(lambda v: v / safe.astype(v.dtype), memory)

    def update(
        self, memory: Parameters, particles: Particles, gradient: Particles, step: Int[Array, ""]
    ) -> Parameters:
        adapting = step < self.adapt_steps

        def on_leaf(mean_square: Array, drift: Array) -> Array:
            decay = self.decay.astype(drift.dtype)
            seen = decay * mean_square + (1 - decay) * jnp.mean(jnp.square(drift), axis=0)
            return jnp.where(adapting, seen, mean_square)

        return jax.tree.map(on_leaf, memory, gradient)

    def diagonal(self, memory: Parameters, step: Int[Array, ""]) -> Parameters:
        return jax.tree.map(
            lambda v, s: s / (jnp.sqrt(v) + self.epsilon.astype(v.dtype)),
            self._mean_squares(memory, jnp.minimum(step + 1, self.adapt_steps)),
            _fitted("RMSPreconditioner scale", self.scale, memory),
        )
