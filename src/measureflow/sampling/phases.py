"""The compiled phases of `sample`: descent, adaptation, sampling. One program each, whatever the numbers."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from measureflow.flows.ensembles import ensemble_covariance
from measureflow.sampling.trajectories import Ensemble, Outcome, Target, Tuning, ensemble, trajectory

# The median acceptance that step sizes are chosen for: robust to a few hopeless particles.
ACCEPTANCE = 0.88
# A covariance is made anew after so many trajectories.
_EVERY = 4
# The step size may be cut to a quarter so many times.
DEEPEST = 3
# What is accepted with less probability than this was too stiff for its steps; a Gaussian never is. Steps are
# fine enough where that happens to no more than this share of the particles.
_HARDLY, STIFF = 0.1, 5e-3


class Report(NamedTuple):
    """What a call did: the median acceptance of trajectories with the common step size, leapfrog steps, the
    share of the finest trajectories that were hardly accepted, and for every particle the share of its
    trajectories that moved it. Until it is `_shared`, all are sums, with the numbers of summands."""

    acceptance: Float[Array, ""]
    leaps: Int[Array, ""]
    stiff: Float[Array, ""]
    moved: Float[Array, " n"]
    common: Float[Array, ""]
    finest: Float[Array, ""]

    def after(self, outcome: Outcome, level: Int[Array, ""], depth: Int[Array, ""]) -> "Report":
        """With one trajectory more."""
        dtype = self.acceptance.dtype
        common, finest = (level == 0).astype(dtype), (level == depth).astype(dtype)
        return Report(
            self.acceptance + common * jnp.median(outcome.acceptance).astype(dtype),
            self.leaps + outcome.leaps,
            self.stiff + finest * _stiff(outcome).astype(dtype),
            self.moved + outcome.moved.astype(dtype),
            self.common + common,
            self.finest + finest,
        )


@eqx.filter_jit
def looked_at(target: Target, rows: Float[Array, "n J"]) -> Ensemble:
    """U and ∇U at rows."""
    return ensemble(target, rows)


@eqx.filter_jit
def descend(
    target: Target,
    state: Ensemble,
    scale: Float[Array, " J"],
    rate: Float[Array, ""],
    key: Key[Array, ""],
    steps: Int[Array, ""],
) -> Ensemble:
    """Langevin steps of every particle on its own: Adam's direction, at most about `rate` in units of
    `scale`, with the noise that belongs to it. Without noise particles would end in the neck of a funnel,
    where densities are highest and hardly any mass is."""

    def step(count: Int[Array, ""], carry: tuple) -> tuple:
        state, first, second = carry
        good = jnp.isfinite(state.values) & jnp.all(jnp.isfinite(state.gradients), axis=1)
        slopes = jnp.where(good[:, None], state.gradients * scale[None], 0.0)
        first = 0.9 * first + 0.1 * slopes
        second = 0.99 * second + 0.01 * jnp.square(slopes)
        t = (count + 1).astype(slopes.dtype)
        size = jnp.sqrt(second / (1 - 0.99**t)) + 1e-6
        noise = jax.random.normal(jax.random.fold_in(key, count), slopes.shape, slopes.dtype)
        kick = jnp.minimum(jnp.sqrt(2 * rate / size), 1.0) * noise
        rows = state.rows + scale[None] * (kick - rate * first / (1 - 0.9**t) / size)
        moved = ensemble(target, rows)
        fine = jnp.isfinite(moved.values) & jnp.all(jnp.isfinite(moved.gradients), axis=1)
        kept = Ensemble(
            jnp.where(fine[:, None], moved.rows, state.rows),
            jnp.where(fine, moved.values, state.values),
            jnp.where(fine[:, None], moved.gradients, state.gradients),
        )
        return kept, first, second

    nothing = jnp.zeros_like(state.rows)
    return jax.lax.fori_loop(0, steps, step, (state, nothing, nothing))[0]


def _stiff(outcome: Outcome) -> Float[Array, ""]:
    return jnp.mean(outcome.acceptance < _HARDLY)


def _level(tuning: Tuning, key: Key[Array, ""]) -> Int[Array, ""]:
    """l ≤ depth with probability ∝ 2⁻ˡ."""
    levels = jnp.arange(DEEPEST + 1, dtype=jnp.int32)
    weights = jnp.where(levels <= tuning.depth, -jnp.log(2.0) * levels.astype(jnp.float32), -jnp.inf)
    return jax.random.categorical(key, weights).astype(jnp.int32)


@eqx.filter_jit
def adapt(
    target: Target, state: Ensemble, tuning: Tuning, key: Key[Array, ""], count: Int[Array, ""]
) -> tuple[Ensemble, Tuning, Report]:
    """`count` trajectories, after each of which the step size follows the acceptance of the ensemble, and
    after some of which the covariance follows its particles. The chain has no law while it adapts."""

    def body(i: Int[Array, ""], carry: tuple) -> tuple:
        state, tuning, report = carry
        own_key, level_key = jax.random.split(jax.random.fold_in(key, i))
        covariance = jax.lax.cond(
            i % _EVERY == 0, lambda: ensemble_covariance(state.rows), lambda: tuning.covariance
        )
        tuning = tuning._replace(covariance=covariance)
        # Every other trajectory sets the common step size.
        level = jnp.where(i % 2 == 0, 0, _level(tuning, level_key))
        state, outcome = trajectory(target, state, tuning, level, own_key)
        rate = jnp.median(outcome.acceptance).astype(tuning.log_step_size.dtype)
        change = jnp.where(level == 0, rate - ACCEPTANCE, 0.0)
        report = report.after(outcome, level, tuning.depth)
        return state, tuning._replace(log_step_size=tuning.log_step_size + change), report

    state, tuning, report = jax.lax.fori_loop(0, count, body, (state, tuning, _none(state)))
    return state, tuning, _shared(report, count)


@eqx.filter_jit
def deepened(
    target: Target, state: Ensemble, tuning: Tuning, key: Key[Array, ""]
) -> tuple[Ensemble, Tuning, Float[Array, ""], Int[Array, ""]]:
    """The first level at which steps are fine enough for nearly every particle, or the last; the share of
    particles for which it is not, and what it took."""

    def too_coarse(carry: tuple) -> Bool[Array, ""]:
        _, level, stiff, _ = carry
        return (stiff > STIFF) & (level < DEEPEST)

    def finer(carry: tuple) -> tuple:
        state, level, _, leaps = carry
        level = level + 1
        state, outcome = trajectory(target, state, tuning, level, jax.random.fold_in(key, level))
        return state, level, _stiff(outcome), leaps + outcome.leaps

    zero = jnp.zeros((), jnp.int32)
    begin = (state, zero - 1, jnp.ones((), jnp.result_type(float)), zero)
    state, level, stiff, leaps = jax.lax.while_loop(too_coarse, finer, begin)
    return state, tuning._replace(depth=level), stiff, leaps


@eqx.filter_jit
def draw(
    target: Target,
    state: Ensemble,
    tuning: Tuning,
    key: Key[Array, ""],
    between: Int[Array, ""],
    kept: int,
) -> tuple[Ensemble, Float[Array, "kept n J"], Float[Array, "kept n"], Report]:
    """`kept` draws of every particle and U there, `between` trajectories apart, with nothing adapted."""

    def one(i: Int[Array, ""], carry: tuple) -> tuple:
        state, report, first = carry
        own_key, level_key = jax.random.split(jax.random.fold_in(key, first + i))
        level = _level(tuning, level_key)
        state, outcome = trajectory(target, state, tuning, level, own_key)
        return state, report.after(outcome, level, tuning.depth), first

    def keep(carry: tuple, k: Int[Array, ""]) -> tuple:
        state, report = carry
        state, report, _ = jax.lax.fori_loop(0, between, one, (state, report, k * between))
        return (state, report), (state.rows, state.values)

    begin, indices = (state, _none(state)), jnp.arange(kept, dtype=jnp.int32)
    (state, report), (rows, values) = jax.lax.scan(keep, begin, indices)
    return state, rows, values, _shared(report, between * kept)


def _none(state: Ensemble) -> Report:
    zero = jnp.zeros((), jnp.result_type(float))
    nobody = jnp.zeros(state.values.shape, zero.dtype)
    return Report(zero, jnp.zeros((), jnp.int32), zero, nobody, zero, zero)


def _shared(report: Report, count: Int[Array, ""]) -> Report:
    """Means in the place of sums; of what there was none, 0 that were too stiff and nothing accepted."""
    return report._replace(
        acceptance=report.acceptance / jnp.maximum(report.common, 1),
        stiff=report.stiff / jnp.maximum(report.finest, 1),
        moved=report.moved / count.astype(report.moved.dtype),
    )
