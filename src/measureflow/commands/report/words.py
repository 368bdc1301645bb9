"""What to distrust, in words: rules, each of which looks at some numbers of a report."""

from collections.abc import Iterator

import numpy as np

from measureflow.commands.evaluating import Entry, mean_and_error
from measureflow.commands.report.drawing import number
from measureflow.commands.report.findings import Findings, Share

# In standard errors: one comparison, and the worst of many.
_CLEAR, _CLEAR_OF_MANY = 2.0, 3.5
# As a share of rows: many rows can tell a difference that matters to nobody.
_LITTLE = 0.05


def how_judged(findings: Findings) -> str:
    """Which rows all scores are of."""
    rows, known = len(findings.rows), findings.judgement.known
    if findings.judgement.how == "new rows":
        trained = (
            f"Baselines were trained on the {known} rows of this file that the model was trained on, too."
            if known >= 50
            else "Baselines were trained on other folds of these same rows: the training table is not here."
        )
        return f"All scores are of {rows} rows of this file that the model was not trained on. {trained}"
    if findings.judgement.how == "folds":
        number = len(findings.judgement.parts)
        return (
            f"This is the table that the model was trained on. So each of its {rows} rows was judged by a "
            f"model that has not seen it: {number} more were trained, each on {number - 1} of {number} "
            "folds, with the network, the law and the prior weight of this one. Baselines had the same folds."
        )
    trained = f"the {rows} rows that it was trained on"
    return f"All scores of this model are of {trained}. Baselines were judged by folds."


def distrust(findings: Findings) -> list[str]:
    """Sentences, the most serious first."""
    return [
        *_of_training_rows(findings),
        *(f"{note[:1].upper()}{note[1:]}" for note in findings.model.about.get("notes", [])),
        *(f"Of the folds: {note}" for note in findings.judgement.notes),
        *_of_rivals(findings),
        *(_of_confidence(findings) if findings.model.is_classifier else _of_intervals(findings)),
        *_of_groups(findings),
        *_of_distance(findings),
        *_of_ignorance(findings),
        *_of_choices(findings),
        "Effects are what the model does where one input changes and all others stay. They are not what "
        "would happen in the world, and inputs that go together share their importance.",
    ]


def _of_training_rows(findings: Findings) -> Iterator[str]:
    if findings.judgement.how == "training rows":
        yield (
            "The model is scored on rows that it has learned from. Its scores are better than they will be "
            "on new rows, perhaps by far; pass --folds 5, or a table of new rows."
        )
    if len(findings.rows) < 200:
        yield f"{len(findings.rows)} rows are few: read every number here with its standard error."


def _of_rivals(findings: Findings) -> Iterator[str]:
    ours, *rivals = findings.judgement.entries
    for rival in rivals:
        yield from _of_means(ours, rival)
        ahead, error = mean_and_error(ours.rows["nll"] - rival.rows["nll"])
        if ahead > _CLEAR * error:
            yield (
                f"The baseline {rival.name} has the better log score, by {ahead:.3f} ± {error:.3f} a row: it "
                "knows something that this model does not."
            )
        elif abs(ahead) <= _CLEAR * error and rival.name != "constant":
            yield f"The baseline {rival.name} is as good in log score, to within two standard errors."
        elif rival.name == "constant" and ahead > -_CLEAR * error:
            yield "The model is not clearly better than a constant: the inputs may say nothing of the target."


def _of_means(ours: Entry, rival: Entry) -> Iterator[str]:
    if "squared error" not in ours.rows:
        return
    worse, error = mean_and_error(ours.rows["squared error"] - rival.rows["squared error"])
    if worse > _CLEAR * error:
        roots = [np.sqrt(np.mean(one.rows["squared error"])) for one in (rival, ours)]
        yield (
            f"The baseline {rival.name} has the lower root mean square error, {number(roots[0])} against "
            f"{number(roots[1])}: where only the mean matters, take it."
        )


def _of_intervals(findings: Findings) -> Iterator[str]:
    for share in findings.coverage:
        if abs(share.off) > _CLEAR and share.promised in (0.5, 0.9):
            little = "a little " if abs(share.found - share.promised) < _LITTLE else ""
            what = f"{little}too {'wide' if share.off > 0 else 'narrow'}"
            yield f"Intervals of {share.name} hold {share.found:.1%} of the targets: they are {what}."
    below = findings.laws["below"]
    bias, error = mean_and_error(below - 0.5)
    if abs(bias) > max(_CLEAR * error, 0.02):
        side = "below" if bias > 0 else "above"
        yield f"Medians lie {side} what came out in {_median(below):.0%} of the rows: predictions are biased."


def _median(below: np.ndarray) -> float:
    share = float(np.mean(below > 0.5))
    return max(share, 1 - share)


def _of_confidence(findings: Findings) -> Iterator[str]:
    confidence, right = findings.laws["confidence"], findings.laws["right"]
    gap, error = mean_and_error(confidence - right)
    if abs(gap) > _CLEAR * error:
        what = "too sure of itself" if gap > 0 else "not sure enough"
        shares = f"{confidence.mean():.1%}, and {right.mean():.1%} are right"
        yield f"The model is {what}: its mean confidence is {shares}."


def _of_groups(findings: Findings) -> Iterator[str]:
    # Where all groups are off alike, that was said before.
    shares = [(group.column, one) for group in findings.groups for one in group.shares]
    overall = {column: _mean_off([one for name, one in shares if name == column]) for column, _ in shares}
    wrong = [
        (column, one)
        for column, one in shares
        if abs(one.off) > _CLEAR_OF_MANY
        and abs(one.found - one.promised - overall[column]) > _CLEAR_OF_MANY * one.error
    ]
    for column, one in sorted(wrong, key=lambda pair: -abs(pair[1].off))[:4]:
        what = f"intervals of 90% hold {one.found:.0%}"
        if findings.model.is_classifier:
            what = f"{one.found:.0%} are right where the model expects {one.promised:.0%}"
        yield f"Where {column} is {one.name} ({one.rows} rows), {what}."


def _mean_off(shares: list[Share]) -> float:
    rows = sum(one.rows for one in shares)
    return sum(one.rows * (one.found - one.promised) for one in shares) / rows


def _of_distance(findings: Findings) -> Iterator[str]:
    far = float(np.mean(findings.distance > 1))
    if far > 0.03:
        yield (
            f"{far:.1%} of the rows are farther out than 99% of the training rows: this table is not one "
            "that the model was trained for, and there neither means nor intervals promise anything."
        )


def _of_ignorance(findings: Findings) -> Iterator[str]:
    total, epistemic = findings.laws["deviation"], findings.laws["epistemic"]
    squared = 1 if findings.model.is_classifier else 2
    part = float(np.mean(epistemic**squared) / max(np.mean(total**squared), 1e-300))
    if part > 0.3:
        yield f"{part:.0%} of the uncertainty is the networks' disagreement: more rows would help a lot."


def _of_choices(findings: Findings) -> Iterator[str]:
    if findings.judgement.how == "folds" and len(findings.model.estimator.validation_scores_["model"]):
        yield (
            "Law and prior weights were chosen on this same table, folds included, so that the "
            "scores of this model are a little better than they will be on new rows."
        )
