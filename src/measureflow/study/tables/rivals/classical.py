"""scikit-learn's boosting and Gaussian process, quantile forests, and two baselines."""

from importlib import import_module
from typing import Any

import numpy as np

from measureflow.study.tables.cases import Case, Prediction, UnsuitedError
from measureflow.study.tables.laws import LEVELS, Gaussian, Quantiles

GAUSSIAN_PROCESS = {"most_rows": 1500, "kernel": "constant * RBF(a length for each input) + white"}


def histogram_boosting(case: Case) -> Prediction:
    """One model for each level, by the defaults: early stopping beyond 10,000 rows."""
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

    train, test = case.one_hot()
    if case.classes:
        classifier = HistGradientBoostingClassifier(random_state=case.seed).fit(train, case.y)
        return lambda: np.asarray(classifier.predict_proba(test), np.float64)
    models = [
        HistGradientBoostingRegressor(loss="quantile", quantile=level, random_state=case.seed).fit(
            train, case.y
        )
        for level in LEVELS
    ]
    return lambda: Quantiles(LEVELS, np.stack([model.predict(test) for model in models], axis=1))


def quantile_forest(case: Case) -> Prediction:
    """A random forest that keeps the targets of its leaves, by the defaults."""
    library = import_module("quantile_forest")
    train, test = case.one_hot()
    forest = library.RandomForestQuantileRegressor(random_state=case.seed, n_jobs=case.threads)
    forest.fit(train, case.y)
    return lambda: Quantiles(LEVELS, np.asarray(forest.predict(test, quantiles=list(LEVELS)), np.float64))


def gaussian_process(case: Case) -> Prediction:
    """One length for each input, and noise; by the marginal likelihood."""
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

    most = GAUSSIAN_PROCESS["most_rows"]
    if len(case.train) > most:
        raise UnsuitedError(f"more than {most} training rows")
    train, test = case.standardised()
    lengths: Any = np.ones(train.shape[1])
    kernel = ConstantKernel() * RBF(lengths, (1e-2, 1e4)) + WhiteKernel(0.1, (1e-8, 1e1))
    process = GaussianProcessRegressor(kernel, normalize_y=True, random_state=case.seed).fit(train, case.y)

    def predict() -> Gaussian:
        mean, deviation = process.predict(test, return_std=True)
        return Gaussian(mean, np.maximum(deviation, np.finfo(np.float64).tiny))

    return predict


def linear(case: Case) -> Prediction:
    """Bayesian ridge regression; for classes logistic regression."""
    from sklearn.linear_model import BayesianRidge, LogisticRegression

    train, test = case.standardised()
    if case.classes:
        classifier = LogisticRegression(max_iter=1000).fit(train, case.y)
        return lambda: np.asarray(classifier.predict_proba(test), np.float64)
    model: Any = BayesianRidge().fit(train, case.y)
    return lambda: Gaussian(*model.predict(test, return_std=True))


def constant(case: Case) -> Prediction:
    """The training targets' Gaussian; for classes their frequencies."""
    rows = len(case.test)
    if case.classes:
        shares = np.bincount(case.y, minlength=case.classes) / len(case.y)
        return lambda: np.tile(shares, (rows, 1))
    mean, deviation = float(case.y.mean()), float(case.y.std())
    return lambda: Gaussian(np.full(rows, mean), np.full(rows, deviation))
