"""From particles to predictions: the mixture (1/N) Σᵢ p(y | x, θᵢ) as a NumPyro distribution."""

import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import entr, logsumexp
from jaxtyping import Array, Float, PyTree
from numpyro.distributions import CategoricalLogits, Distribution, Independent, MixtureSameFamily, constraints
from numpyro.distributions.discrete import BernoulliLogits, BernoulliProbs, CategoricalProbs
from numpyro.distributions.util import validate_sample

from measureflow.core.pytrees import Particles, is_concrete, shown_shapes, strong
from measureflow.core.showing import counted, or_fields, shown
from measureflow.core.validation import (
    positive_number,
    require_leading_axis,
    require_particles,
    require_positive,
)
from measureflow.networks.likelihoods import (
    AbstractLikelihood,
    distribution_of,
    require_likelihood,
    require_network,
    rescaled,
)
from measureflow.networks.network import Network
from measureflow.prediction.cumulative import class_probabilities, cumulative, quantile_bounds
from measureflow.spaces.measures import Empirical

# Rows are evaluated so many at a time. Always: the last digits of a row's result depend on the size of its
# block, and a new size is a new program.
BLOCK = 256

_CLASSES = (BernoulliLogits, BernoulliProbs, CategoricalLogits, CategoricalProbs)


class Mixture(MixtureSameFamily):
    """(1/N) Σᵢ p(y | x, θᵢ): the predictive law, a NumPyro distribution.

    `component_distribution` has the particles as its last batch axis, as in NumPyro. Arguments broadcast
    against `batch_shape`, as NumPyro's do: for m quantiles of every row, pass q of shape (m, 1).

    Transform functions that build a mixture with `jax.vmap`, not the mixture: NumPyro's distributions keep
    the shapes that they were made with.
    """

    def __init__(self, component_distribution: Distribution, *, validate_args: bool | None = None):
        # NumPyro's own constructor refuses components whose support depends on a parameter, as that of
        # Categorical does on the number of classes.
        if not isinstance(component_distribution, Distribution) or not component_distribution.batch_shape:
            raise TypeError(
                f"component_distribution must be a NumPyro distribution with the particles as its last batch "
                f"axis, got {component_distribution!r}; for example Normal(means, scales)."
            )
        *batch_shape, self._mixture_size = component_distribution.batch_shape
        self._mixing_distribution = CategoricalLogits(jnp.zeros(self._mixture_size))
        self._component_distribution = component_distribution
        Distribution.__init__(
            self, tuple(batch_shape), component_distribution.event_shape, validate_args=validate_args
        )

    def __repr__(self) -> str:
        name = type(self.component_distribution).__name__
        shapes = f"batch shape {self.batch_shape}, event shape {self.event_shape}"
        return f"Mixture({counted(self.mixture_size, 'particle')}, {name}, {shapes})"

    def _over_particles(self, values: Any) -> Float[Array, "..."]:
        shape = self.component_distribution.batch_shape + self.event_shape
        return jnp.mean(jnp.broadcast_to(values, shape), axis=self.mixture_dim)

    def _without(self, what: str, remedy: str) -> NotImplementedError:
        name = type(self.component_distribution).__name__
        return NotImplementedError(
            f"a mixture of {name} with events of shape {self.event_shape} has no {what}; {remedy}"
        )

    def _require_numbers(self, what: str) -> None:
        component = self.component_distribution
        base = component.base_dist if isinstance(component, Independent) else component
        if isinstance(base, CategoricalLogits | CategoricalProbs):
            raise self._without(what, "classes are not numbers: use probs, entropy() or log_prob.")

    def _require_one_target(self, what: str) -> None:
        if self.event_shape:
            raise self._without(what, "use marginals, which has one law for each target.")

    @property
    def mean(self) -> Float[Array, "..."]:
        """E[Y] = (1/N) Σᵢ mᵢ."""
        self._require_numbers("mean")
        return self._over_particles(self.component_mean)

    @property
    def variance(self) -> Float[Array, "..."]:
        """Var[Y] = aleatoric + epistemic variance."""
        return self.aleatoric_variance + self.epistemic_variance

    @property
    def aleatoric_variance(self) -> Float[Array, "..."]:
        """(1/N) Σᵢ sᵢ²: the noise that every particle expects; more data would not remove it."""
        self._require_numbers("variance")
        return self._over_particles(self.component_variance)

    @property
    def epistemic_variance(self) -> Float[Array, "..."]:
        """(1/N) Σᵢ (mᵢ − E[Y])²: how far the particles disagree; 0 for one particle."""
        deviation = self.component_mean - jnp.expand_dims(self.mean, self.mixture_dim)
        return self._over_particles(jnp.square(deviation))

    @validate_sample
    def log_prob(self, value: Any, intermediates: Any = None) -> Float[Array, "..."]:
        """log (1/N) Σᵢ p(value | θᵢ)."""
        del intermediates
        value = jnp.expand_dims(jnp.asarray(value), self.mixture_dim)
        log_probs = jnp.asarray(self.component_distribution.log_prob(value))
        return logsumexp(log_probs, axis=-1) - math.log(self.mixture_size)

    def cdf(self, value: Any) -> Float[Array, "..."]:
        """P(Y ≤ value) = (1/N) Σᵢ P(Y ≤ value | θᵢ). Classes count in the order of their numbers."""
        self._require_one_target("cdf")
        return _cdf(self, strong(value))

    def quantile(self, q: Any) -> Float[Array, "..."]:
        """The smallest y with P(Y ≤ y) ≥ q, by bisection; integers, too, are returned as floats.

        q = 1 gives ∞ and q = 0 gives −∞, or 0 for counts; for classes, the last and the first class.
        """
        self._require_one_target("quantile")
        q = strong(q)
        if is_concrete(q) and not np.all((np.asarray(q) >= 0) & (np.asarray(q) <= 1)):
            raise ValueError(f"q must be between 0 and 1, got {q}; 0.5 is the median.")
        return _quantile(self, q)

    def icdf(self, q: Any) -> Float[Array, "..."]:
        """`quantile`, by NumPyro's name."""
        return self.quantile(q)

    def interval(self, coverage: Any) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
        """The central interval (low, high): at most (1 − coverage)/2 of the mass lies on either side."""
        coverage = strong(coverage)
        if is_concrete(coverage) and not np.all((np.asarray(coverage) > 0) & (np.asarray(coverage) < 1)):
            raise ValueError(f"coverage must be between 0 and 1, got {coverage}; 0.9 is usual.")
        return self.quantile((1 - coverage) / 2), self.quantile((1 + coverage) / 2)

    def widened(self, factor: Any) -> "Mixture":
        """The law of m + factor·(Y − m), m = E[Y]: the same mean, and `factor` times the standard deviation.
        A factor above 1 widens the law, one below 1 narrows it."""
        factor = positive_number("factor", factor, "1 leaves the law as it is.")
        mean = jnp.expand_dims(self.mean, self.mixture_dim)
        return Mixture(rescaled(self.component_distribution, (1 - factor) * mean, factor))

    @property
    def probs(self) -> Float[Array, "..."]:
        """(1/N) Σᵢ P(Y = c | θᵢ): with an axis of classes for Categorical, P(Y = 1) for Bernoulli."""
        table = self._class_probabilities("probs")
        return table[..., 1] if self._is_binary else table

    def entropy(self) -> Float[Array, "..."]:
        """H[Y] = −Σ_c p(c) log p(c) of the mixture of classes: the whole uncertainty, in nats."""
        return jnp.sum(entr(self._class_probabilities("entropy")), axis=-1)

    def expected_entropy(self) -> Float[Array, "..."]:
        """(1/N) Σᵢ H[Y | θᵢ]: the aleatoric part of the entropy."""
        self._class_probabilities("expected entropy")
        return self._over_particles(jnp.sum(entr(class_probabilities(self.component_distribution)), axis=-1))

    def mutual_information(self) -> Float[Array, "..."]:
        """H[Y] − (1/N) Σᵢ H[Y | θᵢ] ≥ 0: the epistemic part, how far the particles disagree."""
        return jnp.maximum(self.entropy() - self.expected_entropy(), 0.0)

    @property
    def _is_binary(self) -> bool:
        return isinstance(self.component_distribution, BernoulliLogits | BernoulliProbs)

    def _class_probabilities(self, what: str) -> Float[Array, "*batch classes"]:
        """P(Y = 0), P(Y = 1), … of the mixture."""
        if not isinstance(self.component_distribution, _CLASSES):
            raise self._without(what, "use variance, or marginals where there are several targets.")
        return jnp.mean(class_probabilities(self.component_distribution), axis=-2)

    @property
    def marginals(self) -> "Mixture":
        """The law of each target by itself: a mixture with batch shape (rows, targets)."""
        component = self.component_distribution
        if not self.event_shape:
            return self
        if not isinstance(component, Independent) or component.reinterpreted_batch_ndims != self.event_dim:
            raise self._without("marginals", "only independent targets have marginals; use sample.")
        if self.event_dim != 1:
            raise self._without("marginals", "let the targets have one axis.")
        return Mixture(_with_last_axes_swapped(component.base_dist))


def _with_last_axes_swapped(distribution: Distribution) -> Distribution:
    """The same laws, the last two batch axes swapped."""
    parameters = {}
    for name, value in distribution.get_args().items():
        # Logits of classes, for example, have an axis of their own at the end.
        own = distribution.arg_constraints[name].event_dim
        value = jnp.asarray(value)
        value = jnp.broadcast_to(value, distribution.batch_shape + value.shape[value.ndim - own :])
        parameters[name] = jnp.swapaxes(value, -2 - own, -1 - own)
    if not parameters:
        raise NotImplementedError(
            f"the marginals of {type(distribution).__name__} are not known; let the likelihood return "
            "a distribution with parameters of its own, such as Normal(...).to_event(1)."
        )
    return type(distribution)(**parameters)


@eqx.filter_jit
def _cdf(mixture: Mixture, value: Float[Array, "..."]) -> Float[Array, "..."]:
    below = jnp.mean(cumulative(mixture.component_distribution, value[..., None]), axis=-1)
    return jnp.where(jnp.isinf(value), jnp.where(value > 0, 1.0, 0.0), below)


@eqx.filter_jit
def _quantile(mixture: Mixture, q: Float[Array, "..."]) -> Float[Array, "..."]:
    q = jnp.broadcast_to(q, jnp.broadcast_shapes(q.shape, mixture.batch_shape))
    if isinstance(mixture.component_distribution, _CLASSES):
        return _class_quantile(mixture, q)
    counts = mixture.is_discrete
    if counts and mixture.support != constraints.nonnegative_integer:
        raise NotImplementedError(
            f"a mixture of {type(mixture.component_distribution).__name__} has no quantile; only counts "
            "0, 1, 2, …, classes and continuous laws have one: use sample."
        )
    inside = (q > 0) & (q < 1)
    p = jnp.where(inside, q, 0.5)
    # The quantile of a mixture lies between the smallest and the largest of its components.
    low, high = quantile_bounds(mixture.component_distribution, p[..., None])
    low, high = jnp.min(low, axis=-1), jnp.max(high, axis=-1)
    if counts:
        low, high = jnp.full_like(high, -1.0), jnp.ceil(high) + 1

    resolution = jnp.finfo(p.dtype).eps

    def unfinished(state: tuple[Array, Array, Array]) -> Array:
        steps, low, high = state
        smallest = 1.0 if counts else resolution * jnp.maximum(jnp.abs(low), jnp.abs(high))
        # Around 0 no interval is narrow for its ends: there, the number of steps decides.
        return (steps < 2 * jnp.finfo(p.dtype).nmant) & jnp.any(high - low > smallest)

    def halve(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        steps, low, high = state
        middle = low + (high - low) / 2
        middle = jnp.floor(middle) if counts else middle
        enough = _cdf(mixture, middle) >= p
        return steps + 1, jnp.where(enough, low, middle), jnp.where(enough, middle, high)

    _, _, high = jax.lax.while_loop(unfinished, halve, (jnp.zeros((), jnp.int32), low, high))
    ends = jnp.where(q == 0, 0.0 if counts else -jnp.inf, jnp.where(q == 1, jnp.inf, jnp.nan))
    return jnp.where(inside, high, ends)


def _class_quantile(mixture: Mixture, q: Float[Array, "..."]) -> Float[Array, "..."]:
    """The number of classes with P(Y ≤ c) < q, at most the number of the last class."""
    table = class_probabilities(mixture.component_distribution)
    probabilities = jnp.mean(table, axis=-2)
    total = jnp.cumsum(probabilities, axis=-1)[..., :-1]
    missing = jnp.broadcast_to(total, (*q.shape, total.shape[-1])) < q[..., None]
    return jnp.where(jnp.isnan(q), q, jnp.sum(missing, axis=-1).astype(q.dtype))


def _number_or_one_per_target(name: str) -> Callable[[Any], Float[Array, "..."] | None]:
    def convert(value: Any) -> Float[Array, "..."] | None:
        if value is None:
            return None
        array = strong(value)
        if array.ndim > 1:
            raise ValueError(
                f"{name} must be a number, or one per target, got shape {array.shape}; it is in units of the "
                "targets."
            )
        return array

    return convert


def _spread(value: Any) -> Float[Array, ""] | None:
    return None if value is None else positive_number("spread", value, "None leaves the law as it is.")


def _particles(value: PyTree) -> Particles:
    return require_particles("particles", value)


class Predictive(eqx.Module):
    """x ↦ p(y | x) = (1/N) Σᵢ p(y | f_θᵢ(x)): the mixture over particles.

    The likelihood may be any function outputs ↦ distribution that acts on the last axis of its argument.
    Where targets were standardised, (y − location)/scale, give `location` and `scale`, and predictions are in
    the units of y; these are numbers, or one number per target. `spread` widens the mixture about its mean
    by a factor, as held-out rows may ask for. For a Gaussian measure, as FD-GVI
    returns it, pass `measure.sample(key, n)`.

    Rows are evaluated in blocks of a fixed size, the last one filled up: one program for any number of rows,
    and what is predicted for a row does not depend on how many others are asked for. Within `jax.jit` or
    `jax.vmap`, where shapes are fixed anyway, all rows are one block.
    """

    network: Network
    likelihood: Callable[[Array], Distribution]
    particles: Particles = eqx.field(converter=_particles)
    location: Float[Array, "..."] | None = eqx.field(
        default=None, converter=_number_or_one_per_target("location")
    )
    scale: Float[Array, "..."] | None = eqx.field(default=None, converter=_number_or_one_per_target("scale"))
    spread: Float[Array, ""] | None = eqx.field(default=None, converter=_spread)

    @or_fields
    def __repr__(self) -> str:
        measure, likelihood = Empirical(self.particles), shown(self.likelihood)
        spread = "" if self.spread is None else f", spread {shown(self.spread)}"
        return f"Predictive({measure!r}, likelihood {likelihood}{spread})"

    def __check_init__(self) -> None:
        require_network(self.network)
        require_likelihood(self.likelihood)
        if self.scale is not None:
            require_positive("scale", self.scale, "pass the standard deviation of the targets.")

    def __call__(self, inputs: PyTree) -> Mixture:
        """The mixture for all rows: batch shape (rows,).

        It holds the outputs of all particles for all rows, and NumPyro's methods compile for each number of
        rows; `map` does neither.
        """
        inputs = _rows(inputs)
        if not is_concrete((eqx.filter(self, eqx.is_array), inputs)):
            return self._mixture(_outputs(self.network, self.particles, inputs))
        outputs = _in_blocks(eqx.Partial(_compiled_outputs, self.network, self.particles), inputs)
        return self._mixture(jnp.asarray(outputs))

    def map(self, function: Callable[[Mixture], PyTree], inputs: PyTree) -> PyTree:
        """function(mixture of a block of rows), for all rows: a pytree of NumPy arrays, rows first.

        Only one block is in memory at a time, and network and function are one compiled program. A function
        is part of the program: pass one that is defined once, with its numbers bound by `eqx.Partial`, so
        that a new number compiles nothing:

            def interval(coverage, mixture):
                return mixture.interval(coverage)

            low, high = predictive.map(eqx.Partial(interval, jnp.asarray(0.9)), inputs)
        """
        if not callable(function):
            raise TypeError(f"function must map a Mixture to arrays, got {function!r}; pass a function.")
        inputs = _rows(inputs)
        if not is_concrete((eqx.filter(self, eqx.is_array), inputs)):
            return function(self(inputs))
        return _in_blocks(eqx.Partial(_compiled_map, self, function), inputs)

    def _mixture(self, outputs: Float[Array, "rows n k"]) -> Mixture:
        if not isinstance(self.likelihood, AbstractLikelihood):
            _require_last_axis_only(self.likelihood, outputs)
        distribution = distribution_of(self.likelihood, outputs)
        if self.location is not None or self.scale is not None:
            location = 0.0 if self.location is None else self.location
            distribution = rescaled(distribution, location, 1.0 if self.scale is None else self.scale)
        mixture = Mixture(distribution)
        return mixture if self.spread is None else mixture.widened(self.spread)


def _require_last_axis_only(likelihood: Callable, outputs: Float[Array, "rows n k"]) -> None:
    """Try the likelihood on shapes with no two axes alike: outputs[:, 0] instead of outputs[..., 0] could
    otherwise take the particles for the outputs without any error."""
    width = outputs.shape[-1]
    other = jax.ShapeDtypeStruct((width + 1, width + 2, width), outputs.dtype)
    jax.eval_shape(lambda array: distribution_of(likelihood, array), other)


def _outputs(network: Network, particles: Particles, inputs: PyTree) -> Float[Array, "rows n k"]:
    return jax.vmap(network.apply, in_axes=(0, None), out_axes=1)(particles, inputs)


_compiled_outputs = eqx.filter_jit(_outputs)


@eqx.filter_jit
def _compiled_map(predictive: Predictive, function: Callable, inputs: PyTree) -> PyTree:
    result = function(predictive._mixture(_outputs(predictive.network, predictive.particles, inputs)))
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(result)]
    if not shapes or any(shape[:1] != (BLOCK,) for shape in shapes):
        raise ValueError(
            f"function must return arrays with one row per row of the mixture, got shapes "
            f"{shown_shapes(result)} for {BLOCK} rows; put the rows first, as in mixture.quantile(q).T for q "
            "of shape (m, 1)."
        )
    return result


def _rows(inputs: PyTree) -> PyTree:
    """Inputs, checked: one row for each case."""
    if hasattr(inputs, "shape") and len(inputs.shape) == 1:
        raise ValueError(
            f"inputs must have a row for each case, got shape {tuple(inputs.shape)}; pass x[:, None] for one "
            "feature, or x[None] for one case."
        )
    return require_leading_axis("inputs", inputs, "case")


def _in_blocks(program: Callable[[PyTree], PyTree], inputs: PyTree) -> PyTree[np.ndarray]:
    """program(inputs), block by block; while one is computed, the one before is fetched."""
    inputs = jax.tree.map(np.asarray, inputs)
    rows = len(jax.tree.leaves(inputs)[0])
    results, pending = [], None
    for start in range(0, rows, BLOCK):
        # Copies of the last row, which is a case like others, fill up the last block.
        chosen = np.minimum(np.arange(start, start + BLOCK), rows - 1)
        running = program(jax.tree.map(lambda leaf, chosen=chosen: jnp.asarray(leaf[chosen]), inputs))
        results += [] if pending is None else [jax.device_get(pending)]
        pending = running
    results.append(jax.device_get(pending))
    return jax.tree.map(lambda *blocks: np.concatenate(blocks)[:rows], *results)
