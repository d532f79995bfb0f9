#!/bin/bash
# after the shape of: a short test of a long job's script
#SBATCH -J smoke
#SBATCH -A project
#SBATCH -N 2
#SBATCH -t 10
#SBATCH -C gpu
#SBATCH -q debug
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH -c 32
#SBATCH -o %j.out

module load cray-mpich/8.1.30 pytorch/2.8.0
STOP=900
run() {
    local seconds=$1; shift
    srun -c 32 python -m mpiddp --stop-before "$seconds" "$@"
}
run $STOP train.py --smoke
