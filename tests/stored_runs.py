"""Runs of the four ensembles, stored before the core was opened: they must give the same particles still.

`python tests/stored_runs.py` writes `stored_runs.npz` anew; there should never be a reason to.
"""

import platform
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

import measureflow as mf

STORED = Path(__file__).with_name("stored_runs.npz")
STEPS = 60


def machine() -> str:
    """What decides the last bit: the compiler, and which instructions the processor has."""
    flags = next((line for line in _processor() if line.startswith("flags")), platform.processor())
    widest = next((name for name in ("avx512f", "avx2") if name in flags.split()), platform.machine())
    return f"jaxlib {jaxlib.__version__}, {widest}"


def _processor() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def _two_modes(theta):
    return jnp.sum(1.5 * (theta**4 / 4 + theta**3 / 3 - theta**2) - 3 / 8)


def _regression(theta, batch):
    inputs, targets = batch
    hidden = jnp.tanh(inputs @ theta["in"])
    return jnp.mean(jnp.square(hidden @ theta["out"] - targets))


def _problems(loss, prior, kernel):
    return {
        "DE": mf.deep_ensemble(loss),
        "DLE": mf.deep_langevin_ensemble(loss, prior, kl=0.3),
        "DRE": mf.deep_repulsive_ensemble(loss, prior, kernel, mmd=0.5),
        "DRLE": mf.deep_repulsive_langevin_ensemble(loss, prior, kernel, mmd=0.5, kl=0.3),
    }


def runs() -> dict[str, np.ndarray]:
    """Particles by name of the run, as rows."""
    found = {}
    start_key, run_key, data_key = jax.random.split(jax.random.key(0), 3)
    prior = mf.Gaussian(jnp.zeros(2), 1.0)
    for name, problem in _problems(_two_modes, prior, mf.SquaredExponential(0.7)).items():
        flow = _flow(mf.WassersteinFlow, 1e-2)
        found[f"toy {name}"] = mf.solve(problem, flow, prior.sample(start_key, 30), STEPS, run_key).state
    inputs = jax.random.normal(data_key, (64, 3))
    data = inputs, jnp.sin(inputs[:, 0])
    prior = mf.Gaussian({"in": jnp.zeros((3, 8)), "out": jnp.zeros(8)}, 0.5)
    kernel = mf.SquaredExponential(4.0).on(mf.Whiten(prior))
    for name, problem in _problems(_regression, prior, kernel).items():
        flow = _flow(mf.WassersteinFlow, 1e-2, mf.RMSPreconditioner(40))
        start = prior.sample(start_key, 12)
        solution = mf.solve(problem, flow, start, STEPS, run_key, data=data, batch_size=16)
        found[f"network {name}"] = solution.state
    return {
        name: np.concatenate(
            [leaf.reshape(len(leaf), -1) for leaf in map(np.asarray, jax.tree.leaves(state.particles))],
            axis=1,
        )
        for name, state in found.items()
    }


def _flow(kind, *arguments):
    """Euler–Maruyama, which was the only integrator then."""
    return kind(*arguments)


if __name__ == "__main__":
    np.savez_compressed(STORED, machine=np.array(machine()), **runs())
