"""Intervals, and sets of classes, whose coverage is guaranteed for any number of rows, whatever the model is
worth: split conformal prediction."""

import math
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Shaped
from numpyro.distributions import Distribution

from measureflow.prediction.arguments import (
    components_of,
    continuous_targets,
    in_standard_units,
    probabilities_of,
    require_coverage,
    targets_of,
)
from measureflow.prediction.mixture import Mixture
from measureflow.prediction.quantiles import compiled_tails
from measureflow.prediction.sets import mass_before
from measureflow.prediction.transformed import TransformedMixture
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

    Of classes, `sets` has those with no more than m of probability before them, when the most probable ones
    come first, m the k-th smallest for the right classes of the n rows (Romano, Sesia and Candès, 2020,
    without their random numbers: a set is never empty, and may hold more than it must).

    Parameters
    ----------
    distribution
        The law of each held-out row, such as `predict_dist(X)`: continuous with one target, or classes.
    targets
        What came out, one number for each of these rows; of classes their numbers, as
        np.searchsorted(model.classes_, y) has them.
    groups
        A label for each row, such as a column of the table: the guarantee then holds within every group.
    """

    def __init__(self, distribution: Distribution, targets: Any, groups: Any = None):
        self._of_classes = _is_of_classes(distribution)
        law: Any = distribution
        scores = _class_scores(law, targets) if self._of_classes else _scores(law, targets)
        labels = _labels(groups, len(scores))
        self._scores = {label: np.sort(scores[labels == label]) for label in np.unique(labels)}
        self._grouped = groups is not None

    def __repr__(self) -> str:
        rows = sum(map(len, self._scores.values()))
        return f"Conformal({rows} rows" + (f" in {len(self._scores)} groups)" if self._grouped else ")")

    def interval(
        self, distribution: Distribution, coverage: float = 0.9, groups: Any = None
    ) -> tuple[Float[np.ndarray, " rows"], Float[np.ndarray, " rows"]]:
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
        self._require_same("interval", distribution, of_classes=False)
        highest = self._highest(distribution, coverage, groups)
        tails = np.where(np.isinf(highest), 0.0, -highest)
        low, high = _require_mixture(distribution).between_tails(tails.astype(np.float32))
        return np.asarray(low, np.float64), np.asarray(high, np.float64)

    def sets(
        self, distribution: Distribution, coverage: float = 0.9, groups: Any = None
    ) -> Bool[np.ndarray, "rows classes"]:
        """Whether each class belongs to the set of every row.

        Parameters
        ----------
        distribution
            The probabilities of each new row, from the same model.
        coverage
            The probability that the right class is in the set, at least.
        groups
            The label of each row, where held-out rows had any.
        """
        self._require_same("sets", distribution, of_classes=True)
        law: Any = distribution
        return mass_before(probabilities_of(law)) <= self._highest(law, coverage, groups)[:, None]

    def _require_same(self, what: str, distribution: Any, of_classes: bool) -> None:
        other = "sets, for classes" if self._of_classes else "interval, for numbers"
        if self._of_classes != of_classes or _is_of_classes(distribution) != of_classes:
            raise TypeError(f"{what} is not for the laws that this Conformal was made with; use {other}.")

    def _highest(self, distribution: Distribution, coverage: float, groups: Any) -> np.ndarray:
        """The score up to which a row counts as inside: ∞ where held-out rows are too few."""
        require_coverage(coverage)
        if (groups is not None) != self._grouped:
            told = "needs the groups of" if self._grouped else "was made without groups, and takes none for"
            raise ValueError(f"this Conformal {told} new rows; pass groups in both places, or in none.")
        (rows,) = distribution.batch_shape
        labels = _labels(groups, rows)
        if unknown := sorted(set(labels.tolist()) - {np.asarray(label).item() for label in self._scores}):
            raise ValueError(
                f"groups holds {unknown[0]!r}, which no held-out row has, so that nothing is known of it; "
                "hold out rows of every group."
            )
        highest = np.full(rows, np.inf)
        for label, of_group in self._scores.items():
            rank = math.ceil((len(of_group) + 1) * coverage - 1e-9)
            if rank <= len(of_group):
                highest[labels == label] = of_group[rank - 1]
        return highest


def _is_of_classes(distribution: Any) -> bool:
    return isinstance(distribution, Mixture) and distribution.has_classes


def _require_mixture(distribution: Any) -> Any:
    if not isinstance(distribution, Mixture | TransformedMixture):
        raise TypeError(
            f"distribution must be what predict_dist(X) returns, got {type(distribution).__name__}; pass a "
            "Mixture, a LogMixture or a YeoJohnsonMixture."
        )
    return distribution


def _scores(distribution: Any, targets: Any) -> Float[np.ndarray, " rows"]:
    """−min(P(Y ≤ y), P(Y > y)), neither as 1 − the other: a tail of 10⁻⁹ is a number in float32."""
    values = continuous_targets(distribution, targets)
    law = _require_mixture(distribution)
    if isinstance(law, TransformedMixture):
        law, transformed = law.inner, law.there(values)
        if not np.all(np.isfinite(transformed)):
            raise ValueError(f"targets must be > 0 for a law of log y, got {values.min():g}.")
        values = transformed
    plain, z, _ = in_standard_units(law, values)
    below, above = compiled_tails(components_of(plain), as_jax_has_it(np.asarray(z)))
    return -np.minimum(np.asarray(below, np.float64), np.asarray(above, np.float64))


def _class_scores(distribution: Mixture, targets: Any) -> Float[np.ndarray, " rows"]:
    """The probability of the classes that come before the right one."""
    numbers, table = targets_of(distribution, targets), probabilities_of(distribution)
    wrong = ~((numbers >= 0) & (numbers < table.shape[1]) & (numbers == np.floor(numbers)))
    if np.any(wrong):
        raise ValueError(
            f"targets must be numbers of classes from 0 to {table.shape[1] - 1}, got {numbers[wrong][0]:g}; "
            "pass np.searchsorted(model.classes_, y)."
        )
    return np.take_along_axis(mass_before(table), numbers.astype(int)[:, None], axis=1)[:, 0]


def _labels(groups: Any, rows: int) -> Shaped[np.ndarray, " rows"]:
    labels = np.full(rows, _EVERYONE) if groups is None else np.asarray(groups)
    if labels.shape != (rows,):
        raise ValueError(f"groups has shape {labels.shape}, not ({rows},); pass one label for each row.")
    return labels
