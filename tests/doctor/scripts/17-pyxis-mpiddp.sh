#!/bin/bash
# after the shape of: NVIDIA-NeMo recipes with Pyxis, and soperator's examples
#SBATCH --job-name=nemo-gpt
#SBATCH --account=project
#SBATCH --partition=batch
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=14
#SBATCH --mem=0
#SBATCH --exclusive
#SBATCH --time=04:00:00
#SBATCH --output=logs/%x_%j.log

CONTAINER=/lustre/fsw/images/pytorch-25.06.sqsh
MOUNTS="/lustre/fsw:/lustre/fsw,$PWD:/workspace,/tmp:/tmp"
export NCCL_IB_SL=1
export PMIX_MCA_psec=^munge

read -r -d '' CMD <<'INNER'
cd /workspace && nvidia-smi -L | head -1 && python -m mpiddp finetune.py --tp 4
INNER

srun --mpi=pmix --cpus-per-task=$SLURM_CPUS_PER_TASK \
     --container-image="$CONTAINER" --container-mounts="$MOUNTS" \
     bash -c "$CMD"
