#!/bin/bash -l
# by an author who did not know the doctor's rules
#PBS -N unet_seg
#PBS -q gpuq
#PBS -P ab12
#PBS -l select=2:ncpus=32:ngpus=4:mem=256gb
#PBS -l place=scatter
#PBS -l walltime=10:00:00

# environment
module purge
module load python/3.11 openmpi/4.1.6 cuda/12.2
source /home/$USER/venv-seg/bin/activate

#PBS -j oe
#PBS -o unet_seg.log

echo "Running on:"
sort -u $PBS_NODEFILE

mpirun -np 8 python -m mpiddp train.py --epochs 100 --batch-size 16
