"""Exact interactions of many particles in the plane: pairs a second, against plain JAX and a GPU's limit.

The baseline is plain JAX, in tiles of rows: squared distances coordinate by coordinate, the kernel, and a
matrix product. A pair of the squared exponential kernel takes one exponential, and a GPU has 16 units for
those in each multiprocessor, so that multiprocessors · 16 · clock is the most pairs it can do in a second.
"""

import shutil
import subprocess
from typing import Any

import jax
import jax.numpy as jnp

import measureflow as mf
from benchmarks.timing import Contender, Job, Ratio, comparison
from measureflow.numerics.interactions import EXACT

ROUNDS = 5
OURS, PLAIN = "interaction_gradient", "plain JAX"
LENGTHSCALE = 0.5
_ROWS = 500
#: For exponentials, in each multiprocessor of a GPU.
UNITS = 16


def jobs(*, quick: bool = False) -> list[Job]:
    """One job for each number of particles."""
    sizes = (1_000, 10_000) if jax.default_backend() == "cpu" else (10_000, 100_000, 1_000_000)
    return [_job(n, 1 if quick else ROUNDS) for n in ((40,) if quick else sizes)]


def _job(n: int, rounds: int) -> Job:
    title = f"{n:,} particles in 2-D"

    def run(tick) -> dict[str, Any]:
        kernel, particles = mf.SquaredExponential(LENGTHSCALE), jax.random.normal(jax.random.key(0), (n, 2))
        ours = jax.jit(lambda kernel, particles: EXACT.gradient(kernel, particles))
        ours, plain = (f.lower(kernel, particles).compile() for f in (ours, jax.jit(plain_sum)))
        contenders = {
            PLAIN: Contender(lambda: plain(kernel, particles)),
            OURS: Contender(lambda: ours(kernel, particles)),
        }
        found = comparison(title, contenders, [Ratio(PLAIN, OURS)], rounds, tick, unit="sum")
        return found | {
            "pairs_per_second": n**2 / found["times"][OURS]["median"],
            "limit": limit(),
            "temporary_bytes": int(ours.memory_analysis().temp_size_in_bytes),
        }

    return Job(title, rounds + 1, run)


def plain_sum(kernel: mf.SquaredExponential, particles: jax.Array) -> jax.Array:
    """(1/N) Σⱼ ∇₁κ(θᵢ, θⱼ)."""
    n, scale = len(particles), kernel.lengthscale

    def of_tile(rows: jax.Array) -> jax.Array:
        squares = [(rows[:, None, c] - particles[None, :, c]) ** 2 for c in range(particles.shape[1])]
        weights = jnp.exp(-sum(squares) / (2 * scale**2))
        attraction = jnp.matmul(weights, particles, precision=jax.lax.Precision.HIGHEST)
        return (attraction - jnp.sum(weights, axis=1, keepdims=True) * rows) / (n * scale**2)

    size = min(n, _ROWS)
    tiles = jnp.pad(particles, ((0, -n % size), (0, 0))).reshape(-1, size, particles.shape[1])
    return jax.lax.map(of_tile, tiles).reshape(-1, particles.shape[1])[:n]


def limit() -> float | None:
    """The most pairs a second, by the GPU's exponentials; None where it is not known."""
    multiprocessors = getattr(jax.devices()[0], "core_count", None)
    if not multiprocessors or shutil.which("nvidia-smi") is None:
        return None
    asked = ["nvidia-smi", "--query-gpu=clocks.max.sm", "--format=csv,noheader,nounits"]
    megahertz = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()[0]
    return float(multiprocessors) * UNITS * float(megahertz) * 1e6
