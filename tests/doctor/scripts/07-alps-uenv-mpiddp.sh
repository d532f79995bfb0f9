#!/bin/bash
# after the shape of: eth-cscs/cscs-docs:docs/software/ml/pytorch.md
#SBATCH --job-name=llm
#SBATCH --account=a-g123
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=72
#SBATCH --time=06:00:00
#SBATCH --output=logs/slurm-%x-%j.out
#SBATCH --error=logs/slurm-%x-%j.err
#SBATCH --uenv=pytorch/v2.9.1:v1
#SBATCH --view=default
#SBATCH --exclusive
#SBATCH --mem=0

set -euo pipefail
export OMP_NUM_THREADS=8
export MPICH_GPU_SUPPORT_ENABLED=0
export TRITON_HOME=/dev/shm/
export CUDA_CACHE_DISABLE=1
export NCCL_NET="AWS Libfabric"
export FI_CXI_RX_MATCH_MODE=software
ulimit -c 0

source "$SCRATCH/venv-uenv/bin/activate"
srun -ul --cpus-per-task=$SLURM_CPUS_PER_TASK python -m mpiddp --log-dir=logs finetune.py --config configs/llama.yaml
