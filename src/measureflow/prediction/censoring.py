"""Targets that are known by bounds only: above some number, below it, or between two."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp
from jaxtyping import Bool, Float

from measureflow.networks.censoring import knows_masses, log_mass
from measureflow.prediction.arguments import components_of, continuous_targets, in_standard_units
from measureflow.prediction.mixture import Mixture
from measureflow.prediction.quantiles import compiled_tails
from measureflow.prediction.ranked_probability import as_float64
from measureflow.prediction.rowwise import negative_log_likelihoods
from measureflow.prediction.transformed import TransformedMixture
from measureflow.prediction.units import as_jax_has_it

#: What `censoring=` takes where y has two columns of bounds.
INTERVAL = "interval"


def bounds_of(y: Any, censoring: Any) -> Float[np.ndarray, "rows 2"]:
    """(low, high) of every row: equal where y is known, −∞ or ∞ where there is no bound."""
    y = np.asarray(y, np.float64)
    if isinstance(censoring, str):
        if censoring != INTERVAL:
            raise ValueError(
                f"censoring must be -1, 0 or 1 for every row, or {INTERVAL!r}, got {censoring!r}; 1 says "
                "that the target is larger than y, -1 that it is smaller, 0 that it is y."
            )
        return _checked_bounds(y)
    codes = np.asarray(censoring)
    if y.ndim != 1 or codes.shape != y.shape:
        raise ValueError(
            f"censoring has shape {codes.shape} and y {y.shape}; pass one number for each row, or "
            f"censoring={INTERVAL!r} with the bounds as two columns of y."
        )
    if not np.all(np.isin(codes, (-1, 0, 1))):
        wrong = codes[~np.isin(codes, (-1, 0, 1))][0]
        raise ValueError(
            f"censoring must be -1, 0 or 1, got {wrong!r}; 1 says that the target is larger than y (censored "
            "from the right), -1 that it is smaller, 0 that it is y."
        )
    if not np.all(np.isfinite(y)):
        raise ValueError(f"y must be finite, got {y[~np.isfinite(y)][0]}; drop rows without a target.")
    return np.stack([np.where(codes < 0, -np.inf, y), np.where(codes > 0, np.inf, y)], axis=1)


def _checked_bounds(y: np.ndarray) -> Float[np.ndarray, "rows 2"]:
    if y.ndim != 2 or y.shape[1] != 2:
        raise ValueError(
            f"y must have two columns for censoring={INTERVAL!r}, got shape {y.shape}; the first holds lower "
            "bounds, the second upper ones, equal where the target is known, infinite where it has none."
        )
    low, high = y.T
    wrong = ~(low <= high) | (np.isinf(low) & np.isinf(high))
    if np.any(wrong):
        row = int(np.argmax(wrong))
        raise ValueError(
            f"y must hold bounds low ≤ high, one of them finite, for censoring={INTERVAL!r}, got "
            f"{low[row]:g} and {high[row]:g} in row {row}; drop rows of which nothing is known."
        )
    return y


def are_known(bounds: Float[np.ndarray, "rows 2"]) -> Bool[np.ndarray, " rows"]:
    """Whether both bounds are one number."""
    return bounds[:, 0] == bounds[:, 1]


def points_of(bounds: Float[np.ndarray, "rows 2"]) -> Float[np.ndarray, " rows"]:
    """A number for every row, near its target: the middle of its bounds, or the one that there is."""
    low, high = bounds.T
    low, high = np.where(np.isinf(low), high, low), np.where(np.isinf(high), low, high)
    # Half of each: the sum of two numbers may be infinite.
    return np.where(low == high, low, low / 2 + high / 2)


def censored_log_likelihoods(law: Any, bounds: Float[np.ndarray, "rows 2"]) -> Float[np.ndarray, " rows"]:
    """−log p(y) of rows that are known, −log P(low < Y ≤ high) of the others."""
    known, points = are_known(bounds), points_of(bounds)
    continuous_targets(law, points)
    densities = negative_log_likelihoods(law, np.where(known, points, np.median(points)))
    if isinstance(law, TransformedMixture):
        law, bounds = law.inner, law.there(bounds)
    if knows_masses(components_of(in_standard_units(law, bounds[:, 0])[0])):
        return np.where(known, densities, -_log_masses(law, bounds))
    with np.errstate(divide="ignore"):
        tails = [_tails(law, column) for column in bounds.T]
        (below_low, above_low), (below_high, above_high) = tails
        # The smaller of two tails knows more digits of what is between.
        mass = np.where(below_low > 0.5, above_low - above_high, below_high - below_low)
        return np.where(known, densities, -np.log(np.maximum(mass, 0.0)))


def _log_masses(law: Any, bounds: Float[np.ndarray, "rows 2"]) -> Float[np.ndarray, " rows"]:
    """In double precision: far out, and between near bounds, differences of tails have no digits."""
    plain, low, _ = in_standard_units(law, bounds[:, 0])
    high = in_standard_units(law, bounds[:, 1])[1]
    # What is known has no mass.
    low = np.where(low == high, -np.inf, low)
    with jax.enable_x64(True):
        inner = jax.tree.map(lambda leaf: jnp.asarray(as_float64(leaf)), components_of(plain))
        if not isinstance(plain, Mixture):
            return np.asarray(log_mass(inner, jnp.asarray(low), jnp.asarray(high)))
        parts = log_mass(inner, jnp.asarray(low)[:, None], jnp.asarray(high)[:, None])
        shares = jax.nn.log_softmax(jnp.asarray(as_float64(plain.mixing_distribution.logits)), axis=-1)
        return np.asarray(logsumexp(shares + parts, axis=-1))


def _tails(law: Any, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    plain, z, _ = in_standard_units(law, values)
    below, above = compiled_tails(components_of(plain), as_jax_has_it(np.asarray(z)))
    return np.asarray(below, np.float64), np.asarray(above, np.float64)
