#!/bin/bash
# by an author who did not know the doctor's rules
#SBATCH --job-name=r50
#SBATCH --account=def-group
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=v100l:4
#SBATCH --cpus-per-task=8
#SBATCH --mem=0
#SBATCH --time=03:00:00
#SBATCH --requeue
#SBATCH --signal=USR1@120
#SBATCH --output=%x-%j.out

# Trains in pieces of three hours: two minutes before the end the job puts
# itself into the queue again and goes on from the last checkpoint.

resubmit() {
    echo "$(date): time is nearly up, requeue (restart ${SLURM_RESTART_COUNT:-0})"
    scontrol requeue "$SLURM_JOB_ID"
}
trap resubmit USR1

module load python/3.11 cuda/12.2 nccl
source ~/ENV/bin/activate

export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1)
export MASTER_PORT=$((10000 + SLURM_JOB_ID % 50000))

srun --cpus-per-task=$SLURM_CPUS_PER_TASK --kill-on-bad-exit=1 \
    python train.py --epochs 300 --ckpt ckpt/last.pt
