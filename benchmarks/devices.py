"""Memory and traffic of a step against the number of devices, read from the compiled program.

The devices are simulated on the CPU, so nothing is timed here: what a device holds, and what it sends around,
does not depend on how fast it is.

    python -m benchmarks.devices [--particles 8192] [--dimensions 64]
"""

import argparse
import functools
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

COUNTS = (1, 2, 4, 8)
_COLLECTIVE = re.compile(
    r"= (?P<shapes>.*?) (collective-permute|all-gather|all-reduce|all-to-all)(-start)?\("
)
_SHAPE = re.compile(r"f32\[(?P<sizes>[\d,]*)\]")


@functools.cache
def measured(particles: int = 8192, dimensions: int = 64) -> list[dict[str, float]]:
    """A row per number of devices, from a process that has as many."""
    flags = f"--xla_force_host_platform_device_count={max(COUNTS)}"
    environment = os.environ | {
        "XLA_FLAGS": flags,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent.parent), *filter(None, sys.path)]),
    }
    command = [sys.executable, "-m", "benchmarks.devices", "--particles", str(particles)]
    command += ["--dimensions", str(dimensions), "--here"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def sent(program: str, devices: int) -> int:
    """Bytes that one device sends in one step. What stands in the loop of the ring is sent at each hop."""
    total = 0
    for computation in re.split(r"\n\n", program):
        hops = devices - 2 if "ENTRY" not in computation else 1
        for found in _COLLECTIVE.finditer(computation):
            sizes = [
                math.prod(map(int, filter(None, s["sizes"].split(","))))
                for s in _SHAPE.finditer(found["shapes"])
            ]
            total += 4 * hops * sum(sizes)
    return total


def on_devices(particles: int, dimensions: int) -> list[dict[str, float]]:
    import jax
    import jax.numpy as jnp

    import measureflow as mf
    from measureflow.runs.program import Program

    prior = mf.Gaussian(jnp.zeros(dimensions), 1.0)
    kernel = mf.SquaredExponential(dimensions**0.5)
    problem = mf.deep_repulsive_langevin_ensemble(jnp.sum, prior, kernel, mmd=1.0, kl=1.0)
    found = []
    for devices in COUNTS:
        axis = (jax.sharding.AxisType.Auto,)
        mesh = jax.make_mesh((devices,), ("particles",), axis_types=axis, devices=jax.devices()[:devices])
        flow = mf.WassersteinFlow(1e-3)
        start = flow.init(problem, jnp.zeros((particles, dimensions)))
        run = Program(problem, flow, jax.random.key(0), start, mesh, None)
        step = jax.jit(lambda s, key, r=run: r.layout.placed(r.flow.step(problem, s, None, key)))
        program = step.lower(run.layout.placed(start), jax.random.key(0)).compile()
        memory = program.memory_analysis()
        shard = 4 * particles * dimensions // devices
        found.append(
            {
                "devices": devices,
                "state_bytes": memory.argument_size_in_bytes + memory.output_size_in_bytes,
                "temporary_bytes": memory.temp_size_in_bytes,
                "sent_bytes": sent(program.as_text(), devices) if devices > 1 else 0,
                "least_bytes": (devices - 1) * shard,
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--particles", type=int, default=8192)
    parser.add_argument("--dimensions", type=int, default=64)
    parser.add_argument("--here", action="store_true", help="in this process, which has the devices")
    options = parser.parse_args()
    if options.here:
        print(json.dumps(on_devices(options.particles, options.dimensions)))
        return
    for row in measured(options.particles, options.dimensions):
        print(row)


if __name__ == "__main__":
    main()
