"""Runs that test_devices.py starts in processes of their own: devices are counted when JAX starts.

python on_devices.py OUT PART [COORDINATOR NUMBER]: one of PARTS, in this process or in one of two.
"""

import importlib
import json
import sys
import warnings
from pathlib import Path

import jax

if __name__ == "__main__" and len(sys.argv) > 3:
    jax.distributed.initialize(sys.argv[3], 2, int(sys.argv[4]))

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import optax
from jax.experimental import multihost_utils
from jax.sharding import AxisType

import measureflow as mf
from measureflow.runs import program
from measureflow.runs.batches import Whole

# The package's name for it is the function.
solving = importlib.import_module("measureflow.runs.solve")
RNG = np.random.default_rng(0)
X = RNG.normal(size=(64, 3)).astype(np.float32)
DATA = (X, X.sum(axis=1))
PRIOR = mf.Gaussian({"b": jnp.zeros(()), "w": jnp.zeros(3)}, 1.0)
KERNEL = mf.SquaredExponential(1.0)
ADAPTIVE = mf.WassersteinFlow(1e-2, mf.RMSPreconditioner(5), momentum=0.1)


def loss(theta, batch):
    x, y = batch
    return jnp.mean((x @ theta["w"] + theta["b"] - y) ** 2)


class Product(mf.AbstractKernel):
    def __call__(self, x, y):
        return jnp.exp(0.1 * jnp.sum(x["w"] * y["w"]))


PROBLEMS = {
    "DE": mf.deep_ensemble(loss),
    "DLE": mf.deep_langevin_ensemble(loss, PRIOR, kl=0.01),
    "DRE": mf.deep_repulsive_ensemble(loss, PRIOR, KERNEL, mmd=0.1),
    "DRLE": mf.deep_repulsive_langevin_ensemble(loss, PRIOR, KERNEL, mmd=0.1, kl=0.01),
}
START = PRIOR.sample(jax.random.key(0), 16)
EMPIRICAL = mf.Empirical(PRIOR.sample(jax.random.key(1), 8))

#: name: (problem, flow, batch size)
CASES = {
    f"{name}, {'batches' if size else 'all data'}": (problem, ADAPTIVE, size)
    for name, problem in PROBLEMS.items()
    for size in (None, 16)
}
MORE = {
    "optimiser": (PROBLEMS["DRE"], mf.WassersteinFlow(optimiser=optax.adam(1e-2)), 16),
    "random batches": (PROBLEMS["DRLE"], mf.WassersteinFlow(1e-2, interactions=mf.RandomBatches(4)), 16),
    "random features": (PROBLEMS["DRLE"], mf.WassersteinFlow(1e-2, interactions=mf.RandomFeatures(5)), 16),
    "Stein": (PROBLEMS["DRLE"], mf.SteinFlow(KERNEL, 1e-2), 16),
    "Stein, median": (PROBLEMS["DLE"], mf.SteinFlow(mf.MedianBandwidth(), optimiser=optax.adam(1e-2)), 16),
    "density": (PROBLEMS["DRLE"], mf.WassersteinFlow(1e-2, entropy=mf.KernelDensity(KERNEL)), 16),
    "blob": (PROBLEMS["DLE"], mf.WassersteinFlow(1e-2, entropy=mf.Blob(mf.MedianBandwidth())), 16),
    "spectral": (
        PROBLEMS["DLE"],
        mf.WassersteinFlow(1e-2, entropy=mf.SpectralSteinGradientEstimator(KERNEL)),
        16,
    ),
    "any kernel": (
        mf.Problem(loss, 0.1 * mf.SquaredMMD(EMPIRICAL, Product() + KERNEL.on(mf.Whiten(PRIOR)))),
        ADAPTIVE,
        16,
    ),
}


def predicted(theta, batch):
    x, y = batch
    return dist.Normal(x @ theta["w"] + theta["b"], 0.5 * jnp.ones_like(y)), y


def log_density(theta, batch):
    law, y = predicted(theta, batch)
    return law.log_prob(y)


SCORES = {
    "log score": (mf.Problem(mf.LogScore(log_density), 0.01 * mf.KL(PRIOR)), ADAPTIVE, 16),
    "CRPS": (mf.Problem(mf.RankedProbabilityScore(predicted), 0.01 * mf.KL(PRIOR)), ADAPTIVE, 16),
}


def run(case, mesh=None):
    problem, flow, batch_size = case
    return mf.solve(
        problem,
        flow,
        START,
        12,
        jax.random.key(3),
        data=DATA,
        batch_size=batch_size,
        mesh=mesh,
        collect=mf.Draws(after=3, every=3),
    )


def differences(case, mesh):
    """The largest of particles, relative to the largest; of history, relative to each column's."""
    alone, cut = run(case), run(case, mesh)
    found = multihost_utils.process_allgather(cut.measure.particles, tiled=True)
    pairs = zip(jax.tree.leaves(alone.measure.particles), jax.tree.leaves(found), strict=True)
    particles = max(float(np.max(np.abs(a - b)) / np.max(np.abs(a))) for a, b in pairs)
    draws = zip(jax.tree.leaves(alone.draws), jax.tree.leaves(cut.draws), strict=True)
    assert alone.draws["w"].shape == (16, 3, 3)
    particles = max(particles, *(float(np.max(np.abs(a - b)) / np.max(np.abs(a))) for a, b in draws))
    columns = [(alone.history[name], cut.history[name]) for name in alone.history]
    known = [(a, b) for a, b in columns if np.isfinite(a).any()]
    history = max(float(np.nanmax(np.abs(a - b)) / max(np.nanmax(np.abs(a)), 1e-6)) for a, b in known)
    leaf = jax.tree.leaves(cut.measure.particles)[0]
    return {"particles": particles, "history": history, "shard": leaf.addressable_shards[0].data.shape[0]}


def mesh_of(*sizes):
    names = ("particles", "batch")[: len(sizes)]
    devices = jax.devices()[: int(np.prod(sizes))]
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes), devices=devices)


def compiled(devices, n=8192, dimensions=64):
    """The program of a DRLE chunk for many particles, on so many devices."""
    prior = mf.Gaussian(jnp.zeros(dimensions), 1.0)
    problem = mf.deep_repulsive_langevin_ensemble(jnp.sum, prior, KERNEL, mmd=0.1, kl=0.01)
    mesh, flow = mesh_of(devices), mf.WassersteinFlow(1e-2)
    state = flow.init(problem, jnp.zeros((n, dimensions)))
    whole = program.Program(problem, flow, jax.random.key(0), state, mesh, None)
    one = jnp.ones((), jnp.int32)
    arguments = (problem, whole.flow, whole.layout.placed(state), Whole(None), jax.random.key(0), one, one)
    call = eqx.filter_jit(program._call.__wrapped__)
    return call.lower(*arguments, None, whole.layout).compile()


def memory(devices):
    """Bytes on one device: arguments and results, and what is needed in between; and what is sent around."""
    program = compiled(devices).compiled
    analysis = program.memory_analysis()
    sizes = (analysis.argument_size_in_bytes, analysis.output_size_in_bytes, analysis.temp_size_in_bytes)
    sent = {name: program.as_text().count(f" {name}(") for name in ("collective-permute", "all-gather")}
    return {"state": sizes[0] + sizes[1], "between": sizes[2], **sent}


def refusals():
    """What is said of a mesh that does not fit."""

    def said(**options):
        problem, flow, _ = CASES["DRLE, batches"]
        arguments = {"data": DATA, "batch_size": 16, "initial": START, "flow": flow} | options
        try:
            mf.solve(problem, steps=1, key=jax.random.key(0), **arguments)
        except (TypeError, ValueError) as error:
            return str(error)

    odd = PRIOR.sample(jax.random.key(0), 12)
    explicit = jax.make_mesh((8,), ("particles",), axis_types=(AxisType.Explicit,))
    renamed = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    gaussian = mf.ParametricFlow(mf.MeanFieldGaussian(), optax.adam(1e-2), samples=2)
    return {
        "12 particles": said(mesh=mesh_of(8), initial=odd),
        "a batch of 15": said(mesh=mesh_of(4, 2), batch_size=15),
        "explicit": said(mesh=explicit),
        "renamed": said(mesh=renamed),
        "devices": said(mesh=jax.devices()),
        "no particles": said(mesh=mesh_of(1), flow=gaussian),
        "fine": said(mesh=mesh_of(8)),
    }


def estimators():
    """The largest difference of predictions, in standard deviations of the target."""
    y = DATA[1]
    settings = {"hidden": (4,), "encoding": 0, "likelihood": "heteroscedastic", "prior_weight": 1}
    settings |= {"particles": 8, "steps": 500, "random_state": 0}
    alone, cut = (
        mf.EnsembleRegressor(mesh=mesh, **settings).fit(X, y).predict(X) for mesh in (None, mesh_of(8))
    )
    return float(np.max(np.abs(alone - cut)) / np.std(y))


def equality():
    """All cases on eight devices, and DRLE on four times two."""
    found = {name: differences(case, mesh_of(8)) for name, case in (CASES | MORE).items()}
    return found | two_axes(["DRLE, batches", "DRLE, all data", *SCORES])


def two_axes(names=("DRLE, batches", "log score")):
    """On four times two devices."""
    cases = CASES | SCORES
    return {f"{name}, two axes": differences(cases[name], mesh_of(4, 2)) for name in names}


def processes():
    """All cases on the one device of each of two processes."""
    return {name: differences(case, mesh_of(2)) for name, case in CASES.items()}


def two_processes():
    """DRLE with batches on the one device of each of two processes, and such a run in parts."""
    return {"DRLE": differences(CASES["DRLE, batches"], mesh_of(2)), "checkpoints": checkpoints()}


def checkpointed(folder, steps, mesh=None):
    problem, flow, batch_size = CASES["DRLE, batches"]
    options = {"data": DATA, "batch_size": batch_size, "mesh": mesh, "record_every": 1}
    options["checkpoint"] = None if folder is None else mf.Checkpoint(folder, every=4)
    return mf.solve(problem, flow, START, steps, jax.random.key(3), **options)


def checkpoints():
    """A run of two processes in three parts; before the last one, a file of one of them is damaged."""
    folder, mesh = Path(sys.argv[1]).parent / "run", mesh_of(2)
    checkpointed(folder, 6, mesh)
    checkpointed(folder, 10, mesh)
    # Each process waits for its own file only.
    multihost_utils.sync_global_devices("written")
    names = sorted(path.name for path in folder.iterdir())
    multihost_utils.sync_global_devices("looked")
    if jax.process_index() == 0:
        (folder / "10-2-of-2.safetensors").write_bytes(b"")
    multihost_utils.sync_global_devices("damaged")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resumed = checkpointed(folder, 12, mesh)
    whole = checkpointed(None, 12, mesh)
    pairs = zip(*(jax.tree.leaves(solution.state) for solution in (resumed, whole)), strict=True)
    parts = [(a.addressable_data(0), b.addressable_data(0)) for a, b in pairs]
    parts += [(resumed.history[name], whole.history[name]) for name in whole.history]
    same = [np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in parts]
    same = multihost_utils.process_allgather(np.array(same)).tolist()
    return {"names": names, "same": same, "warned": [str(warning.message) for warning in caught]}


def alone():
    """The largest difference, if one process goes on with what two had begun."""
    finished, whole = checkpointed(Path(sys.argv[1]).parent / "run", 12), checkpointed(None, 12)
    pairs = zip(*(jax.tree.leaves(one.measure.particles) for one in (finished, whole)), strict=True)
    return max(float(np.max(np.abs(a - b)) / np.max(np.abs(a))) for a, b in pairs)


def shares():
    return {str(devices): memory(devices) for devices in (1, 2, 4, 8)}


def sampled():
    """A correlated Gaussian by `sample`: whether it is trusted, its mean and its covariance in units of the
    right one, and whether it is the same to the bit if it goes on from an early checkpoint."""
    root = np.array([[1.0, 0.0], [3.0, 0.1]], np.float32)
    inverse = jnp.asarray(np.linalg.inv(root))
    problem = mf.Problem(lambda theta: 0.5 * jnp.sum(jnp.square(inverse @ (theta - 5))), mf.KL(mf.Flat()))
    folder = Path(sys.argv[1]).parent / "posterior"
    kept = mf.Checkpoint(folder, every=1, keep=100)

    def once():
        start, key = mf.Gaussian(jnp.zeros(2), 1.0), jax.random.key(0)
        return mf.sample(problem, start, key, particles=400, mesh=mesh_of(2), checkpoint=kept)

    result = once()
    files = sorted(folder.glob("*.safetensors"), key=lambda path: int(path.name.split("-")[0]))
    for later in files[2:]:
        later.unlink()
    same = once().draws.tobytes() == result.draws.tobytes()
    z = (result.draws.reshape(-1, 2) - 5) @ np.linalg.inv(root).T
    law = {"mean": z.mean(axis=0).tolist(), "variance": z.var(axis=0).tolist()}
    return {"trusted": bool(result), "resumed": [len(files) > 2, same], **law}


PARTS = {
    "sampled": sampled,
    "equality": equality,
    "two axes": two_axes,
    "processes": processes,
    "two processes": two_processes,
    "alone": alone,
    "memory": shares,
    "refusals": refusals,
    "estimators": estimators,
}

if __name__ == "__main__":
    found = PARTS[sys.argv[2]]()
    if jax.process_index() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")
