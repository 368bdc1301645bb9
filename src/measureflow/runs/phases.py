"""The compiled phases of `sample`: descent, adaptation, sampling. One program each, whatever the numbers."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from measureflow.flows.ensembles import ensemble_covariance
from measureflow.runs.targets import Ensemble, Target, Tuning, ensemble, trajectory

# The acceptance that step sizes are chosen for, and how long trajectories may become.
ACCEPTANCE = 0.9
MOST_LEAPS = 256
_LEAST_LEAPS = 3
# A covariance is made anew after so many trajectories.
_EVERY = 4


class Descent(NamedTuple):
    """Particles on their way down: where they are, the best they have seen, and Adam's two moments."""

    rows: Float[Array, "n J"]
    best: Float[Array, "n J"]
    values: Float[Array, " n"]
    first: Float[Array, "n J"]
    second: Float[Array, "n J"]


class Report(NamedTuple):
    """What a call did: mean acceptance, leapfrog steps, shares of trajectories that diverged, and for every
    particle the share of its trajectories that moved it."""

    acceptance: Float[Array, ""]
    leaps: Int[Array, ""]
    diverged: Float[Array, ""]
    moved: Float[Array, " n"]


@eqx.filter_jit
def looked_at(target: Target, rows: Float[Array, "n J"]) -> Ensemble:
    """U and ∇U at rows."""
    return ensemble(target, rows)


def begun(rows: Float[Array, "n J"], values: Float[Array, " n"]) -> Descent:
    """At rest."""
    return Descent(rows, rows, values, jnp.zeros_like(rows), jnp.zeros_like(rows))


@eqx.filter_jit
def descend(
    target: Target, state: Descent, scale: Float[Array, " J"], rate: Float[Array, ""], steps: Int[Array, ""]
) -> Descent:
    """Adam for every particle on its own, with steps of `rate` in units of `scale`."""

    def step(count: Int[Array, ""], state: Descent) -> Descent:
        values, gradients = target.values_and_gradients(state.rows)
        good = jnp.isfinite(values) & jnp.all(jnp.isfinite(gradients), axis=1)
        better = good & (values < state.values)
        best = jnp.where(better[:, None], state.rows, state.best)
        values = jnp.where(better, values, state.values)
        slopes = jnp.where(good[:, None], gradients * scale[None], 0.0)
        first = 0.9 * state.first + 0.1 * slopes
        second = 0.99 * state.second + 0.01 * jnp.square(slopes)
        t = (count + 1).astype(slopes.dtype)
        direction = (first / (1 - 0.9**t)) / (jnp.sqrt(second / (1 - 0.99**t)) + 1e-20)
        rows = jnp.where(good[:, None], state.rows - rate * scale[None] * direction, best)
        return Descent(rows, best, values, first, second)

    fresh = begun(state.best, state.values)
    return jax.lax.fori_loop(0, steps, step, fresh)


def leaps_of(tuning: Tuning, key: Key[Array, ""], most: int = MOST_LEAPS) -> Int[Array, ""]:
    """How many leapfrog steps make the length, jittered: trajectories of one length may go in circles."""
    size = jnp.exp(tuning.log_step_size)
    length = tuning.length * jax.random.uniform(key, (), size.dtype, 0.4, 1.6)
    return jnp.clip(jnp.ceil(length / size), _LEAST_LEAPS, most).astype(jnp.int32)


@eqx.filter_jit
def adapt(
    target: Target, state: Ensemble, tuning: Tuning, key: Key[Array, ""], count: Int[Array, ""]
) -> tuple[Ensemble, Tuning, Report]:
    """`count` trajectories, after each of which the step size follows the acceptance of the ensemble, and
    after some of which the covariance follows its particles. The chain has no law while it adapts."""

    def body(i: Int[Array, ""], carry: tuple) -> tuple:
        state, tuning, report = carry
        own_key = jax.random.fold_in(key, i)
        covariance = jax.lax.cond(
            i % _EVERY == 0, lambda: ensemble_covariance(state.rows), lambda: tuning.covariance
        )
        tuning = tuning._replace(covariance=covariance)
        leaps = leaps_of(tuning, jax.random.fold_in(own_key, 1), 64)
        state, outcome = trajectory(target, state, tuning, leaps, own_key)
        rate = jnp.mean(outcome.acceptance).astype(tuning.log_step_size.dtype)
        log_size = tuning.log_step_size + 1.0 * (rate - ACCEPTANCE)
        report = Report(
            report.acceptance + rate,
            report.leaps + leaps,
            report.diverged + jnp.mean(outcome.diverged).astype(rate.dtype),
            report.moved + outcome.moved.astype(rate.dtype),
        )
        return state, tuning._replace(log_step_size=log_size), report

    state, tuning, report = jax.lax.fori_loop(0, count, body, (state, tuning, _none(state)))
    return state, tuning, _shares(report, count)


@eqx.filter_jit
def draw(
    target: Target,
    state: Ensemble,
    tuning: Tuning,
    key: Key[Array, ""],
    between: Int[Array, ""],
    kept: int,
) -> tuple[Ensemble, Float[Array, "kept n J"], Report]:
    """`kept` draws of every particle, `between` trajectories apart, with nothing adapted."""

    def one(i: Int[Array, ""], carry: tuple) -> tuple:
        state, report, first = carry
        own_key = jax.random.fold_in(key, first + i)
        leaps = leaps_of(tuning, jax.random.fold_in(own_key, 1))
        state, outcome = trajectory(target, state, tuning, leaps, own_key)
        rate = jnp.mean(outcome.acceptance).astype(report.acceptance.dtype)
        diverged = jnp.mean(outcome.diverged).astype(rate.dtype)
        moved = report.moved + outcome.moved.astype(rate.dtype)
        report = Report(report.acceptance + rate, report.leaps + leaps, report.diverged + diverged, moved)
        return state, report, first

    def keep(carry: tuple, k: Int[Array, ""]) -> tuple:
        state, report = carry
        state, report, _ = jax.lax.fori_loop(0, between, one, (state, report, k * between))
        return (state, report), state.rows

    (state, report), rows = jax.lax.scan(keep, (state, _none(state)), jnp.arange(kept, dtype=jnp.int32))
    return state, rows, _shares(report, between * kept)


def _none(state: Ensemble) -> Report:
    zero = jnp.zeros((), jnp.result_type(float))
    return Report(zero, jnp.zeros((), jnp.int32), zero, jnp.zeros(state.values.shape, zero.dtype))


def _shares(report: Report, count: Int[Array, ""]) -> Report:
    number = count.astype(report.acceptance.dtype)
    return Report(report.acceptance / number, report.leaps, report.diverged / number, report.moved / number)
