"""Modules of `flax.linen`: θ, variables that are frozen, and those that training changes."""

from typing import Any

import jax
from jaxtyping import PyTree

from measureflow.networks.adapters import Held, LinenApply, LinenInit
from measureflow.networks.stateful import LinenTrained
from measureflow.networks.training import Training


def linen_parts(
    module: Any, inputs: PyTree, prediction: dict | None, training: dict | None, variables: dict | None
) -> tuple[LinenInit, Any, Training | None]:
    """init, apply, and how it is trained."""
    from flax import linen

    if not isinstance(module, linen.Module):
        raise TypeError(
            f"module must be an instance of flax.linen.Module, got {module!r}; for nnx use Network.nnx."
        )
    for name, keywords in (("prediction", prediction), ("training", training), ("variables", variables)):
        if not (keywords is None or isinstance(keywords, dict)):
            raise TypeError(f"{name} must be a dictionary, got {keywords!r}; for example {_EXAMPLES[name]}.")
    held, predicting = Held(module), prediction or {}
    init = LinenInit(held, inputs, Held(predicting))
    others = _others(module, inputs, predicting, training, variables)
    if training is None:
        # None: a module without arrays can be hashed, and jax.jit takes it as it is.
        apply = LinenApply(held, Held(predicting), others or None)
        _tried(apply, jax.eval_shape(init, jax.random.key(0)), inputs)
        return init, apply, None
    trained = LinenTrained(held, Held(predicting), Held(training))
    theta = jax.eval_shape(init, jax.random.key(0))
    _tried(LinenApply(held, Held(predicting), others), theta, inputs)
    _tried(lambda theta, x: trained.trained(theta, others, x, jax.random.key(0)), theta, inputs)
    return init, trained.predicted, Training(trained.trained, others)


_EXAMPLES = {
    "prediction": 'prediction={"train": False}',
    "training": 'training={"train": True}',
    "variables": 'variables={"batch_stats": ...}',
}


def _others(module: Any, inputs: PyTree, prediction: dict, training: dict | None, variables: Any) -> dict:
    """The variables that are no parameters: those given, or those that a trained network starts from."""
    shapes = jax.eval_shape(lambda key: module.init(key, inputs, **prediction), jax.random.key(0))
    expected = {name: part for name, part in shapes.items() if name != "params"}
    if variables is not None:
        given = {name: part for name, part in variables.items() if name != "params"}
        if jax.tree.map(jax.numpy.shape, given) != jax.tree.map(jax.numpy.shape, expected):
            raise ValueError(
                f"variables must be those of the module, got {jax.tree.map(jax.numpy.shape, given)}, "
                f"expected {jax.tree.map(jax.numpy.shape, expected)}; pass the dictionary that training "
                "gave, such as "
                '{"batch_stats": ...}.'
            )
        return jax.tree.map(jax.numpy.asarray, given)
    if expected and training is None:
        raise ValueError(
            f"module has variables besides its parameters, got {', '.join(sorted(expected))}; pass "
            'training={"train": True} and prediction={"train": False}, as the module calls it, so that every '
            "particle carries its own; or variables={...} to freeze them; or use layers without state, such "
            "as GroupNorm or LayerNorm for BatchNorm."
        )
    made = jax.jit(lambda key: module.init(key, inputs, **prediction))(jax.random.key(0)) if expected else {}
    return {name: part for name, part in made.items() if name != "params"}


def _tried(apply: Any, theta: PyTree, inputs: PyTree) -> None:
    """Shapes alone: mistakes of Flax's own, in the words of this library."""
    from flax import errors

    try:
        jax.eval_shape(apply, theta, inputs)
    except errors.InvalidRngError as error:
        raise ValueError(
            f"module draws random numbers when applied, got: {error}; make Dropout deterministic in "
            "prediction, "
            'as in prediction={"train": False} with training={"train": True}, name its keys "dropout", or '
            "leave "
            "it out."
        ) from error
    except errors.ModifyScopeVariableError as error:
        raise ValueError(
            f"module changes its variables when applied in prediction, got: {error}; let it use running "
            "averages "
            'there, as in prediction={"train": False}.'
        ) from error
