"""One process of `tabular_fit`: fits diabetes twice, with two seeds, and prints seconds and test NLL as JSON.

    python -P benchmarks/peers/fit.py WHO SETTINGS

WHO is bde or measureflow, SETTINGS a JSON object of its estimator's arguments. This file imports no other of
the benchmarks: it also runs in bde's environment.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.special import logsumexp
from scipy.stats import norm
from sklearn.datasets import load_diabetes
from sklearn.model_selection import train_test_split

# From the split, a seed and the estimator's settings: the seconds of its fit, and its NLL of the test rows.
Fit = Callable[[list[np.ndarray], int, dict[str, Any]], tuple[float, float]]


def split() -> list[np.ndarray]:
    """Training and test rows, training and test targets."""
    return train_test_split(*load_diabetes(return_X_y=True), random_state=0)


def measureflow(parts: list[np.ndarray], seed: int, settings: dict[str, Any]) -> tuple[float, float]:
    import measureflow as mf

    train_x, test_x, train_y, test_y = parts
    began = time.perf_counter()
    estimator = mf.EnsembleRegressor(random_state=seed, **settings).fit(train_x, train_y)
    taken = time.perf_counter() - began
    return taken, float(mf.metrics.negative_log_likelihood(estimator.predict_dist(test_x), test_y))


def bde(parts: list[np.ndarray], seed: int, settings: dict[str, Any]) -> tuple[float, float]:
    from bde import BdeRegressor
    from bde.loss import GaussianNLL

    train_x, test_x, train_y, test_y = parts
    x_mean, x_scale, y_mean, y_scale = train_x.mean(0), train_x.std(0), train_y.mean(), train_y.std()
    began = time.perf_counter()
    regressor = BdeRegressor(seed=seed, loss=GaussianNLL(), **settings)
    regressor.fit(x=(train_x - x_mean) / x_scale, y=((train_y - y_mean) / y_scale).reshape(-1, 1))
    taken = time.perf_counter() - began
    # Members and their samples, of each row a mean and what softplus makes a scale: its predictive mixture.
    raw = np.asarray(regressor.predict((test_x - x_mean) / x_scale, raw=True), np.float64)
    means, scales = y_mean + y_scale * raw[..., 0], y_scale * (np.logaddexp(0.0, raw[..., 1]) + 1e-6)
    densities = norm.logpdf(test_y, means, scales).reshape(-1, len(test_y))
    return taken, -float(np.mean(logsumexp(densities, axis=0) - np.log(len(densities))))


def fits(fit: Fit, settings: dict[str, Any]) -> list[dict[str, float]]:
    """The first fit, and a second with another seed."""
    found = [fit(split(), seed, settings) for seed in (0, 1)]
    return [{"seconds": seconds, "nll": nll} for seconds, nll in found]


if __name__ == "__main__":
    print(json.dumps(fits({"bde": bde, "measureflow": measureflow}[sys.argv[1]], json.loads(sys.argv[2]))))
