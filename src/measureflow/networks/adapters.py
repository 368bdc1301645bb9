"""Modules of Equinox and Flax as pure functions of their parameters."""

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
    module = make(key)
    _require_pure_equinox(module)
    theta, rest = eqx.partition(module, eqx.is_inexact_array)
    return jax.eval_shape(lambda: theta), rest


@saved(build=lambda make: _equinox(EquinoxInit, make, 0), code=("make",))
class EquinoxInit(eqx.Module):
    """The floating-point arrays of make(key)."""

    make: Callable
    template: PyTree[jax.ShapeDtypeStruct]

    def __call__(self, key: Key[Array, ""]) -> PyTree:
        # The structure of every draw is that of the first: functions made afresh by `make` would tell
        # particles and prior apart.
        leaves = jax.tree.leaves(eqx.filter(self.make(key), eqx.is_inexact_array))
        return jax.tree.unflatten(jax.tree.structure(self.template), leaves)


@saved(build=lambda make: _equinox(EquinoxApply, make, 1), code=("make",))
class EquinoxApply(eqx.Module):
    """The module with arrays θ, on every row."""

    make: Callable
    rest: PyTree

    def __call__(self, theta: PyTree, inputs: PyTree) -> Array:
        return jax.vmap(eqx.combine(theta, self.rest))(inputs)


def _require_pure_equinox(module: Any) -> None:
    """A function of its arrays and of one example, as far as can be seen."""
    if not callable(module):
        raise TypeError(
            f"make must return an Equinox module that can be called, got {type(module).__name__}; if it is "
            "a pair (module, state), use layers without state, such as GroupNorm for BatchNorm."
        )
    kinds = (eqx.nn.State, eqx.nn.StateIndex, eqx.nn.Dropout)
    found = jax.tree.leaves(module, is_leaf=lambda node: isinstance(node, kinds))
    if any(isinstance(node, kinds[:2]) for node in found):
        raise ValueError(
            "make returns a module with state, got an eqx.nn.StateIndex; use layers without state, such as "
            "GroupNorm or LayerNorm for BatchNorm."
        )
    active = [node.p for node in found if isinstance(node, eqx.nn.Dropout) and not node.inference and node.p]
    if active:
        raise ValueError(
            f"make returns a module that needs a key in every call, got eqx.nn.Dropout({active[0]}); leave "
            "it out, or pass lambda key: eqx.nn.inference_mode(make(key))."
        )


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

    def __call__(self, key: Key[Array, ""]) -> PyTree:
        return self.module.value.init(key, self.inputs).get("params", {})


class LinenApply(eqx.Module):
    """module.apply({"params": θ}, inputs)."""

    module: Held = eqx.field(static=True)

    def __call__(self, theta: PyTree, inputs: PyTree) -> Array:
        return self.module.value.apply({"params": theta}, inputs)


@eqx.filter_jit
def nnx_parts(make: Callable, key: Key[Array, ""]) -> tuple[Any, dict]:
    """The static structure, and all values but the parameters."""
    from flax import nnx

    module = make(nnx.Rngs(key))
    if not isinstance(module, nnx.Module):
        raise TypeError(
            f"make must return a flax.nnx.Module, got {module!r}; for flax.linen use Network.linen."
        )
    structure, _, statistics, rest = nnx.split(module, nnx.Param, nnx.BatchStat, ...)
    if jax.tree.leaves(statistics):
        names = ", ".join(by_path(nnx.to_pure_dict(statistics)))
        raise ValueError(
            f"make returns a module with batch statistics, got {names}; use layers without state, such as "
            "GroupNorm or LayerNorm for BatchNorm."
        )
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
                f"the module changes its own variables when called, got {', '.join(changed)}; a network is a "
                "function of θ and inputs alone: leave Dropout out, or call module.eval() in make."
            )
        return outputs


def by_path(tree: PyTree) -> dict[str, Any]:
    """Leaves by the words of their path."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _equinox(kind: Any, make: Callable, part: int) -> Any:
    return kind(make, equinox_parts(make, jax.random.key(0))[part])


def _nnx(kind: Any, make: Callable) -> Any:
    return kind(make, *nnx_parts(make, jax.random.key(0)))
