#!/usr/bin/env bash
# after the shape of: a user's phase10 job with absolute paths
#SBATCH --job-name=resnet_full
#SBATCH --account=project
#SBATCH --partition=gpu
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --mem=240G
#SBATCH --time=2-00:00:00
#SBATCH --output=slurm_logs/resnet_%j.out
#SBATCH --error=slurm_logs/resnet_%j.err

mkdir -p slurm_logs
module load openmpi/5.0.5
source /missing/envs/torch-2.9/bin/activate

srun --mpi=pmix -c 16 python -m mpiddp train_resnet50.py --depth 50
