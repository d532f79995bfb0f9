#!/bin/bash -l
# LSF with jsrun: bsub jsrun.sh
#BSUB -J mpiddp
#BSUB -o %J.out
#BSUB -W 1:00                        # edit
#BSUB -nnodes 2                      # edit: nodes
##BSUB -P NAME                       # other options that your site may require: remove the first #
##BSUB -q NAME

# Do once, with these modules loaded, in the environment that has your torch: pip install . (in a clone of mpiddp)
MODULES="pytorch spectrum-mpi"       # edit: your site's modules, including MPI; empty for none
ENVIRONMENT=""                       # edit: a venv's PATH/bin/activate, or conda's $HOME/miniforge3/bin/activate NAME; empty for none
GPUS=6                               # edit: GPUs per node
CORES=7                              # edit: a node's cores, divided by its GPUs
COMMAND="python -m mpiddp train.py"  # edit: your script, and its arguments

if [ -n "$MODULES" ]; then module purge; module load $MODULES || exit 1; fi  # remove the purge if jsrun comes from a module
if [ -n "$ENVIRONMENT" ]; then source $ENVIRONMENT || exit 1; fi
nodes=$(tail -n +2 "$LSB_DJOB_HOSTFILE" | sort -u | wc -l)  # the first line is the launch node
eval "exec jsrun --nrs $((nodes * GPUS)) --rs_per_host $GPUS --tasks_per_rs 1 --cpu_per_rs $CORES --gpu_per_rs 1 --bind none $COMMAND"
