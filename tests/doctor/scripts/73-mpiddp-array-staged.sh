#!/bin/bash -l
# by an author who did not know the doctor's rules
#SBATCH --job-name=lr-sweep
#SBATCH --array=0-3%2                 # four learning rates, two at a time
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4             # one task per GPU
#SBATCH --cpus-per-task=16
#SBATCH --hint=nomultithread
#SBATCH --time=0-04                   # days-hours
#SBATCH --output=%x-%A_%a.out
##SBATCH --nodes=8
# SBATCH --partition=debug

module load openmpi/5.0.6 cuda/12.4 || exit 1
source "$HOME/venvs/sweep/bin/activate" || exit 1
set -u

LRS=(3e-4 1e-3 3e-3 1e-2)
lr=${LRS[$SLURM_ARRAY_TASK_ID]}
run=runs/$SLURM_ARRAY_JOB_ID/$lr
mkdir -p "$run" || exit 1

# Unpack the data on each node's own disk: one task per node is wanted here.
DATA=/tmp/lr-sweep-$SLURM_JOB_ID
srun --mpi=none --ntasks="$SLURM_NNODES" --ntasks-per-node=1 \
    bash -c "mkdir -p '$DATA' && tar -xf digits.tar -C '$DATA'" || exit 1

export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
srun --mpi=pmix --kill-on-bad-exit=1 \
    python -m mpiddp --show fold --log-dir "$run/logs" \
    -m sweep.train --data "$DATA" --lr "$lr" --out "$run/model.pt"
status=$?

srun --mpi=none --ntasks="$SLURM_NNODES" --ntasks-per-node=1 rm -rf "$DATA"
exit $status
