#!/bin/bash
# by an author who did not know the doctor's rules
# ESM-2 in an Apptainer image with Open MPI 5, torch, mpi4py and mpiddp.
# Start it as ./job.sh [arguments of train.py]: it submits itself.
#SBATCH --job-name=esm2
#SBATCH --nodes=2

#SBATCH --ntasks-per-node=8
#SBATCH --gres=gpu:h100:8
#SBATCH --cpus-per-task=12
#SBATCH --exclusive --mem=0
#SBATCH --time=1-00:00:00
#SBATCH --requeue
#SBATCH --signal=B:USR1@180        # to this shell only; train.py knows nothing of it
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out

if [[ -z ${SLURM_JOB_ID:-} ]]; then
    exec sbatch --comment="esm2 $*" "$0" "$@"
fi

SIF=/project/esm/images/esm2-25.10.sif
DATA=/tmp/esm-$SLURM_JOB_ID
export DATA PMIX_MCA_psec=native

# unpack the data once on each node, not once for each rank (the epilog of this site empties /tmp)
srun --ntasks="$SLURM_NNODES" --ntasks-per-node=1 --cpus-per-task=12 \
    bash -c 'mkdir -p "$DATA" && tar -xf /project/esm/uniref50.tar -C "$DATA" && echo "$(hostname): $(du -sh "$DATA")"' || exit

trap 'echo "requeue at $(date)"; scontrol requeue "$SLURM_JOB_ID"' USR1

srun --mpi=pmix --cpus-per-task="$SLURM_CPUS_PER_TASK" \
    apptainer exec --nv --bind /tmp,/project "$SIF" \
    python -m mpiddp --prefix --log-dir logs train.py --data "$DATA" --workers 10 "$@" &
wait $!     # in the background, so that bash runs the trap at once
