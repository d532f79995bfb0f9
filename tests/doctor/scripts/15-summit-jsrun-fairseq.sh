#!/bin/bash
# after the shape of: OLCF Summit, a fairseq recipe with one resource set per node
#BSUB -P ABC123
#BSUB -W 2:00
#BSUB -nnodes 16
#BSUB -J protein
#BSUB -o protein.%J.out
#BSUB -e protein.%J.out
#BSUB -alloc_flags "nvme smt1"

module load open-ce/1.5.2-py39-0
conda activate /gpfs/alpine/proj-shared/abc123/envs/fairseq
nnodes=$(cat ${LSB_DJOB_HOSTFILE} | sort | uniq | grep -v login | grep -v batch | wc -l)

SAVE_DIR=/gpfs/alpine/scratch/$USER/$LSB_JOBNAME
jsrun -n ${nnodes} -a 1 -c 42 -r 1 cp -r /gpfs/alpine/abc123/split_bin /mnt/bb/${USER}/

jsrun -n $((nnodes * 6)) -r 6 -a 1 -g 1 -c 7 -b none \
    python -m mpiddp --no-init train.py --fp16 --save-dir $SAVE_DIR
