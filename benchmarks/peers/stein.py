"""NumPyro's interacting peers: https://num.pyro.ai (contrib.einstein; the example "BNN with SteinVI").

SVGD, Stein variational gradient descent, moves points by their gradients and by their kernel with all others:
of all peers it is closest to DRLE. SteinVI is the same with a Gaussian for every point, as in its example; it
takes N² gradients a step, and as many again for every draw, of which it gets the fewest, one.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.contrib.einstein import SVGD, RBFKernel, SteinVI
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.initialization import init_to_uniform
from numpyro.infer.util import log_density
from numpyro.optim import Adagrad

from benchmarks import ours
from benchmarks.peers.guests import Guests
from benchmarks.targets import TEMPERATURE, Target, disagreement, drift, network, regression
from benchmarks.timing import Contender, Job, Ratio, comparison

ROUNDS = 3
POINTS, GAUSSIANS = "NumPyro SVGD", "NumPyro SteinVI"
# Networks: steps to time, of ours, of SVGD, and of SteinVI.
SIZES = {5: (2000, 1000, 20), 20: (1000, 200, 2)}
WANTED = [Ratio(POINTS, "DRLE", at_least=1.0), Ratio(GAUSSIANS, "DRLE", at_least=50.0)]


def jobs(*, quick: bool = False) -> list[Job]:
    """One job for each number of networks."""
    # A short form of SteinVI would compile as long as the real one.
    sizes = {2: (3, 1)} if quick else SIZES
    return [_job(regression(n), steps, 1 if quick else ROUNDS) for n, steps in sizes.items()]


def _job(target: Target, steps: tuple[int, ...], rounds: int) -> Job:
    def run(tick) -> dict[str, Any]:
        contenders = {"DRLE": Contender(ours.run(target, "DRLE", steps[0]), steps[0])}
        guests = Guests()
        for name, count in zip((POINTS, GAUSSIANS), steps[1:], strict=False):
            guests.invite(name, functools.partial(_come, name, target, count), count)
        contenders |= guests.contenders
        return comparison(target.title, contenders, WANTED, rounds, tick, unit="step", **guests.record())

    return Job(f"SVGD, {target.title}", rounds + 1, run)


def _come(name: str, target: Target, steps: int) -> tuple[Callable[[], Any], float]:
    return stein_steps(name, target, steps), disagreement(peer_drift(target), drift(target))


def model_of(target: Target) -> Callable[..., None]:
    """The target as a NumPyro model. The mean of n squared errors over τ is a normal law of variance τn/2."""
    cases = len(target.data[0])
    shapes = {name: leaf.shape[1:] for name, leaf in _named(target.particles).items()}

    def model(x, y):
        values = {
            name: numpyro.sample(name, dist.Normal(0.0, 1.0).expand(shape).to_event(len(shape)))
            for name, shape in shapes.items()
        }
        mean = network(_layers(values), x)
        with numpyro.plate("cases", cases):
            scale = (TEMPERATURE * cases / 2) ** 0.5
            numpyro.sample("y", dist.Normal(mean[:, 0], scale), obs=y[:, 0])

    return model


def peer_drift(target: Target) -> Any:
    """τ times the gradient of the model's log density."""
    model = model_of(target)

    def log_target(values):
        return TEMPERATURE * log_density(model, target.data, {}, values)[0]

    return _layers(jax.jit(jax.vmap(jax.grad(log_target)))(_named(target.particles)))


def stein_steps(name: str, target: Target, steps: int) -> Callable[[], Any]:
    """`steps` updates in one compiled loop; the compiling, which `run` repeats at every call, left out."""
    model, particles = model_of(target), len(jax.tree.leaves(target.particles)[0])
    init = {"init_loc_fn": functools.partial(init_to_uniform, radius=0.1)}
    optimiser, kernel = Adagrad(0.05), RBFKernel()
    if name == POINTS:
        stein = SVGD(model, optimiser, kernel, num_stein_particles=particles, guide_kwargs=init)
    else:
        guide = AutoNormal(model, **init)
        stein = SteinVI(model, guide, optimiser, kernel, num_stein_particles=particles, num_elbo_particles=1)
    state = jax.jit(stein.init)(jax.random.key(2), *target.data)

    @jax.jit
    def run(state, data):
        return jax.lax.fori_loop(0, steps, lambda _, state: stein.update(state, *data)[0], state)

    return lambda: run(state, target.data).optim_state


def _named(particles: list[dict[str, jax.Array]]) -> dict[str, jax.Array]:
    return {f"{name}_{index}": leaf for index, layer in enumerate(particles) for name, leaf in layer.items()}


def _layers(values: dict[str, jax.Array]) -> list[dict[str, jax.Array]]:
    return [
        {"weight": values[f"weight_{index}"], "bias": jnp.asarray(values[f"bias_{index}"])}
        for index in range(len(values) // 2)
    ]
