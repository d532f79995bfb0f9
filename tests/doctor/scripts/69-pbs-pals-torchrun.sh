#!/bin/bash -l
# by an author who did not know the doctor's rules
#PBS -N gnn
#PBS -A Climate-ML
#PBS -q prod
#PBS -l select=4:system=polaris
#PBS -l place=scatter
#PBS -l walltime=03:00:00
#PBS -l filesystems=home:eagle
#PBS -j oe
#PBS -k doe

cd "$PBS_O_WORKDIR" || exit 1

module use /soft/modulefiles
module load conda
conda activate base

# The nodefile has one line per node here; -u in case the queue sets mpiprocs.
mapfile -t NODES < <(awk '!seen[$0]++' "$PBS_NODEFILE")
NNODES=${#NODES[@]}

export OMP_NUM_THREADS=8
export NCCL_NET_GDR_LEVEL=PHB
export FI_CXI_DISABLE_HOST_REGISTER=1

# One agent per node (PALS is only used to reach the nodes), 4 workers each.
mpiexec -n "$NNODES" --ppn 1 --cpu-bind none \
    torchrun \
    --nnodes="$NNODES" \
    --nproc-per-node=gpu \
    --rdzv-id="$PBS_JOBID" \
    --rdzv-backend=c10d \
    --rdzv-endpoint="${NODES[0]}:29400" \
    --max-restarts=0 \
    train.py --epochs 30 --batch-size 64
