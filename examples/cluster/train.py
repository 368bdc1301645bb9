"""A DRLE of networks on all devices of all processes: one laptop, one GPU machine, or a cluster.

    python train.py --out RUN                          on this machine
    sbatch slurm.sh                                    on a SLURM cluster
    kubectl apply -f kubernetes.yaml                   on Kubernetes

Started again with the same --out, it resumes.
"""

import argparse
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints and the solution")
parser.add_argument("--particles-per-device", type=int, default=4)
parser.add_argument("--steps", type=int, default=10_000)
options = parser.parse_args()

# JAX finds the coordinator and this process's number itself, under srun and in a Kubernetes Indexed Job. One
# process needs neither.
if {"SLURM_PROCID", "JOB_COMPLETION_INDEX"} & set(os.environ):
    jax.distributed.initialize()

import measureflow as mf  # noqa: E402  (JAX counts its devices when they are first asked for)

mesh = jax.make_mesh((jax.device_count(),), ("particles",), axis_types=(jax.sharding.AxisType.Auto,))
particles = options.particles_per_device * jax.device_count()

# Every process makes, or reads, the same data: each of them is on every device.
rng = np.random.default_rng(0)
inputs = rng.normal(size=(10_000, 8)).astype(np.float32)
targets = np.sin(inputs.sum(axis=1, keepdims=True)) + 0.1 * rng.normal(size=(10_000, 1)).astype(np.float32)

network = mf.Network.mlp(8, (50,), 1)
loss = mf.MeanSquaredError(network)
prior = network.prior()
size = sum(leaf.size for leaf in jax.tree.leaves(prior.mean))
kernel = mf.SquaredExponential(float(np.sqrt(size))).on(mf.Whiten(prior))
problem = mf.deep_repulsive_langevin_ensemble(loss, prior, kernel, mmd=size / 1e4, kl=1e-4)

solution = mf.solve(
    problem,
    mf.WassersteinFlow(1e-3, mf.RMSPreconditioner(adapt_steps=options.steps // 2)),
    prior.sample(jax.random.key(0), particles),
    options.steps,
    jax.random.key(1),
    data=(jnp.asarray(inputs), jnp.asarray(targets)),
    batch_size=100,
    mesh=mesh,
    progress=jax.process_index() == 0,
    checkpoint=mf.Checkpoint(options.out / "checkpoints", every=1_000),
)
if jax.process_index() == 0:
    print(f"{particles} particles on {jax.device_count()} devices of {jax.process_count()} processes")
    print(f"loss {solution.history.loss[0]:.2f} at the start, {solution.history.loss[-1]:.2f} at the end")
