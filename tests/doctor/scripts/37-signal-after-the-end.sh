#!/bin/bash
# after the shape of: uOttawa's one-minute mpi.sh and a user's --signal=USR1@1000
#SBATCH --job-name=procthor
#SBATCH --gres gpu:2
#SBATCH --nodes 1
#SBATCH --cpus-per-task 6
#SBATCH --ntasks-per-node 2
#SBATCH --time=00:15:00
#SBATCH --signal=USR1@1000
#SBATCH --partition=short
#SBATCH --output=slurm_logs_%j.out
#SBATCH --open-mode=append
#SBATCH --requeue

source /srv/flash1/me/miniconda3/etc/profile.d/conda.sh
conda deactivate
conda activate procthor

set -x
srun --mpi=pmix -c 6 python -m mpiddp main.py object_nav -b projects/tutorials
[ $? = 75 ] && scontrol requeue $SLURM_JOB_ID
