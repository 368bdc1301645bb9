"""What a flow is: a state, a pure step, and the measure that a state stands for."""

import abc
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from measureflow.core.devices import place
from measureflow.core.pytrees import shapes_of, shown_shapes
from measureflow.core.validation import require_particles
from measureflow.saving.registry import require, saved
from measureflow.spaces.measures import AbstractMeasure
from measureflow.statement.problem import Problem


class AbstractFlow(eqx.Module):
    """How a problem is solved: a state, a pure step, and the measure that a state stands for."""

    #: What `finite` counts, and what to try where they are not.
    movers: ClassVar[str]
    remedy: ClassVar[str]
    #: Whether a part of what moves can be restarted from the rest.
    restarts: ClassVar[bool] = False

    @abc.abstractmethod
    def init(self, problem: Problem, initial: Any) -> Any:
        """The state at step 0."""

    @abc.abstractmethod
    def resume(self, problem: Problem, state: Any) -> Any:
        """A state to continue from, if it is one of this flow and problem; else an error."""

    @abc.abstractmethod
    def step(self, problem: Problem, state: Any, batch: PyTree, key: Key[Array, ""]) -> Any:
        """One step. Randomness is `key` folded with the state's step, so resuming is exact."""

    @abc.abstractmethod
    def measure(self, state: Any) -> AbstractMeasure:
        """Q."""

    @abc.abstractmethod
    def finite(self, state: Any) -> Bool[Array, " n"]:
        """Which particles, or whether the parameters, are finite numbers."""

    @abc.abstractmethod
    def observe(
        self, problem: Problem, state: Any, batch: PyTree, key: Key[Array, ""], sampled_share: float
    ) -> dict[str, Float[Array, ""]]:
        """What history records of a state, on the batch of its step."""

    def rearranged(self, state: Any, sources: Int[Array, " n"]) -> Any:
        """The state in which particle i is what particle sources[i] was."""
        raise NotImplementedError(f"{type(self).__name__} has no particles to rearrange.")

    def on(self, mesh: Mesh | None) -> "AbstractFlow":
        """The same flow, for particles that are cut over a mesh of devices, if there is one."""
        if mesh is None:
            return self
        raise ValueError(
            f"mesh={mesh} was given for {type(self).__name__}, which has no particles to cut over it; use "
            "WassersteinFlow, or leave the mesh out."
        )

    def spread(self, state: Any, mesh: Mesh | None) -> Any:
        """The state on a mesh: what belongs to single particles cut over it, all else on every device."""
        return place(mesh, state)

    @abc.abstractmethod
    def tabulated(self, first: int, used: int, length: int) -> "AbstractFlow":
        """The same flow for steps first, …, first + used − 1, its schedules as arrays of `length`."""


def require_optimiser(optimiser: Any) -> None:
    """An Optax optimiser."""
    if not isinstance(optimiser, optax.GradientTransformation):
        raise TypeError(
            f"optimiser must be an Optax optimiser, got {optimiser!r}; for example optax.adam(1e-2)."
        )


def require_state(flow: AbstractFlow, kind: type, state: Any, fresh: Callable[[], Any]) -> Any:
    """`state`, if it is of the kind, structure and shapes of a fresh one."""
    if not isinstance(state, kind):
        raise TypeError(
            f"initial is a {type(state).__name__}, which {type(flow).__name__} cannot continue from; pass a "
            f"{kind.__name__}, or solution.measure.particles to begin anew."
        )
    expected = eqx.filter_eval_shape(fresh)
    if shapes_of(state) != shapes_of(expected):
        raise ValueError(
            "initial is a state of another flow or problem: its arrays are "
            f"{shown_shapes(state)}, expected {shown_shapes(expected)}; begin anew from "
            "solution.measure.particles."
        )
    return state


def optimiser_step(
    optimiser: optax.GradientTransformation, gradient: PyTree, memory: PyTree, parameters: PyTree
) -> tuple[PyTree, PyTree]:
    """One step of an Optax optimiser, which relies on JAX's standard promotion of types."""
    with jax.numpy_dtype_promotion("standard"):
        updates, memory = optimiser.update(gradient, memory, parameters)
        return optax.apply_updates(parameters, updates), memory


def _require_sound(state: Any) -> None:
    """Raises where a file says what cannot be: a state counts its steps, and all else are arrays."""
    counts = isinstance(state.step, jax.Array) and state.step.shape == ()
    counts = counts and jnp.issubdtype(state.step.dtype, jnp.integer) and int(state.step) >= 0
    require(counts, "step is no number of steps")
    require(all(map(eqx.is_array_like, jax.tree.leaves(state))), "it holds something that is no array")
    particles, drift = getattr(state, "particles", None), getattr(state, "drift", None)
    floats = all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(particles))
    require(floats, "particles does not hold floating-point arrays")
    if particles is not None:
        require_particles("particles", particles)
    require(drift is None or shapes_of(drift) == shapes_of(particles), "drift and particles differ in shape")


#: Files may hold states of this class.
in_files = functools.partial(saved, check=_require_sound)
