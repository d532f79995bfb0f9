"""The ranks stage their environment: one of each node reads its part, all get the mirror of their node. Collective."""

from __future__ import annotations

import atexit
import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..config import LaunchConfig
from ..environment import Place
from ..join.rollcall import RollCall
from ..join.variables import set_all
from ..plan.words import folded, listed
from ..say import say, warn
from ..stages import begin
from . import closure, copies, early
from .closure import Closure, Recorder
from .copies import Copy
from .leader import STAGING, Leader, Outcome
from .trees import trees
from .use import use

LOOKING = "looking at its environment"
WHERE_IT_LIES = "it is read where it lies"
ALREADY = "not-staged: a program with its own main() has imported its environment already"


class Home(NamedTuple):
    """The environment as a rank sees it: its folders on a shared file system, and what tells these apart."""

    trees: tuple[str, ...]
    marks: tuple[tuple[int, int], ...] = ()


class Order(NamedTuple):
    """What rank 0 says to the ranks: which trees are staged, none for nothing, and what to warn of."""

    trees: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


class Answer(NamedTuple):
    """What rank 0 says when it is over: where this rank's mirror lies, empty for none, and what to warn of."""

    path: str = ""
    warnings: tuple[str, ...] = ()


class Staged:
    """A rank's part: the mirror that it uses, if any, and on rank 0 the record of what this start opens."""

    def __init__(self, copy: Copy | None, recorder: Recorder | None, record: str, known: Closure, keep: bool) -> None:
        self._copy, self._recorder, self._record, self._known, self._keep = copy, recorder, record, known, keep
        self._pid = os.getpid()

    def remember(self) -> None:
        """Add to the record what has been opened; where that cannot be written, the next start does without."""
        if self._recorder is None:
            return
        found = self._recorder.found()
        if not found.paths <= self._known.paths:
            self._known = self._known.with_more(found)
            try:
                closure.write(self._record, self._known)
            except OSError as error:
                warn([f"stage-record: cannot keep what a start opens in {self._record}: {error.strerror}"])
                self._recorder = None

    def end(self) -> None:
        """Remember what was opened, and use the mirror no more; nothing in a process that the rank has forked."""
        if os.getpid() == self._pid:
            self.remember()
            early.end(self._copy)
            if self._copy is not None:
                copies.release(self._copy, self._keep)
                self._copy = None


staged: Staged | None = None  # in this process


def remember() -> None:
    """Add to the record what this start has opened, if it is staged, or will be."""
    if staged is not None:
        staged.remember()


def stage(roll: RollCall, place: Place, config: LaunchConfig) -> None:
    """Let this rank find its environment in a mirror on its node, until the process ends. Collective.

    Raises LonelyLaunchError where a node has not read its part in time.
    """
    global staged
    if config.script is None:
        early.settle(None)
        warn([ALREADY] if place.rank == 0 else [])
        return
    desk, leads = Desk(roll), place.local_rank == 0
    own = trees() if leads else ()
    order = roll.agree(LOOKING, Home(own, tuple(map(mark, own))) if leads else None, desk.orders)
    warn(order.warnings)
    if not order.trees:
        early.settle(None)
        return
    begin(STAGING)
    recorder, record, known = recording(order.trees, config.quiet) if place.rank == 0 else (None, "", Closure())
    copy, outcome = None, None
    with leaders(roll, desk, leads) as others:
        if others is not None:
            wanted = known if recorder is None or config.stage_keep else known.without(recorder.loaded())
            copy, outcome = Leader(others, order.trees, config).run(wanted)
    answer = roll.agree(STAGING, (place.node_rank, outcome), desk.answers)
    warn(answer.warnings)
    if copy is None and answer.path:
        copy = copies.share(answer.path)
    early.settle(copy)
    if copy is not None:
        use(copy, order.trees, set_all)
        if recorder is not None:
            recorder.mirror = os.path.realpath(copy.root)
        if leads:
            copies.tidy(os.path.dirname(copy.path), os.path.basename(copy.path))
    staged = Staged(copy, recorder, record, known, config.stage_keep)
    atexit.register(staged.end)  # runs after the rank has left its job: what is registered later comes first


def recording(staged_trees: tuple[str, ...], quiet: bool) -> tuple[Recorder, str, Closure]:
    """Return what sees what rank 0 opens, where that is recorded, and what is known of former starts."""
    record = closure.record_of(staged_trees, os.environ)
    known, recorder = closure.read(record), Recorder(staged_trees)
    if not known.paths:
        recorder.listen()
        if not quiet:
            say("mpiddp: --stage: this start records what it opens; the next one is staged")
    return recorder, record, known


def mark(tree: str) -> tuple[int, int]:
    """Return what a folder's server calls it, and when it was changed; the same on all nodes that see the same one."""
    try:
        about = os.stat(tree)
    except OSError:
        return 0, 0
    return about.st_ino, about.st_mtime_ns


class Desk:
    """Rank 0's part: it compares what the nodes see, and hears what came of it on each of them."""

    def __init__(self, roll: RollCall) -> None:
        self._roll = roll
        self.leaders: list[int] = []  # each node's local rank 0

    def orders(self, homes: Sequence[Home | None]) -> list[Order]:
        """Return each rank's order: only what all nodes see alike is staged."""
        self.leaders = [rank for rank, home in enumerate(homes) if home is not None]
        seen = [dict(zip(home.trees, home.marks, strict=True)) for home in homes if home is not None]
        same = tuple(tree for tree, own in seen[0].items() if all(home.get(tree) == own for home in seen))
        odd = sorted({tree for home in seen for tree in home} - {*same})
        warnings = [f"not-staged: not all nodes see the same folder: {listed(odd)}; {WHERE_IT_LIES}"] if odd else []
        if not same and not odd:
            warnings = ["not-staged: Python's environment is on no shared file system: there is nothing to stage"]
        return [Order(same, tuple(warnings)), *[Order(same)] * (len(homes) - 1)]

    def answers(self, found: Sequence[tuple[int, Outcome | None]]) -> list[Answer]:
        """Return each rank's answer."""
        outcomes = {node: outcome for node, outcome in found if outcome is not None}
        hosts = {found[rank][0]: self._roll.hosts[rank] for rank in self.leaders}
        reasons: dict[str, list[str]] = {}
        for node, outcome in outcomes.items():
            if outcome.refused:
                reasons.setdefault(outcome.refused, []).append(hosts[node])
        warnings = [f"not-staged: {reason}" + (f" (on {folded(names)})" if len(names) < len(outcomes) else "")
                    + f"; {WHERE_IT_LIES}" for reason, names in reasons.items()]
        left = sorted({path for outcome in outcomes.values() for path in outcome.left})
        if left:
            warnings.append(f"not-staged: changed while it was read, or unreadable: {listed(left)}; {WHERE_IT_LIES}")
        return [Answer(outcomes[node].path, tuple(warnings) if rank == 0 else ())
                for rank, (node, _) in enumerate(found)]


@contextlib.contextmanager
def leaders(roll: RollCall, desk: Desk, leads: bool) -> Iterator[RollCall | None]:
    """Return a roll call of each node's local rank 0 for this block; None on other ranks. Collective."""
    from mpi4py import MPI

    comm = roll.comm.Split(0 if leads else MPI.UNDEFINED, roll.rank)
    if not leads:
        yield None
        return
    some = RollCall(comm, roll.remaining_s, time.monotonic())
    comm.Free()
    some.numbers, some.hosts = some.comm.bcast((desk.leaders, [roll.hosts[rank] for rank in desk.leaders]))
    yield some
    some.close()
