#!/bin/bash -l
# after the shape of: a script for a generic cluster moved to LUMI without change
#SBATCH --job-name=tok
#SBATCH --account=project_465000002
#SBATCH --partition=standard-g
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=7
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=02:00:00
#SBATCH --output=%x-%j.out

module load LUMI/24.03 partition/G
module load PrgEnv-cray cray-mpich/8.1.29 cray-python/3.11.7
source /project/project_465000002/venv/bin/activate

export MIOPEN_USER_DB_PATH=$HOME/.miopen/db
export MIOPEN_CUSTOM_CACHE_DIR=$HOME/.miopen/cache
srun --mpi=pmix --cpus-per-task=7 python -m mpiddp train.py
