#!/bin/bash
# after the shape of: hpc_pytorch_distributed_slurm (HiPerGator): srun starts launch_node.sh on each node
#SBATCH --job-name=unet
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-task=4
#SBATCH --cpus-per-task=8
#SBATCH --time=00:10:00
#SBATCH --output=%x-%j.out

module load pytorch

COMMAND="train.py --epochs 1"
PYTHON_PATH="python3"
PRIMARY_PORT=$((20000 + SLURM_JOB_ID % 20000))
PRIMARY=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

echo "Primary node: $PRIMARY"
echo "Primary TCP port: $PRIMARY_PORT"
echo "Secondary nodes: $(scontrol show hostnames | tail -n +2 | tr '\n' ' ')"

export NCCL_DEBUG=WARN
srun --unbuffered bash launch_node.sh "$PWD" "$PRIMARY" "$PRIMARY_PORT" "$PYTHON_PATH" "$COMMAND"
