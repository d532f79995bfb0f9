#!/bin/bash
# after the shape of: services.criann.fr: guide/signals-sent-by-slurm
#SBATCH -J "calcul"
#SBATCH --output calcul.o%J
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --nodes 2
#SBATCH --ntasks-per-node 4
#SBATCH --cpus-per-task 8
#SBATCH --gpus-per-node 4
#SBATCH --mem 180G
#SBATCH --time 08:00:00
#SBATCH --signal=B:USR1@180

module load pytorch/2.9 openmpi/4.1.6

catch_usr1() {
    echo "USR1 at $(date): pass it on to mpirun"
    kill -USR1 "$pid"
}
trap catch_usr1 USR1

mpirun python -m mpiddp train.py --checkpoint=last.pt &
pid=$!
wait "$pid"
wait "$pid"
code=$?
[ "$code" -eq 75 ] && scontrol requeue "$SLURM_JOB_ID"
exit "$code"
