#!/usr/bin/env bash
# What the sbatch scripts beside it share: python -m ssd_train in every task of the allocation. If a signal ended it,
# the job goes back into the queue. Called inside a job, from the folder that holds .venv and slurm/.
#
# Change: how your cluster sets up the environment (modules, a container).
set -euo pipefail

# shellcheck source=/dev/null
source .venv/bin/activate
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"  # srun no longer takes it from sbatch
export OMP_NUM_THREADS="$SRUN_CPUS_PER_TASK"

# --kill-on-bad-exit: if one task fails, the others would wait for it.
status=0
srun --kill-on-bad-exit=1 python -m ssd_train "+model=${MODEL:?set MODEL to a yaml of conf/model}" "$@" || status=$?

# 75: the scheduler's signal came, shortly before the time limit; everything worth keeping is on disk. If a task had to
# be killed all the same, srun says so instead (137, 134), and submitting the job again goes on just as well.
if [[ $status -eq 75 ]]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
