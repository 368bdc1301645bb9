"""Scores of single rows: what metrics are means of, for comparisons that are paired by row."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from measureflow.prediction.arguments import in_standard_units, is_of_counts, targets_of
from measureflow.prediction.logarithmic import LogMixture, log_mixture_crps
from measureflow.prediction.ranked_probability import (
    as_float64,
    count_crps,
    marginal_cdf,
    normal_components,
    normal_mixture_crps,
    quadrature_crps,
)
from measureflow.prediction.transformed import TransformedMixture


def negative_log_likelihoods(law: Any, targets: Any) -> Float[np.ndarray, " rows"]:
    """−log p(y) of every row."""
    plain, z, scale = in_standard_units(law, targets_of(law, targets))
    return np.log(scale) - as_float64(plain.log_prob(jnp.asarray(z, jnp.float32)))


def ranked_probability_scores(law: Any, targets: Any) -> Float[np.ndarray, " rows"]:
    """∫ (F(x) − 1{x ≥ y})² dx of every row: see `metrics.crps`."""
    values = as_float64(targets_of(law, targets))
    if is_of_counts(law):
        return count_crps(law, values)
    if isinstance(law, LogMixture):
        return log_mixture_crps(law, values)
    plain, z, scale = in_standard_units(law, values)
    components = normal_components(plain, z.shape)
    if components is None:
        return scale * quadrature_crps(plain, z)
    return scale * normal_mixture_crps(*components, z)


def below(law: Any, targets: Any) -> Float[np.ndarray, " rows"]:
    """F(y); for counts the middle of the jump, (F(y − 1) + F(y))/2."""
    values = as_float64(targets_of(law, targets))
    if is_of_counts(law):
        lower = np.where(values > 0, as_float64(law.cdf(np.maximum(values - 1, 0).astype(np.float32))), 0.0)
        return (lower + as_float64(law.cdf(values.astype(np.float32)))) / 2
    if isinstance(law, TransformedMixture):
        law, values = law.inner, law.there(values)
    plain, z, _ = in_standard_units(law, values)
    return np.clip(marginal_cdf(plain, z), 0.0, 1.0)


def brier_scores(
    probabilities: Float[np.ndarray, "rows classes"], labels: Int[np.ndarray, " rows"]
) -> Float[np.ndarray, " rows"]:
    """Σ_c (p_c − 1{c = label})² of every row."""
    return np.sum(np.square(probabilities - np.eye(probabilities.shape[1])[labels]), axis=1)
