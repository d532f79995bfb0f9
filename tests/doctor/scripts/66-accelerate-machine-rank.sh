#!/bin/bash
# by an author who did not know the doctor's rules
#SBATCH --job-name=sft-llama
#SBATCH --partition=a100
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=48
#SBATCH --exclusive
#SBATCH --time=1-00:00:00
#SBATCH --output=slurm-%x-%j.log

set -eo pipefail
source /opt/miniforge3/etc/profile.d/conda.sh
conda activate sft

export HF_HOME=/scratch/$USER/hf
export HF_HUB_OFFLINE=1
export GPUS_PER_NODE=4
head_node_ip=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

export LAUNCHER="accelerate launch \
    --config_file fsdp.yaml \
    --num_machines $SLURM_NNODES \
    --num_processes $GPUS_PER_NODE \
    --machine_rank $SLURM_NODEID \
    --main_process_ip $head_node_ip \
    --main_process_port 29500 \
    --rdzv_backend static"

srun --cpus-per-task=$SLURM_CPUS_PER_TASK $LAUNCHER finetune.py --output-dir out
