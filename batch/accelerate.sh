#!/bin/bash -l
# An unchanged Hugging Face Accelerate script, with the configuration that `accelerate config` wrote: sbatch accelerate.sh
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
MODULES=""                                                       # edit: your MPI's module; empty for none
ENVIRONMENT="$HOME/.venv/bin/activate"                           # edit: a venv's, or conda's $HOME/miniforge3/bin/activate NAME; empty for none
CONFIG="$HOME/.cache/huggingface/accelerate/default_config.yaml" # edit
SRUN="srun --mpi=pmix"                                           # edit: srun --mpi=pmi2 for MPICH and Intel MPI, srun alone for Cray MPICH
COMMAND="python -m mpiddp train.py"                              # edit: your script, and its arguments

if [ -n "$MODULES" ]; then module purge; module load $MODULES || exit 1; fi  # remove the purge on an HPE Cray, or if srun comes from a module
if [ -n "$ENVIRONMENT" ]; then source $ENVIRONMENT || exit 1; fi
[ -e "$CONFIG" ] || { echo "no such configuration: $CONFIG" >&2; exit 1; }
settings=$(python - "$CONFIG" <<'END'
# The variables that accelerate launch would set for its ranks, without their number and addresses.
import contextlib, os, shlex, sys
with contextlib.redirect_stdout(sys.stderr):
    from accelerate.commands import launch
    args, told, precision = launch._validate_launch_command(launch.launch_command_parser().parse_args(["--config_file", sys.argv[1], "train.py"]))
    args.num_machines, args.main_process_port, args.gpu_ids = 1, 0, "all"
    args.deepspeed_fields_from_accelerate_config = ",".join([*(told.deepspeed_config if told else ()), *["mixed_precision"] * precision])
    made = launch.prepare_deepspeed_cmd_env(args)[1] if args.use_deepspeed else launch.prepare_multi_gpu_env(args)
made |= {"ACCELERATE_USE_CPU": str(bool(args.use_cpu)).lower(), **{name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "PYTHONPATH")}}
print(*(f"export {name}={shlex.quote(value)}" for name, value in made.items() if value != os.environ.get(name)), sep="\n")
END
) || exit 1
eval "$settings" || exit 1
export SLURM_SRUN_REDUCE_TASK_EXIT_MSG=1 SLURM_STEP_KILLED_MSG_NODE_ID=-1  # fewer lines after mpiddp's report
eval "exec $SRUN --cpus-per-task=$SLURM_CPUS_PER_TASK $COMMAND"
