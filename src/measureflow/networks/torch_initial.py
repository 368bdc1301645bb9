"""Where the parameters of PyTorch's layers start: the laws of their `reset_parameters`."""

import math
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Key


class TorchInit(eqx.Module):
    """U(−b, b) or N(0, s²) for each parameter by name, or where the module has it."""

    laws: tuple[tuple[str, str, float], ...] = eqx.field(static=True)
    shapes: tuple[tuple[int, ...], ...] = eqx.field(static=True)
    fixed: dict[str, Array]
    padding: tuple[tuple[str, int], ...] = eqx.field(static=True)

    @property
    def shapes_by_name(self) -> dict[str, tuple[int, ...]]:
        """Of all parameters."""
        return {name: shape for (name, _, _), shape in zip(self.laws, self.shapes, strict=True)}

    def __call__(self, key: Key[Array, ""]) -> dict[str, Array]:
        found, padding, kind = {}, dict(self.padding), jnp.result_type(float)
        for number, ((name, law, size), shape) in enumerate(zip(self.laws, self.shapes, strict=True)):
            own = jax.random.fold_in(key, number)
            if law == "fixed":
                found[name] = self.fixed[name]
            elif law == "uniform":
                found[name] = jax.random.uniform(own, shape, kind, -size, size)
            else:
                found[name] = size * jax.random.normal(own, shape, kind)
            if name in padding:
                found[name] = found[name].at[padding[name]].set(0.0)
        return found


def initial_laws(module: Any, moving: dict[str, Array], aliases: dict[str, str]) -> tuple:
    """The fields of `TorchInit`. A layer of another class, or a parameter of its own, starts where it is."""
    laws: dict[str, tuple[str, float]] = {}
    padding = {}
    for path, layer in module.named_modules():
        for name, law in _laws(layer):
            full = aliases.get(f"{path}.{name}" if path else name)
            if full in moving:
                laws[full] = law
        if type(layer).__name__ == "Embedding" and layer.padding_idx is not None:
            padding[aliases[f"{path}.weight" if path else "weight"]] = layer.padding_idx
    named = tuple((name, *laws.get(name, ("fixed", 0.0))) for name in moving)
    fixed = {name: moving[name] for name, law, _ in named if law == "fixed"}
    still = tuple((name, row) for name, row in padding.items() if name in moving)
    return named, tuple(value.shape for value in moving.values()), fixed, still


def _laws(layer: Any) -> Iterator[tuple[str, tuple[str, float]]]:
    """Of the parameters of one layer of PyTorch's own. Norms and slopes start at constants, as they are."""
    if not type(layer).__module__.startswith("torch.nn."):
        return
    kind, own = type(layer).__name__, dict(layer.named_parameters(recurse=False))
    if kind in ("Linear", "NonDynamicallyQuantizableLinear") or kind.startswith("Conv"):
        # Kaiming's uniform law with a = √5 is U(±1/√fan-in).
        bound = 1 / math.sqrt(max(own["weight"][0].numel(), 1))
        yield "weight", ("uniform", bound)
        if kind != "NonDynamicallyQuantizableLinear":
            yield "bias", ("uniform", bound)
    elif kind == "Bilinear":
        for name in own:
            yield name, ("uniform", 1 / math.sqrt(layer.in1_features))
    elif kind == "Embedding":
        yield "weight", ("normal", 1.0)
    elif kind == "MultiheadAttention":
        for name in ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"):
            if own.get(name) is not None:
                yield name, ("uniform", math.sqrt(6 / sum(own[name].shape)))
