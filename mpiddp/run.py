"""Run a script in a hold: `python -m mpiddp.run [--env NAME]… [options] script.py [arguments]`."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys

from .base.config import CheckMode, LaunchConfig
from .base.stderr import print_answer, write_all, write_line
from .cli import read_config
from .discovery.runtime import hostname
from .hold import protocol
from .hold.registry import describe_python, read_holds, remove_hold
from .ipc.authentication import CONNECT_TIMEOUT_S, HANDSHAKE_TIMEOUT_S, connect
from .ipc.channel import Channel, Codec
from .output.redirect import open_closed_streams
from .systems.launchers import MPIRUN
from .systems.statuses import EXIT_CANNOT_START, EXIT_OUTPUT_LOST, EXIT_USAGE

CODEC: Codec[protocol.ToClient] = Codec(protocol.ToClient)
HELP = f"""\
usage: python -m mpiddp.run [--env NAME]… [options] script.py [arguments]
       python -m mpiddp.run --end

Run a script at once, in the ranks that `{MPIRUN.command} python -m mpiddp.hold` keeps.

  --env NAME   pass on a variable of this shell, besides MPIDDP_…; before all other options, once for each variable
  --end        end the hold, and a script that runs in it
  options      those of python -m mpiddp (see its --help), except --check, --stage, --trace, --explain and --no-agent"""
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def main() -> int:
    """Run a script in a hold, and return its exit status."""
    open_closed_streams()
    if sys.argv[1:2] in (["-h"], ["--help"]):
        return print_answer(HELP)
    try:
        request = read_request(sys.argv[1:])
    except argparse.ArgumentTypeError as error:
        write_line(str(error))
        return EXIT_USAGE
    for hold in read_holds():
        try:
            connection = connect((hold.address, hold.port), hold.token, CONNECT_TIMEOUT_S, HANDSHAKE_TIMEOUT_S)
        except ConnectionRefusedError:
            if hold.host == hostname():  # it was killed
                remove_hold(hold.run_id)
            continue
        except (OSError, EOFError):
            continue
        return talk(Channel(connection, CODEC), request)
    write_line("mpiddp.run: no hold of yours is ready, or none that this host can reach; start one: "
               f"{MPIRUN.command} python -m mpiddp.hold")
    return EXIT_CANNOT_START


def read_request(arguments: list[str]) -> protocol.StartRun | protocol.EndHold:
    """Return what a command line asks for; raise argparse.ArgumentTypeError with a line for the user."""
    if arguments == ["--end"]:
        return protocol.EndHold()
    names = [name for name in os.environ if name.startswith("MPIDDP_")]
    while arguments[:1] == ["--env"]:
        name, arguments = " ".join(arguments[1:2]), arguments[2:]
        if name not in os.environ:
            raise argparse.ArgumentTypeError(f"mpiddp.run: --env {name}: this shell has no variable of this name")
        names.append(name)
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
        return protocol.StartRun(json.dumps(arguments), json.dumps(variables), os.getcwd(), describe_python())
    except OSError as error:
        raise argparse.ArgumentTypeError(f"mpiddp.run: the working folder: {error.strerror}") from None


def talk(
    channel: Channel[protocol.FromClient, protocol.ToClient], request: protocol.StartRun | protocol.EndHold
) -> int:
    """Let the hold's server do what is asked for; return the exit status."""
    is_sent = channel.send(request)
    if isinstance(request, protocol.EndHold) and is_sent:
        return 0
    for number in FORWARDED:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, lambda number, _: channel.send(protocol.Signal(number)))
    while True:
        try:
            messages = channel.receive(3600.0)
        except TimeoutError:
            continue
        except (EOFError, OSError):
            write_line("mpiddp.run: the hold has ended")
            return 1
        for message in messages:
            match message:
                case protocol.Output(stream, data):
                    try:
                        write_all(stream, data)
                    except OSError as error:
                        if not isinstance(error, BrokenPipeError):
                            write_line(f"mpiddp.run: cannot write its output: {error.strerror}")
                        return EXIT_OUTPUT_LOST
                case protocol.RunOver(status):
                    return status
                case protocol.Refused(reason):
                    write_line(f"mpiddp.run: {reason}")
                    return EXIT_CANNOT_START


if __name__ == "__main__":
    sys.exit(main())
