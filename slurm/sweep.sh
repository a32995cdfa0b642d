#!/usr/bin/env bash
# A SLURM job a setting, through Hydra's submitit launcher (pip install 'ssd_train[sweep]'). All jobs share one cache:
# make it first (cache.sbatch), or the first jobs make it together. Run it on a login node, say in tmux: it waits for
# the jobs, and names those that failed. Jobs that reach the time limit go back into the queue, and go on from their
# last checkpoint (train.checkpoint_every).
#
#   MODEL=lumina slurm/sweep.sh head.k_horizontal=3,5 head.lr=1e-4,3e-4 cache.dir=/scratch/lumina
#   MODEL=lumina slurm/sweep.sh hydra/sweeper=optuna 'head.lr=tag(log,interval(1e-5,1e-3))' hydra.sweeper.n_jobs=4
#
# Change: what a job asks for, here or on the command line (hydra.launcher.partition=gpu).
set -euo pipefail

# shellcheck source=/dev/null
source .venv/bin/activate
python -m ssd_train --multirun "+model=${MODEL:?set MODEL to a yaml of conf/model}" \
  hydra/launcher=submitit_slurm \
  hydra.launcher.gpus_per_node=1 \
  hydra.launcher.cpus_per_task=8 \
  hydra.launcher.mem_gb=64 \
  hydra.launcher.timeout_min=480 \
  hydra.launcher.signal_delay_s=180 \
  hydra.launcher.max_num_timeout=10 \
  "$@"
