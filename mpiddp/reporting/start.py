"""Show what a job is like when it has started."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..base.config import LaunchConfig
from ..base.errors import EXIT_USAGE
from ..base.files import write_file, write_json
from ..base.ranks import JobEnv
from ..base.stderr import print_answer, write_line
from ..base.text import format_address
from ..base.version import __version__
from ..planning.placement import Seat
from .map import lines, records


def announce(env: JobEnv, seats: Sequence[Seat], config: LaunchConfig, logs: str, descriptor: int) -> None:
    """Print the start line and the map unless `quiet` is set, and write the map to `map_file` if it is named.

    `logs` is the folder of the job's logs, empty for none. The terminal is at `descriptor`.
    """
    nodes = "1 node" if env.num_nodes == 1 else f"{env.num_nodes} nodes"
    ranks = "1 rank" if env.world_size == 1 else f"{env.world_size} ranks"
    if not config.quiet:
        start = (f"mpiddp {__version__}: {ranks} on {nodes}, {env.backend} on {env.device.type}, "
                 f"tcp://{format_address(env.master_addr, env.master_port)}")
        write_line("\n".join([start, *lines(seats), *([f"  logs in {logs}"] if logs else [])]), descriptor)
    draw(seats, config.map_file)


def draw(seats: Sequence[Seat], file: str) -> None:
    """Write the map to a file, as records or as a picture, whichever its name asks for; nothing if it is empty."""
    if file.endswith(".json"):
        write_json(file, records(seats))
    elif file:
        from .map import svg

        try:
            write_file(file, svg(seats))
        except ImportError as error:
            write_line(f"mpiddp: cannot draw {file}: {error} (pip install drawsvg)")


def explain(told: Callable[[], str], env: JobEnv, rank: int) -> int:
    """Print on one rank what it runs with and where its variables come from, and return the exit status."""
    if rank >= env.world_size:
        if env.rank == 0:
            write_line(f"mpiddp: --explain {rank}: the job has ranks 0 to {env.world_size - 1}")
        return EXIT_USAGE
    return print_answer(told()) if env.rank == rank else 0
