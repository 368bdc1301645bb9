"""What the records say together: means, differences paired by split, ranks."""

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from scipy.stats import rankdata

from measureflow.prediction.colours import COLOURS
from measureflow.study.tables.records import Record
from measureflow.study.tables.running import OURS
from measureflow.study.tables.tasks import TABLES
from measureflow.study.uci_benchmark import mean_and_error

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NLL, CRPS = "negative_log_likelihood", "crps"
#: A difference counts beyond so many standard errors.
BEYOND = 2.0


class Difference(NamedTuple):
    """Ours minus theirs, paired by split: below 0, ours is better. The error of one split is NaN."""

    mean: float
    error: float
    splits: int

    @property
    def verdict(self) -> int:
        """−1 where ours is better by more than two standard errors, 1 where theirs is, else 0."""
        return int(np.sign(self.mean)) if abs(self.mean) > BEYOND * self.error else 0


class Scores:
    """Scored records, by table, competitor and split."""

    def __init__(self, records: Iterable[Record]):
        self.records = [record for record in records if record["status"] == "scored"]
        self._by_fit: dict[tuple[str, str], dict[int, Record]] = {}
        for record in self.records:
            self._by_fit.setdefault((record["table"], record["competitor"]), {})[record["split"]] = record

    def tables(self, collections: Sequence[str] | None = None) -> list[str]:
        """In the order of the study."""
        known = {record["table"]: record["collection"] for record in self.records}
        return [name for name in TABLES if name in known and (not collections or known[name] in collections)]

    def competitors(self, table: str) -> list[str]:
        """Those with scores on a table, ours first."""
        names = sorted(name for where, name in self._by_fit if where == table)
        return sorted(names, key=lambda name: not name.startswith(OURS))

    def of(self, table: str, competitor: str, score: str) -> dict[int, float]:
        """By split; splits without this score are left out."""
        records = self._by_fit.get((table, competitor), {})
        found = {split: record["scores"].get(score) for split, record in records.items()}
        return {split: value for split, value in sorted(found.items()) if value is not None}

    def seconds(self, table: str, competitor: str) -> float:
        """Mean over splits of the seconds to fit."""
        records = self._by_fit[table, competitor].values()
        return float(np.mean([record["seconds"] for record in records]))

    def kind(self, table: str) -> str:
        """Regression or classes."""
        return next(record["kind"] for record in self.records if record["table"] == table)

    def mean(self, table: str, competitor: str, score: str) -> tuple[float, float]:
        """Over splits, with its standard error; NaN where there is no such score."""
        values = list(self.of(table, competitor, score).values())
        return mean_and_error(values) if values else (math.nan, math.nan)

    def difference(self, table: str, competitor: str, score: str, ours: str = OURS) -> Difference | None:
        """To ours, over the splits that both have; None where there are none."""
        mine, theirs = self.of(table, ours, score), self.of(table, competitor, score)
        both = [split for split in mine if split in theirs]
        if not both:
            return None
        mean, error = mean_and_error([mine[split] - theirs[split] for split in both])
        return Difference(mean, error, len(both))

    def best_rival(self, table: str, score: str) -> str | None:
        """The rival with the best mean, over the splits that it shares with ours."""
        found = {}
        for name in self.competitors(table):
            difference = None if name.startswith(OURS) else self.difference(table, name, score)
            if difference is not None:
                found[name] = difference.mean
        return max(found, key=lambda name: found[name]) if found else None


def mean_ranks(scores: Scores, tables: Sequence[str], score: str) -> tuple[dict[str, float], list[str]]:
    """Mean ranks over tables, 1 the best, of those who have the score on every table; and these tables: all
    on which ours has it. Means are over the splits that all of them have."""
    tables = [table for table in tables if scores.of(table, OURS, score)]
    names = {name for table in tables for name in scores.competitors(table)}
    complete = sorted(name for name in names if all(scores.of(table, name, score) for table in tables))
    ranks = []
    for table in tables:
        splits = set.intersection(*(set(scores.of(table, name, score)) for name in complete))
        if not splits:
            raise ValueError(f"{table}: the competitors have no split in common; run the same splits of all.")
        means = [np.mean([scores.of(table, name, score)[split] for split in splits]) for name in complete]
        ranks.append(rankdata(means))
    means = np.mean(ranks, axis=0) if ranks else []
    found = {name: float(rank) for name, rank in zip(complete, means, strict=True)} if ranks else {}
    return dict(sorted(found.items(), key=lambda item: item[1])), tables


def verdicts(scores: Scores, tables: Sequence[str], competitor: str, score: str) -> tuple[int, int, int]:
    """On how many tables ours is better, neither, worse."""
    found = [scores.difference(table, competitor, score) for table in tables]
    signs = [difference.verdict for difference in found if difference is not None]
    return signs.count(-1), signs.count(0), signs.count(1)


def draw(figure: "Figure", scores: Scores, tables: Sequence[str]) -> None:
    """For each table ours against the best rival: difference in NLL, and ratio of CRPS."""
    left, right = figure.subplots(1, 2, sharey=True)
    for place, table in enumerate(reversed(tables)):
        for axis, score in ((left, NLL), (right, CRPS)):
            rival = scores.best_rival(table, score)
            difference = None if rival is None else scores.difference(table, rival, score)
            if rival is None or difference is None:
                continue
            theirs = scores.mean(table, rival, score)[0]
            unit, middle = (1.0, 0.0) if axis is left else (abs(theirs), 1.0)
            mean, error = middle + difference.mean / unit, BEYOND * difference.error / unit
            colour = COLOURS["DRLE"] if difference.mean < 0 else COLOURS["FD-GVI"]
            axis.errorbar(mean, place, xerr=error, fmt="o", color=colour, capsize=3)
            axis.annotate(rival, (mean, place), (0, 5), textcoords="offset points", fontsize=6, ha="center")
    left.set_yticks(range(len(tables)), list(reversed(tables)))
    for axis, at, label in (
        (left, 0.0, "NLL: ours − best rival's"),
        (right, 1.0, "CRPS: ours / best rival's"),
    ):
        axis.axvline(at, color="0.6", linestyle="--", linewidth=1)
        axis.set_xlabel(f"{label} (left is better)")
        axis.grid(axis="x", alpha=0.2)
        axis.spines[["top", "right"]].set_visible(False)
