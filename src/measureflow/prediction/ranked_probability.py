"""The continuous ranked probability score of NumPyro's laws, row by row: in closed form for mixtures of
Normals, by quadrature for others."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import scipy.special
from jaxtyping import Float
from numpyro.distributions import (
    Distribution,
    ExpandedDistribution,
    Independent,
    MixtureSameFamily,
    Normal,
    StudentT,
)

from measureflow.prediction.cumulative import cumulative

_cumulative = eqx.filter_jit(cumulative)
# A Gauss–Legendre rule on (0, 1), for CRPS without a closed form.
_RULE = np.polynomial.legendre.leggauss(64)
# Counts that are summed over, and those that are looked at in one call.
_MOST_COUNTS, _AT_ONCE = 4096, 64
_NODES, _WEIGHTS = (_RULE[0] + 1) / 2, _RULE[1] / 2


def normal_components(
    distribution: Distribution, shape: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Weights, means and deviations of the Normals that are mixed, particles last; None for other laws."""
    if not isinstance(distribution, MixtureSameFamily):
        normal = _base(distribution)
        if not isinstance(normal, Normal):
            return None
        loc, scale = (np.broadcast_to(as_float64(p), shape)[..., None] for p in (normal.loc, normal.scale))
        return np.ones(1), loc, scale
    normal = _base(distribution.component_distribution)
    if isinstance(normal, MixtureSameFamily):
        return _flattened(distribution, normal, shape)
    if not isinstance(normal, Normal):
        return None
    particles = len(distribution.batch_shape)
    whole = (*shape[:particles], distribution.mixture_size, *shape[particles:])
    loc, scale = (
        np.moveaxis(np.broadcast_to(as_float64(p), whole), particles, -1) for p in (normal.loc, normal.scale)
    )
    weights = as_float64(distribution.mixing_distribution.probs)
    weights = weights / weights.sum(axis=-1, keepdims=True)
    between = (1,) * len(distribution.event_shape)
    return weights.reshape(*weights.shape[:-1], *between, weights.shape[-1]), loc, scale


def _flattened(
    distribution: MixtureSameFamily, component: MixtureSameFamily, shape: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Where each particle is a mixture itself: all Normals of all particles as one mixture."""
    normal = component.component_distribution
    if not isinstance(normal, Normal):
        return None
    particles = len(distribution.batch_shape)
    whole = (*shape[:particles], distribution.mixture_size, *shape[particles:], component.mixture_size)
    of_particles = as_float64(distribution.mixing_distribution.probs)
    of_particles = of_particles / of_particles.sum(axis=-1, keepdims=True)
    of_particles = of_particles.reshape(*of_particles.shape, *(1,) * (len(shape) - particles + 1))
    within = as_float64(component.mixing_distribution.probs)
    within = within / within.sum(axis=-1, keepdims=True)

    def joined(numbers: Any) -> np.ndarray:
        moved = np.moveaxis(np.broadcast_to(as_float64(numbers), whole), particles, -2)
        return moved.reshape(*shape, -1)

    return joined(of_particles * within), joined(normal.loc), joined(normal.scale)


def _expected_absolute(loc: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """A(μ, σ²) = E|X| = 2σφ(μ/σ) + μ(2Φ(μ/σ) − 1)."""
    z = loc / scale
    # Beyond this it is 0, and its square may not be a number.
    density = np.exp(-0.5 * np.square(np.clip(z, -100, 100))) / np.sqrt(2 * np.pi)
    return 2 * scale * density + loc * scipy.special.erf(z / np.sqrt(2))


def normal_mixture_crps(
    weights: np.ndarray, loc: np.ndarray, scale: np.ndarray, targets: np.ndarray
) -> np.ndarray:
    """Σᵢ wᵢ A(y − μᵢ, σᵢ²) − ½ Σᵢⱼ wᵢwⱼ A(μᵢ − μⱼ, σᵢ² + σⱼ²) (Grimit et al., 2006)."""
    weights = np.broadcast_to(weights, loc.shape)
    score = np.sum(weights * _expected_absolute(targets[..., None] - loc, scale), axis=-1)
    # A particle with itself: ½ A(0, 2σ²) = σ/√π.
    score -= np.sum(np.square(weights) * scale, axis=-1) / np.sqrt(np.pi)
    # One particle at a time with those after it, so that memory is rows × particles.
    for i in range(loc.shape[-1] - 1):
        one, others = slice(i, i + 1), slice(i + 1, None)
        spread = np.hypot(scale[..., one], scale[..., others])
        pairs = _expected_absolute(loc[..., one] - loc[..., others], spread)
        score -= np.sum(weights[..., one] * weights[..., others] * pairs, axis=-1)
    return score


def log_normal_mixture_crps(
    weights: np.ndarray, loc: np.ndarray, scale: np.ndarray, targets: np.ndarray
) -> np.ndarray:
    """Σᵢ wᵢ E|Xᵢ − y| − ½ Σᵢⱼ wᵢwⱼ E|Xᵢ − Xⱼ| for Xᵢ = exp(N(μᵢ, σᵢ²)), where for independent X, X′

        E|X − X′| = E[X] erf((μ − μ′ + σ²)/√2d) + E[X′] erf((μ′ − μ + σ′²)/√2d),   d² = σ² + σ′²,

    and a number y > 0 is a law with σ = 0."""
    weights = np.broadcast_to(weights, loc.shape)
    means = np.exp(loc + 0.5 * np.square(scale))

    def apart(one: Any, other: Any) -> np.ndarray:
        (mean, mu, sigma), (mean_, mu_, sigma_) = one, other
        root = np.sqrt(2) * np.hypot(sigma, sigma_)
        first = mean * scipy.special.erf((mu - mu_ + np.square(sigma)) / root)
        return first + mean_ * scipy.special.erf((mu_ - mu + np.square(sigma_)) / root)

    y = targets[..., None]
    score = np.sum(weights * apart((means, loc, scale), (y, np.log(y), np.zeros_like(y))), axis=-1)
    # A law with itself: ½ · 2 E[X] erf(σ/2).
    score -= np.sum(np.square(weights) * means * scipy.special.erf(scale / 2), axis=-1)
    for i in range(loc.shape[-1] - 1):
        one, others = np.s_[..., i : i + 1], np.s_[..., i + 1 :]
        pairs = apart(*((means[part], loc[part], scale[part]) for part in (one, others)))
        score -= np.sum(weights[one] * weights[others] * pairs, axis=-1)
    return score


def count_crps(distribution: Distribution, targets: np.ndarray) -> np.ndarray:
    """Σₖ (F(k) − 1{k ≥ y})² over k = 0, 1, …, to twelve deviations beyond the mean: exact up to 4,096 of
    them, beyond that on as many that lie evenly."""
    # By Cantelli's inequality 1 − F ≤ 1/(1 + c²) at c deviations: what lies beyond adds less than 1/(3c³) of
    # them, and far less for laws of counts, whose tails fall exponentially.
    last = np.max(as_float64(distribution.mean) + 12 * np.sqrt(as_float64(distribution.variance)))
    last = max(float(last), float(np.max(targets, initial=0.0))) + 12
    step = max(int(np.ceil(last / _MOST_COUNTS)), 1)
    counts, total = np.arange(0, last + step, step), np.zeros(targets.shape)
    for some in np.split(counts, range(_AT_ONCE, len(counts), _AT_ONCE)):
        column = some.reshape(-1, *(1,) * targets.ndim)
        below = as_float64(_cumulative(distribution, jnp.asarray(column, jnp.float32)))
        total += step * np.sum(np.square(below - (column >= targets)), axis=0)
    return total


def quadrature_crps(distribution: Distribution, targets: np.ndarray) -> np.ndarray:
    """With any centre m, the tails T±(r) = P(±(X − m) > r), d = |y − m| and the sign ± of y − m,

        CRPS = ∫₀^∞ T₊² dr + ∫₀^∞ T₋² dr + d − 2 ∫₀^d T±(r) dr:

    smooth integrands, whose variable r = s·v/(1 − v) puts 0 < r < ∞ on 0 < v < 1. The last two terms are
    what moving y away from m adds, so that a distant y is as exact as a near one.
    """
    centre, spread = _centre_and_spread(distribution, targets.shape)
    # That of single targets, where several are an event.
    support: Any = getattr(distribution.support, "base_constraint", distribution.support)

    def tail(sign: Any, r: np.ndarray) -> np.ndarray:
        x = centre + sign * r
        below = marginal_cdf(distribution, x)
        # NumPyro's formulas for F hold inside the support only.
        return np.where(support(jnp.asarray(x)), np.where(sign > 0, 1 - below, below), 0.0)

    def integral(function: Callable[[np.ndarray], np.ndarray], end: Any) -> np.ndarray:
        """∫ over 0 < v < end, one node at a time."""
        total = np.zeros(targets.shape)
        for node, weight in zip(_NODES, _WEIGHTS, strict=True):
            v = end * node
            total += weight * end * function(spread * v / (1 - v)) * spread / np.square(1 - v)
        return total

    distance, side = np.abs(targets - centre), np.where(targets < centre, -1.0, 1.0)
    tails = sum(integral(lambda r, sign=sign: np.square(tail(sign, r)), 1.0) for sign in (1.0, -1.0))
    return tails + distance - 2 * integral(lambda r: tail(side, r), distance / (distance + spread))


def _centre_and_spread(distribution: Distribution, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Median and interquartile range, or mean and deviation where there is no quantile function."""
    try:
        quartiles = [
            np.broadcast_to(as_float64(distribution.icdf(jnp.full(shape, level))), shape)
            for level in (0.25, 0.5, 0.75)
        ]
        centre, spread = quartiles[1], quartiles[2] - quartiles[0]
    # NumPyro's quantiles of Beta, Gamma and StudentT need a library that is not required.
    except (NotImplementedError, ImportError):
        try:
            centre, variance = as_float64(distribution.mean), as_float64(distribution.variance)
        except NotImplementedError:
            raise TypeError(
                f"crps of {name_of(distribution)} needs icdf, or mean and variance, which it lacks; "
                "use negative_log_likelihood, or a likelihood such as Normal, StudentT or Laplace."
            ) from None
        centre, spread = np.broadcast_to(centre, shape), np.broadcast_to(np.sqrt(variance), shape)
    if not np.all(np.isfinite(centre) & np.isfinite(spread) & (spread > 0)):
        raise ValueError(
            f"crps of {name_of(distribution)} needs a finite mean and variance, or finite quartiles; check "
            "its parameters for NaN, or give Student tails more than 2 degrees of freedom."
        )
    return centre, spread


def name_of(distribution: Distribution) -> str:
    """What messages call it."""
    return type(distribution).__name__


def _base(distribution: Distribution) -> Distribution:
    """The law of single numbers under what NumPyro wraps around it; axes at the end stay where they are."""
    while isinstance(distribution, Independent | ExpandedDistribution):
        distribution = distribution.base_dist
    return distribution


def marginal_cdf(distribution: Distribution, values: np.ndarray) -> np.ndarray:
    """F of every target by its marginal; also of events, for which NumPyro has none."""
    if isinstance(distribution, MixtureSameFamily):
        below = marginal_cdf(
            distribution.component_distribution, np.expand_dims(values, distribution.mixture_dim)
        )
        weights = as_float64(distribution.mixing_distribution.probs)
        weights = weights.reshape(*weights.shape, *(1,) * len(distribution.event_shape))
        return np.sum(weights * below, axis=distribution.mixture_dim)
    base = _base(distribution)
    if isinstance(base, Normal):
        # In float64, where the difference of two large numbers has more digits.
        return scipy.special.ndtr((values - as_float64(base.loc)) / as_float64(base.scale))
    if isinstance(base, StudentT):
        # NumPyro's is slow, and loses digits in float32 where there are many degrees of freedom.
        df, loc, scale = (as_float64(parameter) for parameter in (base.df, base.loc, base.scale))
        return scipy.special.stdtr(df, (values - loc) / scale)
    try:
        return as_float64(base.cdf(jnp.asarray(values)))
    except NotImplementedError:
        raise TypeError(
            f"this metric needs the cdf of {name_of(base)}, which NumPyro lacks; use "
            "negative_log_likelihood, or a likelihood with a cdf such as Normal, StudentT or Laplace."
        ) from None


def as_float64(array: Any) -> Float[np.ndarray, "..."]:
    """In NumPy's double precision."""
    return np.asarray(array, dtype=np.float64)
