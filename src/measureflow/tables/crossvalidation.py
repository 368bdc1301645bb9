"""Cross-validation: the estimators of all splits as one compiled program, and their scores."""

import warnings
from collections.abc import Sequence
from typing import Any, cast

import equinox as eqx
import numpy as np
from scipy.sparse import issparse
from sklearn.base import clone, is_classifier
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import check_cv
from sklearn.utils import check_consistent_length

from measureflow.prediction import metrics
from measureflow.prediction.arguments import require_coverage
from measureflow.tables.ensemble import AbstractEnsemble, Prepared
from measureflow.tables.table import rows_of


def cross_validate(
    estimator: AbstractEnsemble,
    X: Any,
    y: Any,
    *,
    cv: Any = 5,
    sample_weight: Any = None,
    coverage: float = 0.9,
    return_estimator: bool = False,
) -> dict[str, Any]:
    """Fit the estimator on every split, all of them as one compiled program, and score it on what each
    leaves out.

    `cv` is a number of folds, a splitter of scikit-learn, or a list of (train, test) rows. Returned are
    arrays with one number per split: `negative_log_likelihood`, and for regression `root_mean_square_error`,
    `crps`, `coverage` and `width` of central intervals, for classification `accuracy`,
    `brier_score` and `expected_calibration_error`; and `estimator`, the fitted ones, if asked for.
    """
    if not isinstance(estimator, AbstractEnsemble):
        raise TypeError(
            f"estimator must be an EnsembleRegressor or EnsembleClassifier, got {type(estimator).__name__}; "
            "for others, pipelines included, use sklearn.model_selection.cross_validate."
        )
    require_coverage(coverage)
    X, y = (part if hasattr(part, "shape") else np.asarray(part) for part in (X, y))
    X = X.tocsr() if issparse(X) else X
    check_consistent_length(X, y, sample_weight)
    splitter: Any = check_cv(cv, y, classifier=is_classifier(estimator))
    splits = list(splitter.split(X, y))
    trained = [train for train, _ in splits]
    weights = [None if sample_weight is None else np.asarray(sample_weight)[train] for train in trained]
    fitted, prepared = _prepared(estimator, X, y, trained, weights)
    if is_classifier(estimator):
        _require_same_classes(fitted, [np.asarray(rows_of(y, test)) for _, test in splits])
    _fit_together(fitted, prepared)
    rows = [
        _scores(one, rows_of(X, test), np.asarray(rows_of(y, test)), coverage)
        for one, (_, test) in zip(fitted, splits, strict=True)
    ]
    table: dict[str, Any] = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    return table | ({"estimator": fitted} if return_estimator else {})


def fit_splits(
    estimator: AbstractEnsemble, X: Any, y: Any, trained: Sequence[np.ndarray], weights: Sequence[Any]
) -> list[Any]:
    """Estimators fitted to each of some sets of rows, with weights for these or None, all of them as one
    compiled program."""
    fitted, prepared = _prepared(estimator, X, y, trained, weights)
    _fit_together(fitted, prepared)
    return fitted


def _prepared(
    estimator: AbstractEnsemble, X: Any, y: Any, trained: Sequence[np.ndarray], weights: Sequence[Any]
) -> tuple[list[Any], list[Prepared]]:
    fitted = [cast(Any, clone(estimator)) for _ in trained]
    return fitted, [
        one._prepare(rows_of(X, rows), rows_of(y, rows), weight)
        for one, rows, weight in zip(fitted, trained, weights, strict=True)
    ]


def _fit_together(estimators: list[Any], prepared: list[Prepared]) -> None:
    """Those that are alike as one program."""
    complaints = []
    for group, theirs in _alike(estimators, prepared):
        found = group[0]._learn(group, theirs)
        if found.interrupted:
            raise KeyboardInterrupt(f"{found.interrupted} while the splits were fitted: there are no scores.")
        complaints += [one._complaint(found, index) for index, one in enumerate(group)]
    told = [complaint for complaint in complaints if complaint is not None]
    if told:
        warnings.warn(f"{len(told)} of {len(complaints)} fits: {told[0]}", ConvergenceWarning, stacklevel=3)


def _require_same_classes(fitted: list[Any], tested: list[np.ndarray]) -> None:
    """Of all training rows, and of the rows that are to be scored."""
    if len({tuple(one.classes_) for one in fitted}) > 1:
        raise ValueError("cv gives splits whose training rows have different classes; stratify them.")
    for one, labels in zip(fitted, tested, strict=True):
        if not np.isin(labels, one.classes_).all():
            raise ValueError(
                f"cv gives a split whose test rows have classes {np.unique(labels)!r}, but its training rows "
                f"{one.classes_!r}; stratify it."
            )


def _alike(estimators: list[Any], prepared: list[Prepared]) -> list[tuple[list[Any], list[Prepared]]]:
    """In groups that are one program: those whose models have the same networks and likelihoods, and bins in
    the same columns. Counts have likelihoods of their own, which start from the mean of their training rows,
    and frames networks of other widths, where splits see other levels: what test rows hold is not looked
    at."""
    groups: list[tuple[list[Any], list[Prepared]]] = []
    for one, mine in zip(estimators, prepared, strict=True):
        made_of = [(model.loss, model.views) for model in mine.models]
        for group, theirs in groups:
            if eqx.tree_equal([(model.loss, model.views) for model in theirs[0].models], made_of):
                group.append(one)
                theirs.append(mine)
                break
        else:
            groups.append(([one], [mine]))
    return groups


def _scores(estimator: Any, X: Any, y: np.ndarray, coverage: float) -> dict[str, float]:
    distribution = estimator.predict_dist(X)
    if is_classifier(estimator):
        labels, probabilities = np.searchsorted(estimator.classes_, y), estimator.predict_proba(X)
        return {
            "negative_log_likelihood": metrics.negative_log_likelihood(distribution, labels),
            "accuracy": metrics.accuracy(probabilities, labels),
            "brier_score": metrics.brier_score(probabilities, labels),
            "expected_calibration_error": metrics.expected_calibration_error(probabilities, labels),
        }
    low, high, y = *estimator.predict_interval(X, coverage), np.asarray(y, np.float64)
    targets = y.reshape(len(y), -1) if estimator._targets() > 1 else y.reshape(len(y))
    marginals = distribution if estimator._targets() == 1 else distribution.marginals
    scores = {
        "negative_log_likelihood": metrics.negative_log_likelihood(distribution, targets),
        "root_mean_square_error": metrics.root_mean_square_error(distribution, targets),
        "coverage": metrics.coverage(low, high, y),
        "width": metrics.width(low, high),
    }
    return scores | {"crps": metrics.crps(marginals, targets)}
