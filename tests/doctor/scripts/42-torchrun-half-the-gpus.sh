#!/bin/bash -l
# after the shape of: sara-nl/UvA_ML_2022:notebooks/parallel_ml/submit_script.sh
#SBATCH -J distrib_test
#SBATCH -o distrib_test_%j.txt
#SBATCH -t 0:30:00
#SBATCH --partition gpu_a100
#SBATCH --nodes 1
#SBATCH --gpus 4
#SBATCH --ntasks 1
#SBATCH --cpus-per-task 72

module load 2024
module load PyTorch/2.6.0-foss-2024a-CUDA-12.6.0
export OMP_NUM_THREADS=18

time python -m torch.distributed.launch --use_env --nproc_per_node=2 mnist.py
