#!/bin/bash
# after the shape of: a user's train_requeue job: config.sh, CHECKPOINT_DIR
#SBATCH --job-name=train_requeue
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --gres=gpu:4
#SBATCH --time=04:00:00
#SBATCH --output=logs/train_%j.out
#SBATCH --error=logs/train_%j.err
#SBATCH --signal=B:USR1@90
#SBATCH --requeue
#SBATCH --open-mode=append

set -uo pipefail
. ./config.sh
mkdir -p "$CKPT_DIR"

srun --mpi=pmix --cpus-per-task=8 python -m mpiddp train.py --checkpoint "$CKPT_DIR/last.pt"
rc=$?
if [ $rc -eq 75 ]; then scontrol requeue $SLURM_JOB_ID; fi
exit $rc
