#!/bin/bash -l
# PBS Professional: qsub pbs.sh
#PBS -N mpiddp
#PBS -j oe
#PBS -l walltime=01:00:00                                # edit
#PBS -l select=2:ncpus=8:ngpus=2:mpiprocs=2:ompthreads=4  # edit: nodes; of each its cores, GPUs, and as many mpiprocs

# Once before, with these modules, in the environment that has your torch: pip install . (in a clone of mpiddp)
MODULES="pytorch openmpi"            # edit: empty for none
MPIRUN="mpirun"                      # edit: Open MPI without PBS's tm: mpirun --hostfile $PBS_NODEFILE -x PATH -x LD_LIBRARY_PATH
COMMAND="python -m mpiddp train.py"  # edit: your script, and its arguments

cd "$PBS_O_WORKDIR" || exit 1
if [ -n "$MODULES" ]; then module purge; module load $MODULES || exit 1; fi  # no purge where qsub comes from a module
eval "exec $MPIRUN $COMMAND"
