"""What history records of particles: energies, and the sizes of the forces."""

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float, Key, PyTree

from measureflow.core.pytrees import Particles, add, root_mean_square_norms
from measureflow.numerics.interactions import EXACT, AbstractInteractions
from measureflow.statement.problem import Problem


def observed(
    problem: Problem,
    particles: Particles,
    batch: PyTree,
    interactions: AbstractInteractions = EXACT,
    key: Key[Array, ""] | None = None,
    of_objective: tuple[Float[Array, ""], Particles] | None = None,
) -> dict[str, Float[Array, ""]]:
    """`loss`, the objective G(Q_N): ∫ℓ for a loss; of the regulariser, `reference` ∫V, `interaction` ½∬W and
    `rest`, if there is one; L²(Q_N) norms of their gradients and of the sum; `repulsion`, the size of the
    interaction's gradient relative to the objective's. `of_objective` is G(Q_N) and its gradient, where they
    are those of training."""
    objective, regulariser = problem.objective_energy(batch), problem.regulariser_energy(batch)
    if of_objective is None:
        of_objective = objective.energy(particles), objective.wasserstein_gradient(particles)
    loss, of_loss = of_objective
    of_reference = regulariser.potential_gradient(particles)
    of_interaction, interaction = regulariser.interaction_gradient(particles), jnp.zeros(())
    if regulariser.interaction is not None:
        of_interaction = interactions.gradient(regulariser.interaction, particles, key)
        interaction = 0.5 * interactions.mean(regulariser.interaction, particles, key)
    fields = {"loss": of_loss, "reference": of_reference, "interaction": of_interaction}
    if regulariser.rest is not None:
        fields["rest"] = regulariser.rest_gradient(particles)
    of_all = functools.reduce(add, fields.values())
    *norms, norm_of_all = root_mean_square_norms(*fields.values(), of_all)
    norm_of = dict(zip(fields, norms, strict=True))
    found = {
        "loss": loss,
        "reference": regulariser.potential_energy(particles),
        "interaction": interaction,
        **{f"{name}_gradient_norm": norm for name, norm in norm_of.items()},
        "gradient_norm": norm_of_all,
        "repulsion": _relative(norm_of["interaction"], norm_of["loss"]),
    }
    if regulariser.rest is not None:
        found["rest"] = regulariser.rest_energy(particles)
    return found


def _relative(interaction: Float[Array, ""], loss: Float[Array, ""]) -> Float[Array, ""]:
    """Without a loss gradient there is nothing to compare with: 0/0 would be NaN."""
    relative = interaction / jnp.where(loss > 0, loss, 1.0)
    return jnp.where(loss > 0, relative, jnp.where(interaction > 0, jnp.inf, 0.0))
