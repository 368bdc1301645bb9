"""What an estimator's settings must be, each by itself, and those of a fit that goes on from another."""

from typing import Any

import equinox as eqx
import jax

from measureflow.core.devices import require_mesh
from measureflow.core.validation import positive_number, require_count
from measureflow.networks.priors import perceptron
from measureflow.runs.checkpoint import Checkpoint
from measureflow.tables.members import require_members
from measureflow.tables.methods import method_of


def check_settings(estimator: Any) -> None:
    """What `fit` needs to know, before it looks at data."""
    method_of(estimator.method)
    require_count("particles", estimator.particles, 1, "20 is a start.")
    require_members(estimator.members, estimator.particles)
    positive_number("mmd", estimator.mmd, "0.5 is a start; for none, choose method='DLE' or 'DE'.")
    positive_number("step_size", estimator.step_size, "0.01 is a start.")
    if estimator.prior_weight is not None:
        positive_number("prior_weight", estimator.prior_weight, "1 is the Bayes posterior; None chooses it.")
    if estimator.mesh is not None:
        require_mesh(estimator.mesh, estimator.particles)
    for name in ("steps", "batch_size"):
        if getattr(estimator, name) is not None:
            require_count(name, getattr(estimator, name), 1, "None goes by the number of rows.")
    if estimator.method == "FD-GVI" and estimator.particles == 1 and estimator._goes_on():
        raise ValueError(
            "warm_start with method='FD-GVI' goes on from the Gaussian of the last fit's particles, and "
            "particles=1 has no spread; start over with warm_start=False, and more particles."
        )
    if not 0 < estimator.validation_fraction < 1:
        raise ValueError(
            f"validation_fraction must be between 0 and 1, got {estimator.validation_fraction}; try 0.1."
        )


def require_unchanged(estimator: Any) -> None:
    """A warm start goes on with the particles that there are: what shapes them must be as it was."""
    shape = estimator.shape_
    hidden = shape.hidden if estimator.hidden is None else tuple(estimator.hidden)
    changed = hidden != shape.hidden or estimator.encoding not in (None, shape.encoding)
    likelihood = getattr(estimator, "likelihood", None)
    changed |= likelihood is not None and not eqx.tree_equal(likelihood, shape.likelihood)
    if hasattr(estimator, "classes_"):
        changed |= not eqx.tree_equal(estimator._head(None, None).likelihood, estimator.likelihood_)
    inner, particles = perceptron(estimator.network_), len(jax.tree.leaves(estimator.particles_)[0])
    changed |= inner is not None and estimator.activation not in (None, inner.activation)
    if changed or particles != estimator.particles:
        raise ValueError(
            "warm_start goes on from the last fit, but hidden, encoding, activation, particles, likelihood "
            "or ordinal were changed since; set warm_start=False to start over."
        )


def require_resumable(checkpoint: Any, random_state: Any) -> None:
    """A checkpoint, and a seed that makes two calls the same."""
    if checkpoint is None:
        return
    if not isinstance(checkpoint, Checkpoint):
        raise TypeError(f"checkpoint must be an mf.Checkpoint, got {checkpoint!r}; see mf.Checkpoint.")
    if random_state is None:
        raise ValueError(
            "checkpoint needs a random_state, got None: each call would be another run, and none could "
            "be resumed; set random_state=0, for example."
        )
