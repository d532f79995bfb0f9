#!/bin/bash -l
# In an Enroot container, with Pyxis if Slurm has it: sbatch enroot.sh
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

export IMAGE="$HOME/pytorch.sqsh"           # edit: with torch, mpi4py, MPI and mpiddp in it
export MOUNTS="$PWD"                        # edit: folders to mount in the container, separated by commas
SRUN="srun --mpi=pmix"                      # edit: srun --mpi=pmi2 for MPICH and Intel MPI, srun alone for Cray MPICH
export COMMAND="python -m mpiddp train.py"  # edit: your script, and its arguments

export SLURM_SRUN_REDUCE_TASK_EXIT_MSG=1 SLURM_STEP_KILLED_MSG_NODE_ID=-1  # fewer lines after mpiddp's report
[ -e "$IMAGE" ] || { echo "no such container image: $IMAGE" >&2; exit 1; }
if srun --help | grep -q -e --container-image; then
    eval "exec $SRUN --cpus-per-task=$SLURM_CPUS_PER_TASK --container-image=\"\$IMAGE\" --container-mounts=\"\$MOUNTS\" --container-workdir=\"\$PWD\" $COMMAND"
fi
export CONTAINER="mpiddp-$(basename "$IMAGE" .sqsh)"
srun --ntasks="$SLURM_NNODES" --ntasks-per-node=1 sh -c 'enroot list | grep -qx "$CONTAINER" || enroot create --name "$CONTAINER" "$IMAGE"' || exit 1
# All variables are passed on, except those that describe this node's own programs and folders.
export OWN='^(_|BASH.*|CC|CONDA.*|CPATH|CUDA_(HOME|PATH|ROOT)|CURL_CA_BUNDLE|CXX|EB(DEVEL|ROOT|VERSION).*|F77|F90|FC|FI_PROVIDER_PATH|HOME|HOSTNAME|INFOPATH|I_MPI_ROOT|LD_.*|LIBRARY_PATH|LMOD.*|LOADEDMODULES|LOGNAME|MANPATH|MODULE.*|MOUNTS|MPI_(HOME|ROOT)|OLDPWD|OMPI_HOME|OPAL_PREFIX|OWN|PATH|PKG_.*|PMIX_INSTALL_PREFIX|PS1|PWD|PYTHON(HOME|PATH|STARTUP|USERBASE)|REQUESTS_CA_BUNDLE|SHELL|SHLVL|SSL_CERT_.*|TERM|TMPDIR|UCX_MODULE_DIR|USER|VIRTUAL_ENV|XDG_.*|__.*)$'
exec $SRUN --cpus-per-task="$SLURM_CPUS_PER_TASK" bash -c 'IFS=, read -ra folders <<< "/tmp,$MOUNTS,$PMIX_SERVER_TMPDIR"
    for folder in "${folders[@]}"; do options+=(--mount "$folder"); done
    for name in $(compgen -e | grep -E -v "$OWN"); do options+=(--env "$name"); done
    exec enroot start "${options[@]}" "$CONTAINER" sh -c "cd \"\$0\" && exec env $COMMAND" "$PWD"'
