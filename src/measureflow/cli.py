"""The command line. The only module that knows typer and rich."""

import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from measureflow import __version__
from measureflow.study.demo import SETTINGS, Result, run_demo
from measureflow.study.paper import NAMES, Claim
from measureflow.study.paper import reproduce as run_reproduction
from measureflow.study.provenance import provenance
from measureflow.study.uci import METHODS, SETS, comparison_rows, mean_and_error, run_uci, score_rows
from measureflow.study.uci import Result as UCIResult
from measureflow.study.uci import draw as draw_uci

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_show_locals=False)
# Piped into a file, a table keeps a readable width.
console = Console(width=None if sys.stdout.isatty() else 140)


def _show_version(wanted: bool) -> None:
    if wanted:
        console.print(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Learning as a convex problem over probability measures."""


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for demo.png and demo.json.")] = Path("measureflow-demo"),
    seed: Annotated[int, typer.Option(help="Seed of all randomness.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an earlier demo in that folder.")] = False,
) -> None:
    """DE, DLE, DRE, DRLE and FD-GVI on the paper's one-dimensional loss, against their exact targets."""
    from measureflow.study.figures import demo_figure

    picture, numbers = out / "demo.png", out / "demo.json"
    existing = [str(path) for path in (picture, numbers) if path.exists()]
    if existing and not force:
        raise typer.BadParameter(
            f"{', '.join(existing)} exists; pass --force to overwrite, or another --out.", param_hint="--out"
        )
    out.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    results = list(run_demo(seed, progress=True))
    seconds = round(time.perf_counter() - began, 1)
    console.print(_demo_table(results))
    demo_figure(results, picture)
    rows = [row._asdict() for result in results for row in result.rows]
    record = provenance(seed, SETTINGS) | {"seconds": seconds, "rows": rows}
    _write_json(numbers, record)
    console.print(f"Wrote {picture} and {numbers}.")


@app.command()
def reproduce(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(NAMES)}; or all (all but uci).")],
    out: Annotated[Path, typer.Option(help="Results go to OUT/NAME/.")] = Path("results"),
    seed: Annotated[int, typer.Option(help="Seed of all randomness.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="A smaller and quicker version.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite earlier results.")] = False,
) -> None:
    """Redraw the paper's figures and judge its claims; exit 1 if a claim of theory does not hold."""
    from measureflow.study.figures import save_figure

    names = [known for known in NAMES if known != "uci"] if name == "all" else [name]
    if unknown := [wanted for wanted in names if wanted not in NAMES]:
        raise typer.BadParameter(
            f"unknown {unknown[0]!r}; known are {', '.join(NAMES)}, and all.", param_hint="NAME"
        )
    existing = [str(out / wanted) for wanted in names if (out / wanted).exists()]
    if existing and not force:
        raise typer.BadParameter(
            f"{', '.join(existing)} exists; pass --force to overwrite, or another --out.", param_hint="--out"
        )
    broken = 0
    for wanted in names:
        began = time.perf_counter()
        try:
            result = run_reproduction(wanted, seed, quick=quick, progress=True)
        except FileNotFoundError as missing:
            console.print(f"[red]{missing}[/]")
            raise typer.Exit(2) from None
        seconds = time.perf_counter() - began
        folder = out / wanted
        save_figure(result.draw, result.figure_size, folder)
        record = provenance(seed, result.settings) | {
            "name": wanted,
            "quick": quick,
            "seconds": round(seconds, 1),
        }
        claims = [_recorded(claim, quick) for claim in result.claims]
        _write_json(folder / "claims.json", claims)
        _write_json(folder / "provenance.json", record | (result.tables or {}))
        console.print(
            _claims_table(
                f"{wanted} — {NAMES[wanted]} ({seconds:.0f} s{', quick' if quick else ''})", result.claims
            )
        )
        for title, rows in (result.tables or {}).items():
            console.print(_rows_table(title, rows))
        console.print(f"Wrote {folder}/figure.png, figure.svg, claims.json and provenance.json.")
        broken += sum(not claim.holds for claim in result.claims if claim.kind == "theory")
    if broken:
        console.print(f"[bold red]{broken} claims of theory do not hold.[/]")
        raise typer.Exit(1)


@app.command()
def uci(
    sets: Annotated[str, typer.Option(help="Which sets, separated by commas.")] = ",".join(SETS),
    methods: Annotated[str, typer.Option(help="Which methods, separated by commas.")] = ",".join(METHODS),
    splits: Annotated[int | None, typer.Option(help="How many splits; all by default.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for results.json and the figure.")] = Path("results/uci"),
    seed: Annotated[int, typer.Option(help="Seed of all randomness.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Overwrite earlier results.")] = False,
) -> None:
    """Test scores on the canonical splits of the nine UCI sets, next to published ones."""
    from measureflow.study.figures import save_figure

    names = _chosen("--sets", sets, SETS)
    chosen_methods = _chosen("--methods", methods, METHODS)
    if splits is not None and splits < 2:
        raise typer.BadParameter(
            f"splits must be at least 2, for a standard error, got {splits}.", param_hint="--splits"
        )
    if out.exists() and not force:
        raise typer.BadParameter(
            f"{out} exists; pass --force to overwrite, or another --out.", param_hint="--out"
        )
    record = provenance(seed, {"sets": names, "methods": chosen_methods, "splits": splits})
    out.mkdir(parents=True, exist_ok=True)
    results: list[UCIResult] = []
    try:
        for result in run_uci(names, chosen_methods, splits, seed, progress=True):
            results.append(result)
            nll, error = mean_and_error(result.scores["negative_log_likelihood"])
            console.print(
                f"{result.set} {result.method}: NLL {nll:.3f} ± {error:.3f}, {result.seconds:.1f} s"
            )
            # After every fit: what was computed is not lost if the next one is interrupted.
            _write_json(out / "results.json", record | {"results": [r._asdict() for r in results]})
    except FileNotFoundError as missing:
        console.print(f"[red]{missing}[/]")
        raise typer.Exit(2) from None
    console.print(_rows_table("Test scores, mean ± standard error over splits", score_rows(results)))
    if comparisons := comparison_rows(results):
        console.print(_rows_table("NLL, paired by split: mean difference ± standard error", comparisons))
    save_figure(lambda figure: draw_uci(figure, results), (10.0, 9.0), out)
    console.print(f"Wrote {out}/results.json, figure.png and figure.svg.")


def _chosen(option: str, text: str, known: Sequence[str]) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in known]:
        raise typer.BadParameter(f"unknown {unknown[0]!r}; known are {', '.join(known)}.", param_hint=option)
    return names


def _demo_table(results: list[Result]) -> Table:
    table = Table(
        title=f"{SETTINGS['particles']} particles on ℓ(θ) = 3⁄2(θ⁴/4 + θ³/3 − θ²) − 3⁄8, P = Q₀ = N(0, 1)"
    )
    for heading in ("method", "L(Q)", "target", "W₁ to it", "W₁ of as many draws", "mass θ < 0", "exact"):
        table.add_column(heading, justify="left" if heading in ("method", "target") else "right")
    for row in (row for result in results for row in result.rows):
        table.add_row(
            row.method,
            f"{row.value:.3f}",
            row.target,
            f"{row.distance:.3f}",
            f"{row.chance:.3f}",
            f"{row.left:.3f}",
            f"{row.left_exact:.3f}",
        )
    return table


def _recorded(claim: Claim, quick: bool) -> dict[str, Any]:
    note = f"quick run, smaller than the paper's. {claim.note}" if quick else claim.note
    return claim._asdict() | {"note": note}


def _claims_table(title: str, claims: list[Claim]) -> Table:
    table = Table(title=title)
    for heading, ratio in (
        ("claim", 4),
        ("kind", 1),
        ("expected", 2),
        ("measured", 2),
        ("holds", 1),
        ("note", 4),
    ):
        table.add_column(heading, overflow="fold", ratio=ratio)
    for claim in claims:
        expected = _shown(claim.expected) + (f" {claim.tolerance}" if claim.tolerance else "")
        verdict = "[green]yes[/]" if claim.holds else "[red]no[/]"
        table.add_row(claim.claim, claim.kind, expected, _shown(claim.measured), verdict, claim.note)
    return table


def _rows_table(title: str, rows: list[dict[str, Any]]) -> Table:
    table = Table(*rows[0], title=title)
    for row in rows:
        table.add_row(*[_shown(value) for value in row.values()])
    return table


def _shown(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _write_json(path: Path, content: Any) -> None:
    text = json.dumps(_valid(content), indent=2, ensure_ascii=False, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")


def _valid(value: Any) -> Any:
    """JSON knows no NaN and no infinities: they are null."""
    if isinstance(value, dict):
        return {name: _valid(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_valid(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
