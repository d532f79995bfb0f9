"""`mpiddp -n 4 train.py`: starts the ranks on this machine, with the launcher of the MPI library that mpi4py loads."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from ..base.config import LocalStart
from ..base.errors import LaunchError
from ..base.stderr import write_line
from ..discovery.launchers import read_launch_facts
from ..discovery.mpi import Library, identify_library, load_mpi
from ..discovery.runtime import drop_foreign_run_id
from ..discovery.schedulers import find_scheduler
from ..planning.compatibility import check_no_batch_job, check_not_nested
from ..systems.statuses import EXIT_CANNOT_START
from .refusal import format_refusal, refuse_early

# Open MPI 4 and 5 refuse to start more ranks than the machine has cores, unless one of these is set.
OVERSUBSCRIBE = {"OMPI_MCA_rmaps_base_oversubscribe": "1", "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}


def start_ranks(start: LocalStart) -> int:
    """Replace this process by the launcher of the ranks; if that cannot be, print why and return the exit status."""
    try:
        launcher = choose_launcher(start.ranks)
    except LaunchError as error:
        refuse_early(format_refusal(error))
        return EXIT_CANNOT_START
    command = [launcher, "-n", str(start.ranks), sys.executable, "-m", "mpiddp", *start.arguments]
    write_line(f"mpiddp: {shlex.join(command)}")
    return os.execve(launcher, command, {**OVERSUBSCRIBE, **os.environ})  # noqa: S606 (this process becomes the launcher)


def choose_launcher(ranks: int) -> str:
    """Return the path of the launcher for ranks on this machine; raise LaunchError if they must not be started so."""
    drop_foreign_run_id(os.environ)
    check_not_nested(ranks, read_launch_facts(os.environ))
    load_mpi()
    library = identify_library()
    check_no_batch_job(ranks, find_scheduler(os.environ), library)
    return find_own_launcher(library, os.environ)


def find_own_launcher(library: Library, environ: Mapping[str, str]) -> str:
    """Return the path of a library's own launcher; raise LaunchError `no-mpiexec`."""
    for path in list_launchers(library, environ):
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    raise LaunchError(
        "no-mpiexec",
        actual=f"mpi4py loaded {library}, but there is no {library.row.start} beside it, and none in PATH",
        needed="the launcher of this library",
        do=f"load the module of {library.name}, or install its launcher; or start with the command of your site",
    )


def list_launchers(library: Library, environ: Mapping[str, str]) -> Iterator[str]:
    """Yield the paths that a library's own launcher may have: in the folder bin beside its lib, then in PATH."""
    command = library.row.start
    names = f"{command}.{library.name.replace(' ', '').lower()}", command  # the first one is Debian's: mpirun.openmpi
    for folder in Path(library.path).parents:
        if folder.name in ("lib", "lib64"):
            yield from (str(folder.parent / "bin" / name) for name in names)
    for name in names:
        yield shutil.which(name, path=environ.get("PATH")) or ""
