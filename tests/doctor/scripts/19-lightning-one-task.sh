#!/bin/bash
# after the shape of: Lightning-AI/pytorch-lightning#18104, #20391
#SBATCH --job-name=segmentation
#SBATCH --nodes=1
#SBATCH --gres=gpu:4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --mem=120G
#SBATCH --time=1-00:00:00
#SBATCH --output=train.out

source ~/venvs/lightning/bin/activate
export NCCL_DEBUG=WARN
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK

srun python train.py fit --trainer.devices 4
