"""Tails and quantiles of a mixture with equal weights, whose components are an axis of a law, the last one if
it is not said; and the middle of such a law."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array
from numpyro.distributions import CategoricalLogits, Distribution, Independent, constraints
from numpyro.distributions.discrete import BernoulliLogits, BernoulliProbs, CategoricalProbs

from measureflow.prediction.cumulative import (
    Numbers,
    class_probabilities,
    keeps_tails,
    quantile_bounds,
    tails,
)

# The middle is half-way between the quantiles ½ ± this. No share of particles is near to that level, unless
# they are hundreds: where half of them are on one side of a gap and half on the other, the median may be
# anywhere in it, and rounding decides.
_BESIDE = math.pi / 100

CLASSES = (BernoulliLogits, BernoulliProbs, CategoricalLogits, CategoricalProbs)


def smallest_tail(components: Distribution) -> float:
    """Beyond this, float32 does not know the tails of such a law."""
    return 1e-37 if keeps_tails(components) else 1e-5


def mixture_tails(components: Distribution, value: Numbers, axis: int = -1) -> tuple[Numbers, Numbers]:
    """P(Y ≤ value) and P(Y > value)."""
    below, above = (jnp.mean(t, axis=axis) for t in tails(components, jnp.expand_dims(value, axis)))
    ends = jnp.isinf(value)
    largest = jnp.where(value > 0, 1.0, 0.0)
    return jnp.where(ends, largest, below), jnp.where(ends, 1 - largest, above)


compiled_tails = eqx.filter_jit(mixture_tails)


@eqx.filter_jit
def mixture_quantile(components: Distribution, p: Numbers, c: Numbers, axis: int = -1) -> Numbers:
    """The p-quantile, c = 1 − p: of the two, the smaller one is what is looked for."""
    rows = list(components.batch_shape)
    del rows[axis]
    shape = jnp.broadcast_shapes(p.shape, tuple(rows))
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
    low, high = quantile_bounds(components, jnp.expand_dims(p, axis), jnp.expand_dims(c, axis))
    low, high = jnp.min(low, axis=axis), jnp.max(high, axis=axis)
    if counts:
        low, high = jnp.full_like(high, -1.0), jnp.ceil(high) + 1
    ends = jnp.where(inside, jnp.nan, ends)
    inside = inside & (jnp.minimum(p, c) >= smallest_tail(components))
    return jnp.where(inside, _bisected(components, p, c, low, high, 1.0 if counts else None, axis), ends)


@eqx.filter_jit
def middle(components: Distribution, axis: int = -1) -> Numbers:
    """Half-way between the quantiles ½ ± π/100, of every target: the median, but that it does not jump where
    no mass is."""
    while isinstance(components, Independent):
        components = components.base_dist
    levels = jnp.array([0.5 - _BESIDE, 0.5 + _BESIDE], jnp.asarray(components.mean).dtype)
    return jnp.mean(jax.vmap(lambda p: _with_derivative(components, p, axis))(levels), axis=0)


def _with_derivative(components: Distribution, p: Numbers, axis: int) -> Numbers:
    """The p-quantile q, with the derivative dq = −∂F(q)/density(q), since bisection has none."""
    fixed = jax.tree.map(jax.lax.stop_gradient, components)
    found = mixture_quantile(fixed, p, 1 - p, axis)
    below = mixture_tails(components, found, axis)[0]
    density = jnp.mean(jnp.exp(jnp.asarray(fixed.log_prob(jnp.expand_dims(found, axis)))), axis=axis)
    moves = (jax.lax.stop_gradient(below) - below) / jnp.maximum(density, jnp.finfo(density.dtype).tiny)
    return found + moves


def _bisected(
    components: Distribution,
    p: Array,
    c: Array,
    low: Array,
    high: Array,
    spacing: float | None,
    axis: int,
) -> Numbers:
    """The smallest y between low and high with P(Y ≤ y) ≥ p: on a grid of that spacing, or all of
    float32."""
    kind = jnp.finfo(p.dtype)
    # Around 0 no interval is narrow for its ends: there, the number of steps decides. Bounds of heavy tails
    # are as far away as 1/p.
    most = 2 * kind.nmant + jnp.ceil(-jnp.log2(jnp.min(jnp.minimum(p, c), initial=0.5)))

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
        below, above = mixture_tails(components, middle, axis)
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
