"""What each input does: to the log score, to the mean, and to the spread."""

from typing import Any, NamedTuple

import numpy as np

from measureflow.commands.evaluating import log_scores, mean_and_error
from measureflow.commands.predicting import in_blocks
from measureflow.commands.report.judging import Judgement
from measureflow.tables.reading import column_of, dates_in, numbers_in

# Rows that are shuffled, and rows over which a partial dependence is a mean.
MOST_SHUFFLED, MOST_AVERAGED = 1_000, 150
GRID, LEVELS = 12, 10


class Importance(NamedTuple):
    """By how much the log score of a row falls, on average, where a column is shuffled; in nats."""

    column: str
    loss: float
    error: float


class Effect(NamedTuple):
    """Partial dependence on one column: means over rows of the predictive mean (one line, or one for each
    class) and of the spread, at values of the column. `places` are numbers, or None for levels."""

    column: str
    values: list[str]
    places: list[float] | None
    lines: dict[str, list[float]]
    spread: list[float]


def importances(judgement: Judgement, inputs: Any, targets: np.ndarray, seed: int) -> list[Importance]:
    """Of every column that a network reads, the largest first. Rows are judged by who has not seen them,
    before and after a column is shuffled among them: a difference is paired by row."""
    rng = np.random.default_rng(seed)
    total = len(judgement.rows)
    found: dict[str, list[np.ndarray]] = {}
    for part in judgement.parts:
        number = max(round(min(MOST_SHUFFLED, total) * len(part.rows) / total), 2)
        rows = part.rows if len(part.rows) <= number else rng.choice(part.rows, number, replace=False)
        frame, y = inputs.iloc[rows].reset_index(drop=True), targets[rows]
        before = log_scores(part.estimator, frame, y)
        read = {column.name for column in part.estimator.columns_.columns if column.parts}
        for name in inputs.columns:
            loss = np.zeros(len(rows))
            if name in read:
                order = rng.permutation(len(rows))
                shuffled = frame.assign(**{name: frame[name].to_numpy()[order]})
                shuffled[name] = shuffled[name].astype(frame[name].dtype)
                loss = log_scores(part.estimator, shuffled, y) - before
            found.setdefault(name, []).append(loss)
    entries = [Importance(name, *mean_and_error(np.concatenate(parts))) for name, parts in found.items()]
    return sorted(entries, key=lambda entry: -entry.loss)


def effect(estimator: Any, inputs: Any, column: str, seed: int) -> Effect:
    """Of one column, by the model itself, over some rows of the table."""
    rows = np.random.default_rng(seed).permutation(len(inputs))[:MOST_AVERAGED]
    frame = inputs.iloc[rows].reset_index(drop=True)
    chosen, names, places = _values(inputs, column)
    classes = getattr(estimator, "classes_", None)
    lines: dict[str, list[float]] = {}
    spread: list[float] = []
    for value in chosen:
        # The value of a row of the table, so that its type is the one that the model knows.
        moved = frame.assign(**{column: inputs[column].iloc[[value] * len(frame)].to_numpy()})
        moved[column] = moved[column].astype(inputs[column].dtype)
        if classes is None:
            found = in_blocks(estimator, moved, lambda law: {"mean": law.mean, "spread": law.std})
            lines.setdefault("mean", []).append(float(np.mean(found["mean"])))
        else:
            found = in_blocks(estimator, moved, lambda law: {"p": law.probs, "spread": law.entropy()})
            for i, label in enumerate(classes):
                lines.setdefault(str(label), []).append(float(np.mean(found["p"][:, i])))
        spread.append(float(np.mean(found["spread"])))
    return Effect(column, names, places, lines, spread)


def _values(inputs: Any, column: str) -> tuple[list[int], list[str], list[float] | None]:
    """Rows that hold some values of a column, what to call these, and where they are."""
    raw = column_of(inputs, list(inputs.columns).index(column), column)
    if raw.kind == "text":
        raw = numbers_in(raw) or dates_in(raw) or raw
    known = np.flatnonzero(~raw.missing)
    if raw.kind in ("text", "category"):
        levels, first, counts = np.unique(
            raw.values[known].astype(str), return_index=True, return_counts=True
        )
        most = np.argsort(-counts)[:LEVELS]
        return [int(known[first[i]]) for i in most], [str(levels[i]) for i in most], None
    order = known[np.argsort(raw.values[known], kind="stable")]
    # The outermost hundredths are where a few rows say much.
    at = np.linspace(0.01, 0.99, GRID) * (len(order) - 1)
    chosen = list(dict.fromkeys(order[at.round().astype(int)].tolist()))
    places = [float(raw.values[row]) for row in chosen]
    once = [i for i, place in enumerate(places) if i == 0 or place > places[i - 1]]
    rows, places = [int(chosen[i]) for i in once], [places[i] for i in once]
    names = [str(np.datetime64(int(p), "s"))[:10] if raw.kind == "date" else f"{p:g}" for p in places]
    return rows, names, places
