"""What flows of particles are given: step sizes, optimisers, preconditioners, sums over pairs."""

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import equinox as eqx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from measureflow.core.pytrees import strong
from measureflow.core.validation import positive_number
from measureflow.flows.flow import require_optimiser
from measureflow.flows.preconditioners import AbstractPreconditioner
from measureflow.flows.schedules import Tabulated
from measureflow.numerics.interactions import AbstractInteractions, ExactInteractions
from measureflow.numerics.ring import RingInteractions

#: η: a number, a schedule, or None where an optimiser brings its own.
StepSize: TypeAlias = Float[Array, ""] | Callable[[Int[Array, ""]], Any] | None

Flow = TypeVar("Flow", bound=Any)


def step_size_or_schedule(value: Any) -> StepSize:
    """A number > 0; schedules are left as they are."""
    if value is None or callable(value):
        return value
    return positive_number("step_size", value, "1e-3 is a start.")


def step_size_at(step_size: StepSize, step: Int[Array, ""]) -> Float[Array, ""]:
    """η of this step."""
    assert step_size is not None
    return strong(step_size(step)) if callable(step_size) else step_size


def tabulated_step_size(flow: Flow, first: int, used: int, length: int) -> Flow:
    """The same flow, its schedule as an array: `AbstractFlow.tabulated`."""
    if not callable(flow.step_size):
        return flow
    return eqx.tree_at(lambda f: f.step_size, flow, Tabulated(flow.step_size, first, used, length))


def round_the_ring(flow: Flow, mesh: Mesh) -> Flow:
    """The same flow, its exact sums over pairs round a ring of devices: `AbstractFlow.on`."""
    if not isinstance(flow.interactions, ExactInteractions):
        return flow
    return eqx.tree_at(lambda f: f.interactions, flow, RingInteractions(mesh))


def require_mover(flow: Any) -> None:
    """Either a step size or an optimiser, which brings its own."""
    name = type(flow).__name__
    if (flow.step_size is None) == (flow.optimiser is None):
        raise ValueError(
            f"give {name} either step_size or optimiser, got step_size={flow.step_size} and "
            f"optimiser={flow.optimiser}; an Optax optimiser brings its own learning rate."
        )
    if flow.optimiser is not None:
        require_optimiser(flow.optimiser)


def require_alone(flow: Any, *names: str) -> None:
    """None of these beside an optimiser."""
    for name in names:
        if getattr(flow, name) is not None and flow.optimiser is not None:
            raise ValueError(
                f"give {type(flow).__name__} either {name} or optimiser, got {getattr(flow, name)} and "
                f"{flow.optimiser}; an Optax optimiser brings its own."
            )


def require_preconditioner(preconditioner: Any) -> None:
    """A preconditioner, or None."""
    if preconditioner is not None and not isinstance(preconditioner, AbstractPreconditioner):
        raise TypeError(
            f"preconditioner must be a preconditioner, got {preconditioner!r}; for a constant one "
            "pass mf.FixedPreconditioner(scale)."
        )


def require_interactions(interactions: Any) -> None:
    """A way to sum over pairs."""
    if not isinstance(interactions, AbstractInteractions):
        raise TypeError(
            f"interactions must say how pairs are summed, got {interactions!r}; pass "
            "mf.ExactInteractions(), mf.RandomBatches(size) or mf.RandomFeatures(count)."
        )
