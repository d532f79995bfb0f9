#!/bin/bash -l
# by an author who did not know the doctor's rules
#SBATCH --job-name=lit-unet
#SBATCH --account=medimg
#SBATCH --partition=alpha
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gres=gpu:4
#SBATCH --cpus-per-task=12
#SBATCH --mem=240
#SBATCH --time=20:00:00
#SBATCH --output=$HOME/lit-logs/%x-%j.out
#SBATCH --signal=SIGUSR1@90

module load release/24.04 GCC/12.3.0 OpenMPI/4.1.5 PyTorch/2.1.2-CUDA-12.1.1
source $HOME/lit/bin/activate

export PYTHONFAULTHANDLER=1
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK

# 2 nodes x 4 GPUs
srun python train_lit.py --devices 4 --num-nodes 1 --precision 16-mixed
