"""Where a running job can be asked: a card in the user's state folder, which nobody else can read."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from functools import partial
from typing import Any, NamedTuple, get_type_hints

from ..base.files import find_risk, open_checked, user_folder
from ..discovery.schedulers import SLURM, find_job, find_scheduler

MOST_BYTES = 2**16  # of a card; one has some hundred


class Card(NamedTuple):
    """What one has to know to ask a job where its ranks are.

    `run_id` is the job's own name, `number` that of the scheduler, empty without one; `by_slurm` tells that it is
    Slurm's, and `step` is the number of its step, or of Flux's job in a batch job, empty for none. The coordinator
    listens on `address` and `port` of `host` for those that show `token`.
    """

    run_id: str
    number: str
    by_slurm: bool
    step: str
    host: str
    address: str
    port: int
    token: str
    ranks: int
    version: str

    @property
    def name(self) -> str:
        """What to call the job: its number, or its own name."""
        return self.names[-1] if self.step not in ("", "0") else self.names[0]

    @property
    def names(self) -> list[str]:
        """What the job may be called, but for its own name's beginning."""
        return [self.number or self.run_id, *([f"{self.number}.{self.step}"] if self.step else [])]


def folder() -> str:
    """Return where the user's cards are (XDG Base Directory Specification)."""
    return user_folder(os.environ, "XDG_STATE_HOME", ".local", "state")


def job_number() -> tuple[str, bool, str]:
    """Return the number that the scheduler has given this job, empty for none; whether it is Slurm's; its step."""
    job, step = find_job(os.environ)
    return job, find_scheduler(os.environ) is SLURM, step


def path_of(card: Card) -> str:
    """Return the file of a card."""
    return os.path.join(folder(), f"{card.run_id}.json")


def write(card: Card) -> None:
    """Write a card; where the user's folder cannot be written, or is another user's, the job works without.

    Others may be able to write to a folder above: a umask of 002 lets the user's group, which often is the user alone.
    """
    path = path_of(card)
    new = f"{path}.new"
    with contextlib.suppress(OSError):
        remove(new)
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            with open(open_checked(new, flags, partial(find_risk, job_folder=True), 0o700, 0o600), "w") as file:
                json.dump(card._asdict(), file)
            os.rename(new, path)
        finally:
            remove(new)


def withdraw(card: Card) -> None:
    """Remove a card."""
    remove(path_of(card))


def remove(path: str) -> None:
    """Remove a file, if it is there."""
    with contextlib.suppress(OSError):
        os.unlink(path)


def read_all() -> dict[str, Card]:
    """Return the cards of this user by their files, those that were written last first; what is none is left out."""
    found = []
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = os.listdir(folder())
    for name in names:
        with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
            path = os.path.join(folder(), name)
            with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
                facts = os.fstat(file.fileno())
                if stat.S_ISREG(facts.st_mode) and facts.st_uid == os.getuid() and name.endswith(".json"):
                    found.append((facts.st_mtime, path, checked(json.loads(file.read(MOST_BYTES)))))
    return {path: card for _, path, card in sorted(found, reverse=True)}


def checked(fields: Any) -> Card:
    """Return the card with these fields; raise TypeError or ValueError where they are those of none."""
    import ipaddress  # not where a card is written

    card = Card(**fields)
    if [*map(type, card)] != [*get_type_hints(Card).values()]:
        raise TypeError
    if not ipaddress.ip_address(card.address) or not 0 < card.port < 2**16 or not 0 < card.ranks < 2**31:
        raise ValueError
    return card
