"""How each network of an ensemble was trained, as columns of numbers: what `members_` holds, and `members=`
takes."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from measureflow.tables.choosing import Choice, Trial
from measureflow.tables.methods import Candidate
from measureflow.tables.recipe import LONGEST
from measureflow.tables.views import View

#: The columns: one number for each network.
COLUMNS = ("prior_weight", "share_of_steps", "binned", "linear", "smoothed")


def columns_of(trials: Iterable[Trial]) -> dict[str, np.ndarray]:
    """A row of these columns for each."""
    rows = [(*trial.candidate, *trial.view) for trial in trials]
    table = np.array(rows, np.float64).reshape(-1, len(COLUMNS))
    return {name: np.ascontiguousarray(column) for name, column in zip(COLUMNS, table.T, strict=True)}


def members_of(parts: tuple[Trial, ...], particles: int) -> dict[str, np.ndarray]:
    """A row for each of so many networks, which are cut into equal parts."""
    return columns_of(part for part in parts for _ in range(particles // len(parts)))


def most_frequent(column: np.ndarray) -> float:
    """Of all numbers; the largest of those that are equally frequent."""
    values, counts = np.unique(column, return_counts=True)
    return float(values[counts == counts.max()][-1])


def scores_of(choice: Choice, names: list[str]) -> dict[str, np.ndarray]:
    """What was tried, as columns: `names` are those of the models."""
    return {
        "model": np.array([names[trial.model] for trial in choice.scores], np.str_),
        **columns_of(choice.scores),
        "log_density": np.array(list(choice.scores.values()), np.float64),
        "share": np.array([choice.shares[trial] for trial in choice.scores], np.float64),
    }


def parts_given(
    members: Mapping[str, np.ndarray], prior_weight: float | None = None, *, longest: bool = True
) -> tuple[Trial, ...]:
    """The equal parts of an ensemble whose networks are trained alike: the fewest that there are. A prior
    weight that is given is that of all; without `longest`, none takes more than all steps, and shares stay in
    proportion."""
    if prior_weight is not None:
        members = {**members, "prior_weight": np.full(len(members["binned"]), float(prior_weight))}
    if not longest and members["share_of_steps"].max() > 1:
        members = of_all_steps(members)
    rows = list(zip(*(members[name].tolist() for name in COLUMNS), strict=True))
    number = next(n for n in range(1, len(rows) + 1) if len(rows) % n == 0 and _alike(rows, len(rows) // n))
    chosen = rows[:: len(rows) // number]
    return tuple(Trial(0, Candidate(*row[:2]), View(*map(bool, row[2:]))) for row in chosen)


def sees_smoother(members: Mapping[str, np.ndarray]) -> bool:
    """Whether some networks see what a smoother says."""
    return bool(np.any(members["smoothed"]))


def of_all_steps(members: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """With shares of the steps that the longest take."""
    shares = members["share_of_steps"]
    return {**members, "share_of_steps": shares / shares.max()}


def _alike(rows: list[Any], size: int) -> bool:
    """Whether each run of so many rows holds equal ones."""
    return all(len(set(rows[start : start + size])) == 1 for start in range(0, len(rows), size))


def require_members(members: Any, particles: int, name: str = "members") -> None:
    """None, or columns that `members_` of a fit could have."""
    if members is None:
        return
    sound = isinstance(members, dict) and set(members) == set(COLUMNS)
    sound = sound and all(_are_numbers(column, particles) for column in members.values())
    if sound:
        weights, steps, *view = (members[column] for column in COLUMNS)
        sound = (
            np.all(weights > 0) and np.all((steps > 0) & (steps <= LONGEST)) and np.isin(view, (0, 1)).all()
        )
    if not sound:
        raise ValueError(
            f"{name} must hold {particles} numbers for each of {', '.join(COLUMNS)}, as members_ of a fit "
            f"with particles={particles} does, got {members!r}; None lets held-out rows choose."
        )


def _are_numbers(column: Any, count: int) -> bool:
    floats = isinstance(column, np.ndarray) and column.dtype == np.float64 and column.shape == (count,)
    return floats and bool(np.isfinite(column).all())
