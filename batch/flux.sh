#!/bin/bash -l
# One task per GPU, started by Flux: flux batch flux.sh
#flux: --job-name=mpiddp
#flux: --output={{name}}-{{id}}.out
#flux: --time-limit=60m       # edit
#flux: --nodes=2              # edit: nodes
#flux: --exclusive            # whole nodes
#flux: # --queue=NAME         # other options that your site may require: remove the second #
#flux: # --bank=NAME

# Do once, with these modules loaded, in the environment that has your torch: pip install . (in a clone of mpiddp)
MODULES="pytorch"                    # edit: your site's modules, including MPI; empty for none
ENVIRONMENT=""                       # edit: a venv's PATH/bin/activate, or conda's $HOME/miniforge3/bin/activate NAME; empty for none
TASKS=4                              # edit: tasks per node: as many as it has GPUs
CORES=8                              # edit: a node's cores, divided by its tasks
OPTIONS="--gpus-per-task=1"          # edit: and -o pmi=pmix for Open MPI 5; empty without GPUs
STOP=""                              # edit: --signal=SIGUSR1@120s, if the script calls mpiddp.should_stop(): the job is submitted again
COMMAND="python -m mpiddp train.py"  # edit: your script, and its arguments

if [ -n "$MODULES" ]; then module purge; module load $MODULES || exit 1; fi  # remove the purge on an HPE Cray, or if flux comes from a module
if [ -n "$ENVIRONMENT" ]; then source $ENVIRONMENT || exit 1; fi
nodes=$(flux resource list -s up -no '{nnodes}')
eval "flux run --nodes=$nodes --ntasks=$((nodes * TASKS)) --cores-per-task=$CORES $OPTIONS $STOP $COMMAND"
status=$?
if [ $status = 75 ]; then
    export MPIDDP_RESTART_COUNT=$((${MPIDDP_RESTART_COUNT:-0} + 1))
    flux --parent batch "$0"
fi
exit $status
