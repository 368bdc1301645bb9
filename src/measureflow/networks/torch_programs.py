"""What a PyTorch module computes, as a list of operations that needs no PyTorch: by `torch.export`."""

import importlib
import inspect
import operator
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Key

from measureflow.networks import torch_pooling, torch_shapes
from measureflow.networks.torch_layers import OF_THE_BATCH, is_random
from measureflow.networks.torch_operations import OPERATIONS

# They register operations when they are imported.
_REGISTERED = torch_pooling, torch_shapes
# Where a computation takes place and how numbers lie in memory: of no matter here.
_NO_MATTER = {"memory_format", "device", "layout", "pin_memory", "non_blocking", "copy", "requires_grad"}
_NO_MATTER |= {"cudnn_enable", "cudnn_enabled", "implicit"}
# Of sizes, which are whole numbers of Python.
_PYTHON: dict[str, Callable] = {
    name: getattr(operator, name)
    for name in ("add", "sub", "mul", "floordiv", "mod", "neg", "getitem", "eq", "ne", "lt", "le", "gt", "ge")
}
_SKIPPED = {
    "_assert_tensor_metadata.default",
    "sym_constrain_range_for_size.default",
    "sym_constrain_range.default",
}


class Reference(NamedTuple):
    """A value that was computed before."""

    name: str


class Instruction(NamedTuple):
    """One operation: its arguments by name, and the layer that it belongs to."""

    result: str
    operation: str
    arguments: tuple[tuple[str, Any], ...]
    layer: str


class TorchProgram(NamedTuple):
    """Operations in order. `values` says which parameter, buffer or constant a name is; `changed` which
    buffers have which values afterwards."""

    inputs: tuple[str, ...]
    values: tuple[tuple[str, str], ...]
    instructions: tuple[Instruction, ...]
    output: Reference
    changed: tuple[tuple[str, Reference], ...]

    def __call__(
        self, values: dict[str, Array], inputs: tuple[Array, ...], key: Key[Array, ""] | None = None
    ) -> tuple[Array, dict[str, Array]]:
        """The output, and the buffers that changed."""
        found: dict[str, Any] = {name: values[source] for name, source in self.values}
        found |= dict(zip(self.inputs, inputs, strict=True))
        for number, (result, name, arguments, layer) in enumerate(self.instructions):
            given = {argument: _resolved(value, found) for argument, value in arguments}
            if "random_key" in given and key is not None:
                given["random_key"] = jax.random.fold_in(key, number)
            try:
                found[result] = _function(name)(**given)
            except NotImplementedError as error:
                raise NotImplementedError(f"{error}, in {layer}, is not covered by Network.torch.") from None
        return found[self.output.name], {name: found[value.name] for name, value in self.changed}


def exported(module: Any, inputs: tuple[Any, ...]) -> Any:
    """The module in the mode that it is in, for any number of rows: without operations in place."""
    torch: Any = importlib.import_module("torch")

    rows = tuple({0: torch.export.Dim.DYNAMIC} for _ in inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = torch.export.export(
                module, inputs, dynamic_shapes=(rows,) if _is_variadic(module) else rows
            )
            return found.run_decompositions({})
        except Exception as error:
            # Of many classes; what PyTorch says first is what its user can act on.
            said = str(error).strip().splitlines()
            raise ValueError(
                f"torch.export cannot make a graph of {type(module).__name__}: {said[0] if said else error}; "
                "it must take a batch of any number of rows, and not look at the values of tensors. See the "
                "exception above this one."
            ) from error


def _is_variadic(module: Any) -> bool:
    kinds = [p.kind for p in inspect.signature(module.forward).parameters.values()]
    return kinds == [inspect.Parameter.VAR_POSITIONAL]


def program_of(graph: Any, aliases: dict[str, str], constant: str = "constant") -> TorchProgram:
    """The operations of an exported module, if all are covered. `aliases` has the one name of each parameter
    that has several; numbers in the code of the module are constants of this name."""
    _require_any_rows(graph)
    signature = graph.graph_signature
    sources = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    sources |= {k: f"{constant} {v}" for k, v in signature.inputs_to_lifted_tensor_constants.items()}
    instructions, problems = [], []
    for node in graph.graph.nodes:
        if node.op == "call_function":
            instruction = _instruction(node)
            if isinstance(instruction, str):
                problems.append(instruction)
            elif instruction is not None:
                instructions.append(instruction)
        elif node.op not in ("placeholder", "output"):
            problems.append(f"{node.op} {node.target} in {_layer(node)}")
    if problems:
        raise NotImplementedError(
            f"Network.torch does not cover {'; '.join(dict.fromkeys(problems))}. Use other layers there, or "
            "build the network in Flax or Equinox; the module's weights can be loaded with "
            "network.start_from."
        )
    used = {node.name for node in graph.graph.nodes if node.op == "placeholder" and node.users}
    values = tuple(
        (str(name), str(aliases.get(source, source))) for name, source in sources.items() if name in used
    )
    changed = tuple((buffer, Reference(name)) for name, buffer in signature.buffers_to_mutate.items())
    if len(signature.user_outputs) != 1 or signature.user_inputs_to_mutate:
        raise ValueError(
            f"module must return one tensor and leave its inputs as they are, got "
            f"{len(signature.user_outputs)} outputs; wrap it in a module whose forward returns the one that "
            "is meant."
        )
    names = tuple(map(str, signature.user_inputs))
    return TorchProgram(names, values, tuple(instructions), Reference(signature.user_outputs[0]), changed)


def _require_any_rows(graph: Any) -> None:
    """Its graph is that of any number of rows, and not of those that its inputs had."""
    for name, allowed in graph.range_constraints.items():
        # PyTorch makes a rule of its own of 0 and of 1.
        if str(allowed.upper) not in ("int_oo", "oo") or allowed.lower > 2:
            raise ValueError(
                f"module does something else for another number of rows: of {name} it takes {allowed.lower} "
                f"to {allowed.upper}; its forward may not depend on the number of rows."
            )


def random_layers(program: TorchProgram) -> list[str]:
    """Layers that draw random numbers."""
    return [i.layer for i in program.instructions if is_random(i.operation, dict(i.arguments))]


def batch_layers(program: TorchProgram) -> list[str]:
    """Layers that use statistics of the batch that they are given."""
    return [i.layer for i in program.instructions if i.operation in OF_THE_BATCH]


def _instruction(node: Any) -> Instruction | str | None:
    """What a node does; a text where that is not covered; None where it does nothing."""
    name, layer = _name(node.target), _layer(node)
    if name in _SKIPPED:
        return None
    function = _function(name)
    if function is None:
        return f"{name} in {layer}"
    if name.startswith("python."):
        given = [(f"_{i}", value) for i, value in enumerate(node.args)]
    else:
        bound = _bound(node, function)
        if isinstance(bound, str):
            return f"{name} with {bound} in {layer}"
        given = bound
    return Instruction(node.name, name, tuple((key, _plain(value)) for key, value in given), layer)


def _bound(node: Any, function: Callable) -> list[tuple[str, Any]] | str:
    """Arguments by name, defaults filled in; a text where one matters that is not covered."""
    accepted, found = inspect.signature(function).parameters, []
    for position, argument in enumerate(node.target._schema.arguments):
        given = (
            node.args[position]
            if position < len(node.args)
            else node.kwargs.get(argument.name, argument.default_value)
        )
        name = "x" if argument.name == "self" else argument.name
        if name in accepted:
            found.append((name, given))
        elif argument.name not in _NO_MATTER and given is not None and given != argument.default_value:
            return f"{argument.name}={given}"
    if "random_key" in accepted:
        found.append(("random_key", None))
    return found


def _name(target: Any) -> str:
    """ "add.Tensor" of torch.ops.aten.add.Tensor; those of Python are "python.add"."""
    if hasattr(target, "_schema"):
        space, name = target._schema.name.split("::")
        full = f"{name}.{target._schema.overload_name or 'default'}"
        return full if space == "aten" else f"{space}.{full}"
    return f"python.{getattr(target, '__name__', target)}"


def _function(name: str) -> Any:
    if name.startswith("python."):
        function = _PYTHON.get(name.removeprefix("python."))
        return function and (lambda **given: function(*given.values()))
    if name == "sym_size.int":
        return _size
    return _asserted if name == "_assert_scalar.default" else OPERATIONS.get(name)


def _size(x: Array, dim: int) -> int:
    return x.shape[dim]


def _asserted(x: Any, assert_msg: str) -> None:
    if not x:
        raise ValueError(f"module does not take so many rows: {assert_msg}; pass as many as it was made for.")


def _layer(node: Any) -> str:
    """The class and the name of the layer that a node comes from."""
    stack = [entry for entry in (node.meta.get("nn_module_stack") or {}).values() if "." in str(entry[1])]
    if not stack:
        return "the module"
    path, kind = stack[-1]
    return f"{str(kind).rsplit('.', 1)[-1]}{f' {path!r}' if path else ''}"


def _plain(value: Any) -> Any:
    """What a program may hold: numbers, texts, references and tuples of them."""
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    if hasattr(value, "users"):
        return Reference(value.name)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if str(value).startswith("torch."):
        return str(value).removeprefix("torch.")
    raise TypeError(f"{value!r} of type {type(value).__name__} is no argument that Network.torch knows.")


def _resolved(value: Any, found: dict[str, Any]) -> Any:
    if isinstance(value, Reference):
        return found[value.name]
    return [_resolved(item, found) for item in value] if isinstance(value, tuple) else value
