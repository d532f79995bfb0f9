#!/bin/bash
# after the shape of: Lumi-supercomputer/LUMI-AI-Guide:05-multi-gpu-and-node/run_ddp_srun.sh
#SBATCH --account=project_465000001
#SBATCH --partition=standard-g
#SBATCH --nodes=2
#SBATCH --gpus-per-node=8
#SBATCH --tasks-per-node=8
#SBATCH --cpus-per-task=7
#SBATCH --mem-per-gpu=60G
#SBATCH --exclusive
#SBATCH --time=1:00:00

module use /appl/local/laifs/modules
module load lumi-aif-singularity-bindings

SIF=/appl/local/laifs/containers/lumi-multitorch-latest.sif

export NCCL_SOCKET_IFNAME=hsn0,hsn1,hsn2,hsn3
export NCCL_NET_GDR_LEVEL=PHB
export MASTER_ADDR=$(scontrol show hostname "$SLURM_JOB_NODELIST" | head -n1)
export MASTER_PORT=25900
export WORLD_SIZE=$SLURM_NPROCS

c=fe
MASKS="0x${c}000000000000,0x${c}00000000000000,0x${c}0000,0x${c}000000,0x${c},0x${c}00,0x${c}00000000,0x${c}0000000000"

srun --cpu-bind=v,mask_cpu=$MASKS singularity run "$SIF" bash -c '
    export MIOPEN_USER_DB_PATH=/tmp/$USER-miopen-$SLURM_NODEID
    export MIOPEN_CUSTOM_CACHE_DIR=$MIOPEN_USER_DB_PATH
    export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID
    python train.py --max-steps 400'
