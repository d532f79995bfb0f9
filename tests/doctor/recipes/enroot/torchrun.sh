#!/bin/bash
source env.sh
MASTER_ADDR=$1

NODE_LIST=`scontrol show hostnames $SLURM_JOB_NODELIST`
node_array=($NODE_LIST)
length=${#node_array[@]}
hostnode=`hostname -s`
for (( index = 0; index < length ; index++ )); do
    node=${node_array[$index]}
    if [ $node == $hostnode ]; then
        NODE_RANK=$index
    fi
done

torchrun \
    --nnodes $NNODES \
    --nproc_per_node $NPROC_PER_NODE \
    --node_rank $NODE_RANK \
    --master_addr $MASTER_ADDR \
    --master_port $MASTER_PORT \
    train.py -np $NPROC_PER_NODE \
             -n $NNODES
