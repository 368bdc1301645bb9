"""A NumPyro model as a problem: its posterior on unconstrained parameters, and the way back."""

import dataclasses
import importlib.util
from collections.abc import Callable
from typing import Any, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, PyTree
from numpyro import handlers
from numpyro.distributions import Distribution, ImproperUniform
from numpyro.infer import init_to_uniform
from numpyro.infer.util import initialize_model, unconstrain_fn
from numpyro.primitives import Messenger

from measureflow.core.pytrees import Parameters, Particles
from measureflow.core.validation import require_count, typed_key
from measureflow.spaces.measures import AbstractMeasure, Flat
from measureflow.statement.divergences import KL
from measureflow.statement.problem import Problem

Potential: TypeAlias = Callable[[Parameters], Float[Array, ""]]

# Stan's beginning: uniform on (−2, 2) in unconstrained space.
_WIDTH = 2.0


class ModelPrior(AbstractMeasure):
    """The law of a model's latent sites before it sees data, in unconstrained coordinates."""

    negative_log_density: Callable[[Parameters], Float[Array, ""]] = eqx.field(static=True)
    draw: Callable[[Key[Array, ""]], Parameters] = eqx.field(static=True)
    one: Parameters

    @property
    def has_full_support(self) -> bool:
        return True

    def sample(self, key: Key[Array, ""], n: int) -> Particles:
        keys = jax.random.split(typed_key(key), require_count("n", n, 1, "it counts the draws."))
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return jax.vmap(self.draw)(keys)

    def log_density(self, theta: Parameters) -> Float[Array, ""]:
        return -self.negative_log_density(theta)

    def template(self) -> Parameters:
        return self.one


@dataclasses.dataclass(frozen=True)
class NumpyroModel:
    """What `from_numpyro` returns: `problem` is the posterior of the model's latent sites in unconstrained
    coordinates, Jacobians included, as `loss` with KL to `prior`, so that τ = 1. The two are apart for other
    problems: `mf.Problem(model.loss, 0.5 * mf.KL(model.prior))` is a power of the posterior, and
    `mf.Empirical(model.prior.sample(key, 1_000))` a reference for `mf.SquaredMMD`. With improper
    sites there is no such law: `prior` is `Flat`, and all of the density is in `loss`."""

    problem: Problem
    loss: "NegativeLogDensity"
    prior: AbstractMeasure
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
    """A potential energy of NumPyro's, less another if there is one."""

    def __init__(self, potential: Potential, less: Potential | None = None):
        self.potential, self.less = potential, less

    def __call__(self, theta: Parameters) -> Float[Array, ""]:
        # NumPyro is not written for strict promotion.
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            value = self.potential(theta)
            return value if self.less is None else value - self.less(theta)


class _Unobserved(Messenger):
    """Observed sites do not count: what is left of a model is its prior."""

    def process_message(self, msg: dict[str, Any]) -> None:
        # NumPyro adds the Jacobians of its transformations as observed sites.
        jacobian = msg["name"].startswith("_") and msg["name"].endswith("_log_det")
        if msg["type"] == "sample" and msg["is_observed"] and not jacobian:
            msg["fn"] = msg["fn"].mask(False)


def from_numpyro(model: Callable[..., Any], *args: Any, **kwargs: Any) -> NumpyroModel:
    """The posterior of a NumPyro model, given its arguments.

    Bounded sites are transformed to the whole line, with their Jacobians. Discrete latent sites are summed
    out where they can be enumerated, which takes the package funsor; else an error names them.
    """
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        latent = _latent(model, args, kwargs)
        _require_continuous(latent)
        posterior, before = (
            initialize_model(
                jax.random.key(0), part, model_args=args, model_kwargs=kwargs, validate_grad=False
            )
            for part in (model, _Unobserved(model))
        )
    template = jax.tree.map(jnp.asarray, posterior.param_info.z)
    if not jax.tree.leaves(template):
        raise ValueError(
            "the model has no latent site to draw: every sample statement is observed; pass the data so that "
            "some are not, or leave obs= out of those."
        )

    def draw(key: Key[Array, ""]) -> Parameters:
        traced = handlers.trace(handlers.seed(model, key)).get_trace(*args, **kwargs)
        return unconstrain_fn(model, args, kwargs, {name: traced[name]["value"] for name in template})

    if any(isinstance(law, ImproperUniform) for law in latent.values()):
        # No law, so nothing to draw from: all of it is a loss.
        loss, prior = NegativeLogDensity(posterior.potential_fn), Flat()
    else:
        loss = NegativeLogDensity(posterior.potential_fn, before.potential_fn)
        prior = ModelPrior(NegativeLogDensity(before.potential_fn), draw, template)
    return NumpyroModel(Problem(loss, KL(prior)), loss, prior, template, posterior.postprocess_fn)


def _latent(model: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> dict[str, Distribution]:
    """The laws of the sites that are not observed."""
    # Improper sites cannot be drawn from, so they are given a value.
    seeded = handlers.substitute(handlers.seed(model, jax.random.key(0)), substitute_fn=init_to_uniform)
    traced = handlers.trace(seeded).get_trace(*args, **kwargs)
    return {
        name: site["fn"]
        for name, site in traced.items()
        if site["type"] == "sample" and not site["is_observed"]
    }


def _require_continuous(latent: dict[str, Distribution]) -> None:
    """No discrete latent sites, but those that can be enumerated."""
    discrete = {name: law for name, law in latent.items() if law.is_discrete}
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
