"""A NumPyro model as a problem: its posterior on unconstrained parameters, and the way back."""

import dataclasses
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, PyTree
from numpyro import handlers
from numpyro.infer import init_to_uniform
from numpyro.infer.util import initialize_model

from measureflow.core.pytrees import Parameters, Particles
from measureflow.core.validation import require_count, typed_key
from measureflow.spaces.measures import Flat
from measureflow.statement.divergences import KL
from measureflow.statement.problem import Problem

# Stan's beginning: uniform on (−2, 2) in unconstrained space.
_WIDTH = 2.0


@dataclasses.dataclass(frozen=True)
class NumpyroModel:
    """What `from_numpyro` returns: `problem` is the posterior of the model's latent sites in unconstrained
    coordinates, Jacobians included, as V with KL(Flat()), so that τ = 1."""

    problem: Problem
    template: Parameters
    to_constrained: Callable[[Parameters], dict[str, Any]]

    def initial(self, key: Key[Array, ""], n: int) -> Particles:
        """n particles, uniform on (−2, 2) in every unconstrained coordinate."""
        n = require_count("n", n, 1, "1,000 is a start.")
        leaves, structure = jax.tree.flatten(self.template)
        keys = jax.random.split(typed_key(key), len(leaves))
        drawn = [
            jax.random.uniform(own, (n, *leaf.shape), leaf.dtype, -_WIDTH, _WIDTH)
            for own, leaf in zip(keys, leaves, strict=True)
        ]
        return jax.tree.unflatten(structure, drawn)

    def constrained(self, particles: PyTree) -> dict[str, Array]:
        """The sites of the model in their own spaces, deterministic ones among them, for particles or draws:
        any leading axes."""
        first, like = (jax.tree.leaves(tree)[0] for tree in (particles, self.template))
        leading = first.shape[: first.ndim - like.ndim]
        flat = jax.tree.map(
            lambda leaf, one: jnp.asarray(leaf).reshape(-1, *one.shape), particles, self.template
        )
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            found = jax.jit(jax.vmap(self.to_constrained))(flat)
        return jax.tree.map(lambda leaf: leaf.reshape(*leading, *leaf.shape[1:]), found)


class NegativeLogDensity:
    """V(z) = −log p(z, data), the model's potential energy."""

    def __init__(self, potential: Callable[[Parameters], Float[Array, ""]]):
        self.potential = potential

    def __call__(self, theta: Parameters) -> Float[Array, ""]:
        # NumPyro is not written for strict promotion.
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return self.potential(theta)


def from_numpyro(model: Callable[..., Any], *args: Any, **kwargs: Any) -> NumpyroModel:
    """The posterior of a NumPyro model, given its arguments.

    Bounded sites are transformed to the whole line, with their Jacobians. Discrete latent sites are summed
    out where they can be enumerated, which takes the package funsor; else an error names them.
    """
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        _require_continuous(model, args, kwargs)
        info = initialize_model(
            jax.random.key(0), model, model_args=args, model_kwargs=kwargs, validate_grad=False
        )
    template = jax.tree.map(jnp.asarray, info.param_info.z)
    if not jax.tree.leaves(template):
        raise ValueError(
            "the model has no latent site to draw: every sample statement is observed; pass the data so that "
            "some are not, or leave obs= out of those."
        )
    problem = Problem(NegativeLogDensity(info.potential_fn), KL(Flat()))
    return NumpyroModel(problem, template, info.postprocess_fn)


def _require_continuous(model: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> None:
    """No discrete latent sites, but those that can be enumerated."""
    # Improper sites cannot be drawn from, so they are given a value.
    seeded = handlers.substitute(handlers.seed(model, jax.random.key(0)), substitute_fn=init_to_uniform)
    traced = handlers.trace(seeded).get_trace(*args, **kwargs)
    discrete = {
        name: site["fn"]
        for name, site in traced.items()
        if site["type"] == "sample" and not site["is_observed"] and site["fn"].is_discrete
    }
    hopeless = sorted(name for name, law in discrete.items() if not law.has_enumerate_support)
    if hopeless:
        raise ValueError(
            f"the sites {', '.join(hopeless)} are discrete and cannot be enumerated, and a flow moves along "
            "gradients; sum them out by hand, or use continuous ones."
        )
    if discrete and importlib.util.find_spec("funsor") is None:
        raise ImportError(
            f"the sites {', '.join(sorted(discrete))} are discrete; summing them out takes the package "
            "funsor: pip install funsor; or sum them out by hand, as MixtureSameFamily of NumPyro does."
        )
