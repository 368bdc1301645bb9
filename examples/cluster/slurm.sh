#!/bin/bash
# One process per node, with all of its GPUs. JAX reads the rest from SLURM's variables.
#SBATCH --job-name=measureflow
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --time=04:00:00
# Ten minutes before the end SLURM sends SIGTERM to the steps: the run saves and stops, and resumes when the
# job is submitted again.
#SBATCH --signal=TERM@600
#SBATCH --requeue

srun python train.py --out "$SLURM_SUBMIT_DIR/run"
