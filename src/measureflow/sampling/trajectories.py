"""A posterior as `sample` sees it, U = V/τ at rows, perhaps tempered; and Hamiltonian trajectories in it."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from measureflow.core.pytrees import Parameters, Particles, like_rows
from measureflow.flows.ensembles import Covariance
from measureflow.flows.metropolis import acceptance
from measureflow.statement.problem import Problem

_EXACT = jax.lax.Precision.HIGHEST
_LEAST_LEAPS, _MOST_LEAPS = 3, 1024


class Reference(eqx.Module):
    """A Gaussian from which tempering begins: its mean, and its covariance L Lᵀ."""

    mean: Float[Array, " J"]
    factor: Float[Array, "J J"]
    inverse: Float[Array, "J J"]

    def values_and_gradients(
        self, rows: Float[Array, "n J"]
    ) -> tuple[Float[Array, " n"], Float[Array, "n J"]]:
        """½‖L⁻¹(θ − m)‖² and its gradient."""
        z = jnp.matmul(rows - self.mean[None], self.inverse.T, precision=_EXACT)
        return 0.5 * jnp.sum(jnp.square(z), axis=1), jnp.matmul(z, self.inverse, precision=_EXACT)


class Target(eqx.Module):
    """U(θ) = V(θ)/τ, or βU + (1 − β)U₀ where there is a reference."""

    problem: Problem
    one: Parameters
    batch: PyTree = None
    reference: Reference | None = None
    beta: Float[Array, ""] | None = None

    def unravelled(self, rows: Float[Array, "n J"]) -> Particles:
        """Rows as particles."""
        return like_rows(rows, jax.tree.map(lambda leaf: leaf[None], self.one))

    def posterior(self, rows: Float[Array, "n J"]) -> tuple[Float[Array, " n"], Float[Array, "n J"]]:
        """U and ∇U of the posterior itself."""
        energy = self.problem.free_energy(self.batch)
        potential, temperature = energy.potential, energy.temperature
        assert potential is not None
        assert temperature is not None

        def of_row(row: Float[Array, " J"]) -> Float[Array, ""]:
            theta = jax.tree.map(lambda leaf: leaf[0], self.unravelled(row[None]))
            return (potential(theta) / temperature.astype(row.dtype)).astype(row.dtype)

        # GPUs round products to ten bits by default: such a density would be accepted by its rounding.
        with jax.default_matmul_precision("highest"):
            return jax.vmap(jax.value_and_grad(of_row))(rows)

    def values_and_gradients(
        self, rows: Float[Array, "n J"]
    ) -> tuple[Float[Array, " n"], Float[Array, "n J"]]:
        """U and ∇U, tempered where there is a reference."""
        value, gradient = self.posterior(rows)
        if self.reference is None or self.beta is None:
            return value, gradient
        value0, gradient0 = self.reference.values_and_gradients(rows)
        beta = self.beta.astype(rows.dtype)
        # At β = 0 the posterior must not be asked: 0·∞ is no number.
        known = beta * jnp.where(beta > 0, value, 0.0) + (1 - beta) * value0
        return known, beta * jnp.where(beta > 0, gradient, 0.0) + (1 - beta) * gradient0


class Ensemble(NamedTuple):
    """Particles as rows, with U and ∇U there."""

    rows: Float[Array, "n J"]
    values: Float[Array, " n"]
    gradients: Float[Array, "n J"]


class Tuning(NamedTuple):
    """What trajectories are made with: a covariance, the logarithm of the step size, the length, and how many
    times the step size may be cut to a quarter."""

    covariance: Covariance
    log_step_size: Float[Array, ""]
    length: Float[Array, ""]
    depth: Int[Array, ""]


class Outcome(NamedTuple):
    """Of one trajectory of every particle: with which probability it is accepted, who moved, and how many
    leapfrog steps it took."""

    acceptance: Float[Array, " n"]
    moved: Bool[Array, " n"]
    leaps: Int[Array, ""]


def ensemble(target: Target, rows: Float[Array, "n J"]) -> Ensemble:
    """Rows with U and ∇U there."""
    return Ensemble(rows, *target.values_and_gradients(rows))


def trajectory(
    target: Target, state: Ensemble, tuning: Tuning, level: Int[Array, ""], key: Key[Array, ""]
) -> tuple[Ensemble, Outcome]:
    """Hamiltonian Monte Carlo of every particle, with the ensemble's covariance as inverse mass: leapfrog
    steps of size ε/4ˡ, accepted with probability min(1, e^{−ΔH}).

    Sizes and lengths are jittered: trajectories of one length may go in circles. At level l the same length
    takes 4ˡ times as many steps: for places that the common steps cannot enter.
    """
    velocity_key, size_key, length_key, accept_key = jax.random.split(key, 4)
    scaling, n, dtype = tuning.covariance.scaling(), state.rows.shape[0], state.rows.dtype
    common = jnp.exp(tuning.log_step_size).astype(dtype) * 0.25 ** level.astype(dtype)
    length = tuning.length * jax.random.uniform(length_key, (), dtype, 0.4, 1.6)
    leaps = jnp.clip(jnp.ceil(length / common), _LEAST_LEAPS, _MOST_LEAPS).astype(jnp.int32)
    size = common * jax.random.uniform(size_key, (n, 1), dtype, 0.8, 1.2)
    velocity = jax.random.normal(velocity_key, state.rows.shape, dtype)

    def leap(_: Int[Array, ""], carry: tuple) -> tuple:
        at, velocity = carry
        velocity = velocity - 0.5 * size * scaling.root_transposed(at.gradients)
        at = ensemble(target, at.rows + size * scaling.root(velocity))
        return at, velocity - 0.5 * size * scaling.root_transposed(at.gradients)

    after, turned = jax.lax.fori_loop(0, leaps, leap, (state, velocity))
    kinetic = 0.5 * (jnp.sum(jnp.square(turned), axis=1) - jnp.sum(jnp.square(velocity), axis=1))
    gained = after.values - state.values + kinetic
    finite = jnp.isfinite(gained) & jnp.all(jnp.isfinite(after.gradients), axis=1)
    probability = acceptance(jnp.where(finite, -gained, -jnp.inf))
    moved = jax.random.uniform(accept_key, (n,), probability.dtype) < probability
    chosen = Ensemble(
        jnp.where(moved[:, None], after.rows, state.rows),
        jnp.where(moved, after.values, state.values),
        jnp.where(moved[:, None], after.gradients, state.gradients),
    )
    return chosen, Outcome(probability, moved, leaps)
