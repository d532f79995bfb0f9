#!/bin/bash -l
# Grid Engine: qsub sge.sh
#$ -N mpiddp
#$ -j y
#$ -cwd
# edit the next two lines: walltime; your site's parallel environment for MPI (qconf -spl), with a slot for each rank of the job
#$ -l h_rt=01:00:00
#$ -pe mpi 4
# other options that your site may require: remove the first #
##$ -l gpu=1
##$ -P NAME
##$ -q NAME

# Do once, with these modules loaded, in the environment that has your torch: pip install . (in a clone of mpiddp)
MODULES="pytorch openmpi"            # edit: your site's modules, including MPI; empty for none
ENVIRONMENT=""                       # edit: a venv's PATH/bin/activate, or conda's $HOME/miniforge3/bin/activate NAME; empty for none
MPIRUN="mpirun"                      # edit: your MPI's launcher, and its options
STOP=""                              # edit: --stop-before 120, if the script calls mpiddp.should_stop(): the job is requeued
COMMAND="python -m mpiddp train.py"  # edit: your script, and its arguments

if [ -n "$MODULES" ]; then module purge; module load $MODULES || exit 1; fi  # remove the purge if qstat comes from a module
if [ -n "$ENVIRONMENT" ]; then source $ENVIRONMENT || exit 1; fi
eval "python -m mpiddp.supervise $STOP $MPIRUN $COMMAND"  # it gives mpirun the nodes in $PE_HOSTFILE
status=$?
if [ $status = 75 ]; then exit 99; fi  # Grid Engine requeues the job
exit $status
