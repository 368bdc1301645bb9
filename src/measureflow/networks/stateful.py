"""Modules of Equinox and Flax that are trained with statistics of the batch (BatchNorm) and keys (Dropout):
functions of (θ, s, inputs, key) in training, and of (θ, s) and inputs in prediction."""

import inspect
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Key, PyTree

from measureflow.core.statistics import WithStatistics
from measureflow.networks.adapters import Held, axis_name, by_path, in_training
from measureflow.networks.training import as_floats


class LinenTrained(eqx.Module):
    """module.apply({"params": θ, **s}, inputs), in prediction and in training."""

    module: Held = eqx.field(static=True)
    prediction: Held = eqx.field(static=True)
    training: Held = eqx.field(static=True)

    def predicted(self, point: WithStatistics, inputs: PyTree) -> Array:
        variables = {"params": point.parameters, **point.statistics}
        return self.module.value.apply(variables, inputs, **self.prediction.value)

    def trained(
        self, theta: PyTree, statistics: dict, inputs: PyTree, key: Key[Array, ""]
    ) -> tuple[Array, PyTree]:
        return self.module.value.apply(
            {"params": theta, **statistics},
            inputs,
            mutable=list(statistics),
            rngs={"dropout": key},
            **self.training.value,
        )


class EquinoxTrained(eqx.Module):
    """The module with arrays θ and state s on every row, in prediction and in training."""

    rest: PyTree
    state: Any

    def predicted(self, point: WithStatistics, inputs: PyTree) -> Array:
        module = eqx.nn.inference_mode(eqx.combine(point.parameters, self.rest))
        return self._rows(module, point.statistics, inputs, None)[0]

    def trained(
        self, theta: PyTree, statistics: PyTree, inputs: PyTree, key: Key[Array, ""]
    ) -> tuple[Array, PyTree]:
        return self._rows(eqx.combine(theta, self.rest), statistics, inputs, key)

    def _rows(
        self, module: Any, statistics: PyTree, inputs: PyTree, key: Key[Array, ""] | None
    ) -> tuple[Array, PyTree]:
        """All rows, each with a key of its own where the module takes one."""
        takes_key = "key" in inspect.signature(module).parameters
        rows = len(jax.tree.leaves(inputs)[0])
        keys = jax.random.split(key, rows) if takes_key and key is not None else None

        def on_row(row: PyTree, key: Any) -> Any:
            given = {} if key is None else {"key": key}
            states = () if self.state is None else (self._state(statistics),)
            return module(row, *states, **given)

        mapped = (0, None if keys is None else 0)
        if self.state is None:
            return jax.vmap(on_row, in_axes=mapped, axis_name=axis_name(module))(inputs, keys), statistics
        outputs, after = jax.vmap(on_row, in_axes=mapped, out_axes=(0, None), axis_name=axis_name(module))(
            inputs, keys
        )
        return outputs, as_floats(jax.tree.leaves(after))

    def _state(self, statistics: PyTree) -> Any:
        leaves, structure = jax.tree.flatten(self.state)
        return jax.tree.unflatten(
            structure, [new.astype(old.dtype) for new, old in zip(statistics, leaves, strict=True)]
        )


class NnxTrained(eqx.Module):
    """The module with parameters θ and batch statistics s, in prediction and in training."""

    prediction: Any = eqx.field(static=True)
    training: Any = eqx.field(static=True)
    keys: dict
    counts: dict
    rest: dict

    def predicted(self, point: WithStatistics, inputs: PyTree) -> Array:
        keys = jax.tree.map(lambda _: jax.random.key(0), self.keys)
        outputs, changed, _ = self._called(self.prediction, point.parameters, point.statistics, keys, inputs)
        if changed:
            raise ValueError(
                f"the module changes its variables in prediction, after module.eval(), got "
                f"{', '.join(changed)}; give it layers that nnx.Module.eval reaches, such as nnx.BatchNorm "
                "without use_running_average in its call."
            )
        return outputs

    def trained(
        self, theta: dict, statistics: dict, inputs: PyTree, key: Key[Array, ""]
    ) -> tuple[Array, PyTree]:
        leaves, structure = jax.tree.flatten(self.keys)
        keys = jax.tree.unflatten(structure, [jax.random.fold_in(key, i) for i in range(len(leaves))])
        outputs, changed, after = self._called(self.training, theta, statistics, keys, inputs)
        others = [name for name in changed if not name.startswith(("BatchStat", "RngCount"))]
        if others:
            raise ValueError(
                f"the module changes variables in training that are no nnx.BatchStat, got "
                f"{', '.join(others)}; only batch statistics are carried: give them that type."
            )
        return outputs, after

    def _called(
        self, structure: Any, theta: dict, statistics: dict, keys: dict, inputs: PyTree
    ) -> tuple[Array, list[str], dict]:
        """Outputs, the names of variables that the call has changed, and the batch statistics after it."""
        from flax import nnx

        merged = nnx.merge(structure, theta, statistics, keys, self.counts, self.rest)
        outputs = merged(inputs)
        after = [nnx.to_pure_dict(part) for part in nnx.split(merged, *_filters())[1:]]
        named = zip(("BatchStat", "RngCount", ""), (1, 3, 4), strict=True)
        before = {1: statistics, 3: self.counts, 4: self.rest}
        # By identity, not by value: the values may be traced.
        changed = [
            f"{kind}{path}"
            for kind, part in named
            for path, leaf in by_path(before[part]).items()
            if by_path(after[part]).get(path) is not leaf
        ]
        return outputs, changed, after[1]


def _filters() -> tuple:
    from flax import nnx

    return nnx.Param, nnx.BatchStat, nnx.RngKey, nnx.RngCount, ...


@eqx.filter_jit
def equinox_trained(make: Callable, key: Key[Array, ""]) -> tuple[PyTree, EquinoxTrained, PyTree]:
    """The shapes of θ, the functions, and the statistics at the start."""
    made = make(key)
    module, state = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not callable(module) or not (state is None or isinstance(state, eqx.nn.State)):
        raise TypeError(
            "make must return an Equinox module, or the pair (module, state) of eqx.nn.make_with_state, got "
            f"{type(made).__name__}; pass lambda key: eqx.nn.make_with_state(Model)(key)."
        )
    indices, active = in_training(module)
    if indices and state is None:
        raise ValueError(
            "make returns a module with state, got an eqx.nn.StateIndex; return the pair (module, state) of "
            "eqx.nn.make_with_state."
        )
    if not active:
        raise ValueError(
            "training=True was given for a module without active Dropout or BatchNorm; leave training out, "
            "or return the module without eqx.nn.inference_mode."
        )
    theta, rest = eqx.partition(module, eqx.is_inexact_array)
    start = () if state is None else as_floats(jax.tree.map(jnp.asarray, jax.tree.leaves(state)))
    return jax.eval_shape(lambda: theta), EquinoxTrained(rest, state), start


@eqx.filter_jit
def nnx_trained(make: Callable, key: Key[Array, ""]) -> tuple[NnxTrained, PyTree]:
    """The functions, and the statistics at the start."""
    from flax import nnx

    module = make(nnx.Rngs(key))
    if not isinstance(module, nnx.Module):
        raise TypeError(
            f"make must return a flax.nnx.Module, got {module!r}; for flax.linen use Network.linen."
        )
    module.eval()
    prediction = nnx.split(module, *_filters())[0]
    module.train()
    training, _, statistics, keys, counts, rest = nnx.split(module, *_filters())
    trained = NnxTrained(prediction, training, *map(nnx.to_pure_dict, (keys, counts, rest)))
    return trained, nnx.to_pure_dict(statistics)
