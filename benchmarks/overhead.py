"""DRLE against the bare cost of its parts: the pairwise kernel sum and the normal draws.

The baseline is plain JAX with no import of measureflow: a jitted `scan` that does nothing but sum the
gradient of a squared exponential kernel over all pairs and draw normal noise of the same shape. Both run
in this process, one after the other, several times; the ratio of the medians is what counts.

    python benchmarks/overhead.py [--out FILE]
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp

N, STEPS, STEP_SIZE, REPEATS, AT_MOST = 300, 10_000, 1e-3, 9, 1.5


@jax.jit
def bare(x, key):
    def body(x, k):
        difference = x - x.T
        weights = jnp.exp(-0.5 * difference**2)
        repulsion = (jnp.sum(weights, axis=1, keepdims=True) * x - weights @ x) / N
        noise = jax.random.normal(k, x.shape)
        return x + STEP_SIZE * repulsion + STEP_SIZE * noise, None

    return jax.lax.scan(body, x, jax.random.split(key, STEPS))[0]


def measureflow_run():
    import measureflow as mf

    prior = mf.Gaussian(jnp.zeros(1), 1.0)
    problem = mf.deep_repulsive_langevin_ensemble(
        mf.theory.quartic_loss, prior, mf.SquaredExponential(1.0), mmd=0.5, kl=1.0
    )
    flow = mf.WassersteinFlow(step_size=STEP_SIZE)

    def run(x, key):
        return mf.solve(problem, flow, x, STEPS, key).measure.particles

    return run


def seconds(function, *arguments):
    began = time.perf_counter()
    jax.block_until_ready(function(*arguments))
    return time.perf_counter() - began


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write the numbers to this JSON file")
    out = parser.parse_args().out
    x, key = jax.random.normal(jax.random.key(0), (N, 1)), jax.random.key(1)
    ours = measureflow_run()
    compiled = {"bare": seconds(bare, x, key), "measureflow": seconds(ours, x, key)}
    # Alternating, so that whatever else the machine does falls on both alike.
    times = [(seconds(bare, x, key), seconds(ours, x, key)) for _ in range(REPEATS)]
    bare_time, our_time = (statistics.median(column) for column in zip(*times, strict=True))
    ratio = our_time / bare_time
    print(f"{STEPS} steps, {N} particles in one dimension, median of {REPEATS} alternating runs")
    print(f"  bare kernel sum and noise   {bare_time:7.3f} s   (first call: {compiled['bare']:.2f} s)")
    print(f"  measureflow DRLE, solve     {our_time:7.3f} s   (first call: {compiled['measureflow']:.2f} s)")
    print(f"  ratio                       {ratio:7.2f}     (at most {AT_MOST})")
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        record = {"ratio": ratio, "bare_s": bare_time, "measureflow_s": our_time}
        out.write_text(json.dumps(record | {"device": str(jax.devices()[0])}, indent=2) + "\n")

    return 0 if ratio <= AT_MOST else 1


if __name__ == "__main__":
    sys.exit(main())
