#!/bin/bash
# after the shape of: interactive settings left in a batch script
#SBATCH --job-name=det
#SBATCH --partition=gpu
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --gres=gpu:4
#SBATCH --cpus-per-task=10
#SBATCH --mem=180G
#SBATCH --time=10:00:00
#SBATCH --output=det_%j.out

export CUDA_VISIBLE_DEVICES=0
export LD_LIBRARY_PATH=$CONDA_PREFIX/lib:$LD_LIBRARY_PATH
module load openmpi/5.0.3
source /data/envs/det/bin/activate

RANKS=$((SLURM_NNODES * 8))
mpirun -np $RANKS python -m mpiddp train.py configs/det.yaml
