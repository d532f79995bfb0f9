#!/bin/bash
# after the shape of: DeiC-HPC/cotainr:examples/LUMI, and masks copied to a shared partition
#SBATCH --job-name=bloom
#SBATCH --account=project_465000003
#SBATCH --partition=small-g
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=7
#SBATCH --mem=400G
#SBATCH --time=04:00:00
#SBATCH --output=bloom_%j.txt

SIF=/appl/local/containers/sif-images/lumi-pytorch-rocm-6.2.4.sif
export TRITON_CACHE_DIR=$HOME/.triton/cache
export NCCL_SOCKET_IFNAME=hsn0,hsn1,hsn2,hsn3
export MASTER_ADDR=$(hostname) MASTER_PORT=25900 WORLD_SIZE=$SLURM_NTASKS
MASK=0xfe000000000000,0xfe00000000000000,0xfe0000,0xfe000000,0xfe,0xfe00,0xfe00000000,0xfe0000000000

srun --cpu-bind=mask_cpu:$MASK singularity exec --rocm $SIF \
    bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID python finetune.py'
