"""One self-contained page: works offline, prints, is light or dark, and fits a phone."""

import json
from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np

from measureflow.commands.describing import described, tried
from measureflow.commands.pages import document, resource
from measureflow.commands.report import figures
from measureflow.commands.report.drawing import number, short
from measureflow.commands.report.findings import Findings
from measureflow.commands.report.words import distrust, how_judged

# Columns of the table of rows that are least known.
_MOST_COLUMNS = 4
# By so many columns the calibration is shown at once, and by the others on demand.
_OPEN_GROUPS = 6


def page(findings: Findings) -> str:
    """The whole page as a text."""
    model = findings.model
    title = f"{model.target}: a model and how far to trust it"
    sections = [
        _cards(findings),
        _section("What to distrust", _items(distrust(findings)), how_judged(findings)),
        _section("What was fitted, and how it was chosen", _fitted(findings)),
        _section("Scores", _scores(findings)),
        _section("Calibration", _calibration(findings)),
        _section("Predictions", _predictions(findings)),
        _section("What the inputs do", _effects(findings)),
        _section("What the model does not know", _ignorance(findings)),
        _section("Training", _figures([(figures.training(findings), _TRAINING)])),
    ]
    about = model.about
    foot = (
        f"Made by measureflow {about.get('measureflow', '?')} from {_name(findings)}; seed "
        f"{about.get('seed', '?')}. Dashed lines are what was promised; bars are two standard errors either "
        "side."
    )
    body = (
        f"<main><h1>{escape(title)}</h1><p class='muted'>{escape(_subtitle(findings))}</p>"
        f"{''.join(sections)}<p class='muted'>{escape(foot)}</p></main><aside id='law' hidden></aside>"
        "<script type='application/json' "
        f"id='laws'>{_laws(findings)}</script><script>{resource('report', 'report.js')}</script>"
    )
    return document(title, resource("report", "report.css"), body)


_TRAINING = (
    "Mean negative log-likelihood of training rows along the final training: of single networks, and of "
    "their mixture. The step size falls to 0, so that every run comes to rest; whether it learned enough "
    "before is what notes above say."
)


def _section(title: str, inner: str, lead: str = "") -> str:
    said = f"<p>{escape(lead)}</p>" if lead else ""
    return f"<section><h2>{escape(title)}</h2>{said}{inner}</section>"


def _figures(pairs: Sequence[tuple[str, str]]) -> str:
    inner = "".join(f"<figure>{svg}<figcaption>{escape(said)}</figcaption></figure>" for svg, said in pairs)
    return f"<div class='figures'>{inner}</div>"


def _items(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"


def _table(rows: Sequence[dict[str, str]], ours: str | None = None) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in rows[0])
    body = "".join(
        f"<tr{' class=ours' if ours is not None and ours in row.values() else ''}>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in row.values())
        + "</tr>"
        for row in rows
    )
    return f"<div class='scroll'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _name(findings: Findings) -> str:
    return findings.name.replace("\\", "/").rpartition("/")[2]


def _subtitle(findings: Findings) -> str:
    about = findings.model.about
    return (
        f"{findings.model.task.capitalize()} on {about.get('rows', '?')} rows and "
        f"{about.get('columns', '?')} columns of {about.get('file', '?')}; judged on {len(findings.rows)} "
        f"rows of {_name(findings)}."
    )


def _cards(findings: Findings) -> str:
    board = {line["model"]: line for line in findings.board}
    ours = board[findings.judgement.entries[0].name]
    rival = min((line for line in findings.board if line is not ours), key=lambda line: line["nll"])
    squared = 1 if findings.model.is_classifier else 2
    total, part = (np.mean(findings.laws[name] ** squared) for name in ("deviation", "epistemic"))
    cards = [
        (f"{ours['nll']:.3f} ± {ours['nll_error']:.3f}", "log score, lower is better"),
        (f"{rival['nll']:.3f} ± {rival['nll_error']:.3f}", f"that of the best baseline, {rival['model']}"),
    ]
    if findings.model.is_classifier:
        cards.append((f"{ours['accuracy']:.1%}", "of the rows have the most probable class"))
    else:
        cards.append((f"{ours['coverage_90']:.1%}", "of the targets are in 90% intervals"))
    cards.append(
        (
            f"{part / max(total, 1e-300):.0%}",
            "of the uncertainty is disagreement, which more rows would remove",
        )
    )
    inner = "".join(f"<div class='card'><b>{escape(a)}</b><span>{escape(b)}</span></div>" for a, b in cards)
    return f"<div class='cards'>{inner}</div>"


def _fitted(findings: Findings) -> str:
    lines = [pair for pair in described(findings.model) if pair[0] != "note"]
    inner = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in lines)
    rows = tried(findings.model)
    chosen = "Nothing was chosen: all was given, rows were too few, or time was too short."
    if rows:
        chosen = (
            "Candidates were trained on part of the rows, and the one with the best mean log density on the "
            "others was taken, in units of standardised targets."
        )
    more = f"<details><summary>All {len(rows)} candidates</summary>{_table(rows)}</details>" if rows else ""
    return f"<dl>{inner}</dl><p>{escape(chosen)}</p>{more}"


def _scores(findings: Findings) -> str:
    rows = []
    for place, line in enumerate(findings.board):
        row = {"": line["model"], "log score": f"{line['nll']:.3f} ± {line['nll_error']:.3f}"}
        row["behind, paired"] = f"{line['behind']:.3f} ± {line['behind_error']:.3f}" if place else "first"
        if findings.model.is_classifier:
            row["Brier score"] = f"{line['brier']:.3f} ± {line['brier_error']:.3f}"
            row["right"] = f"{line['accuracy']:.1%} ± {line['accuracy_error']:.1%}"
        else:
            row["CRPS"] = f"{number(line['crps'])} ± {number(line['crps_error'])}"
            row["RMSE"] = number(line["rmse"])
            row["90% holds"] = f"{line['coverage_90']:.1%}"
            row["mean width"] = number(line["width_90"])
        rows.append(row)
    said = (
        "The log score is −log p(y), in nats; lower is better, as for all columns but those of shares. ± is "
        "one standard error over rows. Differences to the first are paired by row: below two standard errors "
        "they may be chance."
    )
    return f"{_table(rows, findings.judgement.entries[0].name)}<p class='muted'>{escape(said)}</p>"


def _calibration(findings: Findings) -> str:
    chance = "The band is what chance allows."
    curve = figures.reliability(findings)
    if findings.model.is_classifier:
        bins = "How often the most probable class is right, by its probability, in bins of as many rows."
        first = [(curve, f"{bins} {chance}")]
    else:
        below = f"The share of targets below their predicted quantiles. {chance}"
        first = [
            (curve, below),
            (figures.coverage(findings), "The share of targets within central intervals."),
        ]
    by_group = [
        (svg, f"By {column}; in brackets the number of rows.") for column, svg in figures.groups(findings)
    ]
    open_ones, others = by_group[:_OPEN_GROUPS], by_group[_OPEN_GROUPS:]
    more = (
        f"<details><summary>By other columns ({len(others)})</summary>{_figures(others)}</details>"
        if others
        else ""
    )
    return _figures(first) + (f"<h3>By group</h3>{_figures(open_ones)}{more}" if by_group else "")


def _predictions(findings: Findings) -> str:
    some = "" if len(findings.shown) == len(findings.rows) else f" {len(findings.shown)} rows are shown."
    if findings.model.is_classifier:
        mean = f"{np.mean(findings.laws['own']):.1%}"
        own = f"The class that came out had a probability of {mean} on average."
        return f"<p>{own}</p>" + _figures(
            [(figures.own_probability(findings), "All rows, by that probability.")]
        )
    point = f"Point at a row to see its law.{some} Orange: outside its 90% interval."
    pairs = [(figures.observed_and_predicted(findings), point)]
    return _figures([*pairs, (figures.intervals(findings), "90% intervals, and what came out.")])


def _effects(findings: Findings) -> str:
    said = (
        "Importance is what the log score of a row loses, on average, when an input is shuffled among the "
        "rows. Effects are means over rows of what the model predicts where one input has the value shown "
        "and all others stay."
    )
    parts = [
        f"<p>{escape(said)}</p>",
        _figures([(figures.importance(findings), "Two standard errors either side.")]),
    ]
    what = "probabilities" if findings.model.is_classifier else "the mean"
    pairs: list[tuple[str, str]] = []
    for column, mean, spread in figures.effects(findings):
        pairs += [(mean, f"Effect of {column} on {what}."), (spread, f"Effect of {column} on the spread.")]
    rows = [
        {"input": one.column, "loss in log score": f"{one.loss:.4f} ± {one.error:.4f}"}
        for one in findings.importances
    ]
    more = f"<details><summary>All {len(rows)} inputs</summary>{_table(rows)}</details>"
    return "".join(parts) + (_figures(pairs) if pairs else "") + more


def _ignorance(findings: Findings) -> str:
    laws = findings.laws
    said = (
        "Aleatoric is the noise that all networks expect: more rows would not remove it. Epistemic is how "
        "far they disagree. Rows with the most of it are those that the model knows least about."
    )
    columns = [one.column for one in findings.importances[:_MOST_COLUMNS]]
    rows = []
    for place in findings.least_known:
        row = {"row": str(findings.numbers[place])}
        if findings.model.is_classifier:
            row |= {"observed": str(findings.targets[place]), "its probability": f"{laws['own'][place]:.1%}"}
        else:
            deviation = number(laws["deviation"][place])
            row |= {
                "observed": number(findings.targets[place]),
                "predicted": f"{number(laws['mean'][place])} ± {deviation}",
            }
        row |= {"epistemic": number(laws["epistemic"][place]), "distance": f"{findings.distance[place]:.2f}"}
        values = findings.inputs.iloc[findings.rows[place]]
        row |= {column: short(_cell(values[column]), 24) for column in columns}
        rows.append(row)
    far = float(np.mean(findings.distance > 1))
    note = f"{far:.1%} of the rows are farther out than 99% of the training rows (distance above 1)."
    caption = "One point for each row; point at it to see its law."
    if findings.model.is_classifier:
        caption += " Orange: the most probable class is wrong."
    figure = _figures([(figures.ignorance(findings), caption)])
    table = f"<h3>Rows that it knows least about</h3>{_table(rows)}"
    return f"<p>{escape(said)}</p>{figure}{table}<p class='muted'>{escape(note)}</p>"


def _cell(value: Any) -> str:
    if value is None or value != value:
        return "missing"
    return number(value) if isinstance(value, float) else str(value)


def _laws(findings: Findings) -> str:
    """What the script knows of every shown row."""
    known: dict[int, dict[str, Any]] = {}
    for place in findings.shown.tolist():
        row, laws = {"t": f"row {findings.numbers[place]}"}, findings.laws
        if findings.model.is_classifier:
            order = np.argsort(-laws["probabilities"][place])[:8]
            labels = [short(str(findings.model.estimator.classes_[i]), 13) for i in order]
            probabilities = [round(float(laws["probabilities"][place][i]), 4) for i in order]
            known[place] = row | {"s": f"it was {findings.targets[place]}", "c": labels, "p": probabilities}
            continue
        grid, density = findings.curves[place]
        # Whole numbers up to 999 are enough for a curve of 62 pixels.
        heights = np.round(999 * density / max(float(density.max()), 1e-300)).astype(int).tolist()
        y, mean, deviation = (
            float(v) for v in (findings.targets[place], laws["mean"][place], laws["deviation"][place])
        )
        said = f"observed {number(y)}, predicted {number(mean)} ± {number(deviation)}"
        ends = {"a": float(grid[0]), "b": float(grid[-1]), "as": number(grid[0]), "bs": number(grid[-1])}
        known[place] = row | {"s": said, "y": y, "d": heights} | ends
    # No text may end the script that it is in.
    return json.dumps(known, allow_nan=False).replace("<", "\\u003c")
