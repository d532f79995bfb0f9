#!/bin/bash -l
# Like requeue.sh, with mpirun; this shell forwards Slurm's signal to it: sbatch requeue_mpirun.sh
#SBATCH --job-name=mpiddp
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@120    # edit, here and in --stop-before below: seconds before the walltime, enough for a step and a checkpoint
#SBATCH --time=01:00:00        # edit
#SBATCH --nodes=2              # edit: nodes
#SBATCH --ntasks-per-node=2    # edit: as many as a node has GPUs
#SBATCH --gpus-per-node=2      # edit
#SBATCH --cpus-per-task=4      # edit: a node's cores, divided by its GPUs
##SBATCH --account=NAME        # other options that your site may require: remove the first #
##SBATCH --partition=NAME
##SBATCH --qos=NAME
##SBATCH --constraint=NAME
##SBATCH --mem=0               # all memory of a node
##SBATCH --mail-type=END,FAIL
##SBATCH --wait-all-nodes=1    # begin when all nodes are ready

# Do once, with these modules loaded, in the environment that has your torch: pip install . (in a clone of mpiddp)
MODULES="openmpi"                       # edit: your MPI's module; empty for none
ENVIRONMENT="$HOME/.venv/bin/activate"  # edit: a venv's, or conda's $HOME/miniforge3/bin/activate NAME; empty for none
COMMAND="python -m mpiddp train.py --checkpoint checkpoint.pt"  # edit: your script, which calls mpiddp.should_stop(), and its arguments
SUPERVISE="python -m mpiddp.supervise --stop-before 120 --progress-file checkpoint.pt"  # edit: the seconds of --signal above; the checkpoint

if [ -n "$MODULES" ]; then module purge; module load $MODULES || exit 1; fi  # remove the purge if mpirun or scontrol comes from a module
if [ -n "$ENVIRONMENT" ]; then source $ENVIRONMENT || exit 1; fi
trap 'kill -USR1 $job; again=yes' USR1
eval "$SUPERVISE mpirun $COMMAND &"
job=$! again=yes
while [ $again = yes ]; do again=no; wait $job; status=$?; done  # the signal interrupts a wait
if [ $status = 75 ]; then scontrol requeue "${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"; fi
exit $status
