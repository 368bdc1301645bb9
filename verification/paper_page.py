"""Writes docs/paper.md, or docs/beyond.md, and its pictures from a folder of `measureflow reproduce` results.

python -m verification.paper_page RESULTS [TIMES …]
python -m verification.paper_page --beyond RESULTS

The table of times has one column for each folder TIMES, of the same commands on different devices; without
any, for RESULTS. Sections of docs/beyond.md whose results are not in RESULTS stay as they are.
"""

import json
import shutil
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from measureflow.study import beyond
from measureflow.study.paper import NAMES

DOCS = Path(__file__).parent.parent / "docs"

INTRODUCTION = r"""# The paper, reproduced

Every figure and table of Wild et al. (2023), redrawn, and each claim measured, as `make paper` last produced
them: `measureflow reproduce all` and `measureflow reproduce uci`. A claim of kind *theory* follows from the
mathematics; its test rejects a correct library with probability at most 0.001, and the command exits 1 if it
fails. A claim of kind *paper* is what the paper reports, and the honest verdict may be no.

## What it claims

For $L(Q) = \int \ell \,\mathrm{{d}}Q + \sum_k w_k D_k(Q, P)$, and particles that start from $Q_0$ and
follow its Wasserstein gradient flow:

- *Theorem 1.* Without a regulariser (a deep ensemble), their law tends to
  $\sum_i Q_0(\Theta_i)\, \delta(m_i)$: an atom at each local minimum $m_i$, weighted by the mass
  that $Q_0$ has in its basin $\Theta_i$. That is not the minimiser.
- *Theorem 2.* With $\mathrm{{MMD}}^2$ and KL (DRLE), their law tends to the unique minimiser,
  $\log q^* = -\frac1\tau \bigl( V + \int W(\cdot, \theta') \,\mathrm{{d}}q^*(\theta') \bigr) + c$,
  as $N \to \infty$, $t \to \infty$ and $\eta \to 0$. With KL alone (DLE),
  $q^* \propto \exp(-\ell/\tau)\, p$.
- *Theorem 7.* With $\mathrm{{MMD}}^2$ alone (DRE), they may stand still at measures that are not the
  minimiser.

## How long it takes

The paper states about an hour on one GeForce RTX 3090 for its final experiments. Seconds here:

{times}
"""


BEYOND = """\
# Beyond the paper

What other papers claim of posteriors, scores and flows, redrawn and measured in the manner of
[The paper, reproduced](paper.md): `measureflow reproduce beyond`, and by name what needs the UCI sets. Each
section has a problem, a law where one is known exactly, and a picture. A claim of kind *theory* must hold;
one of kind *paper* is what its authors report, and the honest verdict may be no.
"""


def page(results: Path, times: list[Path]) -> str:
    """The whole page; only what is in `results` is shown."""
    return "\n".join(
        [INTRODUCTION.format(times=_times(times or [results])), *_sections(results, NAMES, "paper")]
    )


def beyond_page(results: Path, before: str = "") -> str:
    """The same for other papers, each introduced by its module; what is not in `results` stays as it was in
    the page before."""
    return "\n".join([BEYOND, *_sections(results, beyond.NAMES, "beyond", before)])


def _sections(results: Path, names: dict[str, str], assets: str, before: str = "") -> list[str]:
    parts = []
    for name, title in names.items():
        folder = results / name
        if not (folder / "claims.json").exists():
            parts += _section_of(before, title)
            continue
        claims = json.loads((folder / "claims.json").read_text(encoding="utf-8"))
        record = _record(folder)
        shutil.copy(folder / "figure.png", DOCS / "assets" / assets / f"{name}.png")
        introduction = f"{_introduction(name)}\n\n" if assets == "beyond" else ""
        picture = f"![{title}](assets/{assets}/{name}.png)"
        outcome = f"{record['summary']}\n\n" if record.get("summary") else ""
        parts.append(f"## {title}\n\n{introduction}{outcome}{picture}\n\n{_claims(claims)}\n")
        tables = {heading: rows for heading, rows in record.items() if heading.startswith("Table")}
        parts += [f"{heading}:\n\n{_rows(rows)}\n" for heading, rows in tables.items()]
        options = record.get("options", " --quick" if record["quick"] else "")
        parts.append(
            f"*`measureflow reproduce {name}{options}`: {record['seconds']:.0f} s on {record['device']}, "
            f"seed {record['seed']}, measureflow {record['measureflow']}, JAX {record['jax']}.*\n"
        )
    return parts


def _section_of(page: str, title: str) -> list[str]:
    """With its heading, to the next one; none where the page has no such section."""
    _, found, after = page.partition(f"## {title}\n")
    return [(found + after.partition("\n## ")[0]).rstrip("\n") + "\n"] if found else []


def _introduction(name: str) -> str:
    """What a module says of itself."""
    module = import_module(f"measureflow.study.beyond.{name.replace('-', '_')}")
    return (module.__doc__ or "").strip()


def _record(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "provenance.json").read_text(encoding="utf-8"))


def _times(folders: list[Path]) -> str:
    """Seconds of each reproduction, one column per folder, named by its device."""
    columns = [
        {name: _record(folder / name) for name in NAMES if (folder / name / "provenance.json").exists()}
        for folder in folders
    ]
    devices = [next(iter(column.values()))["device"] for column in columns]
    rows = [
        {"reproduction": name}
        | {
            device: f"{column[name]['seconds']:.0f}" if name in column else ""
            for device, column in zip(devices, columns, strict=True)
        }
        for name in NAMES
    ]
    sums = [f"{sum(record['seconds'] for record in column.values()):.0f}" for column in columns]
    return _rows([*rows, {"reproduction": "together"} | dict(zip(devices, sums, strict=True))])


def _claims(claims: list[dict[str, Any]]) -> str:
    rows = [
        {
            "claim": claim["claim"],
            "kind": claim["kind"],
            "expected": f"{_shown(claim['expected'])} {claim['tolerance'] or ''}".strip(),
            "measured": claim["measured"],
            "holds": "yes" if claim["holds"] else "**no**",
            "note": claim["note"],
        }
        for claim in claims
    ]
    return _rows(rows)


def _rows(rows: list[dict[str, Any]]) -> str:
    cells = [[_shown(cell) for cell in row.values()] for row in rows]
    lines = [list(rows[0]), ["---"] * len(rows[0]), *cells]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(part)}" for name, part in value.items())
    if isinstance(value, list):
        return ", ".join(_shown(part) for part in value if part is not None)
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "\\|")


if __name__ == "__main__" and sys.argv[1] == "--beyond":
    (DOCS / "assets" / "beyond").mkdir(parents=True, exist_ok=True)
    before = (DOCS / "beyond.md").read_text(encoding="utf-8") if (DOCS / "beyond.md").exists() else ""
    (DOCS / "beyond.md").write_text(beyond_page(Path(sys.argv[2]), before), encoding="utf-8")
elif __name__ == "__main__":
    (DOCS / "assets" / "paper").mkdir(parents=True, exist_ok=True)
    (DOCS / "paper.md").write_text(
        page(Path(sys.argv[1]), [Path(folder) for folder in sys.argv[2:]]), encoding="utf-8"
    )
