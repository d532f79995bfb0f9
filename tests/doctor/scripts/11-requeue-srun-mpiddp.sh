#!/bin/bash
# after the shape of: kempnerinstitute.github.io/KempnerForge: scripts/slurm/7b_requeue.sh
#SBATCH --job-name=pretrain-7b
#SBATCH --partition=kempner_h100
#SBATCH --account=project
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=24
#SBATCH --mem=0
#SBATCH --time=12:00:00
#SBATCH --signal=USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=logs/%x-%j.out
#SBATCH --exclusive

set -uo pipefail
module load python/3.12 openmpi/5.0.5
source venv/bin/activate

srun --mpi=pmix --cpus-per-task="$SLURM_CPUS_PER_TASK" \
    python -m mpiddp --stall 900 finetune.py --checkpoint ckpt/
status=$?
if [[ $status -eq 75 ]]; then
    echo "requeue number $((${SLURM_RESTART_COUNT:-0} + 1))"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $status
