"""Measures, solutions, networks, likelihoods and predictive laws in files: how each is described, and what a
file must say of it to be believed."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from measureflow.core.pytrees import shapes_of, shown_shapes
from measureflow.core.validation import require_particles
from measureflow.flows.parametric import ParametricState
from measureflow.flows.wasserstein import ParticleState
from measureflow.networks import likelihoods
from measureflow.networks.likelihoods import AbstractLikelihood
from measureflow.networks.network import (
    ConstantsApply,
    ConstantsInit,
    EquinoxInit,
    LinenInit,
    Network,
    NnxInit,
    PerceptronApply,
    PerceptronInit,
    RowsOfOutputs,
)
from measureflow.prediction.predictive import Predictive
from measureflow.runs.solution import History, Restart, Solution
from measureflow.saving.encoding import ANY, DESCRIBERS, KINDS, Code, Kind, anything, describer
from measureflow.spaces.measures import AbstractMeasure, Empirical, Flat, Gaussian, Uniform

# Networks are looked at layer by layer when they are built.
_MOST_LAYERS, _LARGEST_LAYER = 1000, 2**31


def require(condition: Any, message: str) -> None:
    """Raises where what a file says cannot be."""
    if not condition:
        raise ValueError(message)


def _of_attributes(module: str, name: str, fields: tuple[str, ...], build: Callable[..., Any]) -> None:
    """A class whose attributes say all."""
    KINDS[name] = Kind(fields, build)
    DESCRIBERS[f"{module}.{name}"] = lambda thing: (name, {field: getattr(thing, field) for field in fields})


def require_floats(name: str, tree: Any) -> None:
    """A pytree of floating-point arrays of JAX, at least one."""
    leaves = jax.tree.leaves(tree)
    floats = all(isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves)
    require(leaves and floats, f"{name} does not hold floating-point arrays")


def require_fit(network: Any, particles: Any) -> None:
    """Particles have the shapes of the network's parameters, and one axis more."""
    wanted = jax.eval_shape(network.init, jax.random.key(0))
    found = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf)[1:], leaf.dtype), particles)
    require(
        shapes_of(found) == shapes_of(wanted),
        f"the particles have shapes {shown_shapes(found)}, the network's parameters {shown_shapes(wanted)}",
    )


# Measures.


def _gaussian(mean: Any, scale: Any) -> Gaussian:
    require_floats("mean", mean)
    require_floats("scale", scale)
    return Gaussian(mean, scale)


def _uniform(low: Any, high: Any) -> Uniform:
    require_floats("low", low)
    require_floats("high", high)
    return Uniform(low, high)


def _empirical(particles: Any) -> Empirical:
    require_floats("particles", particles)
    return Empirical(particles)


_of_attributes(Gaussian.__module__, "Gaussian", ("mean", "scale"), _gaussian)
_of_attributes(Uniform.__module__, "Uniform", ("low", "high"), _uniform)
_of_attributes(Empirical.__module__, "Empirical", ("particles",), _empirical)
_of_attributes(Flat.__module__, "Flat", (), Flat)


# Solutions.


def _require_step(step: Any) -> None:
    counts = isinstance(step, jax.Array) and step.shape == () and jnp.issubdtype(step.dtype, jnp.integer)
    require(counts and int(step) >= 0, "step is no number of steps")


def _require_arrays(name: str, tree: Any) -> None:
    arrays = all(isinstance(leaf, jax.Array | np.ndarray | np.generic) for leaf in jax.tree.leaves(tree))
    require(arrays, f"{name} holds something that is no array")


def _particle_state(particles: Any, step: Any, memory: Any, drift: Any) -> ParticleState:
    require_floats("particles", particles)
    require_particles("particles", particles)
    _require_step(step)
    _require_arrays("memory", memory)
    if drift is not None:
        require_floats("drift", drift)
        require(shapes_of(drift) == shapes_of(particles), "drift and particles differ in shape")
    return ParticleState(particles, step, memory, drift)


def _parametric_state(parameters: Any, step: Any, memory: Any) -> ParametricState:
    require_floats("parameters", parameters)
    _require_step(step)
    _require_arrays("memory", memory)
    return ParametricState(parameters, step, memory)


def _solution(measure: Any, history: Any, state: Any, restarts: Any) -> Solution:
    require(isinstance(measure, AbstractMeasure), "its measure is none")
    require(isinstance(history, dict), "its history is no dictionary")
    columns = list(history.values())
    arrays = all(isinstance(column, np.ndarray) and column.ndim == 1 for column in columns)
    require(arrays and len({len(column) for column in columns}) <= 1, "its history is no table")
    require(not isinstance(state, bool | int | float | str | list), "its state is none")
    if isinstance(measure, Empirical) and isinstance(state, ParticleState):
        same = shapes_of(measure.particles) == shapes_of(state.particles)
        require(same, "its measure and its state have particles of different shapes")
    require(isinstance(restarts, tuple) and all(map(_is_restart, restarts)), "its restarts are none")
    return Solution(measure, History(history), state, tuple(Restart(*restart) for restart in restarts))


def _integers(values: Any) -> tuple[int, ...]:
    return tuple(map(int, values))


def _is_restart(entry: Any) -> bool:
    if not isinstance(entry, tuple) or len(entry) != 3 or type(entry[0]) is not int:
        return False
    lists = all(isinstance(part, tuple) and all(type(i) is int for i in part) for part in entry[1:])
    return lists and len(entry[1]) == len(entry[2])


def _part_of_solution(field: str, like: Any, values: dict[str, Any]) -> Any:
    """`like` is a solution, or its state, of which the measure has the structure."""
    if like is ANY or field in ("history", "restarts"):
        return ANY
    if isinstance(like, Solution):
        return getattr(like, field)
    if field == "state":
        return like
    if isinstance(like, ParticleState):
        return SimpleNamespace(particles=like.particles)
    if isinstance(like, ParametricState) and type(like.parameters) is tuple and len(like.parameters) == 2:
        # Of both families: the mean, and something of the structure of the scale.
        mean, scale = jax.tree.map(lambda leaf: ANY, like.parameters)
        return SimpleNamespace(mean=mean, scale=scale)
    return ANY


_of_attributes(
    ParticleState.__module__, "ParticleState", ("particles", "step", "memory", "drift"), _particle_state
)
_of_attributes(
    ParametricState.__module__, "ParametricState", ("parameters", "step", "memory"), _parametric_state
)
KINDS["Solution"] = Kind(
    ("measure", "history", "state", "restarts"),
    _solution,
    template=_part_of_solution,
    optional=("state",),
)
DESCRIBERS[f"{Solution.__module__}.Solution"] = lambda solution: (
    "Solution",
    {
        "measure": solution.measure,
        "history": dict(solution.history),
        "state": solution.state,
        "restarts": tuple((int(r.step), _integers(r.lost), _integers(r.copied)) for r in solution.restarts),
    },
)


# Networks.


def _require_constants(constants: Any) -> None:
    counts = isinstance(constants, tuple) and all(type(count) is int for count in constants)
    require(counts and len(constants) <= 10, "constants are no numbers of constants")


def _with(network: Network, constants: tuple[int, ...]) -> Network:
    for count in constants:
        network = network.with_constants(count)
    return network


def _perceptron(sizes: Any, activation: Any, constants: Any) -> Network:
    widths = isinstance(sizes, tuple) and 2 <= len(sizes) <= _MOST_LAYERS
    widths = widths and all(type(size) is int and 1 <= size <= _LARGEST_LAYER for size in sizes)
    require(widths, "sizes are no widths of layers")
    _require_constants(constants)
    return _with(Network.mlp(sizes[0], sizes[1:-1], sizes[-1], activation), constants)


def _of_functions(init: Any, apply: Any, output_axis: Any, constants: Any) -> Network:
    _require_constants(constants)
    return _with(Network(init, apply, output_axis), constants)


def _of_maker(make_network: Callable[[Any], Network]) -> Callable[..., Network]:
    def build(make: Any, constants: Any) -> Network:
        _require_constants(constants)
        return _with(make_network(make), constants)

    return build


def _of_module(module: Any, constants: Any) -> Network:
    raise ValueError("a Flax module takes its inputs' shapes to be built; pass network=")


def describe_network(network: Network) -> tuple[str, dict[str, Any]]:
    """The kind of a network, and its fields."""
    init, apply = network.init, _inner(network.apply)
    counts: tuple[int, ...] = ()
    while isinstance(init, ConstantsInit) and isinstance(apply, ConstantsApply):
        counts = (init.count, *counts)
        init, apply = init.init, _inner(apply.apply)
    if isinstance(init, PerceptronInit) and isinstance(apply, PerceptronApply):
        fields = {"sizes": tuple(init.sizes), "activation": apply.activation, "constants": counts}
        if eqx.tree_equal(_perceptron(**fields), network):
            return "Network.mlp", fields
    if isinstance(init, EquinoxInit | NnxInit):
        kind = "Network.equinox" if isinstance(init, EquinoxInit) else "Network.nnx"
        return kind, {"make": Code(init.make), "constants": counts}
    if isinstance(init, LinenInit):
        return "Network.linen", {"module": Code(init.module.value), "constants": counts}
    functions = {"init": Code(init), "apply": Code(apply)}
    return "Network", {**functions, "output_axis": network.output_axis, "constants": counts}


def _inner(apply: Callable) -> Callable:
    return apply.function if isinstance(apply, RowsOfOutputs) else apply


DESCRIBERS[f"{Network.__module__}.Network"] = describe_network
KINDS["Network.mlp"] = Kind(("sizes", "activation", "constants"), _perceptron, anything)
KINDS["Network.equinox"] = Kind(("make", "constants"), _of_maker(Network.equinox), anything)
KINDS["Network.nnx"] = Kind(("make", "constants"), _of_maker(Network.nnx), anything)
KINDS["Network.linen"] = Kind(("module", "constants"), _of_module, anything)
KINDS["Network"] = Kind(("init", "apply", "output_axis", "constants"), _of_functions, anything)


# Likelihoods.


def or_code(value: Any) -> Any:
    """Itself if it is of a known kind, else code."""
    return Code(value) if describer(value) is None else value


def _likelihood(kind: type[AbstractLikelihood]) -> Callable[..., AbstractLikelihood]:
    def build(**numbers: Any) -> AbstractLikelihood:
        for name in {"targets", "classes"} & set(numbers):
            require(type(numbers[name]) is int, f"{name} is no number")
        if "smallest_scale" in numbers:
            require_floats("smallest_scale", numbers["smallest_scale"])
        return kind(**numbers)

    return build


for _kind, _fields in {
    likelihoods.Heteroscedastic: ("targets", "smallest_scale"),
    likelihoods.Homoscedastic: ("targets", "smallest_scale"),
    likelihoods.StudentT: ("targets", "smallest_scale"),
    likelihoods.Bernoulli: ("targets",),
    likelihoods.Categorical: ("targets", "classes"),
    likelihoods.Poisson: ("targets",),
    likelihoods.NegativeBinomial: ("targets",),
}.items():
    _of_attributes(likelihoods.__name__, _kind.__name__, _fields, _likelihood(_kind))


def require_outputs(network: Any, likelihood: Any) -> None:
    """The network gives as many numbers as the likelihood reads, where both say so."""
    law = getattr(likelihood, "likelihood", likelihood)
    if not isinstance(law, AbstractLikelihood) or describer(network) is None:
        return
    kind, fields = describe_network(network)
    if kind == "Network.mlp":
        outputs = fields["sizes"][-1] + sum(fields["constants"])
        message = f"the network has {outputs} outputs, and the likelihood reads {law.width}"
        require(outputs == law.width, message)


# Predictive laws.


def _predictive(network: Any, likelihood: Any, particles: Any, location: Any, scale: Any, spread: Any) -> Any:
    require_floats("particles", particles)
    numbers = {"location": location, "scale": scale, "spread": spread}
    for name, value in numbers.items():
        # Units are kept in NumPy's double precision.
        kinds = jax.Array if name == "spread" else jax.Array | np.ndarray
        floats = isinstance(value, kinds) and jnp.issubdtype(value.dtype, jnp.floating)
        require(value is None or floats, f"{name} is no array of floating-point numbers")
    if isinstance(network, Network):
        require_fit(network, particles)
        require_outputs(network, likelihood)
    law = getattr(likelihood, "likelihood", likelihood)
    if isinstance(law, AbstractLikelihood):
        event = () if law.targets == 1 else (law.targets,)
        units = [np.shape(value) for value in (location, scale) if value is not None]
        require(
            all(shape in ((), event) for shape in units), "location or scale are not those of the targets"
        )
    return Predictive(network, likelihood, particles, **numbers)


def _part_of_predictive(field: str, like: Any, values: dict[str, Any]) -> Any:
    """Particles have the structure of the network's parameters."""
    if field != "particles":
        return ANY
    if like is not ANY or not isinstance(values["network"], Network):
        return getattr(like, "particles", ANY)
    return jax.tree.map(lambda leaf: ANY, jax.eval_shape(values["network"].init, jax.random.key(0)))


_PREDICTIVE = ("network", "likelihood", "particles", "location", "scale", "spread")
KINDS["Predictive"] = Kind(
    _PREDICTIVE, _predictive, template=_part_of_predictive, given=("network", "likelihood")
)
DESCRIBERS[f"{Predictive.__module__}.Predictive"] = lambda predictive: (
    "Predictive",
    {field: getattr(predictive, field) for field in _PREDICTIVE}
    | {"network": or_code(predictive.network), "likelihood": or_code(predictive.likelihood)},
)
