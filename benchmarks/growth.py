"""How a DRLE step grows: time and memory, along one axis at a time, with the fitted exponent.

An axis is a function `quick -> Job`, listed in AXES, whose result has `sizes`, `values` and their `unit`;
figures and page show whatever is listed.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

import measureflow as mf
from benchmarks import devices, ours
from benchmarks.targets import regression
from benchmarks.timing import Contender, Job, alternate, exponent

ROUNDS = 3


def jobs(*, quick: bool = False) -> list[Job]:
    """The parts of this benchmark; `quick` only shows that they run."""
    return [axis(quick) for axis in AXES]


def particles_in_the_plane(quick: bool) -> Job:
    """N particles in two dimensions: all pairs, summed exactly, in tiles where they are many."""
    most = 30_000 if jax.default_backend() == "cpu" else 300_000
    sizes = (
        [4, 8] if quick else [n for n in (300, 1_000, 3_000, 10_000, 30_000, 100_000, 300_000) if n <= most]
    )

    def contender(n: int) -> Contender:
        # About as many pairs each, so that no size takes all the time.
        steps = max(1, min(1_000, 300_000_000 // n**2)) if not quick else 1
        return Contender(ours.steps_of(*in_the_plane(n), steps), steps)

    return _timed("particles in 2-D", "particles", 2.0, sizes, contender, quick)


def networks(quick: bool) -> Job:
    """N networks: N² distances, but N gradients, and those are what costs."""
    sizes = [2, 3] if quick else [5, 20, 80, 320]

    def contender(n: int) -> Contender:
        steps = max(1, 4_000 // n) if not quick else 1
        return Contender(ours.run(regression(n), "DRLE", steps), steps)

    return _timed("networks 8-50-1, batch 100", "networks", 1.0, sizes, contender, quick)


def parameters(quick: bool) -> Job:
    """20 particles of J parameters, and a loss that costs nothing."""
    sizes = [5, 10] if quick else [100, 1_000, 10_000, 100_000, 1_000_000]

    def contender(size: int) -> Contender:
        steps = max(1, min(1_000, 2_000_000 // size)) if not quick else 1
        particles = jax.random.normal(jax.random.key(0), (20, size))
        return Contender(
            ours.steps_of(ours.problems(half_square, particles[0])["DRLE"], particles, steps), steps
        )

    return _timed("parameters of each of 20 particles", "parameters J", 1.0, sizes, contender, quick)


def memory(quick: bool) -> Job:
    """What the compiled program of N particles in two dimensions needs beside its arguments and results."""
    sizes = [4, 400] if quick else [300, 1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000]

    def run(tick: Callable[[], None]) -> dict[str, Any]:
        values = []
        for n in sizes:
            values.append(temporary_bytes(n))
            tick()
        return _result("memory of particles in 2-D", "particles", 1.0, sizes, values, "bytes")

    return Job("growth of memory", len(sizes), run)


def memory_of_a_device(quick: bool) -> Job:
    """What one of D devices holds in a step: its share of the particles, and what it needs to sum pairs."""

    def value(row: dict[str, float]) -> float:
        return row["state_bytes"] + row["temporary_bytes"]

    return _on_devices("memory of each device", -1.0, quick, value)


def traffic_of_a_device(quick: bool) -> Job:
    """What one of D devices sends in a step, over the least that an exact sum needs."""
    return _on_devices(
        "bytes sent by each device, over the least possible",
        0.0,
        quick,
        lambda row: row["sent_bytes"] / row["least_bytes"] if row["least_bytes"] else None,
    )


AXES = (particles_in_the_plane, networks, parameters, memory, memory_of_a_device, traffic_of_a_device)


def _on_devices(title: str, expected: float, quick: bool, value: Callable[[dict], float | None]) -> Job:
    particles, dimensions = (64, 3) if quick else (8_192, 64)

    def run(tick: Callable[[], None]) -> dict[str, Any]:
        found = [(row["devices"], value(row)) for row in devices.measured(particles, dimensions)]
        tick()
        known = [(count, amount) for count, amount in found if amount is not None]
        unit = "ratio" if expected == 0 else "bytes"
        sizes, values = [count for count, _ in known], [amount for _, amount in known]
        shown = f"{title}, {particles:,} particles in {dimensions}-D"
        return _result(shown, "devices", expected, sizes, values, unit)

    return Job(f"growth with devices: {title}", 1, run)


def half_square(theta: jax.Array) -> jax.Array:
    return 0.5 * jnp.sum(theta**2)


def in_the_plane(n: int) -> tuple[mf.Problem, jax.Array]:
    """DRLE and N particles in two dimensions."""
    prior, kernel = mf.Gaussian(jnp.zeros(2), 1.0), mf.SquaredExponential(0.5)
    problem = mf.deep_repulsive_langevin_ensemble(half_square, prior, kernel, mmd=0.5, kl=1.0)
    return problem, jax.random.normal(jax.random.key(0), (n, 2))


def temporary_bytes(n: int) -> int:
    """From the memory analysis of the compiled loop."""
    problem, particles = in_the_plane(n)
    flow = mf.WassersteinFlow(1e-3)
    arguments = (
        problem,
        flow,
        flow.init(problem, particles),
        None,
        jax.random.key(2),
        jnp.asarray(2, jnp.int32),
    )
    program = eqx.filter_jit(mf.run).lower(*arguments).compile()
    return int(program.compiled.memory_analysis().temp_size_in_bytes)


def _timed(
    title: str,
    axis: str,
    expected: float,
    sizes: list[int],
    contender: Callable[[int], Contender],
    quick: bool,
) -> Job:
    rounds = 1 if quick else ROUNDS

    def run(tick: Callable[[], None]) -> dict[str, Any]:
        times, _ = alternate({str(size): contender(size) for size in sizes}, rounds, tick)
        return _result(
            title, axis, expected, sizes, [times[str(size)]["median"] for size in sizes], "seconds"
        )

    return Job(f"growth with {axis}", rounds + 1, run)


def _result(
    title: str, axis: str, expected: float, sizes: list[int], values: list[Any], unit: str
) -> dict[str, Any]:
    return {
        "title": title,
        "axis": axis,
        "sizes": sizes,
        "values": values,
        "unit": unit,
        "exponent": exponent(sizes, values),
        "expected": expected,
    }
