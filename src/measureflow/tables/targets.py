"""From the targets of a table to their likelihood: by name, from one table, or one's own."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from numpyro.distributions import Beta, Distribution, Independent, constraints

from measureflow.core.validation import require_count
from measureflow.networks import likelihoods
from measureflow.networks.likelihoods import AbstractLikelihood, distribution_of
from measureflow.networks.network import Network
from measureflow.networks.priors import outputs_of
from measureflow.networks.rescaling import is_rescalable
from measureflow.networks.validation import require_likelihood
from measureflow.prediction.yeo_johnson import YeoJohnson
from measureflow.saving.registry import require, saved
from measureflow.tables.scaling import moments

# In units of the targets' standard deviation: noise below this is not believed, and noise above this is.
_SMALLEST_SCALE, _LARGEST_FLOOR = 1e-3, 0.5
# Targets are taken to be rounded where so large a share of the rows has a value that another row has, too.
_REPEATED = 0.1
# Where so large a share of whole numbers is smaller than that, they are taken for counts.
_FEWEST_SMALL, _SMALL_COUNT = 0.05, 10
# In standard deviations of z: a law that knows x is no wider than that of all targets. And no component of a
# mixture of laws of log y is wider than about so much, by itself: where targets are of many orders, one that
# is far out and has no weight to speak of would have all of the mean.
_LARGEST_BENT_SCALE, _LARGEST_OF_LOGARITHMS = 1.0, 1.0
# Of the bounds of locations, in the same units: what they are rounded to, and what is beyond all targets.
_STEP = 0.25
# In nats a row: by so much must a law of log y be ahead to be tried.
_CLEARLY = 0.1

#: By the names that `likelihood=` takes.
LIKELIHOODS: dict[str, Any] = {
    "heteroscedastic": likelihoods.Heteroscedastic,
    "homoscedastic": likelihoods.Homoscedastic,
    "mixture": likelihoods.NormalMixture,
    "student_t": likelihoods.StudentT,
    "poisson": likelihoods.Poisson,
    "negative_binomial": likelihoods.NegativeBinomial,
    "zero_inflated": likelihoods.ZeroInflatedNegativeBinomial,
    "hurdle": likelihoods.HurdleNegativeBinomial,
    "gamma": likelihoods.Gamma,
    "beta": likelihoods.Beta,
}
#: Laws of log y: of the numbers > 0, by the law that the network predicts of their logarithm.
OF_LOGARITHMS = {"log_normal": "heteroscedastic", "log_mixture": "mixture"}
#: Laws of Yeo and Johnson's transform of y, in the same way.
OF_POWERS = {"yeo_johnson_normal": "heteroscedastic", "yeo_johnson_mixture": "mixture"}
_NAMES = LIKELIHOODS | OF_LOGARITHMS | OF_POWERS
# What targets must be, where a law is one of some numbers only.
_SUPPORTS = (
    (constraints.nonnegative_integer, "counts 0, 1, 2, …"),
    (constraints.boolean, "0 and 1"),
    (constraints.positive, "numbers > 0"),
    (constraints.nonnegative, "numbers ≥ 0"),
    (constraints.unit_interval, "numbers from 0 to 1"),
)


@saved(check=lambda law: require(law.shift.shape == (law.likelihood.width,), "shift is not of the outputs"))
class Shifted(eqx.Module):
    """likelihood(outputs + shift): a network for counts, or for other numbers ≥ 0, starts from their mean."""

    likelihood: AbstractLikelihood
    shift: jax.Array

    def __call__(self, outputs: jax.Array) -> Distribution:
        return self.likelihood(outputs + jnp.broadcast_to(self.shift, outputs.shape))


# Their first output is the logarithm of a mean, or of its odds: networks start from the mean of all targets.
_OF_MEANS = (
    likelihoods.Poisson,
    likelihoods.NegativeBinomial,
    likelihoods.ZeroInflatedNegativeBinomial,
    likelihoods.HurdleNegativeBinomial,
    likelihoods.Gamma,
    likelihoods.Beta,
)
# Whether these change units, which would take a while to find out for every prediction.
_KNOWN = {
    likelihoods.Heteroscedastic: True,
    likelihoods.Homoscedastic: True,
    likelihoods.StudentT: True,
    likelihoods.NormalMixture: True,
    likelihoods.Categorical: False,
    likelihoods.Ordinal: False,
    Shifted: False,
}


class TargetUnits(NamedTuple):
    """How a network sees targets: z = (y − mean)/scale, of log y if `log`, of a `transform` of y if there is
    one; as they are where it has a law of other numbers. `floor` is the smallest scale of its law, in units
    of z. Where z bends, `bounds` are those of the locations of its law, `ceiling` is its largest scale."""

    mean: np.ndarray
    scale: np.ndarray
    floor: float
    log: bool = False
    transform: YeoJohnson | None = None
    bounds: tuple[float, float] | None = None
    ceiling: float | None = None

    @classmethod
    def of(
        cls, likelihood: Any, y: np.ndarray, weights: np.ndarray, known: np.ndarray | None = None
    ) -> "TargetUnits":
        """Those of a table's targets, for a law that `likelihood=` stands for. What is rounded is seen by
        those that are `known`, where others are bounds."""
        exact = y if known is None else y[known]
        log = is_of_logarithms(likelihood)
        if log:
            _require_one_target(likelihood, y)
            _require_positive(likelihood, y)
            mean, scale = moments("log y", np.log(y), weights)
            # A step of y is one of log y that is as much smaller as y is large: here, at the median.
            floor = smallest_scale(exact, np.median(y) * scale)
            ceiling = (
                _ceiling(float(np.squeeze(scale))) if likelihood == "log_mixture" else _LARGEST_BENT_SCALE
            )
            return cls(mean, scale, floor, log, ceiling=ceiling)._bounded(y)
        mean, scale = moments("y", y, weights)
        if is_of_powers(likelihood):
            _require_one_target(likelihood, y)
            transform = YeoJohnson.learn(y, weights, mean, scale)
            mean, scale = moments("transformed y", transform(y), weights)
            step = scale * np.exp(-transform.log_slope(np.median(y)))
            units = cls(mean, scale, smallest_scale(exact, step), transform=transform)
            return units._replace(ceiling=_LARGEST_BENT_SCALE)._bounded(y)
        return cls(mean, scale, smallest_scale(exact, scale))

    def _bounded(self, y: np.ndarray) -> "TargetUnits":
        """With bounds that hold all targets, rounded outwards: so the splits of a table share a program."""
        z = self.standardised(y)
        low, high = (
            round_(end / _STEP) * _STEP for round_, end in ((math.floor, z.min()), (math.ceil, z.max()))
        )
        return self._replace(bounds=(low - _STEP, high + _STEP))

    @property
    def bends(self) -> bool:
        """Whether z is on no line with y."""
        return self.log or self.transform is not None

    def standardised(self, y: np.ndarray) -> np.ndarray:
        """As the network sees them."""
        with np.errstate(divide="ignore"):
            # Bounds may be infinite, and a lower one is none where it is not above 0.
            values = np.log(np.maximum(y, 0.0)) if self.log else y
            values = values if self.transform is None else self.transform(values)
        return ((values - np.squeeze(self.mean)) / np.squeeze(self.scale)).astype(np.float32)

    def log_volume(self, y: np.ndarray) -> np.ndarray:
        """log |dz/dy| of one target, for every row."""
        volume = np.full(len(y), -np.log(np.squeeze(self.scale)))
        if self.transform is not None:
            return volume + self.transform.log_slope(y)
        return volume - (np.log(y) if self.log else 0.0)


def _ceiling(scale: float) -> float:
    """Of the components of a mixture of laws of log y, in units of its deviation: a power of two, so that the
    splits of a table share a program."""
    return min(2.0 ** round(math.log2(_LARGEST_OF_LOGARITHMS / scale)), _LARGEST_BENT_SCALE)


class Head(NamedTuple):
    """A likelihood, how many outputs of a network it reads, and how many learned constants after them."""

    likelihood: Callable[[jax.Array], Distribution]
    outputs: int
    constants: int = 0


def smallest_scale(y: np.ndarray, scale: np.ndarray) -> float:
    """Noise below this is not believed, in units of the scale of targets, their standard deviation.

    Targets that are rounded to multiples of δ have noise of δ/√(2π) at least: then a Normal of weight w has
    no density above w/δ, which is that of w spread over one step. With less, a narrow Normal at a value that
    many rows have would be rewarded without end, and tell nothing of the number before it was rounded. It is
    rounded up to a power of two: so the splits of a table, whose deviations differ a little, share a program.
    """
    if len(y) == 0:
        return _SMALLEST_SCALE
    columns = (y / scale).reshape(len(y), -1).T
    floor = min(_resolution(column) for column in columns) / math.sqrt(2 * math.pi)
    if floor <= _SMALLEST_SCALE:
        return _SMALLEST_SCALE
    return min(2.0 ** math.ceil(math.log2(floor)), _LARGEST_FLOOR)


def _resolution(column: np.ndarray) -> float:
    """The smallest difference of two values, where values are repeated; else 0."""
    values, counts = np.unique(column, return_counts=True)
    if len(values) < 2 or counts[counts > 1].sum() < _REPEATED * len(column):
        return 0.0
    # Two computations of one number may differ in their last digits.
    digits = max(16 * np.finfo(np.float64).eps * np.max(np.abs(values)), 1e-9 * np.ptp(values))
    gaps = np.diff(values)
    return float(np.min(gaps[gaps > digits], initial=np.ptp(values)))


def head_for(
    given: Any,
    targets: int,
    mean: Any,
    floor: float = _SMALLEST_SCALE,
    bounds: tuple[float, float] | None = None,
    ceiling: float | None = None,
) -> Head:
    """The likelihood that `likelihood=` stands for, for so many targets of these means, with this smallest
    scale where it has one, and with these bounds and this largest scale where targets are bent."""
    if isinstance(given, tuple) and len(given) == 2:
        require_likelihood(given[0])
        return Head(given[0], require_count("outputs of likelihood", given[1], 1, "it counts what is read."))
    if isinstance(given, AbstractLikelihood):
        return _head(given, targets, mean)
    if isinstance(given, str) and given in _NAMES:
        law = LIKELIHOODS[(OF_LOGARITHMS | OF_POWERS).get(given, given)]
        options: dict[str, Any] = {"targets": targets}
        if is_of_logarithms(given) or is_of_powers(given):
            options |= {"largest_scale": ceiling, "bounds": bounds}
        if any(field.name == "smallest_scale" for field in dataclasses.fields(law)):
            options["smallest_scale"] = floor
        return _head(law(**options), targets, mean)
    raise ValueError(
        f"likelihood must be one of {', '.join(_NAMES)}, got {given!r}; or pass one of "
        "mf.likelihoods, or (function, number of outputs that it reads)."
    )


def _head(given: AbstractLikelihood, targets: int, mean: Any) -> Head:
    if given.targets != targets:
        raise ValueError(
            f"likelihood={type(given).__name__}(targets={given.targets}) does not fit y, which has {targets} "
            f"target(s); pass {type(given).__name__}(targets={targets})."
        )
    if isinstance(given, _OF_MEANS):
        shift = np.zeros(given.width, np.float32)
        odds = mean / np.maximum(1 - mean, 1e-6) if isinstance(given, likelihoods.Beta) else mean
        shift[:targets] = np.log(np.maximum(odds, 1e-6))
        return Head(Shifted(given, jnp.asarray(shift)), given.width)
    constants = given.constants * targets
    return Head(given, given.width - constants, constants)


def law_of(network: Network, likelihood: Callable) -> Distribution:
    """The law of a row's target, without its numbers."""
    outputs = jax.ShapeDtypeStruct((1, outputs_of(network) or 1), jnp.float32)
    return jax.eval_shape(lambda o: distribution_of(likelihood, o), outputs)


def changes_units(network: Network, likelihood: Callable) -> bool:
    """Whether location + scale·Y is of the law's family: then targets are standardised, and the spread of
    the law can be chosen. For other laws, targets are seen as they are."""
    if type(likelihood) in _KNOWN:
        return _KNOWN[type(likelihood)]
    return is_rescalable(law_of(network, likelihood))


def is_of_logarithms(likelihood: Any) -> bool:
    """Whether the network predicts log y."""
    return isinstance(likelihood, str) and likelihood in OF_LOGARITHMS


def is_of_powers(likelihood: Any) -> bool:
    """Whether the network predicts Yeo and Johnson's transform of y."""
    return isinstance(likelihood, str) and likelihood in OF_POWERS


def _require_one_target(likelihood: Any, y: np.ndarray) -> None:
    if y.ndim > 1:
        raise ValueError(f"likelihood={likelihood!r} is a law of one target, got y of shape {y.shape}.")


def _require_positive(likelihood: Any, y: np.ndarray) -> None:
    if not np.all(y > 0):
        raise ValueError(
            f"y must hold numbers > 0 for likelihood={likelihood!r}, got {y[~(y > 0)][0]:g}; use "
            "likelihood='mixture'."
        )


def likelihoods_for(y: np.ndarray, weights: np.ndarray | None = None) -> tuple[str, ...]:
    """Laws that held-out rows may choose from, for targets that count for so much, or all the same: a plain
    one; one that bends, of log y where that is much nearer to a Normal law than y is; for counts, where small
    ones are among them, one of counts; and one of shares, where all numbers are between 0 and 1."""
    weights = np.ones(len(y)) if weights is None else weights
    bending = "mixture"
    if y.ndim == 1 and np.all(y > 0) and _gain_of_logarithm(y, weights) > _CLEARLY:
        bending = "log_mixture"
    small = np.mean(weights @ (y < _SMALL_COUNT) / weights.sum())
    counts = np.all((y >= 0) & (y == np.floor(y))) and small > _FEWEST_SMALL
    counted = counts and len(np.unique(y)) > 2 and y.max() < likelihoods.LARGEST_MEAN
    special = ["negative_binomial"] if counted else ["beta"] if np.all((y > 0) & (y < 1)) else []
    return ("heteroscedastic", bending, *special)


def _gain_of_logarithm(y: np.ndarray, weights: np.ndarray) -> float:
    """By how many nats a row a log-normal law is ahead of a Normal one, both fitted to all targets."""
    logarithms = np.log(y)
    if len(np.unique(y)) < 2:
        return 0.0
    (_, of_logarithms), (_, of_numbers) = (moments("y", part, weights) for part in (logarithms, y))
    return float(np.log(of_numbers) - np.log(of_logarithms) - np.average(logarithms, weights=weights))


def require_support(law: Distribution, y: np.ndarray, likelihood: Any) -> None:
    """Targets are what the law is a law of."""
    for support, words in _SUPPORTS:
        bad = ~np.asarray(support(y)) if _of_one_target(law).support is support else np.zeros(1, bool)
        if bad.any():
            raise ValueError(
                f"y must hold {words} for likelihood={likelihood!r}, got {y[bad][0]:g}; use another."
            )
    if isinstance(_of_one_target(law), Beta) and not np.all((y > 0) & (y < 1)):
        raise ValueError(
            f"y must hold numbers between 0 and 1, without the two, for likelihood={likelihood!r}, got "
            f"{y[~((y > 0) & (y < 1))][0]:g}; use likelihood='mixture'."
        )
    if _of_one_target(law).support is constraints.nonnegative_integer and y.max() > likelihoods.LARGEST_MEAN:
        raise ValueError(
            f"y holds {y.max():.3g}, but likelihood={likelihood!r} has means up to "
            f"{likelihoods.LARGEST_MEAN:.2g}; count in larger units, such as thousands, or use "
            "likelihood='heteroscedastic'."
        )


def _of_one_target(law: Distribution) -> Any:
    return law.base_dist if isinstance(law, Independent) else law
