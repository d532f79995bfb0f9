#!/bin/bash -l
# In an Enroot container, by Pyxis where Slurm has it: sbatch enroot.sh
#SBATCH --job-name=mpiddp
#SBATCH --output=%x-%j.out
#SBATCH --time=01:00:00        # edit
#SBATCH --nodes=2              # edit: nodes
#SBATCH --ntasks-per-node=2    # edit: as many as a node has GPUs
#SBATCH --gpus-per-node=2      # edit
#SBATCH --cpus-per-task=4      # edit: a node's cores, divided by its GPUs
##SBATCH --account=NAME        # and what your site asks for besides: take the first # away
##SBATCH --partition=NAME
##SBATCH --qos=NAME
##SBATCH --constraint=NAME
##SBATCH --mem=0               # all memory of a node
##SBATCH --mail-type=END,FAIL
##SBATCH --wait-all-nodes=1    # begin when all nodes are ready

export IMAGE="$HOME/pytorch.sqsh"           # edit
export COMMAND="python -m mpiddp train.py"  # edit: your script, and its arguments

[ -e "$IMAGE" ] || { echo "no such container image: $IMAGE" >&2; exit 1; }
if srun --help | grep -q -e --container-image; then
    eval "exec srun --mpi=pmix --cpus-per-task=$SLURM_CPUS_PER_TASK --container-image='$IMAGE' --container-mounts='$PWD' --container-workdir='$PWD' $COMMAND"
fi
export CONTAINER="mpiddp-$(basename "$IMAGE" .sqsh)"
srun --ntasks="$SLURM_NNODES" --ntasks-per-node=1 sh -c 'enroot list | grep -qx "$CONTAINER" || enroot create --name "$CONTAINER" "$IMAGE"' || exit 1
# Every variable goes in, but those that tell of this node's own programs and folders.
export OWN='^(_|BASH.*|CONDA.*|CPATH|HOME|HOSTNAME|INFOPATH|LD_.*|LIBRARY_PATH|LMOD.*|LOADEDMODULES|LOGNAME|MANPATH|MODULE.*|OLDPWD|OWN|PATH|PKG_.*|PS1|PWD|PYTHON.*|SHELL|SHLVL|TERM|TMPDIR|USER|VIRTUAL_ENV|XDG_.*|__.*)$'
exec srun --mpi=pmix --cpus-per-task="$SLURM_CPUS_PER_TASK" bash -c 'exec enroot start --mount /tmp --mount "$PWD" --mount "$PMIX_SERVER_TMPDIR" \
    $(compgen -e | grep -E -v "$OWN" | sed "s/^/--env /") "$CONTAINER" sh -c "cd \"$PWD\" && exec $COMMAND"'
