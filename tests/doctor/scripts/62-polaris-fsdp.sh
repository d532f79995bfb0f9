#!/bin/bash -l
# by an author who did not know the doctor's rules
#PBS -N fsdp-polaris
#PBS -A llm-test
#PBS -q prod
#PBS -l select=10:system=polaris
#PBS -l place=scatter:exclhost
#PBS -l walltime=06:00:00
#PBS -l filesystems=home:eagle
#PBS -j oe
#PBS -k doe

cd "${PBS_O_WORKDIR:?submit this with qsub}" || exit

module use /soft/modulefiles
module load conda
conda activate
source venv/bin/activate

export NNODES=$(sort -u "$PBS_NODEFILE" | wc -l)
export HEAD=$(head -n 1 "$PBS_NODEFILE")
jobnumber=${PBS_JOBID%%.*}
export PORT=$((20000 + jobnumber % 10000))

export NCCL_NET_GDR_LEVEL=PHB NCCL_CROSS_NIC=1 NCCL_COLLNET_ENABLE=1
export OMP_NUM_THREADS=8

# One torchrun on each node, which starts 4 processes. Single quotes: PMI_RANK,
# the number of the node, exists only in the shells that mpiexec starts.
mpiexec -n "$NNODES" --ppn 1 --cpu-bind none bash -c '
    exec torchrun --nnodes="$NNODES" --node-rank="$PMI_RANK" --nproc-per-node=4 \
        --master-addr="$HEAD" --master-port="$PORT" \
        train_fsdp.py "$@"' torchrun --steps 20000 --out /eagle/llm-test/runs/"$jobnumber"
