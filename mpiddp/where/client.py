"""One who asks a job where its ranks are."""

from __future__ import annotations

import contextlib
import socket
import time

from ..beside.asking import Ask, Shown
from ..beside.wire import Wire
from ..plan.words import listed
from ..version import __version__
from .cards import Card, read_all, remove
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
    cards = read_all()
    found = [card for card in cards.values() if not job or job == card.number or card.run_id.startswith(job)]
    if not found and job:
        others = listed([name(card) for card in cards.values()])
        raise UnansweredError(f"no job {job} of yours is running with mpiddp{f'; there is {others}' if others else ''}")
    if not found:
        raise UnansweredError("no job of yours is running with mpiddp")
    if len(found) > 1:
        living = [card for card in found if is_reachable(card)]
        if len(living) != 1:
            raise UnansweredError(f"which job? {listed([name(card) for card in living or found])}")
        return living[0]
    return found[0]


def is_reachable(card: Card) -> bool:
    """Tell whether somebody listens where a card says."""
    with contextlib.suppress(OSError), socket.create_connection((card.address, card.port), timeout=1.0):
        return True
    return False


def ask(card: Card) -> Picture:
    """Return where the ranks of a job are; raise UnansweredError where it does not say."""
    if card.version != __version__:
        raise UnansweredError(f"the job has mpiddp {card.version}, this is {__version__}: use the job's environment")
    try:
        connection = socket.create_connection((card.address, card.port), timeout=CONNECTING_S)
    except ConnectionRefusedError:
        if card.host == socket.gethostname():
            forget(card)
            raise UnansweredError(f"job {name(card)} is over: it was killed, and could not say so") from None
        raise UnansweredError(elsewhere(card)) from None
    except OSError:
        raise UnansweredError(elsewhere(card)) from None
    wire = Wire(connection)
    with contextlib.closing(wire):
        connection.sendall(card.token.encode())
        wire.send(Ask())
        deadline = time.monotonic() + ANSWER_S
        try:
            while (left_s := deadline - time.monotonic()) > 0:
                for message in wire.receive(left_s):
                    if isinstance(message, Shown):
                        return from_json(message.picture)
        except EOFError:
            raise UnansweredError(f"job {name(card)} has just ended") from None
        except OSError as error:
            raise UnansweredError(f"job {name(card)} does not answer: {error}") from None
    raise UnansweredError(f"job {name(card)} has not answered for {ANSWER_S:.0f} s")


def elsewhere(card: Card) -> str:
    """Return what to do where a job's network cannot be reached from here."""
    at = f"job {name(card)} listens on {card.address} of {card.host}, which cannot be reached from here"
    if card.number.isdigit():  # Slurm's; PBS has more in its numbers
        step = f"srun --jobid={card.number} --overlap -N1 -n1 -w {card.host}"
        return f"{at}; type\n  {step} python -m mpiddp.where {card.number}"
    return f"{at}; ask on {card.host} itself"


def forget(card: Card) -> None:
    """Remove the card of a job that is over."""
    for path, other in read_all().items():
        if other == card:
            remove(path)


def name(card: Card) -> str:
    """Return what to call a job."""
    return card.number or card.run_id
