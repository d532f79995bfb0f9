#!/bin/bash
# after the shape of: CSCfi/pytorch-ddp-examples:run-gpu4-dist-mahti.sh
#SBATCH --account=project_2000123
#SBATCH --partition=gpumedium
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=128
#SBATCH --mem=0
#SBATCH --time=15
#SBATCH --gres=gpu:a100:4

module purge
module load pytorch/2.9

export OMP_NUM_THREADS=32
srun --cpus-per-task=$SLURM_CPUS_PER_TASK python3 -m torch.distributed.run --standalone --nnodes=1 --nproc_per_node=4 mnist.py "$@"
