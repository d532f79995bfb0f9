#!/bin/bash
# by an author who did not know the doctor's rules
#BSUB -P MAT000
#BSUB -J crystal-gnn
#BSUB -W 02:00:00
#BSUB -nnodes 4
#BSUB -alloc_flags smt4
#BSUB -o crystal.%J.out
#BSUB -e crystal.%J.err

module load gcc/12.1.0 spectrum-mpi cuda/11.8
source $HOME/opt/torch-ppc/bin/activate || exit 1

cd $LS_SUBCWD

export PYTHONUNBUFFERED=1

date
# 4 nodes x 6 V100
jsrun --nrs 4 --rs_per_host 1 --tasks_per_rs 1 --cpu_per_rs 42 --gpu_per_rs 6 --bind none \
    python -m mpiddp --show 0 train.py --epochs 40 --batch-size 32
