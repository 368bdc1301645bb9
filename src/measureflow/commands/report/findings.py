"""All numbers of a report, without a word on how they look."""

import itertools
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from measureflow.commands.evaluating import leaderboard
from measureflow.commands.fitting import Task
from measureflow.commands.model import TableModel
from measureflow.commands.report.drawing import number
from measureflow.commands.report.effects import Effect, Importance, effect, importances
from measureflow.commands.report.judging import Judgement, judged
from measureflow.commands.report.laws import curves, laws, shown_rows
from measureflow.tables.reading import column_of, dates_in, numbers_in

LEVELS = tuple(percent / 100 for percent in range(5, 100, 5))
COVERAGES = (0.5, 0.8, 0.9, 0.95)
# So many inputs have figures of their own, so many groups a column may have, and so many rows are least
# known.
MOST_EFFECTS, MOST_GROUPS, LEAST_KNOWN = 6, 6, 10
# Groups of fewer rows are left out, and a class is calibrated in so many bins.
FEWEST_IN_GROUP, BINS = 15, 8


class Share(NamedTuple):
    """A share that was promised, the one that was found, its standard error, and of how many rows."""

    name: str
    promised: float
    found: float
    error: float
    rows: int

    @property
    def off(self) -> float:
        """How far it is off, in standard errors of a share that is as promised."""
        usual = np.sqrt(self.promised * (1 - self.promised) / self.rows)
        return float((self.found - self.promised) / max(usual, 1e-12))


class Groups(NamedTuple):
    """Shares within groups of the rows, by the values of one column."""

    column: str
    shares: list[Share]


class Findings(NamedTuple):
    """What a report shows. `rows` are places in the table, of all judged rows, and `numbers` what the file
    counts them; all else is in their order."""

    model: TableModel
    name: str
    judgement: Judgement
    rows: np.ndarray
    numbers: np.ndarray
    targets: np.ndarray
    laws: dict[str, np.ndarray]
    distance: Float[np.ndarray, " rows"]
    board: list[dict[str, Any]]
    reliability: list[Share]
    coverage: list[Share]
    groups: list[Groups]
    importances: list[Importance]
    effects: list[Effect]
    least_known: list[int]
    shown: np.ndarray
    curves: dict[int, tuple[np.ndarray, np.ndarray]]
    inputs: Any


def find(model: TableModel, task: Task, folds: int, seed: int = 0, progress: bool = False) -> Findings:
    """Everything, for a table with targets."""
    inputs, targets = task.rows.inputs, task.rows.targets
    judgement = judged(model, task, folds, seed, progress)
    rows = judgement.rows
    found = laws(judgement, inputs, targets)
    important = importances(judgement, inputs, targets, seed)
    top = [one.column for one in important if one.loss > 0][:MOST_EFFECTS]
    shown = shown_rows(len(rows))
    reliability = _reliability_of_classes(found) if model.is_classifier else _reliability(found["below"])
    return Findings(
        model=model,
        name=task.name,
        judgement=judgement,
        rows=rows,
        numbers=task.rows.numbers[rows],
        targets=targets[rows],
        laws=found,
        distance=model.distance(inputs.iloc[rows]),
        board=leaderboard(judgement.entries),
        reliability=reliability,
        coverage=[] if model.is_classifier else _coverage(found["below"]),
        groups=_groups(inputs.iloc[rows].reset_index(drop=True), found, [one.column for one in important]),
        importances=important,
        effects=[effect(model.estimator, inputs, column, seed) for column in top],
        least_known=np.argsort(-found["epistemic"], kind="stable")[:LEAST_KNOWN].tolist(),
        shown=shown,
        curves={} if model.is_classifier else curves(judgement, inputs, shown),
        inputs=inputs,
    )


def share(name: str, promised: float, inside: np.ndarray) -> Share:
    """Of rows for which something holds."""
    found, rows = float(np.mean(inside)), len(inside)
    return Share(name, promised, found, float(np.sqrt(max(found * (1 - found), 1 / rows) / rows)), rows)


def _reliability(below: np.ndarray) -> list[Share]:
    """The share of targets below their predicted quantiles."""
    return [share(f"{level:.0%}", level, below <= level) for level in LEVELS]


def _coverage(below: np.ndarray) -> list[Share]:
    """The share of targets within central intervals."""
    return [share(f"{level:.0%}", level, np.abs(2 * below - 1) <= level) for level in COVERAGES]


def _reliability_of_classes(found: dict[str, np.ndarray]) -> list[Share]:
    """The share of rows whose most probable class is right, by how probable it is, in bins of as many
    rows."""
    order = np.argsort(found["confidence"], kind="stable")
    parts = np.array_split(order, min(BINS, max(len(order) // FEWEST_IN_GROUP, 1)))
    return [
        share(
            f"{found['confidence'][part].mean():.0%}",
            float(found["confidence"][part].mean()),
            found["right"][part],
        )
        for part in parts
        if len(part)
    ]


def _groups(frame: Any, found: dict[str, np.ndarray], columns: list[str]) -> list[Groups]:
    """Whether 90% intervals hold 90% everywhere; for classes, whether the confidence is right."""
    level = 0.9
    inside = np.abs(2 * found["below"] - 1) <= level if "below" in found else found["right"]
    by = {"the prediction": _quarters(found["mean"])} if "mean" in found else {}
    for column in columns:
        by[column] = _labels(frame, column)
    groups = []
    for column, labels in by.items():
        shares = []
        for label in dict.fromkeys(labels[1]):
            rows = labels[0] == label
            promised = (
                level
                if "below" in found
                else float(np.mean(found["confidence"][rows]))
                if rows.any()
                else 0.0
            )
            if rows.sum() >= FEWEST_IN_GROUP:
                shares.append(share(label, promised, inside[rows]))
        if shares:
            groups.append(Groups(column, shares))
    return groups


def _labels(frame: Any, column: str) -> tuple[np.ndarray, list[str]]:
    """The group of every row, and the groups in their order."""
    raw = column_of(frame, list(frame.columns).index(column), column)
    if raw.kind == "text":
        raw = numbers_in(raw) or dates_in(raw) or raw
    if raw.kind in ("number", "date", "duration") and len(np.unique(raw.values[~raw.missing])) > MOST_GROUPS:
        labels, order = _quarters(raw.values, raw.missing, dates=raw.kind == "date")
    else:
        values = [f"{v:g}" if isinstance(v, float) else str(v) for v in raw.values.tolist()]
        labels = np.where(raw.missing, "missing", np.array(values, object)).astype(object)
        if raw.kind == "boolean":
            labels = np.where(labels == "1", "true", np.where(labels == "0", "false", labels)).astype(object)
        names, counts = np.unique(labels.astype(str), return_counts=True)
        order = [str(name) for name in names[np.argsort(-counts)][:MOST_GROUPS]]
        rest = ~np.isin(labels.astype(str), order)
        labels[rest] = "others"
        order += ["others"] if rest.any() else []
    return labels, order


def _quarters(
    values: np.ndarray, missing: np.ndarray | None = None, dates: bool = False
) -> tuple[np.ndarray, list[str]]:
    known = np.ones(len(values), bool) if missing is None else ~missing
    if not known.any():
        return np.full(len(values), "missing", object), ["missing"]
    edges = np.unique(np.quantile(values[known], (0.25, 0.5, 0.75)))
    place = np.searchsorted(edges, np.where(known, values, edges[0]), side="left")

    def text(edge: float) -> str:
        if dates:
            return str(np.datetime64(int(edge), "s"))[:10]
        return number(edge)

    inner = [f"to {text(b)}" if dates else f"{text(a)} to {text(b)}" for a, b in itertools.pairwise(edges)]
    order = [f"up to {text(edges[0])}", *inner, f"above {text(edges[-1])}"]
    labels = np.array(order, object)[place]
    labels[~known] = "missing"
    return labels, order + (["missing"] if not known.all() else [])
