#!/usr/bin/env bash
# Submits the whole walk: the cache by an array of jobs, then training, then decoding, each once the one before it has
# succeeded. Run it on a login node; it returns at once.
#
#   MODEL=lumina slurm/pipeline.sh cache.samples=20000 cache.dir=/scratch/lumina output=/scratch/lumina-heads
#
# Change: ARRAY, the number of jobs that fill the cache; what each stage asks for stands in its own script.
set -euo pipefail

: "${MODEL:?set MODEL to a yaml of conf/model}"
then=(--parsable --kill-on-invalid-dep=yes)
cache=$(sbatch --parsable --array="${ARRAY:-0-3}" slurm/cache.sbatch "$@")
train=$(sbatch "${then[@]}" --dependency="afterok:${cache%%;*}" slurm/train.sbatch "$@")
decode=$(sbatch "${then[@]}" --dependency="afterok:${train%%;*}" slurm/decode.sbatch "$@")
echo "cache ${cache%%;*}, train ${train%%;*}, decode ${decode%%;*}"
