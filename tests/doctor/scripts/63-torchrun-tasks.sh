#!/bin/bash
# by an author who did not know the doctor's rules
#SBATCH --job-name=gpt-small
#SBATCH --account=nlp
#SBATCH --partition=gpu
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gres=gpu:4
#SBATCH --cpus-per-task=8
#SBATCH --mem=200G
#SBATCH --time=12:00:00
#SBATCH --output=%x-%j.out

module purge
module load cuda/12.4 python/3.11
source $HOME/venvs/torch/bin/activate

export NCCL_DEBUG=WARN
export OMP_NUM_THREADS=8

# -------- launch ----------
srun --cpus-per-task=$SLURM_CPUS_PER_TASK torchrun \
    --nnodes=$SLURM_NNODES \
    --nproc_per_node=4 \
    --rdzv_id=$SLURM_JOB_ID \
    --rdzv_backend=c10d \
    --rdzv_endpoint=localhost:29500 \
    train.py --epochs 20 --batch-size 32
