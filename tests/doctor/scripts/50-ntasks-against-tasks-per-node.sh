#!/bin/bash
# after the shape of: Lightning-AI/pytorch-lightning#20391, with an array, a function and mpiddp

#SBATCH --ntasks=1
#SBATCH --nodes=1
#SBATCH --gres=gpu:2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=3

source venv/bin/activate
launcher=(srun --mpi=pmix)
train() {
    local cmd="${launcher[*]} python -m mpiddp --log-dir logs train.py $*"
    eval "$cmd"
}
train --epochs 100
