"""What a model must beat to be worth anything: the constant, a linear model, and gradient boosting.

Each predicts a law, too. The law about the mean of a linear model or of boosted trees is Normal, of y or of
log y, whichever has the better density on rows that were held out; its deviation is that of errors on rows
that were held out, in three folds: training errors of trees would promise far too much. All read the same
numbers as the networks.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from sklearn.base import clone
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.linear_model import LogisticRegression, RidgeCV
from sklearn.model_selection import KFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from threadpoolctl import threadpool_limits

from measureflow.study.tables.laws import Gaussian, LogNormal
from measureflow.tables.frames import Columns

NAMES = ("constant", "linear", "gradient boosting")
_FOLDS, _SMALL = 3, 5_000


def predicted(name: str, train: Any, y: np.ndarray, test: Any, classes: np.ndarray | None, seed: int) -> Any:
    """The laws of test rows, for regression, or the probabilities of the classes."""
    # Boosting small tables on many threads is waiting for threads.
    with threadpool_limits(1 if len(train) < _SMALL else None):
        return _predicted(name, train, y, test, classes, seed)


def _predicted(name: str, train: Any, y: np.ndarray, test: Any, classes: np.ndarray | None, seed: int) -> Any:
    columns = Columns.learn(train)
    rows, new = columns.numbers(train), columns.numbers(test)
    if classes is not None:
        return _probabilities(name, rows, y, new, classes, seed)
    candidates: list[tuple[float, Any]] = []
    for log in (False, True) if np.all(y > 0) else (False,):
        values = np.log(y) if log else y
        means, held_out = _means(name, rows, values, new, seed)
        deviation = max(
            float(np.sqrt(np.mean(np.square(values - held_out)))), 1e-6 * float(np.std(values)), 1e-300
        )
        make: Callable[..., Any] = LogNormal if log else Gaussian
        score = make(held_out, np.full(len(y), deviation)).nll(y).mean()
        candidates.append((float(score), make(means, np.full(len(means), deviation))))
    return min(candidates, key=lambda pair: pair[0])[1]


def _means(
    name: str, rows: np.ndarray, y: np.ndarray, new: np.ndarray, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Of new rows, and of each training row by a model that has not seen it."""
    if name == "constant":
        return np.full(len(new), y.mean()), np.full(len(y), y.mean())
    model: Any = HistGradientBoostingRegressor(random_state=seed)
    if name == "linear":
        model = make_pipeline(StandardScaler(), RidgeCV(alphas=np.logspace(-2, 4, 13)))
    held_out = np.empty(len(y))
    for train, out in KFold(min(_FOLDS, len(y)), shuffle=True, random_state=seed).split(rows):
        one: Any = clone(model)
        held_out[out] = one.fit(rows[train], y[train]).predict(rows[out])
    return model.fit(rows, y).predict(new), held_out


def _probabilities(
    name: str, rows: np.ndarray, y: np.ndarray, new: np.ndarray, classes: np.ndarray, seed: int
) -> np.ndarray:
    numbers = np.searchsorted(classes, y)
    # Each class once more than it was seen, so that none is impossible.
    if name == "constant":
        counts = np.bincount(numbers, minlength=len(classes)) + 1.0
        return np.tile(counts / counts.sum(), (len(new), 1))
    model: Any = HistGradientBoostingClassifier(random_state=seed)
    if name == "linear":
        model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    model.fit(rows, numbers)
    table = np.zeros((len(new), len(classes)))
    table[:, model.classes_] = model.predict_proba(new)
    return table
