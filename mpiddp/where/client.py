"""One who asks a job where its ranks are."""

from __future__ import annotations

import contextlib
import enum
import ipaddress
import os
import shlex
import socket
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

from ..base.text import join_names
from ..base.version import __version__
from ..discovery.schedulers import name_job, run_command
from ..ipc.channel import Wire
from ..ipc.listener import connect
from .protocol import Ask, Inspect, Inspected, Shown
from .registry import Card, path_of, read_all, remove
from .rendering import from_json
from .snapshot import Picture

CONNECTING_S = 5.0
TRYING_S = 1.0  # to find out whether a job runs
CALLERS = 100  # jobs that are tried at once
SLURM_S = 5.0  # for squeue
OLD_S = 30 * 86400.0  # for which a job is believed to run that cannot be seen
INSPECTED, INSPECTED_S = 4, 20.0  # ranks, and for them
UNWATCHED = "the sentinel of its rank 0 was killed, which its output says then"
ANSWER_S = 15.0  # the coordinator waits two seconds for the ranks; a busy node may take longer for the rest


Answer = TypeVar("Answer", Shown, Inspected)


class Inspecting(NamedTuple):
    """What is asked of some ranks besides: all their threads, and the frames of C code if `native`."""

    native: bool

    def choose(self, picture: Picture) -> list[int]:
        """Return the ranks: the odd ones, or one of each place if none is odd; a few at most."""
        groups = [group for group in picture.groups if group.odd] or list(picture.groups)
        ranks = groups[0].ranks if len(groups) == 1 and groups[0].odd else [group.ranks[0] for group in groups]
        return list(ranks[:INSPECTED])


class UnansweredError(Exception):
    """Nobody answers; the text says why, and what to do."""


class Life(enum.Enum):
    """Whether a job runs, as far as can be seen from here."""

    RUNS = "its coordinator answers"
    OVER = "nobody listens on its port, or another program does"
    UNKNOWN = "it cannot be reached, or does not answer soon"


def find(job: str) -> Card:
    """Return the card of a job by its number or the beginning of its name, of the only one that runs if that is empty.

    Raises UnansweredError where there is none, or more than one.
    """
    cards = read_all()
    wanted = name_job(job)
    matching = {path: card for path, card in cards.items()
                if not job or wanted in card.names or card.run_id.startswith(job)
                or (card.number and not card.by_slurm and not card.step and wanted.partition(".")[0] == card.number)}
    found = list(matching.values())
    if len(found) > 1:
        found = running(matching) or (found if job else [])
    if len(found) == 1:
        return found[0]
    if found:
        raise UnansweredError(f"which job? {join_names([f'{card.run_id} ({card.name})' for card in found])}")
    if not job:
        raise UnansweredError("no job of yours is running with mpiddp, or it is still starting")
    others = f"; there is {join_names([card.name for card in cards.values()])}" if cards else ""
    raise UnansweredError(f"no job {job} of yours is running with mpiddp{others}")


def running(cards: Mapping[str, Card]) -> list[Card]:
    """Return those of the cards, which have files, whose jobs run; where none is seen to run, those that may.

    All are asked at once. The cards of jobs that are over are removed. Of a job that cannot be seen from here Slurm
    knows whether it runs; without Slurm a card is believed for OLD_S, unless this host has been started since.
    """
    with ThreadPoolExecutor(CALLERS) as callers:
        lives = dict(zip(cards, callers.map(life_of, cards.values()), strict=True))
    unknown = {path: card for path, card in cards.items() if lives[path] is Life.UNKNOWN}
    queued = slurm_jobs() if any(card.by_slurm for card in unknown.values()) else None
    for path in cards:
        if lives[path] is Life.OVER or (path in unknown and is_outdated(path, cards[path])):
            unknown.pop(path, None)
            remove(path)
    seen = [card for path, card in cards.items() if lives[path] is Life.RUNS]
    return seen or [card for card in unknown.values()
                    if not card.by_slurm or queued is None or card.number in queued]


def is_outdated(path: str, card: Card) -> bool:
    """Tell whether a card is older than any job, or than what runs on this host, if its job did."""
    try:
        written_s = os.stat(path).st_mtime
    except OSError:
        return False
    booted_s = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return written_s < time.time() - OLD_S or (card.host == socket.gethostname() and written_s < booted_s)


def slurm_jobs() -> set[str] | None:
    """Return the numbers of this user's jobs that Slurm knows to run or to wait, None where it does not say."""
    done = run_command("squeue", "--noheader", "--me", "--format=%A", timeout_s=SLURM_S)
    return set(done.stdout.split()) if done is not None and done.returncode == 0 else None


def life_of(card: Card) -> Life:
    """Tell whether a job runs."""
    if is_out_of_sight(card):
        return Life.UNKNOWN
    try:
        connect((card.address, card.port), card.token, TRYING_S, TRYING_S).close()
    except (ConnectionRefusedError, PermissionError):
        return Life.OVER if card.host == socket.gethostname() else Life.UNKNOWN
    except (EOFError, OSError):
        return Life.UNKNOWN
    return Life.RUNS


def is_out_of_sight(card: Card) -> bool:
    """Tell whether a job listens to its own host alone, which is another one."""
    return ipaddress.ip_address(card.address).is_loopback and card.host != socket.gethostname()


def ask(card: Card, inspect: Inspecting | None = None) -> tuple[Picture, dict[int, str]]:
    """Return where the ranks of a job are, and what `inspect` wants; raise UnansweredError where it does not say."""
    if is_out_of_sight(card):
        raise UnansweredError(elsewhere(card))
    if card.version != __version__ and life_of(card) is not Life.OVER:
        raise UnansweredError(f"the job has mpiddp {card.version}, this is {__version__}: use the job's environment")
    try:
        with connect((card.address, card.port), card.token, CONNECTING_S, ANSWER_S) as connection:
            return talk(card, connection, inspect)
    except (ConnectionRefusedError, PermissionError) as error:
        if card.host != socket.gethostname():
            why = ("another program listens there" if isinstance(error, PermissionError) else
                   "nobody listens there any more, or a firewall refuses")
            raise UnansweredError(f"{why}: {elsewhere(card)}") from None
        remove(path_of(card))
        raise UnansweredError(f"job {card.name} is over: it was killed, and could not say so") from None
    except (EOFError, ConnectionResetError, BrokenPipeError):
        raise UnansweredError(f"job {card.name} has just ended, or {UNWATCHED}") from None
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        raise UnansweredError(f"job {card.name} gives an answer that this mpiddp does not understand") from None
    except TimeoutError:
        here = card.host == socket.gethostname()
        raise UnansweredError(f"job {card.name} does not answer: {UNWATCHED}" if here else elsewhere(card)) from None
    except OSError as error:
        raise UnansweredError(f"{elsewhere(card)} ({error})") from None


def talk(card: Card, connection: socket.socket, inspect: Inspecting | None) -> tuple[Picture, dict[int, str]]:
    """Ask over a connection; raise EOFError where the other end hangs up, and UnansweredError where it is silent."""
    wire = Wire(connection)
    wire.send(Ask())
    shown = hear(wire, Shown, 1, ANSWER_S)
    if not shown:
        raise UnansweredError(f"job {card.name} has not answered for {ANSWER_S:.0f} s")
    picture = from_json(shown[0].picture, card.ranks)
    ranks = inspect.choose(picture) if inspect is not None else []
    for rank in ranks:
        wire.send(Inspect(rank, inspect is not None and inspect.native))
    threads = {found.rank: found.text for found in hear(wire, Inspected, len(ranks), INSPECTED_S)}
    return picture, {rank: threads.get(rank, f"no answer in {INSPECTED_S:.0f} s") for rank in ranks}


def hear(wire: Wire, kind: type[Answer], count: int, timeout_s: float) -> list[Answer]:
    """Return so many messages of a kind, or those that came in time."""
    deadline = time.monotonic() + timeout_s
    found: list[Answer] = []
    while len(found) < count and (left_s := deadline - time.monotonic()) > 0:
        with contextlib.suppress(TimeoutError):
            found += [message for message in wire.receive(left_s) if isinstance(message, kind)]
    return found


def elsewhere(card: Card) -> str:
    """Return what to do where a job's network cannot be reached from here."""
    at = f"job {card.name} listens on {card.address} of {card.host}, which cannot be reached from here"
    if not card.by_slurm:
        return f"{at}; ask on {card.host} itself"
    number, host = shlex.quote(card.number), shlex.quote(card.host)
    return f"{at}; type\n  srun --jobid={number} --overlap -N1 -n1 -w {host} python -m mpiddp.where {card.run_id}"
