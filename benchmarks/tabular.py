"""The defaults of the estimators against scikit-learn's networks of the same size.

Run with `python benchmarks/tabular.py`; it takes minutes. On diabetes (regression) and digits (classes),
split once by `train_test_split(random_state=0)`, five seeds: seconds to fit, compiling included where there
is something to compile, test NLL, and test RMSE or accuracy. scikit-learn's regressor predicts numbers; here
it is a Gaussian around them, whose scale is its RMSE on a tenth of the training rows that it does not learn
from.
"""

import time
import warnings

import numpy as np
import scipy.stats
from sklearn.datasets import load_diabetes, load_digits
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import measureflow as mf

SEEDS = range(5)
HIDDEN = (50,)


def ensemble_regression(seed, train_x, test_x, train_y, test_y):
    estimator = mf.EnsembleRegressor(random_state=seed).fit(train_x, train_y)
    yield
    law = estimator.predict_dist(test_x)
    yield mf.metrics.negative_log_likelihood(law, test_y), mf.metrics.root_mean_square_error(law, test_y)


def network_regression(seed, train_x, test_x, train_y, test_y):
    learn_x, held_x, learn_y, held_y = train_test_split(train_x, train_y, test_size=0.1, random_state=seed)
    network = make_pipeline(StandardScaler(), MLPRegressor(hidden_layer_sizes=HIDDEN, random_state=seed)).fit(
        learn_x, learn_y
    )
    scale = np.sqrt(np.mean((network.predict(held_x) - held_y) ** 2))
    yield
    mean = network.predict(test_x)
    nll = -np.mean(scipy.stats.norm.logpdf(test_y, mean, scale))
    yield nll, np.sqrt(np.mean((mean - test_y) ** 2))


def constant_regression(seed, train_x, test_x, train_y, test_y):
    del seed, train_x, test_x
    yield
    nll = -np.mean(scipy.stats.norm.logpdf(test_y, train_y.mean(), train_y.std()))
    yield nll, np.sqrt(np.mean((test_y - train_y.mean()) ** 2))


def classification(make):
    def run(seed, train_x, test_x, train_y, test_y):
        estimator = make(seed).fit(train_x, train_y)
        yield
        probabilities = estimator.predict_proba(test_x)
        yield mf.metrics.log_loss(probabilities, test_y), mf.metrics.accuracy(probabilities, test_y)

    return run


def ensemble_classifier(seed):
    return mf.EnsembleClassifier(random_state=seed)


def network_classifier(seed):
    return make_pipeline(StandardScaler(), MLPClassifier(hidden_layer_sizes=HIDDEN, random_state=seed))


COMPARISONS = {
    "diabetes": (
        load_diabetes,
        "RMSE",
        {
            "EnsembleRegressor()": ensemble_regression,
            f"MLPRegressor({HIDDEN})": network_regression,
            "a constant Gaussian": constant_regression,
        },
    ),
    "digits": (
        load_digits,
        "accuracy",
        {
            "EnsembleClassifier()": classification(ensemble_classifier),
            f"MLPClassifier({HIDDEN})": classification(network_classifier),
        },
    ),
}


def measured(method, seed, parts):
    """Seconds to fit, NLL, and RMSE or accuracy."""
    run = method(seed, *parts)
    began = time.perf_counter()
    next(run)
    seconds = time.perf_counter() - began
    return seconds, *next(run)


def shown(values):
    error = np.std(values, ddof=1) / np.sqrt(len(values))
    return f"{np.mean(values):.3f} ± {error:.3f} ({', '.join(f'{value:.3f}' for value in values)})"


def main():
    # scikit-learn's defaults stop after 200 epochs, and say so.
    warnings.simplefilter("ignore", ConvergenceWarning)
    for name, (load, score, methods) in COMPARISONS.items():
        parts = train_test_split(*load(return_X_y=True), random_state=0)
        print(
            f"\n{name}: {len(parts[0])} rows to learn from, {len(parts[1])} to test on; mean ± standard error"
        )
        for label, method in methods.items():
            found = np.array([measured(method, seed, parts) for seed in SEEDS])
            print(f"  {label}", flush=True)
            for column, heading in enumerate(("seconds", "NLL", score)):
                print(f"    {heading:<9}{shown(found[:, column])}", flush=True)


if __name__ == "__main__":
    main()
