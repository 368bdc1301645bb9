"""F(y) = P(Y ≤ y), 1 − F(y) and bounds of quantiles for NumPyro distributions, in float32.

NumPyro has no F for Bernoulli and Categorical. Its F of StudentT, Poisson and NegativeBinomial rests on
incomplete gamma and beta functions, which in float32 lose all digits where their parameters are large:
P(Poisson(10⁶) ≤ 10⁶) is off by 0.3. What stands here is within 10⁻⁴ of the truth for all parameters.

Both tails are computed, neither as 1 − the other: a tail of 10⁻⁹ is a number in float32, and 1 − 10⁻⁹ is 1.
"""

import contextlib
import functools
import math
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.nn import sigmoid, softmax
from jax.scipy.special import gammainc, gammaincc, gammaln, ndtr, ndtri, xlogy
from jaxtyping import Array, Float
from numpyro.distributions import (
    Beta,
    Distribution,
    ExpandedDistribution,
    Gamma,
    MixtureSameFamily,
    Normal,
    Poisson,
    StudentT,
)
from numpyro.distributions.conjugate import GammaPoisson
from numpyro.distributions.discrete import (
    BernoulliLogits,
    BernoulliProbs,
    CategoricalLogits,
    CategoricalProbs,
    ZeroInflatedProbs,
)

from measureflow.core.pytrees import strong
from measureflow.networks.counts import HurdleNegativeBinomial2, deviance

Numbers: TypeAlias = Float[Array, "..."]
Pair: TypeAlias = tuple[Numbers, Numbers]

# From here on, sums of so many terms are normal enough for `_normal_tails`.
_NORMAL = 30.0
# The score of `_normal_tails` divides by w, which may be 0; closer to it than this, the limit is used.
_CENTRAL = 0.02
# Terms of a continued fraction, in pairs: enough for parameters up to 6·_NORMAL.
_TERMS = 33


@functools.singledispatch
def tails(distribution: Distribution, value: Numbers) -> Pair:
    """P(Y ≤ value) and P(Y > value); the two arguments broadcast."""
    # NumPyro's formulas for F hold inside the support only; outside, one is on one side of all of it.
    support: Any = distribution.support
    inside, middle = support(value), distribution.mean
    below = jnp.where(inside, distribution.cdf(jnp.where(inside, value, middle)), value > middle)
    return below, 1 - below


def keeps_tails(distribution: Distribution) -> bool:
    """Whether `tails` knows more of a tail than 1 − the other."""
    if isinstance(distribution, MixtureSameFamily):
        distribution = distribution.component_distribution
    return tails.dispatch(type(distribution)) is not tails.dispatch(object)


def cumulative(distribution: Distribution, value: Numbers) -> Numbers:
    """F(value) = P(Y ≤ value)."""
    return tails(distribution, value)[0]


@tails.register
def _normal(distribution: Normal, value: Numbers) -> Pair:
    """Φ(z) and Φ(−z)."""
    loc, scale = map(strong, (distribution.loc, distribution.scale))
    return jnp.asarray(distribution.cdf(value)), ndtr((loc - value) / scale)


@tails.register
def _student(distribution: StudentT, value: Numbers) -> Pair:
    """½ ± ½ sign(z)(1 − I_x(ν/2, ½)), with x = ν/(ν + z²), from whichever end loses no digits."""
    freedom, loc, scale = map(strong, (distribution.df, distribution.loc, distribution.scale))
    z = (value - loc) / scale
    # Beyond √max, z² would be ∞.
    squared = jnp.square(jnp.clip(z, -1e15, 1e15))
    total, half = freedom + squared, jnp.full((), 0.5, z.dtype)
    outside, inside = _beta_tails(freedom / 2, half, freedom / total, squared / total)
    tail = jnp.where(inside < 0.5, 1 - inside, outside) / 2
    return jnp.where(z > 0, 1 - tail, tail), jnp.where(z > 0, tail, 1 - tail)


@tails.register
def _poisson(distribution: Poisson, value: Numbers) -> Pair:
    """Q(k + 1, λ) and P(k + 1, λ), with k = ⌊y⌋."""
    above, below = _gamma_tails(_successes(value) + 1, strong(distribution.rate))
    return jnp.where(value < 0, 0.0, below), jnp.where(value < 0, 1.0, above)


@tails.register
def _negative_binomial(distribution: GammaPoisson, value: Numbers) -> Pair:
    """I_x(α, k + 1) and I_y(k + 1, α), with x = r/(1 + r) = 1 − y for concentration α, rate r, k = ⌊y⌋."""
    rate = strong(distribution.rate)
    x, y = 1 / (1 + 1 / rate), 1 / (1 + rate)
    below, above = _beta_tails(strong(distribution.concentration), _successes(value) + 1, x, y)
    return jnp.where(value < 0, 0.0, below), jnp.where(value < 0, 1.0, above)


@tails.register
def _gamma(distribution: Gamma, value: Numbers) -> Pair:
    """P(α, βy) and Q(α, βy)."""
    scaled = strong(distribution.rate) * jnp.maximum(value, 0.0)
    return _gamma_tails(strong(distribution.concentration), scaled)


@tails.register
def _beta(distribution: Beta, value: Numbers) -> Pair:
    """I_y(a, b) and I_{1−y}(b, a)."""
    a, b = map(strong, (distribution.concentration1, distribution.concentration0))
    x = jnp.clip(value, 0.0, 1.0)
    return _beta_tails(a, b, x, 1 - x)


@tails.register
def _zero_inflated(distribution: ZeroInflatedProbs, value: Numbers) -> Pair:
    """g + (1 − g) P(Y ≤ y) and (1 − g) P(Y > y), with g the probability of a 0 that is no count."""
    below, above = tails(distribution.base_dist, value)
    gate, inside = strong(distribution.gate), value >= 0
    return jnp.where(inside, gate + (1 - gate) * below, 0.0), jnp.where(inside, (1 - gate) * above, 1.0)


@tails.register
def _hurdle(distribution: HurdleNegativeBinomial2, value: Numbers) -> Pair:
    """g + (1 − g) P(1 ≤ Y ≤ y)/P(Y > 0) and (1 − g) P(Y > y)/P(Y > 0), with g the probability of 0."""
    below, above = tails(distribution.whole, value)
    # Of the two parts that counts > 0 are cut into, the smaller one by its own number.
    more = -jnp.expm1(distribution.log_zero)
    lower = jnp.clip((below - jnp.exp(distribution.log_zero)) / more, 0.0, 1.0)
    upper = jnp.clip(above / more, 0.0, 1.0)
    lower, upper = jnp.where(below < 0.5, lower, 1 - upper), jnp.where(below < 0.5, 1 - lower, upper)
    lower, upper = jnp.where(value < 1, 0.0, lower), jnp.where(value < 1, 1.0, upper)
    logits = strong(distribution.gate_logits)
    gate, rest = sigmoid(logits), sigmoid(-logits)
    return jnp.where(value < 0, 0.0, gate + rest * lower), jnp.where(value < 0, 1.0, rest * upper)


@tails.register
def _expanded(distribution: ExpandedDistribution, value: Numbers) -> Pair:
    """Those of the law that is repeated."""
    return tails(distribution.base_dist, value)


@tails.register
def _mixture(distribution: MixtureSameFamily, value: Numbers) -> Pair:
    """Σₖ πₖ P(Yₖ ≤ y) and Σₖ πₖ P(Yₖ > y)."""
    shares = class_probabilities(distribution.mixing_distribution)
    below, above = tails(distribution.component_distribution, value[..., None])
    return jnp.sum(shares * below, axis=-1), jnp.sum(shares * above, axis=-1)


def _successes(value: Numbers) -> Numbers:
    """⌊y⌋, or 0 for the y < 0 that are left to the caller."""
    return jnp.maximum(jnp.floor(value), 0.0)


@functools.singledispatch
def class_probabilities(distribution: Distribution) -> Float[Array, "*batch classes"]:
    """P(Y = 0), P(Y = 1), … for a law of classes."""
    raise NotImplementedError(
        f"{type(distribution).__name__} has no classes; use mean, variance and quantile."
    )


@class_probabilities.register
def _bernoulli(distribution: BernoulliLogits) -> Float[Array, "*batch classes"]:
    # Not 1 − p, which forgets small probabilities of 0.
    logits = jnp.asarray(distribution.logits)
    return jnp.stack([sigmoid(-logits), sigmoid(logits)], axis=-1)


@class_probabilities.register
def _bernoulli_by_probability(distribution: BernoulliProbs) -> Float[Array, "*batch classes"]:
    probability = jnp.asarray(distribution.probs)
    return jnp.stack([1 - probability, probability], axis=-1)


@class_probabilities.register
def _categorical(distribution: CategoricalLogits) -> Float[Array, "*batch classes"]:
    return softmax(jnp.asarray(distribution.logits), axis=-1)


@class_probabilities.register
def _categorical_by_probability(distribution: CategoricalProbs) -> Float[Array, "*batch classes"]:
    return jnp.asarray(distribution.probs)


@tails.register(BernoulliLogits)
@tails.register(BernoulliProbs)
@tails.register(CategoricalLogits)
@tails.register(CategoricalProbs)
def _classes(distribution: Distribution, value: Numbers) -> Pair:
    """Σ_{k ≤ y} P(Y = k) and Σ_{k > y} P(Y = k): classes in the order of their numbers."""
    probabilities = class_probabilities(distribution)
    numbers = jnp.arange(probabilities.shape[-1], dtype=value.dtype).reshape((1,) * value.ndim + (-1,))
    is_below = numbers <= value[..., None]
    below, above = (jnp.sum(jnp.where(s, probabilities, 0.0), axis=-1) for s in (is_below, ~is_below))
    return below, above


@functools.singledispatch
def quantile_bounds(distribution: Distribution, p: Numbers, c: Numbers) -> Pair:
    """Two numbers with the p-quantile between them, for 0 < p < 1 and c = 1 − p: NumPyro's quantile, or,
    where it has none, by Cantelli's inequality with mean m and standard deviation s:

    m − s √(c/p) ≤ quantile ≤ m + s √(p/c).
    """
    # Those of Beta and Gamma need a library that is not required.
    with contextlib.suppress(NotImplementedError, ImportError):
        quantile = jnp.asarray(distribution.icdf(p))
        return quantile, quantile
    mean, deviation = distribution.mean, jnp.sqrt(distribution.variance)
    return mean - deviation * jnp.sqrt(c / p), mean + deviation * jnp.sqrt(p / c)


@quantile_bounds.register
def _normal_quantile(distribution: Normal, p: Numbers, c: Numbers) -> Pair:
    """The quantile itself: loc + scale Φ⁻¹(p)."""
    loc, scale = map(strong, (distribution.loc, distribution.scale))
    quantile = loc + scale * jnp.where(p <= c, ndtri(p), -ndtri(c))
    return quantile, quantile


@quantile_bounds.register
def _student_bounds(distribution: StudentT, p: Numbers, c: Numbers) -> Pair:
    """Between the median and the quantile of Cauchy's law, ∓1/tan(π min(p, c)), whose tails are the heaviest
    of all ν ≥ 1."""
    loc, scale = map(strong, (distribution.loc, distribution.scale))
    farthest = scale * jnp.where(p <= c, -1.0, 1.0) / jnp.tan(math.pi * jnp.minimum(p, c))
    return loc + jnp.minimum(farthest, 0.0), loc + jnp.maximum(farthest, 0.0)


@quantile_bounds.register
def _mixture_bounds(distribution: MixtureSameFamily, p: Numbers, c: Numbers) -> Pair:
    """Between the smallest and the largest of its components."""
    low, high = quantile_bounds(distribution.component_distribution, p[..., None], c[..., None])
    return jnp.min(low, axis=-1), jnp.max(high, axis=-1)


def _gamma_tails(a: Numbers, x: Numbers) -> Pair:
    """P(a, x) and Q(a, x) = 1 − P(a, x): regularised incomplete gamma functions."""
    a, x = jnp.broadcast_arrays(a, x)
    large = a >= _NORMAL
    small, mode = jnp.where(large, 1.0, a), jnp.where(large, a, _NORMAL) - 0.5
    gap = mode - x
    upper, lower = _normal_tails(deviance(gap, mode, x), gap / (mode + x), mode, 1.0)
    return jnp.where(large, lower, gammainc(small, x)), jnp.where(large, upper, gammaincc(small, x))


def _beta_tails(a: Numbers, b: Numbers, x: Numbers, y: Numbers) -> Pair:
    """I_x(a, b) and I_y(b, a) = 1 − I_x(a, b), with x + y = 1: regularised incomplete beta functions."""
    a, b, x, y = jnp.broadcast_arrays(a, b, x, y)
    # I_u(s, t), with s ≤ t.
    swapped = a > b
    s, t = jnp.minimum(a, b), jnp.maximum(a, b)
    u, v = jnp.where(swapped, y, x), jnp.where(swapped, x, y)

    normal = s >= _NORMAL
    skew = ~normal & (t >= jnp.maximum(30.0, 6 * s))
    plain = ~normal & ~skew
    first, last = _beta_by_fraction(jnp.where(plain, s, 1.0), jnp.where(plain, t, 1.0), u, v)
    # All three are computed everywhere: 1 is quick where the result is not used.
    for chosen, tails, unused in ((normal, _beta_by_normal, _NORMAL), (skew, _beta_by_gamma, 1.0)):
        below, above = tails(jnp.where(chosen, s, unused), jnp.where(chosen, t, _NORMAL), u, v)
        first, last = jnp.where(chosen, below, first), jnp.where(chosen, above, last)
    return jnp.where(swapped, last, first), jnp.where(swapped, first, last)


def _beta_by_fraction(a: Numbers, b: Numbers, x: Numbers, y: Numbers) -> Pair:
    """I_x(a, b) by its continued fraction, of the smaller tail; JAX's own needs ten times as long."""
    swapped = x * (a + b + 2) > a + 1
    a, b = jnp.where(swapped, b, a), jnp.where(swapped, a, b)
    x, y = jnp.where(swapped, y, x), jnp.where(swapped, x, y)
    tiny = jnp.finfo(x.dtype).tiny

    def nonzero(number: Numbers) -> Numbers:
        return jnp.where(jnp.abs(number) < tiny, tiny, number)

    def extend(m: Array, state: tuple[Numbers, Numbers, Numbers]) -> tuple[Numbers, Numbers, Numbers]:
        """Two more terms, by Lentz's method."""
        value, c, d = state
        m = m.astype(x.dtype)
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            c, d = nonzero(1 + term / c), 1 / nonzero(1 + term * d)
            value = value * c * d
        return value, c, d

    d = 1 / nonzero(1 - (a + b) * x / (a + 1))
    value, _, _ = jax.lax.fori_loop(1, _TERMS, extend, (d, jnp.ones_like(d), d))
    log_factor = gammaln(a + b) - gammaln(a + 1) - gammaln(b) + xlogy(a, x) + xlogy(b, y)
    tail = jnp.exp(log_factor) * value
    return jnp.where(swapped, 1 - tail, tail), jnp.where(swapped, tail, 1 - tail)


def _beta_by_gamma(
    s: Numbers,
    t: Numbers,
    u: Numbers,
    v: Numbers,
) -> Pair:
    """I_u(s, t) for s ≪ t, to second order in 1/N (Wise, 1950): with N = t + (s − 1)/2, w = −N log(1 − u),

    P(s, w) − (s − 1)(s + 1 + w)/(24 N²) · wˢ e⁻ʷ/Γ(s).
    """
    n = t + (s - 1) / 2
    w = n * -jnp.where(u < 0.5, jnp.log1p(-u), jnp.log(v))
    log_weight = s * jnp.log(jnp.maximum(w, jnp.finfo(w.dtype).tiny)) - w - gammaln(s)
    correction = (s - 1) * (s + 1 + w) / (24 * jnp.square(n)) * jnp.exp(log_weight)
    # Far out, w may be ∞ and e⁻ʷ 0.
    correction = jnp.where(jnp.isfinite(w), correction, 0.0)
    return gammainc(s, w) - correction, gammaincc(s, w) + correction


def _beta_by_normal(a: Numbers, b: Numbers, x: Numbers, y: Numbers) -> Pair:
    """I_x(a, b) for large a ≤ b: the chance of at least a successes in a + b − 1 trials."""
    successes, failures = a - 0.5, b - 0.5
    n = successes + failures
    # The same as n·y − failures, but a ≤ b: the rarer outcome knows it with more digits.
    gap = successes - n * x
    total = deviance(gap, successes, n * x) + deviance(-gap, failures, n * y)
    curvature = successes * failures / n
    ratio = gap / (successes * y + failures * x)
    upper, lower = _normal_tails(total, ratio, curvature, (failures - successes) / n)
    return lower, upper


def _normal_tails(
    total: Numbers,
    ratio: Numbers,
    curvature: Numbers,
    skewness: Numbers | float,
) -> Pair:
    """P(X < x) and P(X > x) of a sum X of many independent terms, x halfway between two of its values, by
    the saddle point (Daniels, 1987; Barndorff-Nielsen, 1986):

        Φ(± (w + log(v/w)/w)),   w = ±√(2·total),   v = 2 sinh(t/2) √curvature,   t = 2 artanh(ratio),

    with `total` deviance, where log(v/w)/w tends to skewness/(6 √curvature) at w = 0.
    """
    w = jnp.sign(ratio) * jnp.sqrt(2 * jnp.maximum(total, 0.0))
    # 2 sinh(artanh r) = 2r/√(1 − r²); ratio is ±1 where x or its mean is 0.
    r = jnp.clip(ratio, -1 + 1e-6, 1 - 1e-6)
    v = 2 * r / jnp.sqrt(1 - jnp.square(r)) * jnp.sqrt(curvature)
    central = jnp.abs(w) < _CENTRAL
    w_or_1, v_or_1 = jnp.where(central, 1.0, w), jnp.where(central, 1.0, v)
    score = w + jnp.where(central, skewness / (6 * jnp.sqrt(curvature)), jnp.log(v_or_1 / w_or_1) / w_or_1)
    return ndtr(score), ndtr(-score)
