#!/bin/bash
# after the shape of: sorenwacker's case: Lightning-AI/pytorch-lightning#19883, and EESSI-style containers
#SBATCH --job-name=apptainer-ddp
#SBATCH --partition=gpu
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --gres=gpu:2
#SBATCH --cpus-per-task=8
#SBATCH --mem=64G
#SBATCH --time=02:00:00
#SBATCH --output=apptainer_%j.out

IMAGE=image.sif
RUN="apptainer exec --bind /tmp,$PWD $IMAGE"
export PMIX_MCA_psec=native

srun --mpi=pmix --cpus-per-task=8 $RUN python -m mpiddp train.py
