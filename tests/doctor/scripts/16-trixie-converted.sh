#!/bin/bash
# after the shape of: ai4d-iasc/trixie, wiki "SLURM, pytorch distributed and Multiple Nodes", converted
#SBATCH --partition=TrixieMain
#SBATCH --account=project
#SBATCH --time=00:20:00
#SBATCH --job-name=pytorch.distributed
#SBATCH --gres=gpu:4
#SBATCH --wait-all-nodes=1
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=6
#SBATCH --output=%x-%j.out

source /gpfs/projects/project/opt/miniforge3/bin/activate pytorch-2.9

readonly srun='srun --mpi=pmix'
$srun --cpus-per-task=$SLURM_CPUS_PER_TASK \
    python -m mpiddp --log-dir logs \
        main.py \
        --batch_size 128 \
        --learning_rate 5e-5
