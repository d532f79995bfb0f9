"""Run a script in a hold, or lines of a prompt: `python -m mpiddp.run [options] script.py [arguments]`."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import sys
import time

from .base.config import CheckMode, LaunchConfig
from .base.stderr import print_answer, write_line
from .cli import read_config
from .discovery.runtime import hostname
from .hold import protocol
from .hold.client import CODEC, ToServer, receive
from .hold.registry import describe_python, read_holds, remove_hold
from .ipc.authentication import CONNECT_TIMEOUT_S, HANDSHAKE_TIMEOUT_S, connect
from .ipc.channel import Channel
from .options.table import split_command
from .output.redirect import open_closed_streams
from .systems.launchers import MPIRUN
from .systems.statuses import EXIT_CANNOT_START, EXIT_USAGE

Request = protocol.StartRun | protocol.Renew | protocol.EndHold
HELP = f"""\
usage: python -m mpiddp.run [--wait] [--env NAME]… [options] script.py [arguments]
       python -m mpiddp.run [--wait] [--env NAME]… [options] -i
       python -m mpiddp.run --renew | --end

Run a script at once, in the ranks that `{MPIRUN.command} python -m mpiddp.hold` keeps.

  --wait       wait for a script that runs in the hold, or for a hold that is not ready yet (at most --startup-timeout)
  --env NAME   pass on a variable of this shell, besides MPIDDP_…; once for each variable
  options      those of python -m mpiddp (see its --help), except --check, --stage, --trace, --explain and --no-agent
  -i           a prompt: each line runs on all ranks, which keep what it defines; equal output appears once
  --renew      let the hold import its packages again, as they are on disk now
  --end        end the hold, and a script that runs in it"""
OWN_OPTIONS = ("--wait", "--env", "--renew", "--end")
END_TIMEOUT_S = 30.0  # for a hold to end
POLL_INTERVAL_S = 0.2  # of a look for a hold
INPUT_BYTES = 4096  # the longest line that a terminal gives
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def main() -> int:
    """Run a script in a hold, and return its exit status."""
    open_closed_streams()
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as in the background of a script
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.argv[1:2] in (["-h"], ["--help"]):
        return print_answer(HELP)
    try:
        request, wait_s = read_request(sys.argv[1:])
    except argparse.ArgumentTypeError as error:
        write_line(str(error))
        return EXIT_USAGE
    deadline_s = time.monotonic() + wait_s
    if (hold := find_hold()) is None and wait_s:
        write_line("mpiddp.run: waiting: no hold is ready")
    while hold is None and time.monotonic() < deadline_s:
        time.sleep(POLL_INTERVAL_S)
        hold = find_hold()
    if hold is None:
        write_line("mpiddp.run: no hold of yours is ready, or none that this host can reach; start one: "
                   f"{MPIRUN.command} python -m mpiddp.hold")
        return EXIT_CANNOT_START
    server, ranks = hold
    server.send(request)
    if isinstance(request, protocol.StartRun) and request.is_prompt:
        from .hold.prompt import Prompt  # seldom needed

        Prompt(server, ranks).talk()
    if isinstance(request, protocol.StartRun):
        pass_on_signals(server)
    if isinstance(request, protocol.EndHold):
        with contextlib.suppress(SystemExit, TimeoutError):
            receive(server, END_TIMEOUT_S)
        return 0
    while True:
        if isinstance(request, protocol.StartRun) and request.has_input:
            pass_on_input(server)
        with contextlib.suppress(TimeoutError):
            receive(server, 3600.0)


def find_hold() -> tuple[ToServer, int] | None:
    """Return a connection to the newest hold that can be reached, and its number of ranks; None if there is none."""
    for hold in read_holds():
        try:
            connection = connect((hold.address, hold.port), hold.token, CONNECT_TIMEOUT_S, HANDSHAKE_TIMEOUT_S)
        except ConnectionRefusedError:
            if hold.host == hostname():  # it was killed
                remove_hold(hold.run_id)
        except (OSError, EOFError):
            pass
        else:
            return Channel(connection, CODEC), hold.ranks
    return None


def read_request(arguments: list[str]) -> tuple[Request, float]:
    """Return what a command line asks for, and how many seconds to wait for a hold.

    Raises argparse.ArgumentTypeError with a line for the user.
    """
    if arguments == ["--end"]:
        return protocol.EndHold(), 0.0
    if arguments == ["--renew"]:
        return protocol.Renew(), 0.0
    names = [name for name in os.environ if name.startswith("MPIDDP_")]
    waits = False
    while arguments[:1] in (["--env"], ["--wait"]):
        if arguments[0] == "--wait":
            waits, arguments = True, arguments[1:]
            continue
        name, arguments = " ".join(arguments[1:2]), arguments[2:]
        if name not in os.environ:
            raise argparse.ArgumentTypeError(f"mpiddp.run: --env {name}: this shell has no variable of this name")
        names.append(name)
    ours, command = split_command(arguments)
    if misplaced := [word for word in ours if word.partition("=")[0] in OWN_OPTIONS]:
        raise argparse.ArgumentTypeError(f"mpiddp.run: {misplaced[0]} is not possible here (see python -m mpiddp.run "
                                         "--help): --wait and --env NAME precede all other options")
    if is_prompt := "-i" in ours:
        from .hold.prompt import OPTIONS

        if command:
            raise argparse.ArgumentTypeError(f"mpiddp.run: -i takes no script: {command[0]}")
        if output := [word for word in ours if word.partition("=")[0] in ("--show", "--prefix")]:
            raise argparse.ArgumentTypeError(f"mpiddp.run: {output[0]} is not possible with -i, which shows what all "
                                             "ranks print, and equal lines once")
        ours.remove("-i")
        arguments = [*ours, *OPTIONS]
    config = read_config(arguments, os.environ)
    if not isinstance(config, LaunchConfig):
        raise argparse.ArgumentTypeError("mpiddp.run: -n and --dry-run are for python -m mpiddp")
    for name, is_given in (("--check", config.check is not CheckMode.OFF), ("--stage", config.stage),
                           ("--trace", config.trace_file), ("--no-agent", not config.agent),
                           ("--explain", config.explain is not None)):
        if is_given:
            raise argparse.ArgumentTypeError(f"mpiddp.run: {name} is not possible in a hold; use it with "
                                             f"{MPIRUN.command} python -m mpiddp")
    variables = {name: os.environ[name] for name in names}
    try:
        request = protocol.StartRun(json.dumps(arguments), json.dumps(variables), os.getcwd(), describe_python(), waits,
                                    os.isatty(0) and os.isatty(1), is_prompt)  # a pager reads the terminal, too
    except OSError as error:
        raise argparse.ArgumentTypeError(f"mpiddp.run: the working folder: {error.strerror}") from None
    return request, waits * config.startup_timeout_s


def pass_on_signals(server: ToServer) -> None:
    """Pass on the signals of this process to the run."""
    for number in FORWARDED:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, lambda number, _: server.send(protocol.Signal(number)))


def pass_on_input(server: ToServer) -> None:
    """Pass on what the user types, unless this process is in the background; return when the server has answered."""
    while True:
        awaited = [server.fileno()]
        with contextlib.suppress(OSError):  # it is no terminal of this process's session
            awaited += [0] * (os.tcgetpgrp(0) == os.getpgrp())
        ready, _, _ = select.select(awaited, [], [], POLL_INTERVAL_S)
        if server.fileno() in ready:
            return
        if ready:
            server.send(protocol.Input(os.read(0, INPUT_BYTES)))


if __name__ == "__main__":
    sys.exit(main())
