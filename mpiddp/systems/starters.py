"""What starts several processes of a training on a node by itself, and must not be started by a launcher."""

from __future__ import annotations

from typing import NamedTuple


class Starter(NamedTuple):
    """A starter of processes: its program, and the modules that python -m runs instead.

    `verb` is the word behind the program. Of its options, `flags` take no value, `nodes` is the number of nodes,
    `per_node` that of the processes on each, `total` that of all; `node_rank` is the node's number, `addresses` are the
    first node's. `replaced` are more options that say only where and how many processes start. A starter that
    `needs_address` for several nodes waits or trains alone without one; others train on each node alone without the
    option `several_nodes`, unless `nodes` or one of `elsewhere` is given. A script `gets_local_rank` as its argument
    unless one of these flags is given.
    """

    name: str
    program: str
    modules: tuple[str, ...] = ()
    verb: str = ""
    flags: frozenset[str] = frozenset()
    nodes: str = "nnodes"
    per_node: str = "nproc-per-node"
    total: str = ""
    node_rank: str = "node-rank"
    addresses: tuple[str, ...] = ("rdzv-endpoint", "master-addr")
    replaced: tuple[str, ...] = ()
    needs_address: bool = False
    several_nodes: str = ""
    elsewhere: tuple[str, ...] = ()
    gets_local_rank: tuple[str, ...] = ()


TORCHRUN_FLAGS = frozenset(("standalone", "no-python", "run-path", "use-env", "virtual-local-rank", "help"))
TORCHRUN_REPLACED = ("standalone", "rdzv-backend", "rdzv-id", "rdzv-conf", "master-port", "use-env",
                     "monitor-interval", "start-method", "role", "local-addr")
TORCHRUN = Starter(
    "torchrun", "torchrun", ("torch.distributed.run", "torch.distributed.elastic.run"), flags=TORCHRUN_FLAGS,
    replaced=TORCHRUN_REPLACED, needs_address=True)
TORCH_LAUNCH = Starter(
    "torch.distributed.launch", "", ("torch.distributed.launch",), flags=TORCHRUN_FLAGS, replaced=TORCHRUN_REPLACED,
    needs_address=True, gets_local_rank=("use-env",))
ACCELERATE = Starter(
    "accelerate launch", "accelerate", ("accelerate.commands.launch", "accelerate.launch"), "launch",
    frozenset((
        "multi-gpu", "cpu", "use-deepspeed", "use-fsdp", "use-megatron-lm", "tpu", "use-xpu", "quiet", "debug",
        "no-python", "same-network", "use-cpu", "enable-cpu-affinity", "tpu-cluster", "no-tpu-cluster", "downcast-bf16",
        "dynamo-use-fullgraph", "dynamo-use-dynamic", "dynamo-use-regional-compilation", "help")),
    "num-machines", "", "num-processes", "machine-rank", ("main-process-ip", "rdzv-endpoint"),
    ("multi-gpu", "same-network", "main-process-port", "rdzv-backend", "rdzv-conf", "role", "tee"),
    several_nodes="num-machines", elsewhere=("config-file",))
DEEPSPEED = Starter(
    "deepspeed", "deepspeed", ("deepspeed.launcher.runner", "deepspeed"), "",
    frozenset((
        "no-ssh", "no-ssh-check", "force-multi", "bind-cores-to-rank", "save-pid", "module", "no-python",
        "no-local-rank", "elastic-training", "enable-each-rank-log", "help")),
    "num-nodes", "num-gpus", addresses=("master-addr",), replaced=("master-port", "no-ssh", "no-ssh-check"),
    several_nodes="hostfile", elsewhere=("hostfile", "no-ssh"), gets_local_rank=("no-local-rank",))
STARTERS: tuple[Starter, ...] = (TORCHRUN, TORCH_LAUNCH, ACCELERATE, DEEPSPEED)


def is_starter(target: str) -> bool:
    """Return whether a program or module starts processes by itself."""
    return any(target == row.program or target in row.modules for row in STARTERS) and bool(target)
