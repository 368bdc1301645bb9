"""SVGD against SVGD: NumPyro's (contrib.einstein) and BlackJAX's (`blackjax.svgd`), on a Gaussian of unequal
scales, where the target costs next to nothing and the sum over pairs is all.

All take the median of the particles' distances at every step. NumPyro counts those of particles from
themselves, so before anything is timed drifts are compared at the lengthscale of each.
"""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.contrib.einstein import SVGD, RBFKernel
from numpyro.contrib.einstein.stein_util import median_bandwidth

import measureflow as mf
from benchmarks.peers.guests import Guests, needed
from benchmarks.targets import disagreement
from benchmarks.timing import Contender, Job, Ratio, comparison

ROUNDS = 5
OURS, NUMPYRO, BLACKJAX = "SteinFlow", "NumPyro SVGD", "BlackJAX SVGD"
# Particles and dimensions: steps to time, of ours and of the peers.
SIZES = {(300, 2): (500, 20), (100, 501): (200, 20)}
WANTED = [Ratio(BLACKJAX, OURS, at_least=20.0), Ratio(NUMPYRO, OURS, at_least=2.0)]
RATE = 1e-2


def jobs(*, quick: bool = False) -> list[Job]:
    """One job for each size."""
    sizes = {(6, 2): (3, 2)} if quick else SIZES
    return [_job(*size, *steps, 1 if quick else ROUNDS) for size, steps in sizes.items()]


def _job(particles: int, dimensions: int, own_steps: int, steps: int, rounds: int) -> Job:
    title = f"SVGD, {particles} particles in {dimensions}-D"

    def run(tick) -> dict[str, Any]:
        start = jax.random.normal(jax.random.key(0), (particles, dimensions))
        contenders = {OURS: Contender(ours(start, own_steps), own_steps)}
        guests = Guests()
        for name, come in ((NUMPYRO, numpyros), (BLACKJAX, blackjaxs)):
            guests.invite(name, functools.partial(come, start, steps), steps)
        contenders |= guests.contenders
        return comparison(title, contenders, WANTED, rounds, tick, unit="step", **guests.record())

    return Job(title, rounds + 1, run)


def scales(dimensions: int) -> jax.Array:
    """Standard deviations from ½ to 2."""
    return jnp.linspace(0.5, 2.0, dimensions)


def log_density(theta: jax.Array) -> jax.Array:
    """Of the target."""
    return jnp.sum(dist.Normal(0.0, scales(theta.shape[0])).log_prob(theta))


def negative_log_density(theta: jax.Array) -> jax.Array:
    """The loss of ours."""
    return -log_density(theta)


PROBLEM = mf.Problem(negative_log_density, mf.KL(mf.Flat()))


def ours(particles: jax.Array, steps: int, kernel: Any = None) -> Callable[[], Any]:
    """`steps` steps in one compiled loop."""
    flow = mf.SteinFlow(kernel or mf.MedianBandwidth(), RATE)
    state, count = flow.init(PROBLEM, particles), jnp.asarray(steps, jnp.int32)
    compiled = eqx.filter_jit(mf.run)
    return lambda: compiled(PROBLEM, flow, state, None, jax.random.key(1), count).particles


def numpyros(particles: jax.Array, steps: int) -> tuple[Callable[[], Any], float]:
    """NumPyro's steps in one compiled loop, and how far one of them is from ours."""
    deviations = scales(particles.shape[1])

    def model():
        numpyro.sample("x", dist.Normal(jnp.zeros_like(deviations), deviations).to_event(1))

    stein = SVGD(model, numpyro.optim.SGD(RATE), RBFKernel(), num_stein_particles=len(particles))
    state = jax.jit(stein.init)(jax.random.key(2))
    began, bandwidth = _points(stein, state), median_bandwidth(_points(stein, state), _share)
    moved = _points(stein, jax.jit(stein.update)(state)[0]) - began
    own = ours(began, 1, mf.SquaredExponential(jnp.sqrt(bandwidth / 2)))() - began

    @jax.jit
    def run(state):
        return jax.lax.fori_loop(0, steps, lambda _, state: stein.update(state)[0], state)

    return lambda: run(state).optim_state, disagreement(moved, own)


def _points(stein: SVGD, state: Any) -> jax.Array:
    return stein.get_params(state)["x_auto_loc"]


def _share(n: int) -> jax.Array:
    """NumPyro's factor of the squared median."""
    return 1 / jnp.log(n)


def blackjaxs(particles: jax.Array, steps: int) -> tuple[Callable[[], Any], float]:
    """The same of BlackJAX."""
    svgd = needed("blackjax").svgd(jax.grad(log_density), optax.sgd(RATE))
    lengthscale = mf.MedianBandwidth().at(particles).lengthscale
    state = svgd.init(particles, {"length_scale": 2 * lengthscale**2})
    moved = jax.jit(svgd.step)(state).particles - particles
    own = ours(particles, 1, mf.SquaredExponential(lengthscale))() - particles

    @jax.jit
    def run(state):
        return jax.lax.fori_loop(0, steps, lambda _, state: svgd.step(state), state)

    return lambda: run(state).particles, disagreement(moved, own)
