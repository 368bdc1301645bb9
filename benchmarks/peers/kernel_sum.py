"""KeOps for the kernel sum: https://www.kernel-operations.io (LazyTensor, here with NumPy arrays).

(1/N) Σⱼ ∇₁κ(θᵢ, θⱼ) of the squared exponential kernel, exactly, over all pairs in the plane; neither library
ever holds N² numbers.
"""

import contextlib
import io
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import measureflow as mf
from benchmarks.peers.guests import Guests, needed
from benchmarks.targets import disagreement
from benchmarks.timing import AbsentError, Contender, Job, Ratio, comparison
from measureflow.numerics.interactions import EXACT

ROUNDS = 3
NAME, OURS = "KeOps", "interaction_gradient"
SIZES = (1_000, 10_000, 20_000)
LENGTHSCALE = 0.5
WANTED = [Ratio(NAME, OURS, at_least=1.0)]


def jobs(*, quick: bool = False) -> list[Job]:
    """One job for each number of particles."""
    return [_job(n, 1 if quick else ROUNDS) for n in ((40,) if quick else SIZES)]


def _job(n: int, rounds: int) -> Job:
    title = f"kernel sum of {n:,} particles in 2-D"

    def run(tick) -> dict[str, Any]:
        particles = np.random.default_rng(0).normal(size=(n, 2)).astype(np.float32)
        summed = our_sum(particles)
        guests = Guests()
        guests.invite(NAME, lambda: _come(particles, summed))
        contenders = {OURS: Contender(summed)} | guests.contenders
        return comparison(title, contenders, WANTED, rounds, tick, unit="sum", **guests.record())

    return Job(title, rounds + 1, run)


def _come(particles: np.ndarray, summed: Callable[[], Any]) -> tuple[Callable[[], Any], float]:
    keops = keops_sum(particles)
    return keops, disagreement(keops(), summed())


def our_sum(particles: np.ndarray) -> Callable[[], Any]:
    kernel, on_device = mf.SquaredExponential(LENGTHSCALE), jnp.asarray(particles)
    compiled = jax.jit(lambda kernel, particles: EXACT.gradient(kernel, particles))
    return lambda: compiled(kernel, on_device)


def keops_sum(particles: np.ndarray) -> Callable[[], Any]:
    if jax.default_backend() != "cpu":
        raise AbsentError("KeOps is compared on a CPU only")
    # It says on standard output that it compiles.
    with contextlib.redirect_stdout(io.StringIO()):
        keops = needed("pykeops.numpy")

    def summed() -> np.ndarray:
        rows, columns = keops.LazyTensor(particles[:, None, :]), keops.LazyTensor(particles[None, :, :])
        difference = rows - columns
        weights = (-(difference**2).sum(-1) / (2 * LENGTHSCALE**2)).exp()
        return -(weights * difference).sum(1) / (len(particles) * LENGTHSCALE**2)

    with contextlib.redirect_stdout(io.StringIO()):
        summed()
    return summed
