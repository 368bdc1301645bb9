"""One fit, timed and scored: of a rival, and of ours."""

import importlib
import time
import warnings
from typing import Any, NamedTuple

import numpy as np

from measureflow.study.tables.cases import Case, UnsuitedError, one_hot
from measureflow.study.tables.laws import COVERAGE, class_scores, regression_scores
from measureflow.study.tables.records import Record
from measureflow.study.tables.rivals import RIVALS
from measureflow.study.tables.tasks import Task, load_task


class Job(NamedTuple):
    """What a process is asked for."""

    table: str
    rival: str
    split: int
    seed: int
    threads: int


def fit_rival(job: Job) -> Record:
    """A record without its origin. Errors of a rival are its own: the study goes on."""
    rival, case = RIVALS[job.rival], Case(load_task(job.table), job.split, job.seed, job.threads)
    record = about(case.task, job.rival, job.split) | {"threads": job.threads, "settings": rival.settings}
    try:
        version = _version(rival.package)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            began = time.perf_counter()
            predict = rival.fit(case)
            fitted = time.perf_counter()
            predicted = predict()
            ended = time.perf_counter()
            y = case.task.targets[case.test]
            scores = _scored(predicted, y)
    except UnsuitedError as reason:
        return record | {"status": "unsuited", "reason": str(reason)}
    except Exception as error:
        return record | {"status": "failed", "reason": f"{type(error).__name__}: {error}"[:500]}
    seconds = {"seconds": fitted - began, "seconds_to_predict": ended - fitted}
    return record | {"status": "scored", "scores": scores, "version": version} | seconds


def fit_ours(task: Task, name: str, settings: dict[str, Any], splits: list[int], seed: int) -> list[Record]:
    """Records of the splits. Those of a numeric table are fitted as one program, and share its seconds."""
    from measureflow.tables.crossvalidation import cross_validate
    from measureflow.tables.estimators import EnsembleClassifier, EnsembleRegressor

    kind = EnsembleClassifier if task.kind == "classes" else EnsembleRegressor
    estimator: Any = kind(**settings, random_state=seed)
    records = []
    groups = [splits] if task.is_numeric else [[split] for split in splits]
    for group in groups:
        inputs = _inputs(task, estimator, task.splits[group[0]][0])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            began = time.perf_counter()
            cv = [task.splits[split] for split in group]
            found = cross_validate(estimator, inputs, task.targets, cv=cv, coverage=COVERAGE)
            seconds = (time.perf_counter() - began) / len(group)
        for place, split in enumerate(group):
            scores = {score: float(values[place]) for score, values in found.items()}
            records.append(
                about(task, name, split)
                | {"status": "scored", "scores": scores, "seconds": seconds, "settings": settings}
                | {"fitted_together": len(group)}
            )
    return records


def about(task: Task, competitor: str, split: int) -> Record:
    train, test = task.splits[split]
    return {
        "table": task.name,
        "collection": task.collection,
        "kind": task.kind,
        "competitor": competitor,
        "split": split,
        "train_rows": len(train),
        "test_rows": len(test),
        "columns": len(task.columns),
    }


def _inputs(task: Task, estimator: Any, train: np.ndarray) -> Any:
    """A data frame where the estimator says that it takes text, else numbers."""
    if task.is_numeric:
        return task.matrix()
    tags = estimator.__sklearn_tags__().input_tags
    if tags.string or tags.categorical:
        import pandas

        return pandas.DataFrame(task.columns)
    return one_hot(task, train)


def _scored(predicted: Any, y: np.ndarray) -> dict[str, float]:
    return (
        class_scores(predicted, y) if isinstance(predicted, np.ndarray) else regression_scores(predicted, y)
    )


def _version(package: str) -> str | None:
    module = importlib.import_module(package)
    return getattr(importlib.import_module(package.partition(".")[0]), "__version__", None) or getattr(
        module, "__version__", None
    )
