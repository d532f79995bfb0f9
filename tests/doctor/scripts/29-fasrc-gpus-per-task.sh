#!/bin/bash
# after the shape of: fasrc/User_Codes:Training/Distributed_GPU_Computing/Exercise6/run.sbatch
#SBATCH --job-name=ex6
#SBATCH --partition=gpu
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-task=1
#SBATCH --cpus-per-task=4
#SBATCH --mem=64G
#SBATCH --time=00:20:00
#SBATCH --output=ex6_%j.out

module load python/3.12.5-fasrc01 openmpi/5.0.5
mamba activate /n/holylabs/envs/pt2.9

MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((29500 + SLURM_JOB_ID % 20000))
export MASTER_ADDR MASTER_PORT

srun --mpi=pmix --ntasks=$SLURM_NTASKS --ntasks-per-node=$SLURM_NTASKS_PER_NODE \
    --cpus-per-task=4 --gpus-per-task=1 python -u -m mpiddp ddp.py
