#!/bin/bash
# One per node: launch_node.sh FOLDER PRIMARY PORT PYTHON COMMAND
cd "$1" || exit 1
$4 -m torch.distributed.run --nnodes="$SLURM_NNODES" --nproc_per_node="$SLURM_GPUS_PER_TASK" \
    --node_rank="$SLURM_NODEID" --master_addr="$2" --master_port="$3" $5
