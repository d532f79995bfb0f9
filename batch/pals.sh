#!/bin/bash -l
# HPE Cray with PBS Professional, where mpiexec is that of PALS: qsub pals.sh
#PBS -N mpiddp
#PBS -j oe
#PBS -l walltime=01:00:00            # edit
#PBS -l select=2:ncpus=64:ngpus=4    # edit: nodes; of each its cores and GPUs; ALCF: 2:system=polaris:ncpus=64
#PBS -l place=scatter
##PBS -A NAME                        # and what your site asks for besides: take the first # away
##PBS -q NAME
##PBS -l filesystems=home:eagle      # ALCF: the file systems without which the job shall not start

# Once before, with these modules: MPICC="cc -shared" pip install --no-binary=mpi4py mpi4py; pip install . (in a clone of mpiddp)
MODULES=""                           # edit: your site's; empty for none
ENVIRONMENT=""                       # edit: a venv's PATH/bin/activate, or conda's $HOME/miniforge3/bin/activate NAME; empty for none
TASKS=4                              # edit: tasks of a node: as many as it has GPUs
COMMAND="python -m mpiddp train.py"  # edit: your script, and its arguments

cd "$PBS_O_WORKDIR" || exit 1
if [ -n "$MODULES" ]; then module load $MODULES || exit 1; fi  # no purge: mpiexec comes from a module
if [ -n "$ENVIRONMENT" ]; then source $ENVIRONMENT || exit 1; fi
nodes=$(sort -u "$PBS_NODEFILE" | wc -l)
eval "exec mpiexec -n $((nodes * TASKS)) --ppn $TASKS --cpu-bind none $COMMAND"  # mpiddp divides a node's cores
