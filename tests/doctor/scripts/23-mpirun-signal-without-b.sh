#!/bin/bash
# after the shape of: facebookresearch-style requeue with mpirun
#SBATCH --job-name=pretrain
#SBATCH --partition=learnlab
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=10
#SBATCH --mem=480G
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=logs/%x_%j.out

module load openmpi/4.1.6
source ~/envs/pretrain/bin/activate

requeue=no
on_signal() {
    requeue=yes
    kill -USR1 $MPI_PID
}
trap on_signal SIGUSR1

mpirun python -m mpiddp train.py --resume auto &
MPI_PID=$!
while kill -0 $MPI_PID 2>/dev/null; do wait $MPI_PID; done
[ $requeue = yes ] && scontrol requeue $SLURM_JOB_ID
