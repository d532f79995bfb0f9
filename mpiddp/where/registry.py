"""Registry of running jobs: one endpoint file each in the user's state folder, readable by that user only."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from functools import partial
from typing import Any, NamedTuple, get_type_hints

from ..base.files import find_risk, open_checked, user_folder
from ..discovery.schedulers import find_job, find_scheduler
from ..discovery.site_profile import find_state_folder
from ..systems.schedulers import SLURM

MAX_FILE_BYTES = 2**16  # an endpoint has a few hundred


class JobEndpoint(NamedTuple):
    """The names of a job, and the address of its coordinator; `started_s` is the time.time() of its start."""

    run_id: str  # mpiddp's own name for the job
    number: str  # the scheduler's job number; empty without a scheduler
    by_slurm: bool  # whether that is Slurm
    step: str  # the number of the job's step, or of Flux's job within a batch job; empty for none
    host: str
    address: str
    port: int
    token: str  # the secret by which a client authenticates
    ranks: int  # their number
    version: str  # of mpiddp
    script: str = ""
    started_s: float = 0.0

    @property
    def name(self) -> str:
        """The job's name in messages: its number, or its own name."""
        return self.names[-1] if self.step not in ("", "0") else self.names[0]

    @property
    def full_name(self) -> str:
        """The job's name in messages that list several."""
        return f"{self.name} ({self.run_id})" if self.number else self.run_id

    @property
    def names(self) -> list[str]:
        """The names by which the job is found, besides the beginning of its own name."""
        return [self.number or self.run_id, *([f"{self.number}.{self.step}"] if self.step else [])]


def registry_folder() -> str:
    """Return the folder of the user's endpoint files (XDG Base Directory Specification)."""
    return user_folder(os.environ, "XDG_STATE_HOME", ".local", "state", site=find_state_folder(os.environ))


def find_job_number() -> tuple[str, bool, str]:
    """Return this job's number in the scheduler, empty for none; whether that is Slurm; and the step."""
    job, step = find_job(os.environ)
    return job, find_scheduler(os.environ) is SLURM, step


def endpoint_path(endpoint: JobEndpoint) -> str:
    """Return the file of an endpoint."""
    return os.path.join(registry_folder(), f"{endpoint.run_id}.json")


def write_endpoint(endpoint: JobEndpoint) -> None:
    """Write an endpoint; do nothing if the user's folder is not writable, or belongs to another user.

    The user's group may be able to write to a folder above, as a umask of 002 permits: the group often has one member.
    """
    with contextlib.suppress(OSError):
        write_private(endpoint_path(endpoint), endpoint._asdict())


def write_private(path: str, fields: dict[str, Any]) -> None:
    """Write a file that this user alone can read, with the folders above it, in one step; raise OSError."""
    new = f"{path}.new"
    remove_file(new)
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        descriptor = open_checked(new, flags, partial(find_risk, job_folder=True), 0o700, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump(fields, file)
        os.rename(new, path)
    finally:
        remove_file(new)


def read_private(path: str) -> Any:
    """Return what a file of this user's holds; raise OSError or ValueError if it is none."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), encoding="utf-8") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
            raise PermissionError(path)
        return json.loads(file.read(MAX_FILE_BYTES))


def remove_endpoint(endpoint: JobEndpoint) -> None:
    """Remove an endpoint's file, if it exists."""
    remove_file(endpoint_path(endpoint))


def remove_file(path: str) -> None:
    """Remove a file, if it exists."""
    with contextlib.suppress(OSError):
        os.unlink(path)


def read_endpoints() -> dict[str, JobEndpoint]:
    """Return this user's endpoints by their files, the newest first; skip files that hold none."""
    endpoints = []
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = os.listdir(registry_folder())
    for name in names:
        with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
            path = os.path.join(registry_folder(), name)
            if name.endswith(".json"):
                endpoint = parse_endpoint(read_private(path))
                endpoints.append((os.stat(path).st_mtime, path, endpoint))
    return {path: endpoint for _, path, endpoint in sorted(endpoints, reverse=True)}


def parse_endpoint(fields: Any) -> JobEndpoint:
    """Return the endpoint with these fields; raise TypeError or ValueError if they are invalid."""
    import ipaddress  # not needed by a job, which only writes its endpoint

    endpoint = JobEndpoint(**fields)
    if [*map(type, endpoint)] != [*get_type_hints(JobEndpoint).values()]:
        raise TypeError
    if not ipaddress.ip_address(endpoint.address) or not 0 < endpoint.port < 2**16 or not 0 < endpoint.ranks < 2**31:
        raise ValueError
    return endpoint
