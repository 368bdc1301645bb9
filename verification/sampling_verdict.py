"""Does sampling better predict better, and do repulsion and temperature? Paired differences on small tables.

python -m verification.sampling_verdict [--tables yacht servo] [--splits 3] [--hidden 50] [--out FILE]

Every ensemble has 20 networks of one layer, a Normal law and a prior weight that is given, so that nothing is
chosen and no law is widened: what differs is what is sampled, and how well. Results are kept in the file
`--out`, and what is there is not measured again: to begin afresh, delete it. MEASUREFLOW_DATA and
MEASUREFLOW_TABLES name the folders of UCI sets and of the other tables.
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

TABLES = ("yacht", "boston", "servo", "machine", "autos")


class Way(NamedTuple):
    """A method, and the prior's weight."""

    method: str
    prior_weight: float = 1.0

    @property
    def name(self) -> str:
        return self.method if self.prior_weight == 1 else f"{self.method} at {self.prior_weight:g}"


WAYS = (
    Way("DE"),
    Way("DRE"),
    Way("DLE"),
    Way("DRLE"),
    Way("DLE", 0.1),
    Way("posterior"),
    Way("posterior", 0.1),
)
#: What is asked, of two ways: whether the first has the lower negative log-likelihood.
QUESTIONS = (
    ("sampling better: draws that were tested, for DLE", "posterior", "DLE"),
    ("the same, at a tenth of the temperature", "posterior at 0.1", "DLE at 0.1"),
    ("repulsion, without noise", "DRE", "DE"),
    ("repulsion, with noise", "DRLE", "DLE"),
    ("noise: Langevin for a deep ensemble", "DLE", "DE"),
    ("a colder posterior, by DLE", "DLE at 0.1", "DLE"),
    ("a colder posterior, sampled", "posterior at 0.1", "posterior"),
)


def main() -> None:
    """Measure what is asked for, and print the verdict."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tables", nargs="+", default=list(TABLES))
    parser.add_argument("--splits", type=int, default=3)
    parser.add_argument("--hidden", type=int, nargs="+", default=[50])
    parser.add_argument("--ways", nargs="+", default=[way.name for way in WAYS])
    parser.add_argument("--steps", type=int, help="of those that are trained; by default as for any fit")
    parser.add_argument("--out", type=Path, default=Path("build/sampling-verdict.json"))
    asked = parser.parse_args()
    found = json.loads(asked.out.read_text(encoding="utf-8")) if asked.out.exists() else {}
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    for table in asked.tables:
        for split in range(asked.splits):
            for way in WAYS:
                name = f"{table}; {split}; {way.name}"
                if name in found or way.name not in asked.ways:
                    continue
                found[name] = measured(table, split, way, tuple(asked.hidden), asked.steps)
                print(f"{name}: {found[name]}", flush=True)
                asked.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(verdict(found))


def measured(table: str, split: int, way: Way, hidden: tuple[int, ...], steps: int | None) -> dict[str, Any]:
    """Scores on the test rows of a split, seconds, and whether draws of the posterior were certified."""
    task = load_task(table)
    (train, test), inputs = task.splits[split], task.matrix()
    trained: dict[str, Any] = {} if way.method == "posterior" else {"steps": steps}
    model = mf.EnsembleRegressor(
        way.method,
        likelihood="heteroscedastic",
        hidden=hidden,
        encoding=0,
        prior_weight=way.prior_weight,
        random_state=split,
        **trained,
    )
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(inputs[train], task.targets[train])
    law, y = model.predict_dist(inputs[test]), task.targets[test]
    verdict_ = model.certificate_
    return {
        "nll": mf.metrics.negative_log_likelihood(law, y),
        "crps": mf.metrics.crps(law, y),
        "seconds": round(time.perf_counter() - began, 1),
        "certified": None if verdict_ is None else bool(verdict_),
        "r_hat": None if verdict_ is None else round(verdict_.r_hat, 4),
        "gradients": None if verdict_ is None else verdict_.gradients,
    }


def verdict(found: dict[str, dict[str, Any]]) -> str:
    """Tables of scores, and of paired differences with their standard errors over all splits."""
    cells: dict[tuple[str, str], dict[str, float]] = {}
    for name, scores in found.items():
        table, split, way = name.split("; ")
        cells.setdefault((table, split), {})[way] = scores["nll"]
    names = [way.name for way in WAYS]
    lines = ["", "| table | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    for table in dict.fromkeys(table for table, _ in cells):
        rows = [scores for (other, _), scores in cells.items() if other == table]
        shown = [[row[way] for row in rows if way in row] for way in names]
        lines.append(f"| {table} | " + " | ".join(f"{np.mean(s):.3f}" if s else "—" for s in shown) + " |")
    lines += ["", "| what | difference in NLL | standard error | pairs |", "|---|---|---|---|"]
    for words, first, second in QUESTIONS:
        gaps = [row[first] - row[second] for row in cells.values() if first in row and second in row]
        if len(gaps) < 2:
            continue
        error = np.std(gaps, ddof=1) / np.sqrt(len(gaps))
        what = f"{words} ({first} − {second})"
        lines.append(f"| {what} | {np.mean(gaps):+.3f} | {error:.3f} | {len(gaps)} |")
    certified = [scores["certified"] for scores in found.values() if scores["certified"] is not None]
    lines += ["", f"Certified: {sum(certified)} of {len(certified)} samples of a posterior."]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
