"""Show what a job is like when it has started."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..base.config import LaunchConfig
from ..base.errors import EXIT_USAGE
from ..base.files import write, write_json
from ..base.ranks import Environment
from ..base.stderr import answer, say
from ..base.text import at_port
from ..base.version import __version__
from ..planning.job import Placement
from .map import format_map, list_records


def print_start(env: Environment, seats: Sequence[Placement], config: LaunchConfig, logs: str, descriptor: int) -> None:
    """Print the start line and the map unless `quiet` is set, and write the map to `map_file` if it is named.

    `logs` is the folder of the job's logs, empty for none. The terminal is at `descriptor`.
    """
    nodes = "1 node" if env.num_nodes == 1 else f"{env.num_nodes} nodes"
    ranks = "1 rank" if env.world_size == 1 else f"{env.world_size} ranks"
    if not config.quiet:
        start = (f"mpiddp {__version__}: {ranks} on {nodes}, {env.backend} on {env.device.type}, "
                 f"tcp://{at_port(env.master_addr, env.master_port)}")
        say("\n".join([start, *format_map(seats), *([f"  logs in {logs}"] if logs else [])]), descriptor)
    write_map(seats, config.map_file)


def write_map(seats: Sequence[Placement], file: str) -> None:
    """Write the map to a file, as records or as a picture, whichever its name asks for; nothing if it is empty."""
    if file.endswith(".json"):
        write_json(file, list_records(seats))
    elif file:
        from .map import draw_svg

        try:
            write(file, draw_svg(seats))
        except ImportError as error:
            say(f"mpiddp: cannot draw {file}: {error} (pip install drawsvg)")


def print_explanation(told: Callable[[], str], env: Environment, rank: int) -> int:
    """Print on one rank what it runs with and where its variables come from, and return the exit status."""
    if rank >= env.world_size:
        if env.rank == 0:
            say(f"mpiddp: --explain {rank}: the job has ranks 0 to {env.world_size - 1}")
        return EXIT_USAGE
    return answer(told()) if env.rank == rank else 0
