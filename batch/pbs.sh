#!/bin/bash -l
# PBS Professional: qsub pbs.sh
#PBS -N mpiddp
#PBS -j oe
#PBS -l walltime=01:00:00                                # edit
#PBS -l select=2:ncpus=8:ngpus=2:mpiprocs=2:ompthreads=4  # edit: nodes; of each its cores, GPUs, and as many mpiprocs

MODULES="pytorch openmpi"            # edit: empty for none
COMMAND="python -m mpiddp train.py"  # edit: your script, and its arguments

cd "$PBS_O_WORKDIR" || exit 1
if [ -n "$MODULES" ]; then module purge; module load $MODULES || exit 1; fi
eval "exec mpirun $COMMAND"
