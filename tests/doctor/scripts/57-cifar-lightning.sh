#!/usr/bin/env bash
# by an author who did not know the doctor's rules

#SBATCH --job-name=cifar-pl
#SBATCH --partition=gpu
#SBATCH --nodes=2
#SBATCH --ntasks=8
#SBATCH --gres=gpu:4
#SBATCH --cpus-per-task=8
#SBATCH --mem=200G
#SBATCH --time=04:00:00
#SBATCH --output=%x.%j.out
#SBATCH --error=%x.%j.err

# PyTorch Lightning, DDP over 2 nodes with 4 GPUs each

eval "$(conda shell.bash hook)"
conda activate lightning

export NCCL_DEBUG=INFO
export PYTHONFAULTHANDLER=1
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK

nvidia-smi -L

python train.py fit --data_dir "$SCRATCH/cifar10" \
    --devices 4 \
    --num_nodes 4 \
    --batch_size 256 \
    --max_epochs 200
