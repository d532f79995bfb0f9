#!/bin/bash
# after the shape of: SeHwanYoo/train_latent:train_submit.sh, NSCC's PBS with mpirun
#PBS -q normal
#PBS -j oe
#PBS -l select=2:ncpus=64:ngpus=4:mem=440gb
#PBS -l walltime=24:00:00
#PBS -P personal
#PBS -N log_train_vae

export NCCL_DEBUG=INFO
module load pytorch/2.9 openmpi/4.1.5

mpirun python -m mpiddp train.py
