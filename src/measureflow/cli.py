"""The command line. The only module that knows typer and rich."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from measureflow import __version__
from measureflow.demo import SETTINGS, Result, run_demo
from measureflow.provenance import provenance

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_show_locals=False)
console = Console()


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
    from measureflow.plots import demo_figure

    picture, numbers = out / "demo.png", out / "demo.json"
    existing = [str(path) for path in (picture, numbers) if path.exists()]
    if existing and not force:
        raise typer.BadParameter(
            f"{', '.join(existing)} exists; pass --force to overwrite, or another --out.", param_hint="--out"
        )
    out.mkdir(parents=True, exist_ok=True)
    results = list(run_demo(seed, progress=True))
    console.print(_demo_table(results))
    demo_figure(results, picture)
    record = provenance(seed, SETTINGS) | {"rows": [row._asdict() for r in results for row in r.rows]}
    numbers.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    console.print(f"Wrote {picture} and {numbers}.")


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
