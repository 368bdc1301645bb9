"""One fit, timed and scored: of a rival, and of ours."""

import importlib
import importlib.metadata
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
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
        # Imports are not part of a fit.
        record["version"] = _version(rival.package)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            began = time.perf_counter()
            predict = rival.fit(case)
            fitted = time.perf_counter()
            predicted = predict()
            ended = time.perf_counter()
        scores = _scored(predicted, case.task.targets[case.test])
    except UnsuitedError as reason:
        return record | {"status": "unsuited", "reason": str(reason)}
    except Exception as error:
        return record | _failed(error)
    seconds = {"seconds": fitted - began, "seconds_to_predict": ended - fitted}
    return record | {"status": "scored", "scores": scores, "warnings": _texts(told)} | seconds


def fit_ours(
    task: Task, name: str, settings: dict[str, Any], splits: list[int], seed: int
) -> Iterator[Record]:
    """Records of the splits. Those of a numeric table are fitted as one program, and share its seconds."""
    for group in [splits] if task.is_numeric else [[split] for split in splits]:
        try:
            found = _fitted_together(task, settings, group, seed)
        except Exception as error:
            found = [_failed(error)] * len(group)
        for split, one in zip(group, found, strict=True):
            more = {"settings": settings, "fitted_together": len(group)}
            yield about(task, name, split) | more | one


def _fitted_together(task: Task, settings: dict[str, Any], splits: list[int], seed: int) -> list[Record]:
    from measureflow.tables.classifier import EnsembleClassifier
    from measureflow.tables.crossvalidation import cross_validate
    from measureflow.tables.regressor import EnsembleRegressor

    kind = EnsembleClassifier if task.kind == "classes" else EnsembleRegressor
    estimator: Any = kind(**settings, random_state=seed)
    cv = [task.splits[split] for split in splits]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        began = time.perf_counter()
        inputs = _inputs(task, estimator, cv[0][0])
        found = cross_validate(estimator, inputs, task.targets, cv=cv, coverage=COVERAGE)
        seconds = (time.perf_counter() - began) / len(cv)
    records = []
    for place in range(len(cv)):
        scores = {score: float(values[place]) for score, values in found.items()}
        records.append(
            {"status": "scored", "scores": scores, "seconds": seconds, "warnings": _texts(told)},
        )
    return records


def about(task: Task, competitor: str, split: int) -> Record:
    """What a record says of any fit."""
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
        pandas = importlib.import_module("pandas")
        return pandas.DataFrame(task.columns)
    return one_hot(task, train)


def _scored(predicted: Any, y: np.ndarray) -> dict[str, float]:
    if isinstance(predicted, np.ndarray):
        return class_scores(predicted, y)
    return regression_scores(predicted, y)


def _failed(error: Exception) -> Record:
    return {"status": "failed", "reason": f"{type(error).__name__}: {error}"[:500]}


def _texts(told: Iterable[warnings.WarningMessage]) -> list[str]:
    """The first few, each once."""
    texts = dict.fromkeys(f"{one.category.__name__}: {one.message}"[:300] for one in told)
    return list(texts)[:5]


def _version(package: str) -> str | None:
    """Of the distribution that a package came with; the package is imported."""
    importlib.import_module(package)
    found = _distributions().get(package.partition(".")[0], ())
    return importlib.metadata.version(found[0]) if found else None


@lru_cache(maxsize=1)
def _distributions() -> Mapping[str, list[str]]:
    return importlib.metadata.packages_distributions()
