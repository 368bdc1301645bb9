"""Modules of Equinox and Flax as pure functions of their parameters; in training: `stateful.py`."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array, Key, PyTree

from measureflow.saving.registry import saved


# Compiled, as is the same for nnx below, so that parameters, which are left aside, are never drawn.
@eqx.filter_jit
def equinox_parts(make: Callable, key: Key[Array, ""]) -> tuple[PyTree, PyTree]:
    """The shapes of θ, and all else."""
    made = make(key)
    module, state = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    require_pure_equinox(module, state)
    theta, rest = eqx.partition(module, eqx.is_inexact_array)
    return jax.eval_shape(lambda: theta), (rest, state)


@saved(build=lambda make: _equinox(EquinoxInit, make, 0), code=("make",))
class EquinoxInit(eqx.Module):
    """The floating-point arrays of make(key)."""

    make: Callable
    template: PyTree[jax.ShapeDtypeStruct]

    def __call__(self, key: Key[Array, ""]) -> PyTree:
        # The structure of every draw is that of the first: functions made afresh by `make` would tell
        # particles and prior apart.
        made = self.make(key)
        module = made[0] if isinstance(made, tuple) else made
        leaves = jax.tree.leaves(eqx.filter(module, eqx.is_inexact_array))
        return jax.tree.unflatten(jax.tree.structure(self.template), leaves)


@saved(build=lambda make: _equinox(EquinoxApply, make, 1), code=("make",))
class EquinoxApply(eqx.Module):
    """The module with arrays θ, on every row; its state, where it has one, stays what it is."""

    make: Callable
    rest: PyTree

    def __call__(self, theta: PyTree, inputs: PyTree) -> Array:
        rest, state = self.rest
        module = eqx.combine(theta, rest)
        if state is None:
            return jax.vmap(module)(inputs)
        return jax.vmap(lambda row: module(row, state)[0], axis_name=axis_name(module))(inputs)


def require_pure_equinox(module: Any, state: Any) -> None:
    """A function of its arrays and of one example, as far as can be seen."""
    if not callable(module) or not (state is None or isinstance(state, eqx.nn.State)):
        raise TypeError(
            f"make must return an Equinox module that can be called, or eqx.nn.make_with_state(...)'s pair "
            f"(module, state), got {type(module).__name__}; pass lambda key: eqx.nn.MLP(..., key=key)."
        )
    indices, active = in_training(module)
    if indices and state is None:
        raise ValueError(
            "make returns a module with state, got an eqx.nn.StateIndex; return the pair (module, state) of "
            "eqx.nn.make_with_state, or use layers without state, such as GroupNorm or LayerNorm for "
            "BatchNorm."
        )
    if active:
        raise ValueError(
            f"make returns a module that is in training mode, got eqx.nn.{active[0]}; pass "
            "Network.equinox(make, training=True), so that every particle is trained with its own statistics "
            "and keys; or freeze it with eqx.nn.inference_mode(module) in make; or use layers without state, "
            "such as GroupNorm or LayerNorm for BatchNorm."
        )


def in_training(module: Any) -> tuple[int, list[str]]:
    """How many places of a state a module refers to, and its layers that do something else in training."""
    with_state = eqx.nn.BatchNorm, eqx.nn.SpectralNorm
    kinds = (eqx.nn.StateIndex, eqx.nn.Dropout, *with_state)
    found = jax.tree.leaves(module, is_leaf=lambda node: isinstance(node, kinds))
    names = [f"Dropout({x.p})" for x in found if isinstance(x, eqx.nn.Dropout) and not x.inference and x.p]
    names += [type(x).__name__ for x in found if isinstance(x, with_state) and not x.inference]
    states = [x for x in found if isinstance(x, (eqx.nn.StateIndex, *with_state))]
    return len(states), names


def axis_name(module: Any) -> Any:
    """What the BatchNorm layers of a module call the batch."""
    found = jax.tree.leaves(module, is_leaf=lambda node: isinstance(node, eqx.nn.BatchNorm))
    names = {x.axis_name for x in found if isinstance(x, eqx.nn.BatchNorm)}
    if len(names) > 1:
        raise ValueError(
            f"the BatchNorm layers name the batch differently, got {sorted(map(str, names))}; give all of "
            "them one axis_name."
        )
    return next(iter(names), "batch")


class Held:
    """A value that is compared as it is, but hashed by its type: Flax modules may hold lists."""

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Held) and (self.value is other.value or self.value == other.value)

    def __hash__(self) -> int:
        return hash(type(self.value))


class LinenInit(eqx.Module):
    """module.init(key, inputs)["params"]."""

    module: Held = eqx.field(static=True)
    inputs: PyTree
    keywords: Held = eqx.field(static=True)

    def __call__(self, key: Key[Array, ""]) -> PyTree:
        return self.module.value.init(key, self.inputs, **self.keywords.value).get("params", {})


class LinenApply(eqx.Module):
    """module.apply({"params": θ}, inputs); its other variables, where it has some, stay what they are."""

    module: Held = eqx.field(static=True)
    keywords: Held = eqx.field(static=True)
    variables: PyTree = None

    def __call__(self, theta: PyTree, inputs: PyTree) -> Array:
        variables = {"params": theta, **(self.variables or {})}
        return self.module.value.apply(variables, inputs, **self.keywords.value)


@eqx.filter_jit
def nnx_parts(make: Callable, key: Key[Array, ""]) -> tuple[Any, dict]:
    """The static structure, and all values but the parameters."""
    from flax import nnx

    module = make(nnx.Rngs(key))
    if not isinstance(module, nnx.Module):
        raise TypeError(
            f"make must return a flax.nnx.Module, got {module!r}; for flax.linen use Network.linen."
        )
    structure, _, rest = nnx.split(module, nnx.Param, ...)
    return structure, nnx.to_pure_dict(rest)


@saved(code=("make",))
class NnxInit(eqx.Module):
    """The parameters of make(rngs), as nested dictionaries of arrays."""

    make: Callable

    def __call__(self, key: Key[Array, ""]) -> dict:
        from flax import nnx

        return nnx.to_pure_dict(nnx.state(self.make(nnx.Rngs(key)), nnx.Param))


@saved(build=lambda make: _nnx(NnxApply, make), code=("make",))
class NnxApply(eqx.Module):
    """The module with parameters θ, on a batch."""

    make: Callable
    structure: Any = eqx.field(static=True)
    rest: dict

    def __call__(self, theta: dict, inputs: PyTree) -> Array:
        from flax import nnx

        module = nnx.merge(self.structure, theta, self.rest)
        outputs = module(inputs)
        _, _, rest = nnx.split(module, nnx.Param, ...)
        after = by_path(nnx.to_pure_dict(rest))
        # By identity, not by value: the values may be traced.
        changed = [path for path, leaf in by_path(self.rest).items() if after.get(path) is not leaf]
        if changed:
            raise ValueError(
                f"the module changes its own variables when called, got {', '.join(changed)}; pass "
                "Network.nnx(make, training=True), so that every particle is trained with its own statistics "
                "and keys; or call module.eval() in make, which freezes batch statistics; or leave BatchNorm "
                "and Dropout out."
            )
        return outputs


def by_path(tree: PyTree) -> dict[str, Any]:
    """Leaves by the words of their path."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _equinox(kind: Any, make: Callable, part: int) -> Any:
    return kind(make, equinox_parts(make, jax.random.key(0))[part])


def _nnx(kind: Any, make: Callable) -> Any:
    return kind(make, *nnx_parts(make, jax.random.key(0)))
