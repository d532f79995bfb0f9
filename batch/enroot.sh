#!/bin/bash -l
# In an Enroot container, by Pyxis where Slurm has it: sbatch enroot.sh
#SBATCH --job-name=mpiddp
#SBATCH --output=%x-%j.out
#SBATCH --time=01:00:00        # edit
#SBATCH --nodes=2              # edit: nodes
#SBATCH --ntasks-per-node=2    # edit: as many as a node has GPUs
#SBATCH --gpus-per-node=2      # edit
#SBATCH --cpus-per-task=4      # edit: a node's cores, divided by its GPUs

export IMAGE="$HOME/pytorch.sqsh"           # edit
export COMMAND="python -m mpiddp train.py"  # edit: your script, and its arguments

[ -e "$IMAGE" ] || { echo "no such container image: $IMAGE" >&2; exit 1; }
if srun --help | grep -q -e --container-image; then
    exec srun --mpi=pmix --cpus-per-task="$SLURM_CPUS_PER_TASK" --container-image="$IMAGE" --container-mounts="$PWD" --container-workdir="$PWD" $COMMAND
fi
export CONTAINER="mpiddp-$(basename "$IMAGE" .sqsh)"
srun --ntasks="$SLURM_NNODES" --ntasks-per-node=1 sh -c 'enroot list | grep -qx "$CONTAINER" || enroot create --name "$CONTAINER" "$IMAGE"' || exit 1
exec srun --mpi=pmix --cpus-per-task="$SLURM_CPUS_PER_TASK" bash -c 'exec enroot start --mount /tmp --mount "$PWD" --mount "$PMIX_SERVER_TMPDIR" \
    $(compgen -e | grep -E "^(SLURM|PMIX|MPIDDP)_" | sed "s/^/--env /") "$CONTAINER" sh -c "cd $PWD && $COMMAND"'
