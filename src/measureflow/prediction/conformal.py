"""Intervals whose coverage is guaranteed for any number of rows, whatever the model is worth: split conformal
prediction."""

import math
from typing import Any

import numpy as np
from numpyro.distributions import Distribution

from measureflow.prediction.arguments import components_of, continuous_targets, in_standard_units
from measureflow.prediction.logarithmic import LogMixture
from measureflow.prediction.mixture import Mixture
from measureflow.prediction.quantiles import compiled_tails
from measureflow.prediction.units import as_jax_has_it

_EVERYONE = "all rows"


class Conformal:
    """Intervals of a predictive law, made to hold on rows that the model was not trained on:

        [F⁻¹(t), F⁻¹(1 − t)],   t the k-th largest of the tails tᵢ = min(F, 1 − F)(yᵢ | xᵢ) of n rows,

    with k = ⌈(n + 1) coverage⌉ (Vovk et al., 2005; Chernozhukov, Wüthrich and Zhu, 2021). A new row that
    comes from where these come from lies inside with probability k/(n + 1) ≥ coverage, on average over draws
    of all of them. Where n is so small that k > n, intervals are infinite.

        rows = mf.Conformal(model.predict_dist(X_held_out), y_held_out)
        low, high = rows.interval(model.predict_dist(X_new), coverage=0.9)

    Parameters
    ----------
    distribution
        The law of each held-out row, such as `predict_dist(X)`; continuous, with one target.
    targets
        What came out, one number for each of these rows.
    groups
        A label for each row, such as a column of the table: the guarantee then holds within every group.
    """

    def __init__(self, distribution: Distribution, targets: Any, groups: Any = None):
        y = continuous_targets(distribution, targets)
        tails = _smaller_tails(distribution, y)
        labels = _labels(groups, len(y))
        # The largest first.
        self._tails = {label: np.sort(tails[labels == label])[::-1] for label in np.unique(labels)}
        self._grouped = groups is not None

    def __repr__(self) -> str:
        rows = sum(map(len, self._tails.values()))
        return f"Conformal({rows} rows" + (f" in {len(self._tails)} groups)" if self._grouped else ")")

    def interval(
        self, distribution: Distribution, coverage: float = 0.9, groups: Any = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """The ends of an interval for every row of a predictive law.

        Parameters
        ----------
        distribution
            The law of each new row, from the same model.
        coverage
            The probability that a target lies inside, at least.
        groups
            The label of each row, where held-out rows had any.
        """
        if not 0 < coverage < 1:
            raise ValueError(f"coverage must be between 0 and 1, got {coverage}; 0.9 is usual.")
        if (groups is not None) != self._grouped:
            told = "needs the groups of" if self._grouped else "was made without groups, and takes none for"
            raise ValueError(f"this Conformal {told} new rows; pass groups in both places, or in none.")
        (rows,) = distribution.batch_shape
        labels = _labels(groups, rows)
        if unknown := sorted(set(labels.tolist()) - {np.asarray(label).item() for label in self._tails}):
            raise ValueError(
                f"groups holds {unknown[0]!r}, which no held-out row has, so that nothing is known of it; "
                "hold out rows of every group."
            )
        tails = np.zeros(rows)
        for label, of_group in self._tails.items():
            rank = math.ceil((len(of_group) + 1) * coverage - 1e-9)
            tails[labels == label] = of_group[rank - 1] if rank <= len(of_group) else 0.0
        low, high = _require_mixture(distribution).between_tails(tails.astype(np.float32))
        return np.asarray(low, np.float64), np.asarray(high, np.float64)


def _require_mixture(distribution: Any) -> Any:
    if not isinstance(distribution, Mixture | LogMixture):
        raise TypeError(
            f"distribution must be what predict_dist(X) returns, got {type(distribution).__name__}; pass a "
            "Mixture or a LogMixture."
        )
    return distribution


def _smaller_tails(distribution: Any, y: np.ndarray) -> np.ndarray:
    """min(P(Y ≤ y), P(Y > y)), neither as 1 − the other: a tail of 10⁻⁹ is a number in float32."""
    law, values = _require_mixture(distribution), y
    if isinstance(law, LogMixture):
        if not np.all(values > 0):
            raise ValueError(f"targets must be > 0 for a law of log y, got {values.min():g}.")
        law, values = law.logarithm, np.log(values)
    plain, z, _ = in_standard_units(law, values)
    below, above = compiled_tails(components_of(plain), as_jax_has_it(np.asarray(z)))
    return np.minimum(np.asarray(below, np.float64), np.asarray(above, np.float64))


def _labels(groups: Any, rows: int) -> np.ndarray:
    labels = np.full(rows, _EVERYONE) if groups is None else np.asarray(groups)
    if labels.shape != (rows,):
        raise ValueError(f"groups has shape {labels.shape}, not ({rows},); pass one label for each row.")
    return labels
