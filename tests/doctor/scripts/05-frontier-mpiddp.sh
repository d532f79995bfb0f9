#!/bin/bash
# after the shape of: olcf/olcf-user-docs:software/analytics/pytorch_frontier.rst
#SBATCH -A ABC123
#SBATCH -J resnet
#SBATCH -o resnet-%j.out
#SBATCH -t 0:30:00
#SBATCH -p batch
#SBATCH -N 2
#SBATCH --network=disable_rdzv_get

unset SLURM_EXPORT_ENV
cd "$SLURM_SUBMIT_DIR"

module load PrgEnv-gnu/8.6.0
module load rocm/6.2.4
module load miniforge3/23.11.0-0
module load rccl-net-plugin
source activate /lustre/orion/abc123/proj-shared/envs/torch-rocm

export MIOPEN_USER_DB_PATH="/tmp/miopen-$SLURM_JOB_ID"
export MIOPEN_CUSTOM_CACHE_DIR=$MIOPEN_USER_DB_PATH
rm -rf "$MIOPEN_USER_DB_PATH"
mkdir -p "$MIOPEN_USER_DB_PATH"
export FI_CXI_RDZV_PROTO=alt_read

srun -N2 -n16 -c7 --gpus-per-node=8 python3 -W ignore -u -m mpiddp train.py --epochs 20
