#!/bin/bash
# by an author who did not know the doctor's rules
#SBATCH --job-name=vit-l16
#SBATCH --account=p_vision
#SBATCH --partition=gpu-a100
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=48
#SBATCH --mem=0
#SBATCH --time=23:59:00
#SBATCH --output=logs/%x_%j.log

# ViT-L/16 on ImageNet, 4 nodes x 4 A100 = 16 GPUs, global batch 16 x 128

mkdir -p logs checkpoints

module purge
module load GCCcore/12.3.0 CUDA/12.1.1
source "$HOME/venvs/vit/bin/activate"

export OMP_NUM_THREADS=12
export NCCL_DEBUG=WARN

echo "job $SLURM_JOB_ID on $SLURM_JOB_NODELIST"
python -c 'import torch; print(torch.__version__, torch.cuda.device_count(), "GPUs on", __import__("socket").gethostname())'

srun torchrun \
    --standalone \
    --nproc-per-node=4 \
    train.py \
        --data /scratch/datasets/imagenet \
        --epochs 90 \
        --workers 11 \
        --checkpoint checkpoints/vit-l16.pt

echo "finished with status $?"
