"""`measureflow describe`: what a model file holds, in words and numbers."""

from collections import Counter
from typing import Any

import jax
import numpy as np

from measureflow.commands.model import TableModel


def described(model: TableModel) -> list[tuple[str, str]]:
    """(what, how it is) of a fitted model."""
    estimator, about = model.estimator, model.about
    particles = jax.tree.leaves(estimator.particles_)
    parameters = sum(leaf[0].size for leaf in particles)
    lines = [
        ("model", f"{_method(estimator)}, {len(particles[0])} networks of {parameters:,} parameters"),
        ("target", f"{model.target} ({model.task}{_because(about)})"),
        (
            "fitted to",
            f"{about.get('file', '?')}: {about.get('rows', '?')} rows, {about.get('columns', '?')} columns",
        ),
        ("inputs", _inputs(estimator)),
        ("network and law", estimator.shape_.name),
        ("networks trained with", members(estimator)),
    ]
    if model.is_classifier:
        lines.insert(2, ("classes", ", ".join(map(str, estimator.classes_))))
    else:
        lines.append(("spread", f"{estimator.spread_:.3g}, power {estimator.spread_power_:g}"))
    lines += [
        ("steps", f"{estimator.n_iter_:,}, in {about.get('seconds', '?')} s on {about.get('device', '?')}"),
        ("chosen from", _chosen_from(estimator)),
        ("seed", str(about.get("seed", "?"))),
        ("settings given", _settings(about.get("settings", {}))),
        ("written by", f"measureflow {about.get('measureflow', '?')}, JAX {about.get('jax', '?')}"),
    ]
    if model.kinds:
        lines.append(("types given", ", ".join(f"{column}={kind}" for column, kind in model.kinds.items())))
    return lines + [("note", str(note)) for note in about.get("notes", [])]


def tried(model: TableModel) -> list[dict[str, Any]]:
    """What held-out rows chose from, the best first; empty where nothing was chosen."""
    scores = model.estimator.validation_scores_
    order = np.argsort(-scores["log_density"])
    return [
        {
            "network and law": str(scores["model"][i]),
            "sees": _view(scores["binned"][i], scores["linear"][i], scores["smoothed"][i]),
            "prior weight": f"{scores['prior_weight'][i]:g}",
            "share of steps": f"{scores['share_of_steps'][i]:g}",
            "log density of held-out rows": f"{scores['log_density'][i]:.3f}",
            "share of the ensemble": f"{scores['share'][i]:.0%}",
        }
        for i in order
    ]


def members(estimator: Any) -> str:
    """How many networks have which prior weight, and what they see: "15 with prior weight 1, 5 with 0.3"."""
    columns = [estimator.members_[name].tolist() for name in ("prior_weight", "binned", "linear", "smoothed")]
    alike = Counter(zip(*columns, strict=True))
    differ = len({row[1:] for row in alike}) > 1
    texts = []
    for (weight, *view), number in alike.most_common():
        texts.append(
            f"{number} with prior weight {weight:g}" + (f", seeing {_view(*view)}" if differ else "")
        )
    return "; ".join(texts)


def _view(binned: float, linear: float, smoothed: float) -> str:
    columns = ("bins" if binned else "columns") + (" and a smoother" if smoothed else "")
    return columns + (", linearly" if linear else "")


def _method(estimator: Any) -> str:
    return estimator.method if isinstance(estimator.method, str) else estimator.method.name


def _because(about: dict[str, Any]) -> str:
    return f": {about['task_because']}" if "task_because" in about else ""


def _inputs(estimator: Any) -> str:
    kinds = Counter(column.kind for column in estimator.columns_.columns)
    parts = ", ".join(f"{number} {kind}" for kind, number in kinds.most_common())
    return f"{parts}; {estimator.columns_.width} numbers in all"


def _chosen_from(estimator: Any) -> str:
    scores = estimator.validation_scores_
    if not len(scores["model"]):
        return "nothing: all was given, rows were few, or time was short"
    models = len(set(scores["model"].tolist()))
    return f"{len(scores['model'])} candidates ({models} models) by held-out rows"


def _settings(settings: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items()) or "none"
