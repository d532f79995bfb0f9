#!/bin/bash -l
# Like requeue.sh; after a fault the job restarts at once, on a spare node if a node is lost: sbatch supervise.sh
#SBATCH --job-name=mpiddp
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=USR1@120      # edit, here and in --stop-before below: seconds before the walltime, enough for a step and a checkpoint
#SBATCH --time=01:00:00        # edit
#SBATCH --nodes=3              # edit: nodes, including spare ones
#SBATCH --no-kill              # the job continues if a node is lost
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
MODULES=""                              # edit: your MPI's module; empty for none
ENVIRONMENT="$HOME/.venv/bin/activate"  # edit: a venv's, or conda's $HOME/miniforge3/bin/activate NAME; empty for none
SRUN="srun --mpi=pmix"                  # edit: srun --mpi=pmi2 for MPICH and Intel MPI, srun alone for Cray MPICH
COMMAND="python -m mpiddp train.py --checkpoint checkpoint.pt"  # edit: your script, which calls mpiddp.should_stop(), and its arguments
SUPERVISE="python -m mpiddp.supervise --nodes 2 --max-restarts 10 --stop-before 120 --progress-file checkpoint.pt"  # edit: nodes, without spare ones; the seconds of --signal above; the checkpoint

if [ -n "$MODULES" ]; then module purge; module load $MODULES || exit 1; fi  # remove the purge on an HPE Cray, or if srun comes from a module
if [ -n "$ENVIRONMENT" ]; then source $ENVIRONMENT || exit 1; fi
export SLURM_SRUN_REDUCE_TASK_EXIT_MSG=1  # fewer lines after mpiddp's report
job=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}
# If this node is lost, Slurm keeps the other nodes for the job, but this script is gone: a task on the second node asks
# Slurm every minute whether the job still has this node, and otherwise requeues it. It is started until srun can do so.
guard='trap "" USR1; while sleep 60; do nodes=$(squeue --noheader --jobs="$1" --states=RUNNING --format=%N) && [ -n "$nodes" ] && ! scontrol show hostnames "$nodes" | grep -qx "$0" && scontrol requeue "$1"; done'
until srun --overlap --mpi=none --nodes=1 --ntasks=1 --relative=1 --job-name=guard bash -c "$guard" "$SLURMD_NODENAME" "$job"; do sleep 60; done &>/dev/null &
eval "$SUPERVISE $SRUN --cpus-per-task=$SLURM_CPUS_PER_TASK $COMMAND"
status=$?
if [ $status = 75 ]; then scontrol requeue "$job"; fi
exit $status
