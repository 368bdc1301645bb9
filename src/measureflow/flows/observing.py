"""What history records of particles: energies, and the sizes of the forces."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Key, PyTree

from measureflow.core.pytrees import Particles, add, root_mean_square_norm
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
    total = add(add(of_loss, of_reference), of_interaction)
    loss_norm, interaction_norm = map(root_mean_square_norm, (of_loss, of_interaction))
    found = {
        "loss": loss,
        "reference": regulariser.potential_energy(particles),
        "interaction": interaction,
        "loss_gradient_norm": loss_norm,
        "reference_gradient_norm": root_mean_square_norm(of_reference),
        "interaction_gradient_norm": interaction_norm,
    }
    if regulariser.rest is not None:
        of_rest = regulariser.rest_gradient(particles)
        total = add(total, of_rest)
        found["rest"] = regulariser.rest_energy(particles)
        found["rest_gradient_norm"] = root_mean_square_norm(of_rest)
    # Without a loss gradient there is nothing to compare with: 0/0 would be NaN.
    repulsion = interaction_norm / jnp.where(loss_norm > 0, loss_norm, 1.0)
    repulsion = jnp.where(loss_norm > 0, repulsion, jnp.where(interaction_norm > 0, jnp.inf, 0.0))
    return {**found, "gradient_norm": root_mean_square_norm(total), "repulsion": repulsion}
