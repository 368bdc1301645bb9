"""`method="posterior"`: networks drawn from the posterior by the certified sampler, for small tables."""

import dataclasses
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key

from measureflow.core.pytrees import Particles, dimension
from measureflow.runs.checkpoint import Checkpoint
from measureflow.runs.history import History
from measureflow.sampling.result import Sample, SamplingWarning
from measureflow.sampling.sample import sample
from measureflow.saving.registry import saved
from measureflow.statement.certificate import NotStationaryWarning
from measureflow.tables.choosing import Choice, Trial
from measureflow.tables.methods import METHODS, Candidate
from measureflow.tables.models import Model
from measureflow.tables.recipe import Recipe
from measureflow.tables.table import Table, stacked
from measureflow.tables.training import Ensemble
from measureflow.tables.trials import Plan

#: Its name.
POSTERIOR = "posterior"
#: A gradient of the whole table, for every particle of the sampler, costs in proportion to rows × parameters.
MOST_ROWS_TIMES_PARAMETERS = 500_000
#: The sampler learns the posterior's covariance from so many particles of its own.
CHAINS = 200


@saved
@dataclasses.dataclass(frozen=True)
class Verdict:
    """What the sampler says of the networks that it drew: true if nothing speaks against them.

    Attributes
    ----------
    statistic, limit
        The largest deviation of a moment from what the posterior's gradient says it must be, in standard
        errors, and what exact draws exceed once in a thousand times: see `mf.Certificate`.
    r_hat
        The largest nested R̂ of all weights: above 1.01, particles remember where they began.
    effective_draws
        The least of all weights.
    gradients
        How many each particle took.
    problems
        What speaks against the draws, in words.
    """

    statistic: float
    limit: float
    r_hat: float
    effective_draws: float
    gradients: int
    problems: tuple[str, ...]

    @classmethod
    def of(cls, drawn: Sample) -> "Verdict":
        """Of a result of `mf.sample`."""
        problems = drawn.problems if drawn.certificate else (str(drawn.certificate), *drawn.problems)
        r_hats, effective = (jax.tree.leaves(tree) for tree in (drawn.r_hat, drawn.effective_draws))
        return cls(
            float(drawn.certificate.statistic),
            float(drawn.certificate.limit),
            max(float(np.max(leaf)) for leaf in r_hats),
            min(float(np.min(leaf)) for leaf in effective),
            int(drawn.gradients),
            tuple(problems),
        )

    def __bool__(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        if self:
            return (
                f"drawn from the posterior, as far as can be told: R̂ ≤ {self.r_hat:.3g}, largest deviation "
                f"{self.statistic:.1f} of {self.limit:.1f} standard errors."
            )
        return (
            f"the networks are not certified as draws of the posterior: {self.problems[0]} Predictions may "
            "still be good: compare log scores on held-out rows, as mf.cross_validate has them."
        )


def is_sampled(method: Any) -> bool:
    """Whether there is a sampler in the place of training."""
    return method in (POSTERIOR, METHODS[POSTERIOR])


def require_sampled(estimator: Any, callbacks: Any) -> None:
    """Settings that a sampler has."""
    given = {name: getattr(estimator, name) for name in ("steps", "batch_size", "members")}
    for name, value in given.items():
        if value is not None:
            raise ValueError(
                f"method='posterior' draws with all rows until draws are certified, and has no {name}, got "
                f"{value!r}; leave it out, or use method='DLE'."
            )
    for name in ("early_stopping", "warm_start"):
        if getattr(estimator, name):
            raise ValueError(f"method='posterior' is not trained, and knows no {name}; use method='DLE'.")
    if callbacks:
        raise ValueError("method='posterior' is not trained, and calls no callback; use method='DLE'.")


def drawn_for(
    table: Table,
    model: Model,
    recipe: Recipe,
    key: Key[Array, ""],
    *,
    progress: bool = False,
    checkpoint: Checkpoint | None = None,
) -> tuple[Ensemble, Verdict, str | None]:
    """As many networks as the recipe has particles, drawn from exp(−n ℓ(θ)/λ) P(θ): the posterior, tempered
    by the prior's weight λ, which is 1 unless it is given; and the name of a signal that ended it."""
    rows, parameters = len(table.weights), dimension(model.prior.mean)
    if rows * parameters > MOST_ROWS_TIMES_PARAMETERS:
        raise ValueError(
            f"method='posterior' is for small tables: {rows:,} rows × {parameters:,} parameters are more "
            f"than {MOST_ROWS_TIMES_PARAMETERS:,}; use a smaller network, such as hidden=(10,) with "
            "encoding=0, fewer rows, or method='DLE'."
        )
    weight = 1.0 if recipe.prior_weight is None else recipe.prior_weight
    trial = Trial(0, Candidate(weight), model.tried[-1])
    seen = model.view(table)
    plan = Plan.of(model.loss, model.prior, model.views, recipe, rows)
    numbers = jnp.asarray([weight / table.cases, 1.0, *trial.view], jnp.float32)
    setting = plan.setting(numbers)
    data = tuple(part[0] for part in stacked([seen], len(seen.weights)))
    with warnings.catch_warnings():
        # The verdict has them all, and the estimator tells.
        for kind in (SamplingWarning, NotStationaryWarning):
            warnings.simplefilter("ignore", kind)
        drawn = sample(
            plan.method.problem(setting),
            setting.prior,
            key,
            particles=max(CHAINS, recipe.particles),
            data=data,
            mesh=recipe.mesh,
            progress=progress,
            checkpoint=checkpoint,
        )
    particles = plan.pruned(_some(drawn, recipe.particles), numbers)
    columns = {name: column for name, column in drawn.history.items() if name not in ("gradients", "phase")}
    history = History({"step": drawn.history["gradients"], **columns})
    ensemble = Ensemble(Choice((trial,)), particles, drawn.gradients, drawn.gradients, history)
    return ensemble, Verdict.of(drawn), drawn.interrupted


def _some(drawn: Sample, number: int) -> Particles:
    """The last draws of so many particles of the sampler, which lie evenly among all."""
    chains = len(jax.tree.leaves(drawn.draws)[0])
    chosen = np.linspace(0, chains - 1, number).round().astype(int)
    return jax.tree.map(lambda leaf: jnp.asarray(leaf[chosen, -1]), drawn.draws)
