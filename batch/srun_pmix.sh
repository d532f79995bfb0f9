#!/bin/bash -l
# One task per GPU, started by srun with PMIx: sbatch srun_pmix.sh
#SBATCH --job-name=mpiddp
#SBATCH --output=%x-%j.out
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
MODULES="pytorch"                    # edit: your site's modules, including MPI; empty for none
ENVIRONMENT=""                       # edit: a venv's PATH/bin/activate, or conda's $HOME/miniforge3/bin/activate NAME; empty for none
CONTAINER=""                         # edit: an Apptainer image with torch, mpi4py, MPI and mpiddp in it; empty for none
APPTAINER="apptainer exec --nv"      # edit: --rocm for AMD; singularity; run instead of exec if the image's start script is needed
MOUNTS="$PWD"                        # edit: folders to mount in the container, separated by commas
SRUN="srun --mpi=pmix"               # edit: srun --mpi=pmi2 for MPICH and Intel MPI, srun alone for Cray MPICH
COMMAND="python -m mpiddp train.py"  # edit: your script, and its arguments

if [ -n "$MODULES" ]; then module purge; module load $MODULES || exit 1; fi  # remove the purge on an HPE Cray, or if srun comes from a module
if [ -n "$ENVIRONMENT" ]; then source $ENVIRONMENT || exit 1; fi
if [ -n "$CONTAINER" ]; then
    [ -e "$CONTAINER" ] || { echo "no such container image: $CONTAINER" >&2; exit 1; }
    COMMAND="$APPTAINER --bind \"/tmp,\$MOUNTS\" \"\$CONTAINER\" $COMMAND"  # PMIx communicates with Slurm through files in /tmp
fi
export SLURM_SRUN_REDUCE_TASK_EXIT_MSG=1 SLURM_STEP_KILLED_MSG_NODE_ID=-1  # fewer lines after mpiddp's report
eval "exec $SRUN --cpus-per-task=$SLURM_CPUS_PER_TASK $COMMAND"
