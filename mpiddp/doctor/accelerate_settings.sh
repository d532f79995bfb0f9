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
