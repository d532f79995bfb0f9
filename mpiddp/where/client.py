"""One who asks a job where its ranks are."""

from __future__ import annotations

import contextlib
import ipaddress
import shlex
import socket
import time

from ..beside.asking import Ask, Shown
from ..beside.wire import Wire
from ..plan.words import listed
from ..version import __version__
from .cards import Card, path_of, read_all, remove
from .merge import Picture
from .table import from_json

CONNECTING_S = 5.0
ANSWER_S = 15.0  # the coordinator waits two seconds for the ranks; a busy node may take longer for the rest


class UnansweredError(Exception):
    """Nobody answers; the text says why, and what to do."""


def find(job: str) -> Card:
    """Return the card of a job by its number or the beginning of its name, of the only one if that is empty.

    Raises UnansweredError where there is none, or more than one.
    """
    cards = list(read_all().values())
    found = [card for card in cards if not job or job == card.number or card.run_id.startswith(job)]
    if len(found) == 1:
        return found[0]
    if found:
        raise UnansweredError(f"which job? {listed([f'{card.run_id} ({card.name})' for card in found])}")
    if not job:
        raise UnansweredError("no job of yours is running with mpiddp")
    others = f"; there is {listed([card.name for card in cards])}" if cards else ""
    raise UnansweredError(f"no job {job} of yours is running with mpiddp{others}")


def ask(card: Card) -> Picture:
    """Return where the ranks of a job are; raise UnansweredError where it does not say."""
    if card.version != __version__:
        raise UnansweredError(f"the job has mpiddp {card.version}, this is {__version__}: use the job's environment")
    is_here = card.host == socket.gethostname()
    if ipaddress.ip_address(card.address).is_loopback and not is_here:
        raise UnansweredError(elsewhere(card))
    try:
        with socket.create_connection((card.address, card.port), timeout=CONNECTING_S) as connection:
            return talk(card, connection)
    except ConnectionRefusedError:
        if not is_here:
            raise UnansweredError(elsewhere(card)) from None
        remove(path_of(card))
        raise UnansweredError(f"job {card.name} is over: it was killed, and could not say so") from None
    except EOFError:
        raise UnansweredError(f"job {card.name} has just ended") from None
    except (KeyError, TypeError, ValueError):
        raise UnansweredError(f"job {card.name} gives an answer that this mpiddp does not understand") from None
    except TimeoutError:
        raise UnansweredError(elsewhere(card)) from None
    except OSError as error:
        raise UnansweredError(f"{elsewhere(card)} ({error})") from None


def talk(card: Card, connection: socket.socket) -> Picture:
    """Ask over a connection; raise EOFError where the other end hangs up, and UnansweredError where it is silent."""
    connection.sendall(card.token.encode())
    wire = Wire(connection)
    wire.send(Ask())
    deadline = time.monotonic() + ANSWER_S
    while (left_s := deadline - time.monotonic()) > 0:
        with contextlib.suppress(TimeoutError):
            for message in wire.receive(left_s):
                if isinstance(message, Shown):
                    return from_json(message.picture)
    raise UnansweredError(f"job {card.name} has not answered for {ANSWER_S:.0f} s")


def elsewhere(card: Card) -> str:
    """Return what to do where a job's network cannot be reached from here."""
    at = f"job {card.name} listens on {card.address} of {card.host}, which cannot be reached from here"
    if not card.by_slurm:
        return f"{at}; ask on {card.host} itself"
    number, host = shlex.quote(card.number), shlex.quote(card.host)
    return f"{at}; type\n  srun --jobid={number} --overlap -N1 -n1 -w {host} python -m mpiddp.where {card.run_id}"
