"""Rows as a user passes them, by scikit-learn's rules: arrays and sparse matrices of numbers, and frames."""

import warnings
from typing import Any

import numpy as np
from sklearn.base import is_classifier
from sklearn.utils.validation import check_array, check_is_fitted, check_X_y, validate_data

from measureflow.tables.leaks import warn_of_the_target
from measureflow.tables.reading import dense, is_frame, names_of, targets_of
from measureflow.tables.scaling import moments

# Of the sum n of all weights, 1/n is the prior's weight: a number in single precision.
_WEIGHTS = (1e-30, 1e30)


def checked(estimator: Any, X: Any, y: Any, again: bool, **of_targets: Any) -> tuple[Any, np.ndarray]:
    """Rows and targets to fit. A frame stays one where this fit learns its columns, or the one did that it
    goes on from; all else is an array of numbers."""
    y = targets_of(y)
    if (estimator.columns_ is None) if again else not is_frame(X):
        X, y = validate_data(
            estimator, X, y, reset=not again, dtype=np.float64, accept_sparse="csr", **of_targets
        )
        return dense(X), y
    X = _named(estimator, X, again)
    _, y = check_X_y(np.zeros((len(X), 1)), y, estimator=estimator, **of_targets)
    return X, y


def require_fitted(estimator: Any) -> None:
    """Raises scikit-learn's NotFittedError."""
    check_is_fitted(estimator, "particles_")


def numbers(estimator: Any, X: Any) -> np.ndarray:
    """Rows to predict for."""
    if estimator.columns_ is not None:
        return estimator.columns_.numbers(_named(estimator, X, again=True))
    return dense(validate_data(estimator, X, reset=False, dtype=np.float64, accept_sparse="csr"))


def _named(estimator: Any, X: Any, again: bool) -> Any:
    """A frame, or an array of anything in the place of one, with the columns that it had."""
    if not is_frame(X):
        X = check_array(X, dtype="object", ensure_all_finite=False)
        return validate_data(estimator, X, reset=not again, skip_check_array=True)
    # It raises where two are one, which scikit-learn would not explain.
    names = names_of(X)
    if hasattr(X, "iloc"):
        X = validate_data(estimator, X, reset=not again, skip_check_array=True)
        # Of names that are no text scikit-learn knows nothing.
        if again and not hasattr(estimator, "feature_names_in_"):
            _require_names(names, tuple(column.name for column in estimator.columns_.columns))
        return X
    # Not every pair of versions of scikit-learn and polars sees names, which must not go unchecked.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "X does not have valid feature names", UserWarning)
        validate_data(estimator, X, reset=not again, skip_check_array=True)
    if not again:
        estimator.feature_names_in_ = np.array(names, object)
    elif hasattr(estimator, "feature_names_in_"):
        _require_names(names, tuple(estimator.feature_names_in_))
    return X


def _require_names(names: tuple[str, ...], known: tuple[str, ...]) -> None:
    if names != known:
        raise ValueError(
            "The feature names should match those that were passed during fit.\nThey were "
            f"{', '.join(known)}, and are {', '.join(names)}; they must be the same, in the same order."
        )


def scaling(
    estimator: Any, X: np.ndarray, y: np.ndarray, weights: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and scale of every number, and a warning where one of them is the target."""
    columns = estimator.columns_
    names = getattr(estimator, "feature_names_in_", None) if columns is None else columns.names
    mean, scale = moments("X", X, weights, names)
    if columns is None:
        return mean, scale
    warn_of_the_target(columns, X, y, are_labels=is_classifier(estimator))
    return mean, columns.scale(scale)


def require_mass(weights: np.ndarray) -> np.ndarray:
    """Weights of rows, whose sum is a number that can be computed with."""
    if not weights.any():
        raise ValueError("sample_weight is zero for every row; give some rows a weight > 0.")
    with np.errstate(over="ignore"):
        total = weights.sum()
    if not _WEIGHTS[0] < total < _WEIGHTS[1]:
        raise ValueError(
            f"sample_weight sums to {total:.3g}, but a row of weight k counts as k equal rows; divide it by "
            "its mean."
        )
    return weights
