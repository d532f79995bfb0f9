#!/bin/bash -l
# PBS Professional: qsub pbs.sh
#PBS -N mpiddp
#PBS -j oe
# edit the next two lines (qsub refuses a comment behind a directive): walltime; nodes, and for each node its cores,
# GPUs, mpiprocs (as many as GPUs) and ompthreads (cores divided by mpiprocs)
#PBS -l walltime=01:00:00
#PBS -l select=2:ncpus=8:ngpus=2:mpiprocs=2:ompthreads=4
# other options that your site may require: remove the first #
##PBS -A NAME
##PBS -q NAME

# Do once, with these modules loaded, in the environment that has your torch: pip install . (in a clone of mpiddp)
MODULES="pytorch openmpi"            # edit: your site's modules, including MPI; empty for none
ENVIRONMENT=""                       # edit: a venv's PATH/bin/activate, or conda's $HOME/miniforge3/bin/activate NAME; empty for none
MPIRUN="mpirun"                      # edit: your MPI's launcher, and its options
STOP=""                              # edit: --stop-before 120, if the script calls mpiddp.should_stop(): the job is submitted again
COMMAND="python -m mpiddp train.py"  # edit: your script, and its arguments

cd "$PBS_O_WORKDIR" || exit 1
if [ -n "$MODULES" ]; then module purge; module load $MODULES || exit 1; fi  # remove the purge if qsub comes from a module
if [ -n "$ENVIRONMENT" ]; then source $ENVIRONMENT || exit 1; fi
eval "python -m mpiddp.supervise $STOP $MPIRUN $COMMAND"  # it gives mpirun the nodes in $PBS_NODEFILE
status=$?
if [ $status = 75 ]; then qsub -v MPIDDP_RESTART_COUNT=$((${MPIDDP_RESTART_COUNT:-0} + 1)) "$0"; fi  # the job stopped before its walltime
exit $status
