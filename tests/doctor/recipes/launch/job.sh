#!/bin/bash
# after the shape of: "A native tool: torch.distributed", with its helper for Slurm
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --job-name=helloworld
#SBATCH --time=00:10:00
#SBATCH --gres=gpu:2
#SBATCH --cpus-per-task=4
#SBATCH --mem=4G

module load pytorch
srun bash slurm_multinode_helper.sh
