"""The command line. Commands for tables are those of `commands.shell`.

It exits 0 where all went well, 1 where a claim of theory does not hold, and 2 for what the user can mend:
wrong options, data that are missing or damaged, a folder that cannot be written.
"""

import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from measureflow import __version__
from measureflow.commands import shell
from measureflow.study import beyond
from measureflow.study.datasets import DataError
from measureflow.study.demo import SETTINGS, Result, run_demo
from measureflow.study.files import write_json
from measureflow.study.paper import NAMES, Claim, Reproduction
from measureflow.study.paper import reproduce as run_reproduction
from measureflow.study.provenance import provenance
from measureflow.study.tables.records import ResumeError
from measureflow.study.tables.rivals import RIVALS, missing
from measureflow.study.tables.running import (
    OURS,
    Plan,
    chosen_splits,
    chosen_tables,
    run_tables,
    settings_of,
)
from measureflow.study.tables.tasks import COLLECTIONS
from measureflow.study.uci_benchmark import (
    METHODS,
    SETS,
    comparison_rows,
    mean_and_error,
    run_uci,
    score_rows,
)
from measureflow.study.uci_benchmark import Result as UCIResult
from measureflow.study.uci_benchmark import draw as draw_uci

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_show_locals=False)
# Piped into a file, a table keeps a readable width.
console = Console(width=None if sys.stdout.isatty() else 140)
# Narrower than this, claims are shown one below the other.
_WIDE = 100
_ON_DATA = " and ".join(beyond.NEED_DATA)
Seed = Annotated[int, typer.Option(help="Seed of all randomness.", min=0, max=2**32 - 1)]


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


# What most people come for is listed first.
shell.add_to(app)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for demo.png and demo.json.")] = Path("measureflow-demo"),
    seed: Seed = 0,
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
    with _results_in(out):
        began = time.perf_counter()
        results = list(run_demo(seed, progress=_has_bars()))
        seconds = round(time.perf_counter() - began, 1)
        _print_demo(results)
        demo_figure(results, picture)
        rows = [row._asdict() for result in results for row in result.rows]
        record = provenance(seed, SETTINGS) | {"seconds": seconds, "rows": rows}
        write_json(numbers, record)
    console.print(f"Wrote {picture} and {numbers}.")


@app.command()
def reproduce(
    name: Annotated[
        str,
        typer.Argument(
            help=f"Of the paper: {', '.join(NAMES)}; or all (all but uci). Of other papers: "
            f"{', '.join(beyond.NAMES)}; or beyond (all but {' and '.join(beyond.NEED_DATA)})."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Results go to OUT/NAME/.")] = Path("results"),
    seed: Seed = 0,
    quick: Annotated[bool, typer.Option("--quick", help="A smaller and quicker version.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite earlier results.")] = False,
    sets: Annotated[
        str | None, typer.Option(help=f"Which UCI sets, for {_ON_DATA}: separated by commas; all by default.")
    ] = None,
    splits: Annotated[
        int | None, typer.Option(help=f"How many splits of each kind, for {_ON_DATA}.", min=2)
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help=f"At most how many steps of training, for {_ON_DATA}.", min=1)
    ] = None,
) -> None:
    """Redraw the figures of the paper, and of others, and judge their claims.

    What needs the UCI sets keeps a record of each in OUT/NAME/records/, and does not compute it again.

    Exits 1 if a claim of theory does not hold, and 2 if the options are wrong, data are missing or damaged,
    or results cannot be written.
    """
    together = {
        "all": [known for known in NAMES if known != "uci"],
        "beyond": [known for known in beyond.NAMES if known not in beyond.NEED_DATA],
    }
    names, known = together.get(name, [name]), (*NAMES, *beyond.NAMES)
    if unknown := [wanted for wanted in names if wanted not in known]:
        raise typer.BadParameter(
            f"unknown {unknown[0]!r}; known are {', '.join(known)}, all and beyond.", param_hint="NAME"
        )
    chosen = None if sets is None else tuple(_chosen("--sets", sets, SETS))
    size = {"sets": chosen, "splits": splits, "steps": steps}
    given = {option: value for option, value in size.items() if value is not None}
    if given and name not in beyond.NEED_DATA:
        raise typer.BadParameter(
            f"only {_ON_DATA} take it; {name} has no UCI sets to choose from.",
            param_hint=f"--{next(iter(given))}",
        )
    resumed = [wanted for wanted in names if wanted in beyond.NEED_DATA]
    _require_new([out / wanted for wanted in names if wanted not in resumed], force)
    with _results_in(out):
        for wanted in resumed if force else ():
            for record in _records(out / wanted, chosen or SETS):
                record.unlink(missing_ok=True)
        broken = sum(_reproduced(wanted, out / wanted, seed, quick, given) for wanted in names)
    if broken:
        console.print(f"[bold red]{broken} claims of theory do not hold.[/]")
        raise typer.Exit(1)


def _records(folder: Path, sets: Sequence[str]) -> list[Path]:
    return [folder / "records" / f"{name}.json" for name in sets]


def _run(name: str, folder: Path, seed: int, quick: bool, size: dict[str, Any]) -> Reproduction:
    if name not in beyond.NEED_DATA:
        run = beyond.reproduce if name in beyond.NAMES else run_reproduction
        return run(name, seed, quick=quick, progress=_has_bars())
    try:
        return beyond.reproduce_on_data(name, seed, quick, folder / "records", _has_bars(), **size)
    except ResumeError as error:
        raise typer.BadParameter(str(error), param_hint="--out") from None


def _reproduced(name: str, folder: Path, seed: int, quick: bool, size: dict[str, Any]) -> int:
    """How many claims of theory do not hold; all that was found is shown, and written."""
    from measureflow.study.figures import save_figure

    began = time.perf_counter()
    result = _run(name, folder, seed, quick, size)
    seconds = time.perf_counter() - began
    title = (NAMES | beyond.NAMES)[name]
    _print_claims(f"{name} — {title} ({seconds:.0f} s{', quick' if quick else ''})", result.claims)
    for heading, rows in (result.tables or {}).items():
        _print_rows(heading, rows)
    if result.summary:
        console.print(escape(result.summary))
    save_figure(result.draw, result.figure_size, folder)
    record = provenance(seed, result.settings) | {"name": name, "quick": quick, "seconds": round(seconds, 1)}
    record |= {"summary": result.summary} | (result.origin or {})
    write_json(folder / "claims.json", [_recorded(claim, quick) for claim in result.claims])
    write_json(folder / "provenance.json", record | (result.tables or {}))
    console.print(f"Wrote {folder}/figure.png, figure.svg, claims.json and provenance.json.")
    return sum(not claim.holds for claim in result.claims if claim.kind == "theory")


@app.command()
def uci(
    sets: Annotated[str, typer.Option(help="Which sets, separated by commas.")] = ",".join(SETS),
    methods: Annotated[str, typer.Option(help="Which methods, separated by commas.")] = ",".join(METHODS),
    splits: Annotated[int | None, typer.Option(help="How many splits; all by default.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for results.json and the figure.")] = Path("results/uci"),
    seed: Seed = 0,
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
    _require_new([out], force)
    record = provenance(seed, {"sets": names, "methods": chosen_methods, "splits": splits})
    results: list[UCIResult] = []
    with _results_in(out):
        for result in run_uci(names, chosen_methods, splits, seed, progress=_has_bars()):
            results.append(result)
            nll, error = mean_and_error(result.scores["negative_log_likelihood"])
            console.print(
                f"{result.set} {result.method}: NLL {nll:.3f} ± {error:.3f}, {result.seconds:.1f} s"
            )
            # After every fit: what was computed is not lost if the next one is interrupted.
            write_json(out / "results.json", record | {"results": [r._asdict() for r in results]})
        _print_rows("Test scores, mean ± standard error over splits", score_rows(results))
        if comparisons := comparison_rows(results):
            _print_rows("NLL, paired by split: mean difference ± standard error", comparisons)
        save_figure(lambda figure: draw_uci(figure, results), (10.0, 9.0), out)
    console.print(f"Wrote {out}/results.json, figure.png and figure.svg.")


@app.command()
def tables(
    out: Annotated[Path, typer.Option(help="Folder for OUT/TABLE/COMPETITOR/SPLIT.json.")] = Path(
        "results/tables"
    ),
    only_tables: Annotated[
        str, typer.Option(help=f"Tables, or collections of them: {', '.join(COLLECTIONS)}.")
    ] = ",".join(COLLECTIONS),
    only: Annotated[str, typer.Option(help="Competitors, separated by commas.")] = ",".join((OURS, *RIVALS)),
    ours: Annotated[
        list[str] | None,
        typer.Option(help="A variant of ours besides, as method=DLE,particles=40."),
    ] = None,
    splits: Annotated[str | None, typer.Option(help="Numbers of splits, as 0,1,2; all by default.")] = None,
    most_rows: Annotated[int | None, typer.Option(help="Leave larger tables out.", min=1)] = None,
    seconds_per_fit: Annotated[float | None, typer.Option(help="Stop a rival's fit after.", min=1)] = None,
    jobs: Annotated[int, typer.Option(help="Rivals fitted at a time, in processes.", min=1)] = 1,
    threads: Annotated[int, typer.Option(help="Threads of a rival's fit.", min=1)] = 1,
    seed: Seed = 0,
) -> None:
    """Ours beside rivals on many tables: scores and seconds. What lies in OUT is not computed again."""
    try:
        plan = Plan(
            chosen_tables([name.strip() for name in only_tables.split(",")]),
            tuple(_chosen("--only", only, (OURS, *RIVALS))),
            tuple(ours or ()),
            None if splits is None else chosen_splits(splits),
            most_rows,
            seconds_per_fit,
            jobs,
            threads,
            seed,
        )
        for variant in plan.variants:
            settings_of(variant)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    for name in plan.competitors:
        if name in RIVALS and (reason := missing(name)):
            console.print(f"{name} is left out: {reason}.")
    with _results_in(out):
        began, written = time.perf_counter(), 0
        try:
            for record in run_tables(plan, out):
                written += 1
                seconds = time.perf_counter() - began
                console.print(f"{seconds:.0f} s: {escape(_told(record))}", highlight=False)
        except ResumeError as error:
            raise typer.BadParameter(str(error), param_hint="--out") from None
    console.print(f"Wrote {written} files to {out}.")


def _told(record: dict[str, Any]) -> str:
    """One line on one fit."""
    what = f"{record['table']} {record['split']} {record['competitor']}"
    if record["status"] != "scored":
        return f"{what}: {record['status']}, {record['reason']}"
    nll = record["scores"]["negative_log_likelihood"]
    return f"{what}: NLL {nll:.3f}, {record['seconds']:.1f} s"


def _has_bars() -> bool:
    """Progress bars are for terminals: in a file, each of their thousand states would be a line."""
    return sys.stderr.isatty()


def _require_new(folders: Sequence[Path], force: bool) -> None:
    """None of the folders has anything in it, unless it may be overwritten."""
    existing = [str(folder) for folder in folders if folder.is_dir() and any(folder.iterdir())]
    if existing and not force:
        raise typer.BadParameter(
            f"{', '.join(existing)} exists; pass --force to overwrite, or another --out.", param_hint="--out"
        )


@contextlib.contextmanager
def _results_in(out: Path) -> Iterator[None]:
    """Work whose results go to `out`: it must be possible to write there before anything is computed, and no
    folder that was made for it stays behind empty."""
    made = [folder for folder in (out, *out.parents) if not folder.exists()]
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise typer.BadParameter(
            f"nothing can be written to {out} ({error}); pass another --out.", param_hint="--out"
        ) from None
    try:
        yield
    except (DataError, FileNotFoundError) as missing:
        console.print(f"[red]{escape(str(missing))}[/]")
        raise typer.Exit(2) from None
    except OSError as error:
        console.print(f"[red]{escape(f'The results could not be written to {out}: {error}')}[/]")
        raise typer.Exit(2) from None
    finally:
        for folder in made:
            with contextlib.suppress(OSError):
                folder.rmdir()


def _chosen(option: str, text: str, known: Sequence[str]) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in known]:
        raise typer.BadParameter(f"unknown {unknown[0]!r}; known are {', '.join(known)}.", param_hint=option)
    return names


def _print_demo(results: list[Result]) -> None:
    title = f"{SETTINGS['particles']} particles on ℓ(θ) = 3⁄2(θ⁴/4 + θ³/3 − θ²) − 3⁄8, P = Q₀ = N(0, 1)"
    _print_rows(
        title,
        [
            {
                "method": row.method,
                "L(Q)": f"{row.value:.3f}",
                "target": row.target,
                "W₁ to it": f"{row.distance:.3f}",
                "W₁ of as many draws": f"{row.chance:.3f}",
                "mass θ < 0": f"{row.left:.3f}",
                "exact": f"{row.left_exact:.3f}",
            }
            for result in results
            for row in result.rows
        ],
        left=("method", "target"),
    )


def _recorded(claim: Claim, quick: bool) -> dict[str, Any]:
    note = f"quick run, smaller than the paper's. {claim.note}" if quick else claim.note
    return claim._asdict() | {"note": note}


def _print_claims(title: str, claims: list[Claim]) -> None:
    ratios = {"claim": 4, "kind": 1, "expected": 2, "measured": 2, "holds": 1, "note": 4}
    rows = []
    for claim in claims:
        expected = _shown(claim.expected) + (f" {claim.tolerance}" if claim.tolerance else "")
        verdict = "[green]yes[/]" if claim.holds else "[red]no[/]"
        texts = (claim.claim, claim.kind, expected, _shown(claim.measured))
        rows.append(dict(zip(ratios, (*map(escape, texts), verdict, escape(claim.note)), strict=True)))
    if console.width < _WIDE:
        _print_records(title, rows)
        return
    table = Table(title=title)
    for heading, ratio in ratios.items():
        table.add_column(heading, overflow="fold", ratio=ratio)
    for row in rows:
        table.add_row(*row.values())
    console.print(table)


def _print_rows(title: str, rows: list[dict[str, Any]], left: Sequence[str] | None = None) -> None:
    """A table, if every number in it has room; else its rows, one below the other. Columns are aligned right,
    but for those of `left`; with None, all are aligned left."""
    headings = list(dict.fromkeys(heading for row in rows for heading in row))
    cells = [{heading: escape(_shown(row.get(heading))) for heading in headings} for row in rows]
    columns = {heading: [cell[heading] for cell in cells] for heading in headings}
    whole = [max(map(cell_len, (heading, *column))) for heading, column in columns.items()]
    # Headings may be broken, but only between words.
    broken = [max(map(cell_len, (*heading.split(), *column))) for heading, column in columns.items()]
    # A cell has a border, and a blank on either side.
    room = console.width - 3 * len(headings) - 1
    if sum(broken) > room:
        _print_records(title, cells)
        return
    table = Table(title=title)
    for heading, width in zip(headings, whole if sum(whole) <= room else broken, strict=True):
        side = "left" if left is None or heading in left else "right"
        table.add_column(heading, justify=side, width=width)
    for cell in cells:
        table.add_row(*cell.values())
    console.print(table)


def _print_records(title: str, rows: list[dict[str, str]]) -> None:
    console.print(f"[italic]{escape(title)}[/]")
    for row in rows:
        grid = Table.grid(padding=(0, 2))
        grid.add_column()
        grid.add_column(overflow="fold")
        for heading, cell in row.items():
            grid.add_row(f"[bold]{escape(heading)}[/]", cell)
        console.print(grid, "")


def _shown(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
