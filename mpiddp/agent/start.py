"""The fork of a rank: the process that the launcher has started becomes the rank's agent."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import stat
import sys
import time
from posix import fork  # os.fork may be a debugger's own, which holds the new process

from ..base.config import BLOCKED_EXIT_TIMEOUT_S, LaunchConfig, Script
from ..base.files import read_text
from ..base.process import redirect_to_devnull
from ..base.termination import flush_python
from ..discovery import launchers, runtime, schedulers
from ..ipc.channel import Channel
from ..output.redirect import is_forwarded, open_closed_streams, redirect_streams
from ..systems.launchers import describe_hang
from ..where import progress  # noqa: F401 (its page is shared by the rank and its agent)
from ..where.protocol import InspectFds
from . import client, protocol

PR_SET_PDEATHSIG, PR_SET_PTRACER = 1, 0x59616D61  # (linux/prctl.h)
DEVNULL_FOR_STDIN = 0


def make_agent_config(config: LaunchConfig, started_by: launchers.LaunchFacts | None) -> protocol.AgentConfig:
    """Return what is known of this process's rank before it exists; rank 0's agent can probe other hosts.

    A rank has a process group of its own, so that signals reach its agent alone, unless the launcher signals each
    process of a step, or the rank has to read from a terminal.
    """
    rank = started_by.rank if started_by else 0
    by_srun = started_by is not None and started_by.by_srun
    launcher = started_by.launcher if started_by else None
    has_own_group = not os.isatty(0) and not (launcher and launcher.signals_all)
    return protocol.AgentConfig(
        name=f"rank {rank} on {runtime.hostname()}",
        first_on_node=launchers.is_first_on_node(os.environ),
        step=runtime.find_slurm_step(os.environ, started_by),
        hosts=lambda: schedulers.list_slurm_hosts(os.environ) if rank == 0 else [],
        by_srun=by_srun,
        step_daemon=runtime.find_ancestor(os.getpid(), [runtime.STEP_DAEMON]) if by_srun else 0,
        timeout_s=config.startup_timeout_s,
        launcher=launcher.name if launcher and not by_srun else "",
        launcher_pid=os.getppid() if launcher and not by_srun else 0,
        has_own_group=has_own_group,
        kill_delay_s=launcher.kill_delay_s if launcher else 0.0,
        stall_s=config.stall_s or 0.0,
        stall_abort=config.stall_abort,
        blocked_timeout_s=config.exit_timeout_s or BLOCKED_EXIT_TIMEOUT_S,
        exit_timeout_s=config.exit_timeout_s or 0.0,
        may_hang=describe_hang(os.environ),
        script=describe_script(config.script),
    )


def describe_script(script: Script | None) -> str:
    """Return a script's path or module; of code from the command line the option, of our own programs the module."""
    if script is None:
        return getattr(sys.modules["__main__"].__spec__, "parent", "")
    return "-c" if script.is_code else script.target


def has_silent_stdin(started_by: launchers.LaunchFacts | None) -> bool:
    """Return whether a prompt of the rank would wait for ever: neither input nor its end comes on stdin."""
    option = started_by.launcher.stdin_option if started_by and started_by.rank > 0 else ""
    if not option or stat.S_ISREG(os.fstat(0).st_mode):
        return False
    program, *options = read_text(f"/proc/{os.getppid()}/cmdline").split("\0")
    return os.path.basename(program).startswith("hydra") and option not in options  # no shell, which may give an input


def fork_rank(config: LaunchConfig, started_by: launchers.LaunchFacts | None) -> client.AgentClient:
    """Fork the rank, in which this returns; this process is its agent from now on, and ends after it.

    MPI and torch are not loaded yet. The rank dies with its agent.
    """
    began_s = time.monotonic()
    open_closed_streams()
    agent_config = make_agent_config(config, started_by)
    flush_python()
    output_pipes = {stream: os.pipe() for stream in (1, 2)} if is_forwarded(config) else {}
    ours, its = socket.socketpair()
    crash_reading, crash_writing = os.pipe()
    stack_reading, stack_writing = os.pipe()
    our_query, its_query = socket.socketpair()
    is_silent = has_silent_stdin(started_by)
    agent_pid = os.getpid()
    pid = fork()
    if pid:
        from .connections import RANK_CODEC  # the rank does not wait for these imports
        from .process import RankProcess, run_agent

        for descriptor in (its.detach(), crash_writing, its_query.detach(),
                           *(writing for _, writing in output_pipes.values())):
            os.close(descriptor)
        streams = {stream: reading for stream, (reading, _) in output_pipes.items()}
        os.dup2(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC), DEVNULL_FOR_STDIN)
        inspect_fds = InspectFds(stack_reading, stack_writing, our_query.detach())
        os.close(stack_writing)
        run_agent(RankProcess(pid, Channel(ours, RANK_CODEC), crash_reading, inspect_fds, streams), agent_config,
                  began_s)
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(PR_SET_PTRACER, agent_pid, 0, 0, 0)  # else Yama lets py-spy, the agent's child, read no stack
    if os.getppid() != agent_pid:  # it has died meanwhile
        os.kill(os.getpid(), signal.SIGKILL)
    if agent_config.has_own_group:
        os.setpgid(0, 0)
    redirect_streams(output_pipes)
    if is_silent:
        redirect_to_devnull(DEVNULL_FOR_STDIN)
    for descriptor in (ours.detach(), crash_reading, stack_reading, our_query.detach()):
        os.close(descriptor)
    os.set_blocking(stack_writing, False)
    return client.AgentClient(Channel(its, client.CODEC), crash_writing, (stack_writing, its_query.detach()), began_s,
                              agent_config.has_own_group, bool(output_pipes))
