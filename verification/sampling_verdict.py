"""Does sampling better predict better, and do repulsion and temperature? Paired differences on small tables.

python -m verification.sampling_verdict [--only linear] [--out build/sampling-verdict.json]

Every ensemble has 20 networks, a Normal law whose noise depends on the input, and a prior weight that is
given, so that nothing is chosen and no law is widened: what differs is what is sampled, and how well. Results
are kept in the file `--out`, and what is there is not measured again: to begin afresh, delete it. Writes
docs/sampling.md. MEASUREFLOW_DATA and MEASUREFLOW_TABLES name the folders of UCI sets and of the other
tables.
"""

import argparse
import json
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from sklearn.exceptions import ConvergenceWarning

import measureflow as mf
from measureflow.study.tables.tasks import load_task

PAGE = Path(__file__).parent.parent / "docs" / "sampling.md"


class Way(NamedTuple):
    """A method, and the prior's weight."""

    method: str
    prior_weight: float = 1.0

    @property
    def name(self) -> str:
        return self.method if self.prior_weight == 1 else f"{self.method} at {self.prior_weight:g}"


TRAINED = (Way("DE"), Way("DRE"), Way("DLE"), Way("DRLE"), Way("DLE", 0.1))
SAMPLED = (Way("posterior"), Way("posterior", 0.1))
SMALL = ("servo", "machine", "autos", "yacht", "concreteslump", "autompg", "boston")


class Study(NamedTuple):
    """Networks with these hidden layers, on the first splits of some tables."""

    words: str
    hidden: tuple[int, ...]
    tables: tuple[str, ...]
    splits: int
    ways: tuple[Way, ...]


STUDIES = {
    "linear": Study("No hidden layer", (), SMALL, 5, (*TRAINED, *SAMPLED)),
    "small": Study("One layer of five units", (5,), ("servo", "machine", "yacht"), 2, (*TRAINED, *SAMPLED)),
    "usual": Study("One layer of 50 units", (50,), SMALL, 5, TRAINED),
}
#: What is asked, of two ways: whether the first has the lower negative log-likelihood.
QUESTIONS = (
    ("sampling better: draws of the sampler, for DLE", "posterior", "DLE"),
    ("the same, at a tenth of the temperature", "posterior at 0.1", "DLE at 0.1"),
    ("repulsion, without noise", "DRE", "DE"),
    ("repulsion, with noise", "DRLE", "DLE"),
    ("noise: Langevin for a deep ensemble", "DLE", "DE"),
    ("a colder posterior, by DLE", "DLE at 0.1", "DLE"),
    ("a colder posterior, sampled", "posterior at 0.1", "posterior"),
)
INTRODUCTION = """\
# Does sampling better predict better?

An ensemble that is trained by DLE or DRLE anneals its noise away, and is no exact sample of the
posterior. `method="posterior"` is one, as far as its certificate can tell. Does that predict better? And
do repulsion, noise, and a colder posterior? Measured by `python -m verification.sampling_verdict` on the
first splits of small tables: 20 networks each, one Normal law whose noise depends on the input, a prior
weight that is given. Nothing is chosen on held-out rows, and no law is widened, so that what differs is
what is sampled, and how well. Numbers are mean test NLL; differences are paired by split, with their
standard errors over all pairs, and below 0 the first way predicts better. Training rows of a table's
splits overlap, so that standard errors are rather too small.
"""


def main() -> None:
    """Measure what is missing, and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=list(STUDIES), default=list(STUDIES))
    parser.add_argument("--out", type=Path, default=Path("build/sampling-verdict.json"))
    asked = parser.parse_args()
    found = json.loads(asked.out.read_text(encoding="utf-8")) if asked.out.exists() else {}
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    for name in asked.only:
        study = STUDIES[name]
        for table in study.tables:
            for split in range(study.splits):
                for way in study.ways:
                    where = f"{name}; {table}; {split}; {way.name}"
                    if where not in found:
                        found[where] = measured(table, split, way, study.hidden)
                        print(f"{where}: {found[where]}", flush=True)
                        asked.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    parts = [page(name, found) for name in STUDIES if any(key.startswith(f"{name};") for key in found)]
    PAGE.write_text("\n".join([INTRODUCTION, *parts]), encoding="utf-8")


def measured(table: str, split: int, way: Way, hidden: tuple[int, ...]) -> dict[str, Any]:
    """Scores on the test rows of a split, seconds, and whether draws of the posterior were certified."""
    task = load_task(table)
    (train, test), inputs = task.splits[split], task.matrix()
    model = mf.EnsembleRegressor(
        way.method,
        likelihood="heteroscedastic",
        hidden=hidden,
        encoding=0,
        prior_weight=way.prior_weight,
        random_state=split,
    )
    began = time.perf_counter()
    with warnings.catch_warnings():
        # A fit that is stopped returns what it has, with a warning: that is no result.
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(inputs[train], task.targets[train])
    law, y = model.predict_dist(inputs[test]), task.targets[test]
    verdict = model.certificate_
    return {
        "nll": mf.metrics.negative_log_likelihood(law, y),
        "crps": mf.metrics.crps(law, y),
        "seconds": round(time.perf_counter() - began, 1),
        "certified": None if verdict is None else bool(verdict),
        "r_hat": None if verdict is None else round(verdict.r_hat, 4),
        "gradients": None if verdict is None else verdict.gradients,
    }


def page(name: str, found: dict[str, dict[str, Any]]) -> str:
    """A study's scores, and its paired differences, of the splits that all its ways have."""
    study, cells, certified = STUDIES[name], {}, []
    for where, scores in found.items():
        of_study, table, split, way = where.split("; ")
        if of_study == name:
            cells.setdefault((table, split), {})[way] = scores["nll"]
            certified += [] if scores["certified"] is None else [scores["certified"]]
    names = [way.name for way in study.ways]
    cells = {split: scores for split, scores in cells.items() if set(names) <= set(scores)}
    planned = len(study.tables) * study.splits
    lines = [
        f"## {study.words}",
        "",
        f"{len(cells)} of the {planned} splits of this study were measured.",
        "",
    ]
    lines += ["| table | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    for table in dict.fromkeys(table for table, _ in cells):
        rows = [scores for (other, _), scores in cells.items() if other == table]
        shown = [[row[way] for row in rows if way in row] for way in names]
        means = " | ".join(f"{np.mean(scores):.3f}" if scores else "" for scores in shown)
        lines.append(f"| {table}, {len(rows)} splits | {means} |")
    lines += ["", "| what | difference in NLL | standard error | pairs |", "|---|---|---|---|"]
    for words, first, second in QUESTIONS:
        gaps = [row[first] - row[second] for row in cells.values() if first in row and second in row]
        if len(gaps) > 1:
            error, what = np.std(gaps, ddof=1) / np.sqrt(len(gaps)), f"{words} ({first} − {second})"
            lines.append(f"| {what} | {np.mean(gaps):+.3f} | {error:.3f} | {len(gaps)} |")
    if certified:
        lines += ["", f"Certified: {sum(certified)} of {len(certified)} samples of the posterior."]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
