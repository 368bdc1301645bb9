"""What a pipeline of scikit-learn does not pass on to its last step."""

from typing import Any


def through(pipeline: Any, method: str, X: Any, *arguments: Any, **settings: Any) -> Any:
    """Call any method of a pipeline's last step with rows as the steps before it make them.

    A `Pipeline` has `predict`, `predict_proba` and `score` of its last step, but no `predict_interval`: it is
    `mf.through(pipeline, "predict_interval", X, coverage=0.9)`. A search, such as a fitted GridSearchCV, is
    asked for the best estimator that it found.

    Parameters
    ----------
    pipeline
        A fitted pipeline, or a search over pipelines; an estimator alone is asked itself.
    method
        The name of a method of the last step, such as "predict_interval" or "predict_dist".
    X
        Rows as the pipeline was fitted with.
    *arguments, **settings
        For the method.
    """
    last = pipeline
    while hasattr(last, "best_estimator_") or hasattr(last, "named_steps"):
        if hasattr(last, "best_estimator_"):
            last = last.best_estimator_
            continue
        if len(last.steps) > 1:
            X = last[:-1].transform(X)
        last = last.steps[-1][1]
    if not callable(getattr(last, method, None)):
        raise TypeError(
            f"{type(last).__name__}, the last step of the pipeline, has no method {method!r}; "
            "EnsembleRegressor has predict_interval and predict_dist, EnsembleClassifier predict_dist."
        )
    return getattr(last, method)(X, *arguments, **settings)
