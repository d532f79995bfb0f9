#!/bin/bash
# Runs on each node: launch_node.sh FOLDER PRIMARY PORT PYTHON COMMAND
FOLDER=$1
PRIMARY=$2
PORT=$3
PYTHON=$4
COMMAND=$5

cd "$FOLDER" || exit 1
echo "node $SLURM_NODEID of $SLURM_JOB_NUM_NODES: $(hostname)"
$PYTHON -m torch.distributed.launch \
    --nproc_per_node=$SLURM_GPUS_PER_TASK \
    --nnodes=$SLURM_JOB_NUM_NODES \
    --node_rank=$SLURM_NODEID \
    --master_addr=$PRIMARY \
    --master_port=$PORT \
    $COMMAND
