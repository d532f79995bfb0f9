#!/bin/bash
# after the shape of: a sbatch script of ddp for one node of four GPUs (dbcata)
#SBATCH --job-name=gpu_ddp
#SBATCH --output=slurm_train_%j.out
#SBATCH --partition=gpu
#SBATCH --nodes=1
#SBATCH --ntasks=4
#SBATCH --cpus-per-task=4
#SBATCH --gpus-per-node=4

# env
source ~/.dbcata/bin/activate
python -m mpiddp -m scripts.train
