#!/bin/bash -l
# by an author who did not know the doctor's rules
#SBATCH -J vit-imagenet
#SBATCH -A project_g
#SBATCH -C gpu
#SBATCH -q regular
#SBATCH -N 4
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH -t 06:00:00
#SBATCH -o logs/%x.%j.out
#SBATCH -e logs/%x.%j.err

mkdir -p logs

module load pytorch/2.3.1

export MASTER_ADDR=$(hostname)
export MASTER_PORT=29500
export WORLD_SIZE=$SLURM_NTASKS
export RANK=$SLURM_PROCID
export LOCAL_RANK=$SLURM_LOCALID

srun --cpus-per-task=$SLURM_CPUS_PER_TASK --cpu-bind=cores \
     python -u train.py --epochs 90 --batch-size 128
