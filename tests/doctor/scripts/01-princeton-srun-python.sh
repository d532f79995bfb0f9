#!/bin/bash
# after the shape of: PrincetonUniversity/multi_gpu_training:02_pytorch_ddp/job.slurm
#SBATCH --job-name=ddp-torch     # create a short name for your job
#SBATCH --nodes=2                # node count
#SBATCH --ntasks-per-node=2      # total number of tasks per node
#SBATCH --cpus-per-task=8        # cpu-cores per task
#SBATCH --mem=32G                # total memory per node
#SBATCH --gres=gpu:2             # number of allocated gpus per node
#SBATCH --time=00:30:00          # total run time limit (HH:MM:SS)

export MASTER_PORT=$(get_free_port)
export WORLD_SIZE=$(($SLURM_NNODES * $SLURM_NTASKS_PER_NODE))
echo "WORLD_SIZE=$WORLD_SIZE"

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR=$first
echo "MASTER_ADDR=$MASTER_ADDR"

module purge
module load anaconda3/2024.10
conda activate torch-env

srun --cpus-per-task=$SLURM_CPUS_PER_TASK python mnist.py --epochs=2
