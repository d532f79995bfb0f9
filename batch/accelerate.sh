#!/bin/bash -l
# A Hugging Face Accelerate script as it is, with the configuration that `accelerate config` wrote: sbatch accelerate.sh
#SBATCH --job-name=mpiddp
#SBATCH --output=%x-%j.out
#SBATCH --time=01:00:00        # edit
#SBATCH --nodes=2              # edit: nodes
#SBATCH --ntasks-per-node=2    # edit: as many as a node has GPUs
#SBATCH --gpus-per-node=2      # edit
#SBATCH --cpus-per-task=4      # edit: a node's cores, divided by its GPUs

MODULES=""                                                       # edit: your MPI's, empty for none
ENVIRONMENT="$HOME/.venv/bin/activate"                           # edit: of a venv; conda: as in requeue.sh
CONFIG="$HOME/.cache/huggingface/accelerate/default_config.yaml" # edit
COMMAND="python -m mpiddp train.py"                              # edit: your script, and its arguments

if [ -n "$MODULES" ]; then module load $MODULES || exit 1; fi
source $ENVIRONMENT || exit 1
[ -e "$CONFIG" ] || { echo "no such configuration: $CONFIG" >&2; exit 1; }
precision=$(sed -n 's/^mixed_precision: *//p' "$CONFIG" | tr -d "'\"")
steps=$(sed -n 's/^gradient_accumulation_steps: *//p' "$CONFIG")
export ACCELERATE_MIXED_PRECISION=${precision:-no} ACCELERATE_GRADIENT_ACCUMULATION_STEPS=${steps:-1}
exec srun --mpi=pmix --cpus-per-task="$SLURM_CPUS_PER_TASK" $COMMAND
