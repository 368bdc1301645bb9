"""(1/N) Σᵢ p(y | x, θᵢ), the mixture over particles, as a NumPyro distribution."""

import math
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import entr, logsumexp
from jaxtyping import Array, Float
from numpyro.distributions import CategoricalLogits, Distribution, Independent, MixtureSameFamily, constraints
from numpyro.distributions.discrete import (
    BernoulliLogits,
    BernoulliProbs,
    CategoricalProbs,
    ZeroInflatedProbs,
)
from numpyro.distributions.util import validate_sample

from measureflow.core.pytrees import is_concrete, strong
from measureflow.core.showing import counted
from measureflow.core.validation import positive_number, require_positive, require_representable
from measureflow.networks.censoring import Censored
from measureflow.networks.rescaling import require_rescalable, rescaled, widened
from measureflow.prediction.cumulative import class_probabilities
from measureflow.prediction.quantiles import CLASSES, compiled_tails, middle, mixture_quantile, smallest_tail
from measureflow.prediction.spread import Spread
from measureflow.prediction.units import Units, as_jax_has_it

# What the methods of a mixture return: of JAX, or, in units, of NumPy in double precision. Those that NumPyro
# has, too, promise arrays of JAX there, so their types are left open.
Numbers: TypeAlias = Float[Array | np.ndarray, "..."]


class Mixture(MixtureSameFamily):
    """(1/N) Σᵢ p(y | x, θᵢ): the predictive law, a NumPyro distribution.

    `component_distribution` has the particles as its last batch axis, as in NumPyro. Arguments broadcast
    against `batch_shape`, as NumPyro's do; only `quantile` and `interval` take a list of levels, too, and
    give all of them for every row.

    With `location` and `scale`, numbers or one per target, it is the law of location + scale·Y, for
    components Normal or StudentT: predictions for standardised targets get their units back. Values come in
    and go out in float64, as arrays of NumPy, since float32 counts seconds since 1970 in steps of 128;
    `standardised` is the law of Y itself. Within `jax.jit`, which has float32 only, units that it cannot hold
    raise.

    Transform functions that build a mixture with `jax.vmap`, not the mixture: NumPyro's distributions keep
    the shapes that they were made with.

    Parameters
    ----------
    component_distribution
        The laws that are mixed, particles as the last batch axis.
    location, scale
        Units: the mixture is the law of location + scale·Y. Numbers, or one per target.
    validate_args
        As in NumPyro.
    """

    pytree_data_fields = ("_units",)

    def __init__(
        self,
        component_distribution: Distribution,
        *,
        location: Any = None,
        scale: Any = None,
        validate_args: bool | None = None,
    ):
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
        self._units = None
        if location is not None or scale is not None:
            self._units = Units(location, scale)
            require_rescalable(component_distribution, self._units.location, self._units.scale)
        Distribution.__init__(
            self, tuple(batch_shape), component_distribution.event_shape, validate_args=validate_args
        )

    def in_units(self, units: Units | None) -> "Mixture":
        """The law of location + scale·Z, Z the standardised mixture; of Z itself for None."""
        mixture = Mixture(self._component_distribution)
        mixture._units = units
        return mixture

    @property
    def standardised(self) -> "Mixture":
        """The law of (Y − location)/scale; itself where there are no units."""
        return self if self._units is None else self.in_units(None)

    @property
    def location(self) -> Float[Array | np.ndarray, "..."] | None:
        """What is added to the standardised law, in float64; None where there are no units."""
        return None if self._units is None else self._units.location

    @property
    def scale(self) -> Float[Array | np.ndarray, "..."] | None:
        """What multiplies the standardised law, in float64; None where there are no units."""
        return None if self._units is None else self._units.scale

    @property
    def component_distribution(self) -> Distribution:
        """The laws that are mixed, in the units of y, as float32: where that cannot hold them, it raises."""
        if self._units is None:
            return self._component_distribution
        self._units.require_fit()
        return rescaled(self._component_distribution, self._units.location, self._units.scale)

    @constraints.dependent_property
    def support(self) -> Any:
        """Of the components: units move all numbers to all numbers."""
        return self._component_distribution.support

    @property
    def is_discrete(self) -> bool:
        """Whether they are counts or classes."""
        return self._component_distribution.is_discrete

    def __repr__(self) -> str:
        name = type(self._component_distribution).__name__
        shapes = f"batch shape {self.batch_shape}, event shape {self.event_shape}"
        return f"Mixture({counted(self.mixture_size, 'particle')}, {name}, {shapes})"

    def _over_particles(self, values: Any) -> Float[Array, "..."]:
        shape = self._component_distribution.batch_shape + self.event_shape
        return jnp.mean(jnp.broadcast_to(values, shape), axis=self.mixture_dim)

    def _without(self, what: str, remedy: str) -> NotImplementedError:
        name = type(self._component_distribution).__name__
        return NotImplementedError(
            f"a mixture of {name} with events of shape {self.event_shape} has no {what}; {remedy}"
        )

    def _require_numbers(self, what: str) -> None:
        component = self._component_distribution
        base = component.base_dist if isinstance(component, Independent) else component
        if isinstance(base, CategoricalLogits | CategoricalProbs):
            raise self._without(what, "classes are not numbers: use probs, entropy() or log_prob.")

    def _require_one_target(self, what: str) -> None:
        if self.event_shape:
            raise self._without(what, "use marginals, which has one law for each target.")

    @property
    def mean(self) -> Any:
        """E[Y] = (1/N) Σᵢ mᵢ."""
        self._require_numbers("mean")
        mean = self._over_particles(self._component_distribution.mean)
        return mean if self._units is None else self._units.restored(mean)

    @property
    def variance(self) -> Any:
        """Var[Y] = aleatoric + epistemic variance."""
        law = self.standardised
        variance = law.aleatoric_variance + law.epistemic_variance
        return variance if self._units is None else self._units.times(variance, 2)

    @property
    def aleatoric_variance(self) -> Numbers:
        """(1/N) Σᵢ sᵢ²: the noise that every particle expects; more data would not remove it."""
        self._require_numbers("variance")
        variance = self._over_particles(self._component_distribution.variance)
        return variance if self._units is None else self._units.times(variance, 2)

    @property
    def epistemic_variance(self) -> Numbers:
        """(1/N) Σᵢ (mᵢ − E[Y])²: how far the particles disagree; 0 for one particle."""
        mean = jnp.expand_dims(self.standardised.mean, self.mixture_dim)
        variance = self._over_particles(jnp.square(self._component_distribution.mean - mean))
        return variance if self._units is None else self._units.times(variance, 2)

    @property
    def std(self) -> Numbers:
        """√Var[Y], in the units of y."""
        deviation = jnp.sqrt(self.standardised.variance)
        return deviation if self._units is None else self._units.times(deviation)

    @property
    def stddev(self) -> Numbers:
        """`std`, by PyTorch's name."""
        return self.std

    @property
    def median(self) -> Numbers:
        """The ½-quantile: the smallest y with P(Y ≤ y) ≥ ½."""
        return self.quantile(0.5)

    def sample_with_intermediates(
        self, key: Any, sample_shape: tuple[int, ...] = ()
    ) -> tuple[Any, list[Any]]:
        """Draws, and which particle each is from."""
        if self._units is None:
            return super().sample_with_intermediates(key, sample_shape)
        draws, particles = self.standardised.sample_with_intermediates(key, sample_shape)
        return self._units.restored(draws), particles

    def _array(self, value: Any) -> Any:
        """Numbers and lists as arrays."""
        return value if isinstance(value, jax.Array) else np.asarray(value)

    @validate_sample
    def log_prob(self, value: Any, intermediates: Any = None) -> Float[Array, "..."]:
        """log (1/N) Σᵢ p(value | θᵢ)."""
        del intermediates
        if self._units is None:
            z = jnp.asarray(require_representable("value", self._array(value)))
        else:
            z = as_jax_has_it(self._units.standardised(value))
        log_probs = self._component_distribution.log_prob(jnp.expand_dims(z, self.mixture_dim))
        density = logsumexp(jnp.asarray(log_probs), axis=-1) - math.log(self.mixture_size)
        if self._units is None:
            return density
        volume = jnp.asarray(self._units.log_volume(self.event_shape), density.dtype)
        return density - jnp.broadcast_to(volume, density.shape)

    def cdf(self, value: Any) -> Float[Array, "..."]:
        """P(Y ≤ value) = (1/N) Σᵢ P(Y ≤ value | θᵢ). Classes count in the order of their numbers."""
        self._require_one_target("cdf")
        z = strong(self._array(value)) if self._units is None else self._units.standardised(value)
        return compiled_tails(self._component_distribution, as_jax_has_it(z))[0]

    def quantile(self, q: Any) -> Numbers:
        """The smallest y with P(Y ≤ y) ≥ q, by bisection; integers, too, are returned as floats.

        q = 1 gives ∞ and q = 0 gives −∞, or 0 for counts; for classes, the last and the first class.

        Parameters
        ----------
        q
            A number, or a list of m levels, which gives m numbers for each row: shape (m, rows). Arrays
            with more axes broadcast against `batch_shape`.
        """
        return self.icdf(self._listed(q))

    def icdf(self, q: Any) -> Any:
        """`quantile`, by NumPyro's name and rules: q broadcasts against `batch_shape`."""
        self._require_one_target("quantile")
        if not is_concrete(q):
            q = strong(q)
            return self._at(q, 1 - q)
        levels = np.asarray(q, np.float64)
        if not np.all((levels >= 0) & (levels <= 1)):
            raise ValueError(f"q must be between 0 and 1, got {q}; 0.5 is the median.")
        self._require_tails("q", q, np.minimum(levels, 1 - levels))
        return self._at(strong(levels), strong(1 - levels))

    def _require_tails(self, name: str, given: Any, tails: Any) -> None:
        smallest, law = smallest_tail(self._component_distribution), type(self._component_distribution)
        if np.any((tails > 0) & (tails < smallest)):
            raise ValueError(
                f"{name} must leave no tail, or one of at least {smallest:g}, got {given}: smaller ones of "
                f"{law.__name__} are not known in float32; q = 0 and q = 1 are the ends of the law."
            )

    def interval(self, coverage: Any) -> tuple[Numbers, Numbers]:
        """The central interval (low, high): at most (1 − coverage)/2 of the mass lies on either side.

        A list of m coverages gives m intervals for each row."""
        if not is_concrete(coverage):
            return self.between_tails((1 - strong(self._listed(coverage))) / 2)
        coverage = np.asarray(coverage, np.float64)
        if not np.all((coverage > 0) & (coverage < 1)):
            raise ValueError(f"coverage must be between 0 and 1, got {coverage}; 0.9 is usual.")
        self._require_tails("coverage", coverage, (1 - coverage) / 2)
        return self.between_tails((1 - self._listed(coverage)) / 2)

    def between_tails(self, tail: Any) -> tuple[Numbers, Numbers]:
        """(low, high) with P(Y ≤ low) = P(Y > high) = tail: `interval` of 1 − 2·tail, which may be 1 in
        float32."""
        self._require_one_target("quantile")
        tail = strong(tail)
        return self._at(tail, 1 - tail), self._at(1 - tail, tail)

    def _at(self, p: Float[Array, "..."], c: Float[Array, "..."]) -> Numbers:
        """The p-quantile, where c = 1 − p: each with all its digits."""
        quantile = mixture_quantile(self._component_distribution, p, c)
        return quantile if self._units is None else self._units.restored(quantile)

    def _listed(self, levels: Any) -> Any:
        """A list of levels, as one axis before those of the batch."""
        levels = self._array(levels)
        return levels.reshape(-1, *(1,) * len(self.batch_shape)) if levels.ndim == 1 else levels

    def widened(self, factor: Any) -> "Mixture":
        """The law of m + factor·(Y − m), m the median of Y: `factor` times the standard deviation. A factor
        above 1 widens the law, one below 1 narrows it.

        About the mean, a far tail would move all the rest: where one network of a hundred is 60 deviations
        away from the others, the mean is half a deviation away from these. (Half-way between the quantiles
        ½ ± π/100, m has one value also where half of the networks are far away from the other half.)

        Parameters
        ----------
        factor
            A number, or one for each row (and target); or a `Spread`, whose factor depends on how wide the
            law of a row is.
        """
        require_rescalable(self._component_distribution, 0.0, 1.0)
        law = self.standardised
        centre = jnp.expand_dims(law._middle(), self.mixture_dim)
        if isinstance(factor, Spread):
            numbers = jnp.expand_dims(factor.of(jnp.sqrt(law.variance)), self.mixture_dim)
        else:
            require_positive("factor", factor, "1 leaves the law as it is.")
            numbers = jnp.asarray(factor, centre.dtype)
            if numbers.ndim:
                whole = jnp.broadcast_to(numbers, self.batch_shape + self.event_shape)
                numbers = jnp.expand_dims(whole, self.mixture_dim)
        numbers = jnp.broadcast_to(numbers, centre.shape)
        return Mixture(widened(self._component_distribution, centre, numbers)).in_units(self._units)

    def _middle(self) -> Float[Array, "..."]:
        """That of every row and target; where bounds of a target are known, for each of them."""
        component = self._component_distribution
        if not isinstance(component, Censored):
            return middle(component, self.mixture_dim)
        of_targets = middle(component.base_dist)
        return jnp.broadcast_to(of_targets[..., None], (*of_targets.shape, *self.event_shape))

    @property
    def has_classes(self) -> bool:
        """Whether what is predicted is a class, of which `probs` has the probabilities."""
        return isinstance(self._component_distribution, CLASSES)

    def tempered(self, temperature: Any) -> "Mixture":
        """Classes with every particle's log probabilities divided by a temperature, as a classifier's
        `spread_` has it (Guo et al., 2017): above 1 less sure, below 1 surer.

        Parameters
        ----------
        temperature
            A number > 0; 1 leaves the law as it is.
        """
        divisor = positive_number("temperature", temperature, "1 leaves the law as it is.")
        component: Any = self._component_distribution
        if not self.has_classes:
            raise self._without("temperature", "use widened, for numbers.")
        logits = jnp.asarray(component.logits) / divisor
        return Mixture(BernoulliLogits(logits) if self._is_binary else CategoricalLogits(logits))

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
        return self._over_particles(jnp.sum(entr(class_probabilities(self._component_distribution)), axis=-1))

    def mutual_information(self) -> Float[Array, "..."]:
        """H[Y] − (1/N) Σᵢ H[Y | θᵢ] ≥ 0: the epistemic part, how far the particles disagree."""
        return jnp.maximum(self.entropy() - self.expected_entropy(), 0.0)

    @property
    def _is_binary(self) -> bool:
        return isinstance(self._component_distribution, BernoulliLogits | BernoulliProbs)

    def _class_probabilities(self, what: str) -> Float[Array, "*batch classes"]:
        """P(Y = 0), P(Y = 1), … of the mixture."""
        if not self.has_classes:
            raise self._without(what, "use variance, or marginals where there are several targets.")
        return jnp.mean(class_probabilities(self._component_distribution), axis=-2)

    @property
    def marginals(self) -> "Mixture":
        """The law of each target by itself: a mixture with batch shape (rows, targets)."""
        component = self._component_distribution
        if not self.event_shape:
            return self
        if not isinstance(component, Independent) or component.reinterpreted_batch_ndims != self.event_dim:
            raise self._without("marginals", "only independent targets have marginals; use sample.")
        if self.event_dim != 1:
            raise self._without("marginals", "let the targets have one axis.")
        return Mixture(_with_last_axes_swapped(component.base_dist)).in_units(self._units)


def _with_last_axes_swapped(distribution: Any, after: int = 0) -> Any:
    """The same laws, the last two batch axes swapped, but for so many that come after them."""
    if isinstance(distribution, MixtureSameFamily):
        shares = _with_last_axes_swapped(distribution.mixing_distribution, after)
        parts = _with_last_axes_swapped(distribution.component_distribution, after + 1)
        return MixtureSameFamily(shares, parts)
    parameters = {}
    for name, value in distribution.get_args().items():
        # Logits of classes, for example, have an axis of their own at the end.
        own = distribution.arg_constraints[name].event_dim
        value = jnp.asarray(value)
        value = jnp.broadcast_to(value, distribution.batch_shape + value.shape[value.ndim - own :])
        parameters[name] = jnp.swapaxes(value, -2 - own - after, -1 - own - after)
    if not parameters:
        raise NotImplementedError(
            f"the marginals of {type(distribution).__name__} are not known; let the likelihood return "
            "a distribution with parameters of its own, such as Normal(...).to_event(1)."
        )
    if isinstance(distribution, ZeroInflatedProbs):
        parameters["base_dist"] = _with_last_axes_swapped(distribution.base_dist, after)
    return type(distribution)(**parameters)
