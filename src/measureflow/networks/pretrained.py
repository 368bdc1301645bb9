"""Particles about pretrained weights."""

import math
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key, PyTree

from measureflow.core.pytrees import Particles, is_concrete, strong
from measureflow.core.statistics import WithStatistics, parameters_of
from measureflow.core.validation import require_count

_Named = dict[str, Any]


def started(
    network: Any, pretrained: Any, key: Key[Array, ""], n: int, noise: Any, new: Sequence[str]
) -> Particles:
    """n particles about pretrained weights: `Network.start_from`."""
    n = require_count("n", n, 1, "it counts the particles.")
    if is_concrete(noise) and not (np.ndim(noise) == 0 and 0 <= float(noise) < math.inf):
        raise ValueError(f"noise must be a number ≥ 0 and finite, got {noise!r}; 0.1 is a start.")
    centre = matched(network.point(), pretrained, new)
    if is_concrete(noise) and float(noise) == 0 and n > 1 and not new:
        raise ValueError(
            f"noise is 0 and nothing is new, so that all n={n} particles would be the same, and stay so: "
            "identical particles do not repel each other; pass noise=0.1, or new=['head']."
        )
    return _drawn(network, centre, key, n, strong(noise))


# Compiled, so that a large network is not drawn array by array.
@eqx.filter_jit
def _drawn(network: Any, centre: list, key: Key[Array, ""], n: int, noise: Array) -> Particles:
    new_key, noise_key = jax.random.split(key)
    fresh = network.sample(new_key, n)
    parameters = parameters_of(fresh)
    number = len(jax.tree.leaves(parameters))
    theta = perturbed(centre[:number], parameters, noise_key, n, noise)
    if not isinstance(fresh, WithStatistics):
        return theta
    return WithStatistics(theta, perturbed(centre[number:], fresh.statistics, noise_key, n, strong(0.0)))


def matched(point: PyTree, pretrained: Any, new: Sequence[str]) -> list[np.ndarray | None]:
    """The numbers of `pretrained` for the leaves of `point` (θ, or θ with statistics, as shapes), in order;
    None for those that are new: whose names begin with one of `new`."""
    if isinstance(new, str) or not all(isinstance(name, str) for name in new):
        raise TypeError(f"new must be a sequence of names, got {new!r}; pass new=['head'].")
    source = _named(_weights(pretrained))
    wanted = _named(point)
    unused = [name for name in new if not any(_begins(path, name) for path in wanted)]
    if unused:
        raise ValueError(
            f"new names nothing in the network, got {unused[0]!r}; its arrays are {_listed(wanted)}."
        )
    is_new = {path: any(_begins(path, name) for name in new) for path in wanted}
    found = {path: None if is_new[path] else _of(source, path, leaf) for path, leaf in wanted.items()}
    return list(found.values())


def perturbed(centre: list, fresh: Particles, key: Key[Array, ""], n: int, noise: Array) -> Particles:
    """θᵢ = θ + noise·rms(θ)·Zᵢ for every array; where the centre is None, `fresh` ones."""
    leaves, structure = jax.tree.flatten(fresh)

    def around(number: int, leaf: Any, drawn: Array) -> Array:
        if leaf is None:
            return drawn
        leaf = jnp.asarray(leaf, drawn.dtype)
        size = noise.astype(leaf.dtype) * jnp.sqrt(jnp.mean(jnp.square(leaf)))
        normal = jax.random.normal(jax.random.fold_in(key, number), (n, *leaf.shape), leaf.dtype)
        return leaf[None] + size * normal

    moved = [around(i, *pair) for i, pair in enumerate(zip(centre, leaves, strict=True))]
    return jax.tree.unflatten(structure, moved)


def _weights(pretrained: Any) -> Any:
    """Arrays of what a user has: a module or its state dict, variables of Flax, or a pytree like θ."""
    bases = {base.__module__.split(".")[0] for base in type(pretrained).__mro__}
    if "torch" in bases and hasattr(pretrained, "state_dict"):
        pretrained = pretrained.state_dict()
    if isinstance(pretrained, dict) and any(hasattr(leaf, "detach") for leaf in pretrained.values()):
        return {name: leaf.detach().cpu().numpy() for name, leaf in pretrained.items()}
    if "flax" in bases and hasattr(pretrained, "eval"):
        from flax import nnx

        state = [nnx.to_pure_dict(nnx.state(pretrained, kind)) for kind in (nnx.Param, nnx.BatchStat)]
        return WithStatistics(*state)
    if isinstance(pretrained, dict) and "params" in pretrained:
        others = {name: part for name, part in pretrained.items() if name != "params"}
        return WithStatistics(pretrained["params"], others)
    if isinstance(pretrained, tuple) and len(pretrained) == 2 and isinstance(pretrained[1], eqx.nn.State):
        module, state = pretrained
        return WithStatistics(eqx.filter(module, eqx.is_inexact_array), jax.tree.leaves(state))
    if isinstance(pretrained, eqx.Module) and not isinstance(pretrained, WithStatistics):
        return eqx.filter(pretrained, eqx.is_inexact_array)
    return pretrained


def _named(tree: PyTree) -> _Named:
    """Leaves by name: of θ alone, and of statistics, which have names of their own, alike."""
    if not isinstance(tree, WithStatistics):
        return {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
    statistics = jax.tree_util.tree_leaves_with_path(tree.statistics)
    return _named(tree.parameters) | {f"statistics.{_name(path)}": leaf for path, leaf in statistics}


def _name(path: tuple) -> str:
    return ".".join(jax.tree_util.keystr((entry,), simple=True) for entry in path)


def _begins(path: str, name: str) -> bool:
    return path == name or path.startswith((f"{name}.", f"statistics.{name}."))


def _of(source: _Named, path: str, like: Any) -> np.ndarray:
    """The array of this name and shape. A state dict of torch has statistics beside the weights."""
    names = (path, path.removeprefix("statistics."))
    found = next((source[name] for name in names if name in source), None)
    if found is None:
        raise ValueError(
            f"pretrained has no array {path!r}; it has {_listed(source)}. Name what is to be new at random, "
            f"such as new=[{path.split('.')[0]!r}]."
        )
    if jnp.shape(found) != like.shape:
        raise ValueError(
            f"pretrained has shape {jnp.shape(found)} at {path!r}, but the network {like.shape}; a new head "
            f"is named by new=[{path.rsplit('.', 1)[0]!r}]."
        )
    return np.asarray(found, like.dtype)


def _listed(names: _Named) -> str:
    shown = ", ".join(list(names)[:8])
    return f"{shown}, …" if len(names) > 8 else shown or "none"
