#!/bin/bash -l
# after the shape of: argonne-lcf/user-guides:docs/polaris/data-science/frameworks/pytorch.md
#PBS -N gpt
#PBS -A project
#PBS -q prod
#PBS -l select=10:system=polaris
#PBS -l place=scatter
#PBS -l walltime=03:00:00
#PBS -l filesystems=home:eagle
#PBS -j oe

cd "${PBS_O_WORKDIR}"
module use /soft/modulefiles
module load conda
conda activate /eagle/datascience/envs/torch

NNODES=$(wc -l < "$PBS_NODEFILE")
NRANKS_PER_NODE=4
NTOTRANKS=$(( NNODES * NRANKS_PER_NODE ))
echo "NUM_OF_NODES=${NNODES} TOTAL_NUM_RANKS=${NTOTRANKS}"

export NCCL_NET="AWS Libfabric"
export NCCL_COLLNET_ENABLE=1

mpiexec -n "${NTOTRANKS}" --ppn "${NRANKS_PER_NODE}" --cpu-bind none \
    python -m mpiddp --show 0 train.py --data /eagle/datascience/imagenet
