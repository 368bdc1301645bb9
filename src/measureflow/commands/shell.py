"""The commands for tables, as the command line has them: options in, files and texts out.

Standard output is for results, standard error for all else: types that were found, progress and notes. Exit
codes: 0 where all went well, 1 where a fit failed for numerical reasons, 2 for what the user can mend (then
nothing was written), 130 for Ctrl-C.
"""

import contextlib
import json
import sys
from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import typer

from measureflow.commands.errors import InputError
from measureflow.runs.solution import DivergenceError
from measureflow.saving.container import FileFormatError

Data = Annotated[
    str, typer.Argument(help="A table: .csv, .parquet or .feather, or - for CSV on standard input.")
]
ModelFile = Annotated[str, typer.Argument(help="A model that measureflow fit wrote.")]
Target = Annotated[str, typer.Option(help="The column to predict.")]
TaskName = Annotated[str | None, typer.Option(help="regression or classification; found by default.")]
Types = Annotated[
    list[str] | None,
    typer.Option(
        "--type", help="Overrule a column's type: COLUMN=number, category, date or drop. May be repeated."
    ),
]
Drop = Annotated[list[str] | None, typer.Option(help="Leave out a column. May be repeated.")]
Missing = Annotated[
    list[str] | None, typer.Option(help="A text that says that there is no value. May be repeated.")
]
Separator = Annotated[str | None, typer.Option(help="Between the cells of a CSV file; found by default.")]
Form = Annotated[
    str | None, typer.Option("--format", help="csv, parquet or feather; by the file's name by default.")
]
Skip = Annotated[bool, typer.Option("--skip-missing-targets", help="Leave out rows without a target.")]
Likelihood = Annotated[
    str | None, typer.Option(help="The law of numbers, such as mixture; chosen by default.")
]
Particles = Annotated[int | None, typer.Option(help="How many networks; 20 by default.", min=1)]
Hidden = Annotated[
    str | None, typer.Option(help="Widths of the hidden layers, as 50 or 16,16; chosen by default.")
]
Encoding = Annotated[
    int | None, typer.Option(help="Bins for a column of numbers, 0 for none; chosen by default.")
]
PriorWeight = Annotated[float | None, typer.Option(help="1 is the Bayes posterior; chosen by default.")]
Steps = Annotated[
    int | None, typer.Option(help="Steps of training; by the number of rows by default.", min=1)
]
Seed = Annotated[int, typer.Option(help="Seed of all randomness.", min=0, max=2**32 - 1)]
Force = Annotated[bool, typer.Option("--force", help="Overwrite what is there.")]
ByName = Annotated[bool, typer.Option("--by-name", help="Take columns in another order, each by its name.")]
Unseen = Annotated[
    bool,
    typer.Option(
        "--unseen", help="Let categories pass that no training row had, and columns without values."
    ),
]


def add_to(app: typer.Typer) -> None:
    """The commands, as those of an app."""
    for command in (fit, predict, evaluate, report, describe, export, explore, completion):
        app.command()(command)


def fit(
    data: Data,
    target: Target,
    out: Annotated[str, typer.Option(help="The model file to write.")],
    task: TaskName = None,
    method: Annotated[str, typer.Option(help="DRLE, DLE, DRE, DE, FD-GVI, PrO or posterior.")] = "DRLE",
    likelihood: Likelihood = None,
    time: Annotated[float | None, typer.Option(help="Seconds that the fit may take.", min=1)] = None,
    particles: Particles = None,
    hidden: Hidden = None,
    encoding: Encoding = None,
    prior_weight: PriorWeight = None,
    steps: Steps = None,
    types: Types = None,
    drop: Drop = None,
    missing: Missing = None,
    separator: Separator = None,
    form: Form = None,
    skip_missing_targets: Skip = False,
    seed: Seed = 0,
    force: Force = False,
) -> None:
    """Fit a model to a table, and write it to a file."""
    with _told():
        from measureflow.commands.describing import members
        from measureflow.commands.files import require_writable
        from measureflow.commands.fitting import fit_task
        from measureflow.saving.documents import save

        if out == "-":
            raise InputError("a model is a file, which does not go to standard output; pass --out model.mf.")
        require_writable(out, force)
        settings = _settings(method, likelihood, particles, hidden, encoding, prior_weight, steps)
        _require_method(method)
        ready = _prepared(data, target, types, drop, missing, separator, form, task, skip_missing_targets)
        model = fit_task(ready, settings, time, seed, sys.stderr.isatty())
        _say(*(f"note: {note}" for note in model.about["notes"]))
        save(model, out, force=force)
        chosen = f"{model.estimator.shape_.name}; networks: {members(model.estimator)}"
        _say(f"{model.estimator.n_iter_} steps in {model.about['seconds']} s: {chosen}.", f"Wrote {out}.")


def predict(
    model: ModelFile,
    data: Data,
    out: Annotated[
        str, typer.Option(help="A table to write, by the end of its name; - is standard output.")
    ] = "-",
    quantiles: Annotated[str, typer.Option(help="Levels of quantiles, separated by commas.")] = "0.05,0.95",
    above: Annotated[
        list[float] | None, typer.Option(help="A column with P(y > t). May be repeated.")
    ] = None,
    keep: Annotated[
        list[str] | None, typer.Option(help="Copy a column of the data. May be repeated.")
    ] = None,
    missing: Missing = None,
    separator: Separator = None,
    form: Form = None,
    by_name: ByName = False,
    unseen: Unseen = False,
    force: Force = False,
) -> None:
    """Predict a law for every row of a table: mean, deviation, quantiles, and how far to trust them."""
    with _told():
        from measureflow.commands.files import read_table, require_table_format, require_writable, write_table
        from measureflow.commands.fitting import noted, told_as_input_errors
        from measureflow.commands.model import inputs_of, load_model
        from measureflow.commands.predicting import Wanted, checked, predictions

        require_writable(out, force)
        require_table_format(out)
        fitted = load_model(model)
        source = read_table(data, separator=separator, form=form, missing=missing or ())
        wanted = Wanted(_numbers("--quantiles", quantiles), tuple(above or ()), tuple(keep or ()))
        checked(wanted, fitted, source)
        with told_as_input_errors(source.name), noted() as more:
            rows, notes = inputs_of(fitted, source, by_name=by_name, unseen=unseen)
            table = predictions(fitted, rows, source, wanted)
        far = int((table.iloc[:, -1] > 1).sum())
        _say(*(f"note: {note}" for note in [*notes, *more]))
        write_table(table, out, force)
        _say(
            f"{len(table)} rows, {far} of them farther from the training data than 99% of its rows (distance "
            "> 1)."
        )


def evaluate(
    data: Data,
    target: Target,
    out: Annotated[str | None, typer.Option(help="Also write the leaderboard: .csv or .json.")] = None,
    task: TaskName = None,
    methods: Annotated[
        str, typer.Option(help="Which methods, separated by commas.")
    ] = "DRLE,DLE,DRE,DE,FD-GVI",
    folds: Annotated[int, typer.Option(help="Folds of the cross-validation.", min=2)] = 5,
    likelihood: Likelihood = None,
    particles: Particles = None,
    hidden: Hidden = None,
    encoding: Encoding = None,
    prior_weight: PriorWeight = None,
    steps: Steps = None,
    types: Types = None,
    drop: Drop = None,
    missing: Missing = None,
    separator: Separator = None,
    form: Form = None,
    skip_missing_targets: Skip = False,
    seed: Seed = 0,
    force: Force = False,
) -> None:
    """Cross-validated scores of every method beside a constant, a linear model and gradient boosting."""
    with _told():
        from measureflow.commands import showing
        from measureflow.commands.evaluating import evaluated, leaderboard, splits_of
        from measureflow.commands.files import pandas_or_remedy, require_writable, write_table, write_text
        from measureflow.study.provenance import provenance

        if out is not None:
            require_writable(out, force)
            if not out.endswith((".csv", ".json")):
                raise InputError(f"--out must end in .csv or .json, got {out}.")
        names = [name.strip() for name in methods.split(",") if name.strip()]
        _require_method(*names)
        settings = _settings(None, likelihood, particles, hidden, encoding, prior_weight, steps)
        ready = _prepared(data, target, types, drop, missing, separator, form, task, skip_missing_targets)
        splits, entries = splits_of(ready, folds, seed), []
        for entry in evaluated(ready, names, settings, splits, seed, sys.stderr.isatty()):
            entries.append(entry)
            _say(f"{entry.name}: {entry.seconds:.1f} s", *(f"note: {note}" for note in entry.notes))
        lines = leaderboard(entries)
        sys.stdout.write(f"{showing.leaderboard(lines)}\n")
        if out is not None and out.endswith(".csv"):
            write_table(pandas_or_remedy().DataFrame(lines), out, force)
        elif out is not None:
            record = provenance(seed, {"folds": folds, "methods": names, "target": target} | settings)
            write_text(json.dumps(record | {"leaderboard": lines}, indent=2) + "\n", out, force)


def report(
    model: ModelFile,
    data: Data,
    out: Annotated[str, typer.Option(help="The page to write, such as report.html.")],
    folds: Annotated[
        int, typer.Option(help="Where the table is that of training: folds that judge it, 0 for none.", min=0)
    ] = 5,
    missing: Missing = None,
    separator: Separator = None,
    form: Form = None,
    by_name: ByName = False,
    unseen: Unseen = False,
    skip_missing_targets: Skip = False,
    seed: Seed = 0,
    force: Force = False,
) -> None:
    """One page on a model and a table with targets: scores, calibration, effects, and what to distrust."""
    with _told():
        from measureflow.commands.files import read_table, require_writable, write_text
        from measureflow.commands.fitting import noted, told_as_input_errors
        from measureflow.commands.model import load_model
        from measureflow.commands.report.findings import find
        from measureflow.commands.report.page import page
        from measureflow.commands.reporting import judged_table

        require_writable(out, force)
        if folds == 1:
            raise InputError("--folds must be 0, for none, or at least 2, got 1.")
        fitted = load_model(model)
        source = read_table(data, separator=separator, form=form, missing=missing or ())
        with told_as_input_errors(source.name), noted() as more:
            task, notes = judged_table(
                fitted, source, by_name=by_name, unseen=unseen, skip_missing=skip_missing_targets
            )
            _say(f"{source.name}: {len(task.rows.targets)} rows with {fitted.target!r}; this takes a while.")
            findings = find(fitted, task, folds, seed, sys.stderr.isatty())
        _say(*(f"note: {note}" for note in dict.fromkeys([*notes, *more])))
        write_text(page(findings), out, force)
        _say(f"Wrote {out}.")


def describe(model: ModelFile) -> None:
    """What a model file holds: what was fitted to what, and how it was chosen."""
    with _told():
        from measureflow.commands import showing
        from measureflow.commands.describing import described, tried
        from measureflow.commands.model import load_model

        fitted = load_model(model)
        sys.stdout.write(f"{showing.pairs(described(fitted))}\n")
        if rows := tried(fitted):
            sys.stdout.write(f"\n{showing.table(rows, left=('network and law',))}\n")


def export(
    model: ModelFile,
    out: Annotated[str, typer.Option(help="A folder to write, for programs without measureflow.")],
    force: Force = False,
) -> None:
    """Write a model as a function of JAX that other programs run without measureflow."""
    with _told():
        from measureflow.commands.files import MISSING
        from measureflow.commands.model import load_model
        from measureflow.tables.exporting import require_folder

        try:
            require_folder(out, force)
            load_model(model).estimator.export(out, force=force, missing=MISSING)
        except (FileExistsError, ImportError) as error:
            raise InputError(str(error).replace("force=True", "--force").replace("path", "--out")) from None
        _say(f"Wrote {out}: predict.bin, model.json and predictor.py, which runs them.")


def explore(
    out: Annotated[str, typer.Option(help="The page to write.")] = "explorer.html",
    force: Force = False,
) -> None:
    """Write the flow explorer: one page on which particles of every method move, in a browser."""
    with _told():
        from measureflow.commands.explorer.page import page
        from measureflow.commands.files import require_writable, write_text

        require_writable(out, force)
        write_text(page(), out, force)
        if out != "-":
            _say(f"Wrote {out}; open it in a browser.")


def completion(
    context: typer.Context,
    shell: Annotated[str, typer.Argument(help="bash, zsh or fish.")],
) -> None:
    """Print a script by which a shell completes commands and options at TAB.

    bash: measureflow completion bash > ~/.local/share/bash-completion/completions/measureflow
    """
    with _told():
        from measureflow.commands.completion import INSTALL, commands_of, script
        from measureflow.commands.targets import TASKS
        from measureflow.study.paper import NAMES
        from measureflow.tables.methods import METHODS

        if shell not in INSTALL:
            raise InputError(f"SHELL must be {', '.join(INSTALL)}, got {shell!r}.")
        values = {"--method": METHODS, "--task": TASKS, "--format": ("csv", "parquet", "feather")}
        words = {"completion": tuple(INSTALL), "reproduce": (*NAMES, "all")}
        sys.stdout.write(script(shell, commands_of(context.find_root().command, values, words)))
        if sys.stdout.isatty():
            _say(f"To install it: {INSTALL[shell]}")


def _prepared(
    data: str,
    target: str,
    types: list[str] | None,
    drop: list[str] | None,
    missing: Iterable[str] | None,
    separator: str | None,
    form: str | None,
    task: str | None,
    skip: bool,
) -> Any:
    """A table that can be fitted, once what was found in it is shown."""
    from measureflow.commands import showing
    from measureflow.commands.files import read_table
    from measureflow.commands.fitting import prepared
    from measureflow.commands.kinds import overrules
    from measureflow.commands.targets import TASKS

    if task is not None and task not in TASKS:
        raise InputError(f"--task must be {' or '.join(TASKS)}, got {task!r}.")
    kinds = overrules(types or (), drop or ())
    source = read_table(data, separator=separator, form=form, missing=missing or ())
    ready, notes = prepared(source, target, kinds, task, skip)
    rows = ready.rows
    _say(
        f"{source.name}: {len(rows.targets)} rows; {rows.task} of {target!r}, since {rows.reason}."
        if rows.reason != "as told"
        else f"{source.name}: {len(rows.targets)} rows; {rows.task} of {target!r}, as told.",
        showing.kinds(ready.found),
        *(f"note: {note}" for note in notes),
    )
    return ready


def _settings(
    method: str | None,
    likelihood: str | None,
    particles: int | None,
    hidden: str | None,
    encoding: int | None,
    prior_weight: float | None,
    steps: int | None,
) -> dict[str, Any]:
    """By the names of an estimator's parameters; those that were not given are left out."""
    widths = None if hidden is None else tuple(int(width) for width in _numbers("--hidden", hidden))
    given = {"method": method, "likelihood": likelihood, "particles": particles, "hidden": widths}
    given |= {"encoding": encoding, "prior_weight": prior_weight, "steps": steps}
    return {name: value for name, value in given.items() if value is not None}


def _require_method(*names: str) -> None:
    from measureflow.tables.methods import METHODS

    if unknown := [name for name in names if name not in METHODS]:
        raise InputError(f"unknown method {unknown[0]!r}; known are {', '.join(METHODS)}.")


def _numbers(option: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise InputError(f"{option} must be numbers separated by commas, got {text!r}.") from None


def _say(*lines: str) -> None:
    for line in lines:
        sys.stderr.write(f"{line}\n")


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Errors as one line, and the exit code that says whose they are."""
    try:
        yield
    except (InputError, FileFormatError, OSError) as error:
        _say(f"error: {error}")
        raise typer.Exit(2) from None
    except DivergenceError as error:
        _say(f"error: {error}")
        raise typer.Exit(1) from None
    except KeyboardInterrupt as error:
        _say(f"interrupted: {error or 'nothing was written'}")
        raise typer.Exit(130) from None
