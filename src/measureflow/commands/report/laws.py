"""Numbers of every judged row's law: what the figures of a report are drawn from."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from measureflow.commands.predicting import blocks
from measureflow.commands.report.judging import Judgement
from measureflow.prediction.rowwise import below

# Points at which the law of a shown row is drawn.
POINTS = 61
# Rows that are shown as points, with their laws.
MOST_SHOWN = 240


def laws(judgement: Judgement, inputs: Any, targets: np.ndarray) -> dict[str, np.ndarray]:
    """Of all judged rows, in the order of the parts."""
    found: list[dict[str, np.ndarray]] = []
    for part in judgement.parts:
        y = targets[part.rows]
        for rows, law in blocks(part.estimator, inputs.iloc[part.rows]):
            classes = getattr(part.estimator, "classes_", None)
            found.append(_of_numbers(law, y[rows]) if classes is None else _of_classes(law, y[rows], classes))
    return {name: np.concatenate([one[name] for one in found]) for name in found[0]}


def _of_numbers(law: Any, y: np.ndarray) -> dict[str, np.ndarray]:
    low, high = (np.asarray(end, np.float64) for end in law.interval(0.9))
    aleatoric, epistemic = (
        np.sqrt(np.maximum(np.asarray(part, np.float64), 0.0))
        for part in (law.aleatoric_variance, law.epistemic_variance)
    )
    return {
        "mean": np.asarray(law.mean, np.float64),
        "median": np.asarray(law.median, np.float64),
        "low": low,
        "high": high,
        "below": below(law, y),
        "aleatoric": aleatoric,
        "epistemic": epistemic,
        "deviation": np.hypot(aleatoric, epistemic),
    }


def _of_classes(law: Any, y: np.ndarray, classes: np.ndarray) -> dict[str, np.ndarray]:
    table = np.asarray(law.probs, np.float64)
    table /= table.sum(axis=1, keepdims=True)
    labels = np.searchsorted(classes, y)
    return {
        "probabilities": table,
        "label": labels,
        "own": table[np.arange(len(y)), labels],
        "confidence": table.max(axis=1),
        "right": (table.argmax(axis=1) == labels).astype(np.float64),
        "aleatoric": np.asarray(law.expected_entropy(), np.float64),
        "epistemic": np.asarray(law.mutual_information(), np.float64),
        "deviation": np.asarray(law.entropy(), np.float64),
    }


def shown_rows(rows: int) -> np.ndarray:
    """Places of the rows that are shown as points: all of them, or some that lie evenly."""
    return np.unique(np.linspace(0, rows - 1, min(rows, MOST_SHOWN)).round().astype(int))


def curves(judgement: Judgement, inputs: Any, shown: np.ndarray) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """For each shown row (a place among the judged ones): numbers y, and the density of its law there; for
    counts, of the law between y − ½ and y + ½."""
    found: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    first = 0
    for part in judgement.parts:
        mine = [place for place in shown if first <= place < first + len(part.rows)]
        first += len(part.rows)
        if not mine:
            continue
        offset = first - len(part.rows)
        law = part.estimator.predict_dist(inputs.iloc[part.rows[np.array(mine) - offset]])
        low, high = (np.asarray(law.quantile(q), np.float64) for q in (0.002, 0.998))
        grid = low + (high - low) * np.linspace(0, 1, POINTS)[:, None]
        if law.is_discrete:
            grid = np.unique(np.round(grid), axis=0)
            density = np.exp(np.asarray(law.log_prob(jnp.asarray(grid, jnp.int32)), np.float64))
        else:
            density = np.exp(np.asarray(law.log_prob(grid), np.float64))
        found |= {place: (grid[:, i], density[:, i]) for i, place in enumerate(mine)}
    return found
