#!/bin/bash
# after the shape of: hju/hpc_pytorch_distributed_slurm: job_launch.sh
#SBATCH --job-name=unet
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-task=4
#SBATCH --cpus-per-task=32
#SBATCH --mem=240gb
#SBATCH --partition=hpg-ai
#SBATCH --exclusive
#SBATCH --time=12:00:00
#SBATCH --output=%x.%j.out

export NCCL_DEBUG=INFO
module load pytorch/2.2.0

COMMAND="train.py --amp"
PYTHON_PATH="python3"

PRIMARY=$(scontrol show hostnames | head -n 1)
PRIMARY_PORT=$((20000 + SLURM_JOB_ID % 20000))
echo "Primary node: $PRIMARY:$PRIMARY_PORT"

srun --unbuffered --cpus-per-task="$SLURM_CPUS_PER_TASK" \
    bash launch_node.sh "$(realpath .)" "$PRIMARY" "$PRIMARY_PORT" "$PYTHON_PATH" "$COMMAND"
