"""PyTorch modules as functions of their parameters, and particles as state dicts."""

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key, PyTree

from measureflow.core.pytrees import Particles, particle_count
from measureflow.core.statistics import WithStatistics, parameters_of
from measureflow.core.validation import require_representable
from measureflow.networks.functions import CastApply, RowsOfOutputs
from measureflow.networks.torch_initial import TorchInit, initial_laws
from measureflow.networks.torch_programs import (
    TorchProgram,
    batch_layers,
    exported,
    program_of,
    random_layers,
)
from measureflow.networks.training import PointApply, Training, as_floats

# How far outputs may be from PyTorch's own, relative to their size: far above rounding, far below a mistake.
_TOLERANCE = 1e-3
# Numbers in the code of a module may be others in training.
_IN_TRAINING = "constant in training"


class TorchApply(eqx.Module):
    """The module with parameters θ on a batch; all else stays what it is."""

    program: TorchProgram = eqx.field(static=True)
    constants: dict[str, Array]
    shapes: tuple[tuple[tuple[int, ...], bool], ...] = eqx.field(static=True)
    #: Every name of the state dict, and that of the value.
    names: tuple[tuple[str, str], ...] = eqx.field(static=True)

    def __call__(self, theta: dict[str, Array], inputs: PyTree) -> Array:
        return self.program({**self.constants, **theta}, self.rows(inputs))[0]

    def rows(self, inputs: Any) -> tuple[Array, ...]:
        """Inputs as the module takes them."""
        given = inputs if isinstance(inputs, tuple | list) else (inputs,)
        found = tuple(map(jnp.asarray, given))
        if len(found) != len(self.shapes):
            raise ValueError(
                f"inputs must be {len(self.shapes)} arrays, got {len(found)}; pass them as the module takes "
                "them."
            )
        for array, (shape, whole) in zip(found, self.shapes, strict=True):
            if array.shape[1:] != shape or jnp.issubdtype(array.dtype, jnp.integer) != whole:
                wanted, kind = ", ".join(map(str, ("rows", *shape))), "integers" if whole else "floats"
                raise ValueError(
                    f"inputs must have shape ({wanted}) and hold {kind}, got {array.dtype} of shape "
                    f"{array.shape}; the network was built for inputs of that shape."
                )
        return found


class TorchTrained(eqx.Module):
    """The module with parameters θ and running statistics s, in prediction and in training."""

    prediction: TorchApply
    training: TorchProgram = eqx.field(static=True)
    whole: tuple[str, ...] = eqx.field(static=True)

    def predicted(self, point: WithStatistics, inputs: PyTree) -> Array:
        return self.prediction({**point.parameters, **self._counts(point.statistics)}, inputs)

    def trained(
        self, theta: dict[str, Array], statistics: dict, inputs: PyTree, key: Key[Array, ""]
    ) -> tuple[Array, PyTree]:
        values = {**self.prediction.constants, **theta, **self._counts(statistics)}
        outputs, changed = self.training(values, self.prediction.rows(inputs), key)
        return outputs, as_floats({name: changed.get(name, old) for name, old in statistics.items()})

    def _counts(self, statistics: dict[str, Array]) -> dict[str, Array]:
        """Numbers of batches as the whole numbers that they are."""
        return {
            name: leaf.astype(jnp.result_type(int)) if name in self.whole else leaf
            for name, leaf in statistics.items()
        }


def torch_parts(module: Any, inputs: Any, training: bool) -> tuple[TorchInit, Any, Training | None]:
    """init, apply, and how it is trained."""
    torch = _torch()
    if not isinstance(module, torch.nn.Module):
        raise TypeError(
            f"module must be an instance of torch.nn.Module, got {type(module).__name__}; pass the module "
            "itself."
        )
    aliases = _one_name(module)
    moving = _parameters(module, aliases)
    tensors = _tensors(torch, module, inputs)
    shapes = tuple((tuple(x.shape[1:]), not x.is_floating_point()) for x in tensors)
    names = tuple((str(name), str(aliases.get(name, name))) for name in module.state_dict())
    with _mode(module, False) if training else contextlib.nullcontext():
        graph = exported(module, tensors)
        program = program_of(graph, aliases)
        _require_pure(program, training)
        apply = TorchApply(program, _constants(module, graph, aliases, moving), shapes, names)
        _require_equal(module, apply, moving, tensors)
    init = TorchInit(*initial_laws(module, moving, aliases))
    if not training:
        return init, apply, None
    _require_momentum(torch, module)
    with _mode(module, True) if not module.training else contextlib.nullcontext():
        graph = exported(module, tensors)
        in_training = program_of(graph, aliases, _IN_TRAINING)
        more = _constants(module, graph, aliases, moving, _IN_TRAINING)
        apply = eqx.tree_at(lambda a: a.constants, apply, {**more, **apply.constants})
        parts = _trained(module, init, apply, in_training)
        _require_equal_in_training(module, parts[2], moving, tensors, in_training)
    return parts


def _trained(module: Any, init: TorchInit, apply: TorchApply, program: TorchProgram) -> tuple:
    changed = [name for name, _ in program.changed]
    if not changed and not random_layers(program):
        raise ValueError(
            f"training=True was given, but {type(module).__name__} has no BatchNorm or Dropout that would do "
            "anything else in training; leave training out."
        )
    buffers = {name: _array(tensor) for name, tensor in module.named_buffers() if name in changed}
    whole = tuple(name for name, value in buffers.items() if not jnp.issubdtype(value.dtype, jnp.floating))
    apply = eqx.tree_at(
        lambda a: a.constants, apply, {k: v for k, v in apply.constants.items() if k not in buffers}
    )
    trained = TorchTrained(apply, program, whole)
    return init, trained.predicted, Training(trained.trained, as_floats(buffers))


def state_dict(network: Any, particles: Particles, index: int) -> dict[str, Any]:
    """The particle of this number as tensors, by the names of the module: `Network.state_dict`."""
    apply = _inner(network)
    torch = _torch()
    theta, n = parameters_of(particles), particle_count(particles)
    if not -n <= index < n:
        raise IndexError(f"index must be below the number of particles, {n}, got {index}.")
    values = {name: leaf[index] for name, leaf in theta.items()}
    whole: tuple[str, ...] = ()
    if isinstance(particles, WithStatistics):
        values |= {name: leaf[index] for name, leaf in particles.statistics.items()}
        whole = _whole(network)
    values = {**apply.constants, **values}
    missing = [source for _, source in apply.names if source not in values]
    if missing:
        raise ValueError(
            f"particles have no array {missing[0]!r}, which the module has; pass "
            "solution.measure.particles of this network."
        )

    def tensor(source: str) -> Any:
        numbers = np.array(values[source])
        # JAX keeps 32 bits of PyTorch's 64.
        is_whole = source in whole or numbers.dtype == np.int32
        return torch.from_numpy(numbers.astype(np.int64) if is_whole else numbers)

    return {name: tensor(source) for name, source in apply.names}


def _inner(network: Any) -> TorchApply:
    function = network.apply
    while isinstance(function, RowsOfOutputs | CastApply | PointApply):
        function = function.apply if isinstance(function, CastApply) else function.function
    owner = getattr(function, "__self__", function)
    owner = owner.prediction if isinstance(owner, TorchTrained) else owner
    if not isinstance(owner, TorchApply):
        raise TypeError(
            "state_dict is that of a PyTorch module, and this network is none; make it with mf.Network.torch."
        )
    return owner


def _whole(network: Any) -> tuple[str, ...]:
    return network.training.apply.__self__.whole


def _torch() -> Any:
    try:
        torch: Any = importlib.import_module("torch")
    except ModuleNotFoundError as error:
        raise ImportError(
            "Network.torch needs PyTorch, which is not installed; run `pip install torch`."
        ) from error
    return torch


def _one_name(module: Any) -> dict[str, str]:
    """The first name of every parameter and buffer, by all of its names: weights may be shared."""
    first: dict[int, str] = {}
    both = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return {name: first.setdefault(id(tensor), name) for name, tensor in both}


def _parameters(module: Any, aliases: dict[str, str]) -> dict[str, Array]:
    """Those that are learned, by their first names."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        kind = str(tensor.dtype).removeprefix("torch.")
        if kind.startswith(("float", "bfloat", "complex")) and kind != str(jnp.result_type(float)):
            raise TypeError(
                f"module must be of {jnp.result_type(float)}, got {kind} at {name!r}; pass module.float()."
            )
        if tensor.device.type == "meta":
            raise ValueError(
                f"module has no numbers yet, got a meta tensor at {name!r}; load its weights first."
            )
    found = {aliases[n]: _array(tensor) for n, tensor in module.named_parameters() if tensor.requires_grad}
    if not found:
        raise ValueError(
            "module has no parameters that are learned: all have requires_grad=False, or there are none; "
            "call module.requires_grad_(True)."
        )
    return found


def _constants(
    module: Any, graph: Any, aliases: dict[str, str], moving: dict[str, Array], constant: str = "constant"
) -> dict[str, Array]:
    """All values but the parameters that are learned."""
    both = (*module.named_parameters(), *module.named_buffers())
    found = {aliases[name]: _array(tensor) for name, tensor in both}
    own = {name: tensor for name, tensor in graph.constants.items() if hasattr(tensor, "dtype")}
    found |= {f"{constant} {name}": _array(tensor) for name, tensor in own.items()}
    return {name: value for name, value in found.items() if name not in moving}


def _array(tensor: Any) -> Array:
    numbers = tensor.detach().cpu().numpy()
    return jnp.asarray(np.array(require_representable("module", numbers)))


def _tensors(torch: Any, module: Any, inputs: Any) -> tuple[Any, ...]:
    """Inputs as tensors of their own, of two rows at least: of one, PyTorch would make a rule."""
    given = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
    device, found = next(module.parameters()).device, []
    for value in given:
        array = value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
        if array.ndim == 0 or not len(array):
            raise ValueError(
                f"inputs must have a leading axis with at least one row, got shape {array.shape}; add the "
                "axis with x[None]."
            )
        if array.dtype.kind not in "fiub":
            raise TypeError(f"inputs must hold numbers, got {array.dtype}; convert them with astype.")
        array = array.astype(jnp.result_type(float) if array.dtype.kind == "f" else np.int64)
        array = np.concatenate([array] * 3) if len(array) == 1 else array
        found.append(torch.from_numpy(np.array(array)).to(device))
    if len({len(x) for x in found}) > 1:
        raise ValueError(f"inputs have different numbers of rows, got {[len(x) for x in found]}.")
    return tuple(found)


@contextlib.contextmanager
def _mode(module: Any, training: bool) -> Iterator[None]:
    """The module in a mode; afterwards every layer is as it was."""
    modes = {layer: layer.training for layer in module.modules()}
    try:
        module.train(training)
        yield
    finally:
        for layer, mode in modes.items():
            layer.training = mode


def _require_pure(program: TorchProgram, training: bool) -> None:
    """A prediction changes no buffers and draws no random numbers."""
    layers = list(dict.fromkeys([*random_layers(program), *batch_layers(program)]))
    layers += [f"the buffer {name!r}" for name, _ in program.changed if not layers]
    if not layers:
        return
    if training:
        raise ValueError(
            f"module is random or changes its buffers in the mode of module.eval(), too: "
            f"{', '.join(layers)}; give BatchNorm track_running_stats=True, and let Dropout see "
            "module.training."
        )
    raise ValueError(
        f"module is in training mode: {', '.join(layers)} would draw random numbers or use statistics of the "
        "batch; call module.eval(), which freezes running statistics and leaves Dropout out, or pass "
        "Network.torch(module, inputs, training=True), so that every particle has its own."
    )


def _require_momentum(torch: Any, module: Any) -> None:
    for name, layer in module.named_modules():
        if isinstance(layer, torch.nn.modules.batchnorm._BatchNorm) and layer.momentum is None:
            raise NotImplementedError(
                f"Network.torch does not cover {type(layer).__name__} {name!r} with momentum=None, the mean "
                "over all batches; give it momentum=0.1."
            )


def _require_equal(module: Any, apply: TorchApply, theta: dict[str, Array], tensors: tuple[Any, ...]) -> None:
    """What is computed in prediction is what PyTorch computes; for one row, too, which graphs leave out."""
    torch: Any = importlib.import_module("torch")

    for some in (tensors, tuple(x[:1] for x in tensors)):
        with torch.no_grad():
            expected = module(*some).detach().cpu().numpy()
        with jax.default_matmul_precision("highest"):
            found = eqx.filter_jit(apply)(theta, _inputs(some))
        _require_close(module, f"outputs of {len(some[0])} rows", np.asarray(found), expected)


def _require_equal_in_training(
    module: Any, training: Training, theta: dict[str, Array], tensors: tuple[Any, ...], program: TorchProgram
) -> None:
    """What is computed in training, too, where that is not random; on copies of the module's buffers."""
    torch: Any = importlib.import_module("torch")

    if random_layers(program):
        return
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    with torch.no_grad():
        expected = torch.func.functional_call(module, buffers, tensors).detach().cpu().numpy()
    with jax.default_matmul_precision("highest"):
        outputs, after = eqx.filter_jit(training.apply)(
            theta, training.statistics, _inputs(tensors), jax.random.key(0)
        )
    _require_close(module, "outputs in training", np.asarray(outputs), expected)
    for name, value in after.items():
        _require_close(module, f"the buffer {name!r}", np.asarray(value), buffers[name].cpu().numpy())


def _inputs(tensors: tuple[Any, ...]) -> Any:
    arrays = [np.asarray(x.cpu().numpy()) for x in tensors]
    return tuple(arrays) if len(arrays) > 1 else arrays[0]


def _require_close(module: Any, what: str, found: np.ndarray, expected: np.ndarray) -> None:
    if found.shape == expected.shape:
        size = np.max(np.abs(expected[np.isfinite(expected)]), initial=0.0)
        tolerance = _TOLERANCE * size + 1e-6
        if np.allclose(found, expected, rtol=_TOLERANCE, atol=tolerance, equal_nan=True):
            return
    raise RuntimeError(
        f"Network.torch computes something else than {type(module).__name__} itself: {what} of shape "
        f"{found.shape} and {expected.shape} differ; if the module is not random, please report this."
    )
