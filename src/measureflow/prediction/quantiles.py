"""Tails and quantiles of a mixture with equal weights, whose components are the last batch axis of a law."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array
from numpyro.distributions import CategoricalLogits, Distribution, constraints
from numpyro.distributions.discrete import BernoulliLogits, BernoulliProbs, CategoricalProbs

from measureflow.prediction.cumulative import (
    Numbers,
    class_probabilities,
    keeps_tails,
    quantile_bounds,
    tails,
)

CLASSES = (BernoulliLogits, BernoulliProbs, CategoricalLogits, CategoricalProbs)


def smallest_tail(components: Distribution) -> float:
    """Beyond this, float32 does not know the tails of such a law."""
    return 1e-37 if keeps_tails(components) else 1e-5


def mixture_tails(components: Distribution, value: Numbers) -> tuple[Numbers, Numbers]:
    """P(Y ≤ value) and P(Y > value)."""
    below, above = (jnp.mean(t, axis=-1) for t in tails(components, value[..., None]))
    ends = jnp.isinf(value)
    largest = jnp.where(value > 0, 1.0, 0.0)
    return jnp.where(ends, largest, below), jnp.where(ends, 1 - largest, above)


compiled_tails = eqx.filter_jit(mixture_tails)


@eqx.filter_jit
def mixture_quantile(components: Distribution, p: Numbers, c: Numbers) -> Numbers:
    """The p-quantile, c = 1 − p: of the two, the smaller one is what is looked for."""
    shape = jnp.broadcast_shapes(p.shape, components.batch_shape[:-1])
    p, c = jnp.broadcast_to(p, shape), jnp.broadcast_to(c, shape)
    if isinstance(components, CLASSES):
        return _class_quantile(components, p, c)
    counts = components.is_discrete
    if counts and components.support != constraints.nonnegative_integer:
        raise NotImplementedError(
            f"a mixture of {type(components).__name__} has no quantile; only counts "
            "0, 1, 2, …, classes and continuous laws have one: use sample."
        )
    inside = (p > 0) & (c > 0)
    ends = jnp.where(p == 0, 0.0 if counts else -jnp.inf, jnp.where(c == 0, jnp.inf, jnp.nan))
    p, c = jnp.where(inside, p, 0.5), jnp.where(inside, c, 0.5)
    # The quantile of a mixture lies between the smallest and the largest of its components.
    low, high = quantile_bounds(components, p[..., None], c[..., None])
    low, high = jnp.min(low, axis=-1), jnp.max(high, axis=-1)
    if counts:
        low, high = jnp.full_like(high, -1.0), jnp.ceil(high) + 1
    ends = jnp.where(inside, jnp.nan, ends)
    inside = inside & (jnp.minimum(p, c) >= smallest_tail(components))
    return jnp.where(inside, _bisected(components, p, c, low, high, 1.0 if counts else None), ends)


def _bisected(
    components: Distribution, p: Array, c: Array, low: Array, high: Array, spacing: float | None
) -> Numbers:
    """The smallest y between low and high with P(Y ≤ y) ≥ p: on a grid of that spacing, or all of
    float32."""
    kind = jnp.finfo(p.dtype)
    # Around 0 no interval is narrow for its ends: there, the number of steps decides. Bounds of heavy tails
    # are as far away as 1/p.
    most = 2 * kind.nmant + jnp.ceil(-jnp.log2(jnp.min(jnp.minimum(p, c))))

    def is_wide(low: Array, high: Array) -> Array:
        smallest = kind.eps * jnp.maximum(jnp.abs(low), jnp.abs(high)) if spacing is None else spacing
        return high - low > smallest

    def unfinished(state: tuple[Array, Array, Array]) -> Array:
        steps, low, high = state
        return (steps < most) & jnp.any(is_wide(low, high))

    def halve(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        steps, low, high = state
        middle = low + (high - low) / 2
        middle = middle if spacing is None else jnp.floor(middle)
        below, above = mixture_tails(components, middle)
        enough = jnp.where(p <= c, below >= p, above <= c)
        # What is narrow stays as it is: a row's number must not depend on those beside it.
        goes_on = is_wide(low, high)
        low, high = jnp.where(goes_on & ~enough, middle, low), jnp.where(goes_on & enough, middle, high)
        return steps + 1, low, high

    return jax.lax.while_loop(unfinished, halve, (jnp.zeros((), p.dtype), low, high))[2]


def _class_quantile(components: Distribution, p: Numbers, c: Numbers) -> Numbers:
    """The number of classes with P(Y ≤ k) < p, at most the number of the last class."""
    probabilities = jnp.mean(class_probabilities(components), axis=-2)
    below = jnp.cumsum(probabilities, axis=-1)[..., :-1]
    above = jnp.cumsum(probabilities[..., ::-1], axis=-1)[..., ::-1][..., 1:]
    shape = (*p.shape, below.shape[-1])
    below, above = jnp.broadcast_to(below, shape), jnp.broadcast_to(above, shape)
    missing = jnp.where((p <= c)[..., None], below < p[..., None], above > c[..., None])
    return jnp.where(jnp.isnan(p), p, jnp.sum(missing, axis=-1).astype(p.dtype))
