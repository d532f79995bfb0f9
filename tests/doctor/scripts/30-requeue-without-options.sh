#!/bin/bash
# after the shape of: a user's cc_run.sh and auto_resubmit jobs
#SBATCH --job-name=gan
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=12
#SBATCH --mem=200G
#SBATCH --time=08:00:00
#SBATCH --signal=USR1@240
#SBATCH --output=logs/%x-%j.out

module load openmpi/5.0.3 python/3.12
source venv/bin/activate

export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
srun --mpi=pmix python -m mpiddp finetune.py --checkpoint last.ckpt
case $? in
    75) scontrol requeue $SLURM_JOB_ID ;;
    0) echo finished ;;
    *) echo failed >&2; exit 1 ;;
esac
