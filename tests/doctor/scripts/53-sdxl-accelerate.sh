#!/bin/bash
# by an author who did not know the doctor's rules
#SBATCH -J sdxl-lora
#SBATCH -A genai
#SBATCH -p h100
#SBATCH -N 2
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:h100:4
#SBATCH -c 64
#SBATCH --mem=700G
#SBATCH -t 12:00:00
#SBATCH -o sdxl-lora-%j.out

source /sw/miniforge/etc/profile.d/conda.sh
conda activate diffusers

export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((15000 + SLURM_JOB_ID % 10000))
export HF_HUB_OFFLINE=1

# one launcher per node, 4 processes on each
srun accelerate launch \
    --config_file accelerate.yaml \
    --num_machines $SLURM_NNODES \
    --machine_rank $SLURM_NODEID \
    --main_process_ip $MASTER_ADDR \
    --main_process_port $MASTER_PORT \
    train_lora.py --resolution 1024 --batch-size 4 --output lora-out
