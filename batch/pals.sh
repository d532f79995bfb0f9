#!/bin/bash -l
# HPE Cray with PBS Professional, where mpiexec belongs to PALS: qsub pals.sh
#PBS -N mpiddp
#PBS -j oe
# edit the next two lines (qsub refuses a comment behind a directive): walltime; nodes, and for each node its cores,
# GPUs and ompthreads (cores divided by GPUs)
#PBS -l walltime=01:00:00
#PBS -l select=2:ncpus=64:ngpus=4:ompthreads=16
#PBS -l place=scatter
# other options that your site may require: remove the first #. ALCF: select=2:system=polaris:ncpus=64, and the file
# systems that the job needs
##PBS -A NAME
##PBS -q NAME
##PBS -l filesystems=home:eagle

# Do once, with these modules loaded, in the environment that has your torch: MPICC="cc -shared" pip install --no-binary=mpi4py mpi4py; pip install . (in a clone of mpiddp)
MODULES=""                           # edit: your site's modules; empty for none
ENVIRONMENT=""                       # edit: a venv's PATH/bin/activate, or conda's $HOME/miniforge3/bin/activate NAME; empty for none
TASKS=4                              # edit: tasks per node: as many as it has GPUs
COMMAND="python -m mpiddp train.py"  # edit: your script, and its arguments; python -m mpiddp --stop-before 120 train.py, if it calls mpiddp.should_stop(): the job is submitted again

cd "$PBS_O_WORKDIR" || exit 1
if [ -n "$MODULES" ]; then module load $MODULES || exit 1; fi  # no purge: mpiexec comes from a module
if [ -n "$ENVIRONMENT" ]; then source $ENVIRONMENT || exit 1; fi
export PMI_MMAP_SYNC_WAIT_TIME=600  # ranks that start late: Cray's PMI gives up after 180 s
nodes=$(sort -u "$PBS_NODEFILE" | wc -l)
eval "mpiexec -n $((nodes * TASKS)) --ppn $TASKS --cpu-bind none $COMMAND"  # mpiddp divides a node's cores
status=$?
if [ $status = 75 ]; then qsub -v MPIDDP_RESTART_COUNT=$((${MPIDDP_RESTART_COUNT:-0} + 1)) "$0"; fi  # the job stopped before its walltime
exit $status
