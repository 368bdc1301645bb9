"""What a flow is: a state, a pure step, and the measure that a state stands for. All else has a default."""

import abc
import functools
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from measureflow.core.pytrees import Particles, particle_count, shapes_of, shown_shapes
from measureflow.core.showing import one_line
from measureflow.core.statistics import parameters_of
from measureflow.core.validation import require_particles
from measureflow.flows.observing import observed
from measureflow.saving.registry import require, saved
from measureflow.spaces.empirical import Empirical
from measureflow.spaces.measures import AbstractMeasure
from measureflow.statement.problem import Problem


class AbstractFlow(eqx.Module):
    """How a problem is solved.

    `init`, `step` and `measure` make a flow. A state is any pytree of arrays. It should have a field `step`,
    the number of steps taken, which every step raises by one; randomness then comes from `key` folded with
    it, `jax.random.fold_in(key, state.step)`, so that resuming is exact. If a state has no such field,
    `solve` counts its steps and gives every step a key of its own.
    """

    def __repr__(self) -> str:
        return one_line(self)

    #: What `finite` counts, and what to try where some became NaN or infinite.
    movers: ClassVar[str] = "particles"
    remedy: ClassVar[str] = "smaller steps"
    #: Whether its steps carry the statistics of a network that is trained with BatchNorm or Dropout.
    carries_statistics: ClassVar[bool] = False

    @abc.abstractmethod
    def init(self, problem: Problem, initial: Any) -> Any:
        """The state at step 0.

        Parameters
        ----------
        problem
            What is minimised.
        initial
            What the user passed to `solve`: particles, or whatever else this flow begins from.
        """

    @abc.abstractmethod
    def step(self, problem: Problem, state: Any, batch: PyTree, key: Key[Array, ""]) -> Any:
        """The state after one more step: a pure function, compiled.

        Parameters
        ----------
        problem
            What is minimised: `problem.free_energy(batch)` has its V, W, τ and rest.
        state
            The state before the step.
        batch
            The batch of this step; None where there is no data.
        key
            The key of the run where the state has a field `step`, else one of this step alone.
        """

    @abc.abstractmethod
    def measure(self, state: Any) -> AbstractMeasure:
        """Q: an `Empirical` of the particles, or any other measure."""

    def describe(self, problem: Problem) -> str:
        """`problem.describe()`, and what this flow makes of the problem.

        Parameters
        ----------
        problem
            What is minimised.
        """
        told = self.promises(problem) or ["What it reaches is for its author to say."]
        return "\n".join([problem.describe(), f"Solved by {self}:", *[f"  - {note}" for note in told]])

    def promises(self, problem: Problem) -> list[str]:
        """Sentences for `describe`: what the flow reaches of the problem's minimiser, and what it costs.

        Parameters
        ----------
        problem
            What is minimised.
        """
        return []

    def resume(self, problem: Problem, state: Any) -> Any:
        """A state to continue from, if its structure and shapes are those of this flow and problem."""
        try:
            measure = self.measure(state)
        except (AttributeError, TypeError, KeyError, IndexError):
            raise TypeError(
                f"initial is a {type(state).__name__}, which {type(self).__name__} cannot continue from; "
                "pass solution.measure.particles to start over."
            ) from None
        initial = measure.particles if isinstance(measure, Empirical) else measure
        expected = eqx.filter_eval_shape(self.init, problem, initial)
        if shapes_of(state) != shapes_of(expected):
            raise ValueError(
                "initial is a state of another flow or problem: its arrays are "
                f"{shown_shapes(state)}, expected {shown_shapes(expected)}; start over from "
                "solution.measure.particles."
            )
        return state

    def finite(self, state: Any) -> Bool[Array, " n"]:
        """Which particles are finite numbers; where there are none, whether the whole state is."""
        measure = self.measure(state)
        if isinstance(measure, Empirical):
            return finite_particles(measure.particles)
        return jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(state)]))[None]

    def observe(
        self, problem: Problem, state: Any, batch: PyTree, key: Key[Array, ""], sampled_share: float
    ) -> dict[str, Float[Array, ""]]:
        """What history records of a state, on the batch of its step: names and numbers. By default the
        energies and forces of the particles; nothing where there are none."""
        measure = self.measure(state)
        return observed(problem, measure.particles, batch) if isinstance(measure, Empirical) else {}

    def require_share(self, sampled_share: float) -> None:
        """Raise where this flow is not valid for batches that hold this share of all cases."""
        return

    def on(self, mesh: Mesh) -> "AbstractFlow":
        """The same flow, for particles that are cut over a mesh of devices."""
        return self

    def tabulated(self, first: int, used: int, length: int) -> "AbstractFlow":
        """The same flow for steps first, …, first + used − 1, its schedules as arrays of `length`."""
        return self


def finite_particles(particles: Particles) -> Bool[Array, " n"]:
    """Which particles are finite numbers."""
    leaves = [leaf.reshape(leaf.shape[0], -1) for leaf in jax.tree.leaves(particles)]
    return functools.reduce(jnp.logical_and, [jnp.all(jnp.isfinite(leaf), axis=1) for leaf in leaves])


def finite_state(particles: Particles, memory: PyTree) -> Bool[Array, " n"]:
    """Which particles are finite numbers; none where what a preconditioner remembers is not: one that has
    overflowed is 0 for ever, and all particles would stand still, and be finite."""
    known = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(memory)]
    return functools.reduce(jnp.logical_and, known, finite_particles(particles))


def particle_leaves(flow: AbstractFlow, problem: Problem, state: Any) -> tuple[bool, ...]:
    """Which leaves of a state have a row for every particle: those that grow where there is a particle more.
    They are cut over a mesh, and go with a particle that is restarted."""
    measure = flow.measure(state)
    leaves = jax.tree.leaves(state)
    if not isinstance(measure, Empirical):
        return (False,) * len(leaves)
    n = particle_count(measure.particles)
    more = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((n + 1, *leaf.shape[1:]), leaf.dtype), measure.particles
    )
    grown = jax.tree.leaves(eqx.filter_eval_shape(flow.init, problem, more))
    return tuple(a.shape[:1] == (n,) and b.shape[:1] == (n + 1,) for a, b in zip(leaves, grown, strict=True))


def rearranged(state: Any, rows: tuple[bool, ...], sources: Int[Array, " n"]) -> Any:
    """The state in which particle i is what particle sources[i] was; `rows` as `particle_leaves` says."""
    leaves, structure = jax.tree.flatten(state)
    moved = [leaf[sources] if has_rows else leaf for leaf, has_rows in zip(leaves, rows, strict=True)]
    return jax.tree.unflatten(structure, moved)


def require_optimiser(optimiser: Any) -> None:
    """An Optax optimiser."""
    if not isinstance(optimiser, optax.GradientTransformation):
        raise TypeError(
            f"optimiser must be an Optax optimiser, got {optimiser!r}; for example optax.adam(1e-2)."
        )


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
    require(counts, "step is not a number of steps")
    require(all(map(eqx.is_array_like, jax.tree.leaves(state))), "it holds something that is not an array")
    particles, drift = getattr(state, "particles", None), getattr(state, "drift", None)
    floats = all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(particles))
    require(floats, "particles does not hold floating-point arrays")
    if particles is not None:
        require_particles("particles", particles, with_statistics=True)
    require(
        drift is None or shapes_of(drift) == shapes_of(parameters_of(particles)),
        "drift and particles differ in shape",
    )


#: Files may hold states of this class.
in_files = functools.partial(saved, check=_require_sound)
