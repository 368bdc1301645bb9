"""From the targets of a table to their likelihood: by name, from one table, or one's own."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from numpyro.distributions import Distribution, Independent, constraints

from measureflow.core.validation import require_count
from measureflow.networks import likelihoods
from measureflow.networks.likelihoods import AbstractLikelihood, distribution_of, is_rescalable
from measureflow.networks.network import Network
from measureflow.networks.validation import require_likelihood
from measureflow.saving.registry import require, saved

# In units of the targets' standard deviation: noise below this is not believed.
_SMALLEST_SCALE = 1e-3

#: By the names that `likelihood=` takes.
LIKELIHOODS: dict[str, Callable[..., AbstractLikelihood]] = {
    "heteroscedastic": functools.partial(likelihoods.Heteroscedastic, smallest_scale=_SMALLEST_SCALE),
    "homoscedastic": functools.partial(likelihoods.Homoscedastic, smallest_scale=_SMALLEST_SCALE),
    "mixture": functools.partial(likelihoods.NormalMixture, smallest_scale=_SMALLEST_SCALE),
    "student_t": functools.partial(likelihoods.StudentT, smallest_scale=_SMALLEST_SCALE),
    "poisson": likelihoods.Poisson,
    "negative_binomial": likelihoods.NegativeBinomial,
}
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
    """likelihood(outputs + shift): a network for counts starts from their mean."""

    likelihood: AbstractLikelihood
    shift: jax.Array

    def __call__(self, outputs: jax.Array) -> Distribution:
        return self.likelihood(outputs + jnp.broadcast_to(self.shift, outputs.shape))


# Whether these change units, which would take a while to find out for every prediction.
_KNOWN = {
    likelihoods.Heteroscedastic: True,
    likelihoods.Homoscedastic: True,
    likelihoods.StudentT: True,
    likelihoods.NormalMixture: True,
    likelihoods.Categorical: False,
    Shifted: False,
}


class Head(NamedTuple):
    """A likelihood, how many outputs of a network it reads, and how many learned constants after them."""

    likelihood: Callable[[jax.Array], Distribution]
    outputs: int
    constants: int = 0


def head_for(given: Any, targets: int, mean: Any) -> Head:
    """The likelihood that `likelihood=` stands for, for so many targets of these means."""
    if isinstance(given, tuple) and len(given) == 2:
        require_likelihood(given[0])
        return Head(given[0], require_count("outputs of likelihood", given[1], 1, "it counts what is read."))
    if isinstance(given, AbstractLikelihood):
        return _head(given, targets, mean)
    if isinstance(given, str) and given in LIKELIHOODS:
        return _head(LIKELIHOODS[given](targets=targets), targets, mean)
    raise ValueError(
        f"likelihood must be one of {', '.join(LIKELIHOODS)}, got {given!r}; or pass one of mf.likelihoods, "
        "or (function, number of outputs that it reads)."
    )


def _head(given: AbstractLikelihood, targets: int, mean: Any) -> Head:
    if given.targets != targets:
        raise ValueError(
            f"likelihood={type(given).__name__}(targets={given.targets}) does not fit y, which has {targets} "
            f"target(s); pass {type(given).__name__}(targets={targets})."
        )
    if isinstance(given, likelihoods.Poisson | likelihoods.NegativeBinomial):
        shift = np.zeros(given.width, np.float32)
        shift[:targets] = np.log(np.maximum(mean, 1e-6))
        return Head(Shifted(given, jnp.asarray(shift)), given.width)
    constants = given.constants * targets
    return Head(given, given.width - constants, constants)


def law_of(network: Network, likelihood: Callable, features: int) -> Distribution:
    """The law of a row's target, without its numbers."""
    theta = jax.eval_shape(network.init, jax.random.key(0))
    row = jax.ShapeDtypeStruct((1, features), jnp.float32)
    return jax.eval_shape(lambda t, x: distribution_of(likelihood, network.apply(t, x)), theta, row)


def changes_units(network: Network, likelihood: Callable, features: int) -> bool:
    """Whether location + scale·Y is of the law's family: then targets are standardised, and the spread of
    the law can be chosen. For other laws, targets are seen as they are."""
    if type(likelihood) in _KNOWN:
        return _KNOWN[type(likelihood)]
    return is_rescalable(law_of(network, likelihood, features))


def require_support(law: Distribution, y: np.ndarray, likelihood: Any) -> None:
    """Targets are what the law is a law of."""
    for support, words in _SUPPORTS:
        bad = ~np.asarray(support(y)) if _of_one_target(law).support is support else np.zeros(1, bool)
        if bad.any():
            raise ValueError(
                f"y must hold {words} for likelihood={likelihood!r}, got {y[bad][0]:g}; use another."
            )
    if _of_one_target(law).support is constraints.nonnegative_integer and y.max() > likelihoods.LARGEST_MEAN:
        raise ValueError(
            f"y holds {y.max():.3g}, but likelihood={likelihood!r} has means up to "
            f"{likelihoods.LARGEST_MEAN:.2g}; count in larger units, such as thousands, or use "
            "likelihood='heteroscedastic'."
        )


def _of_one_target(law: Distribution) -> Any:
    return law.base_dist if isinstance(law, Independent) else law
