"""The part of each node's local rank 0: it looks at its share of the files, reads it, and writes the node's mirror."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

from ..config import LaunchConfig
from ..errors import LonelyLaunchError
from ..join.rollcall import TURNS, RollCall
from ..say import say
from ..waiting import wait_for
from . import copies, room
from .closure import Closure
from .copies import Copy
from .exchange import Exchange
from .manifest import Chunk, Manifest, Range, chunks, folders_of, home_of, reader_of, readers_of, rooted, worth_copying
from .mirror import Writer
from .reading import Read, Seen, Source, look, reading_ahead, sizes, unchanged
from .trees import name_of

STAGING = "staging"
FEW_MORE = 0.02  # a mirror that lacks so little of what is wanted is used as it is
OTHERS_S = 60.0  # for another job on this node to finish the mirror that it has begun

Value = TypeVar("Value")


class Outcome(NamedTuple):
    """What came of it on a node: where the mirror lies, or why there is none, and files that were left out."""

    path: str = ""
    refused: str = ""
    left: tuple[str, ...] = ()


class Leader:
    """Gets a mirror of the environment's `trees` onto its node, together with the other nodes' leaders."""

    def __init__(self, roll: RollCall, trees: tuple[str, ...], config: LaunchConfig) -> None:
        self._roll, self._trees, self._config = roll, trees, config
        self._deadline = time.monotonic() + roll.remaining_s + min(roll.rank, TURNS)
        self._problem = ""  # why this node gets no mirror
        self._writer: Writer | None = None
        self._copy: Copy | None = None  # that is being made

    def run(self, wanted: Closure) -> tuple[Copy | None, Outcome]:
        """Return this node's mirror, locked for use, and what came of it; rank 0 knows what is wanted. Collective."""
        wanted = self._shared(wanted)
        if not wanted.paths:
            return None, Outcome()
        former = self._former()
        ahead = self._ahead(wanted, former)
        with reading_ahead(ahead):
            manifest = self._still_right(wanted, former) or self._manifest(wanted)
            left = ({*manifest.others} & wanted.touched.keys()) - ahead.keys()  # by a job of another number of nodes
            with reading_ahead({path: wanted.touched[path] for path in left}):
                return self._mirror(manifest, former)

    def _mirror(self, manifest: Manifest, former: Copy | None) -> tuple[Copy | None, Outcome]:
        """Return the mirror of a manifest, and what came of it: the former one, or one that is made now. Collective."""
        name = f"{name_of(self._trees)}-{manifest.fingerprint()}"
        copy = former if former is not None and self._fits(former, name, manifest) else None
        path = "" if copy is not None else self._begin(name, manifest)
        if not self._all(self._writer is None):
            self._read(manifest)
        if path and not self._problem:
            copy = self._finish(path, manifest)
        if copy is None:
            return None, Outcome(refused=self._problem)
        return copy, Outcome(copy.path, left=tuple(self._writer.left) if self._writer else ())

    def _shared(self, value: Value) -> Value:
        """Return rank 0's value, when all have come to ask for it."""
        self._roll.agree(STAGING, None, lambda facts: [None] * len(facts))
        found: Value = self._roll.comm.bcast(value)
        return found

    def _all(self, own: bool) -> bool:
        """Tell whether that is so on all nodes."""
        return self._roll.agree(STAGING, own, lambda facts: [all(facts)] * len(facts))

    def _former(self) -> Copy | None:
        """Return the newest mirror of the environment on this node, locked for use."""
        name = name_of(self._trees)
        paths = [path for folder in room.asked(self._config.stage, os.environ) if room.is_ours(room.ours(folder))
                 for path in copies.find(room.ours(folder), name)]
        return next((copy for path in paths if (copy := copies.share(path))), None)

    def _ahead(self, wanted: Closure, former: Copy | None) -> dict[str, tuple[Range, ...]]:
        """Return which parts of files this node reads itself: large ones that are no copies, and will be none."""
        paths = [path for path in sorted(wanted.touched) if former is None or os.path.islink(former.root + path)]
        return {path: wanted.touched[path] for path, size in zip(paths, sizes(paths), strict=True)
                if size and not self._is_worth_copying(path, size, wanted)}

    def _is_worth_copying(self, path: str, size: int, wanted: Closure) -> bool:
        return worth_copying(size, wanted.touched.get(path), self._roll.size, self._config.stage_keep)

    def _still_right(self, wanted: Closure, former: Copy | None) -> Manifest | None:
        """Return the manifest of rank 0's former mirror if it has what is wanted, and all of that is as it was."""
        own = copies.manifest_of(former.path) if former is not None and self._roll.rank == 0 else None
        if own is not None and own.lacks(wanted.paths) > FEW_MORE * len(wanted.paths):
            own = None
        found = self._shared(own)
        if found is None:
            return None
        return found if self._all(unchanged(*found.share(self._roll.rank, self._roll.size))) else None

    def _manifest(self, wanted: Closure) -> Manifest:
        """Return what is to be staged, as it is now: each node looks at a part of it."""
        own, nodes, paths = self._roll.rank, self._roll.size, sorted(wanted.paths)
        files = [path for path, reader in zip(paths, readers_of(paths, nodes), strict=True) if reader == own]
        folders = [folder for folder in folders_of(wanted.paths, self._trees) if reader_of(folder, nodes) == own]
        parts: list[Seen] = []

        def merge(found: Sequence[Seen]) -> list[None]:
            parts.extend(found)
            return [None] * len(found)

        self._roll.agree("looking at files", look(files, folders, self._trees), merge)
        listed = tuple(rooted((folder for part in parts for folder in part.folders), self._trees))
        known = {folder.path for folder in listed}
        hot = tuple(file for file in sorted(file for part in parts for file in part.files)
                    if home_of(file.path) in known and self._is_worth_copying(file.path, file.size, wanted))
        others = tuple(sorted(wanted.paths - {file.path for file in hot}))
        found: Manifest = self._roll.comm.bcast(Manifest(self._trees, hot, listed, others))
        return found

    def _fits(self, former: Copy, name: str, manifest: Manifest) -> bool:
        """Tell whether a mirror is that of the manifest, and whole; give it back if it is not."""
        if os.path.basename(former.path) == name and copies.fits(former, manifest):
            return True
        copies.release(former, keep=False)
        return False

    def _begin(self, name: str, manifest: Manifest) -> str:
        """Return where the mirror will be, empty for nowhere; be ready to write it, unless another job does."""
        chosen = room.choose(room.asked(self._config.stage, os.environ), manifest.size)
        self._problem = chosen.refused
        if chosen.refused:
            return ""
        path = os.path.join(room.ours(chosen.path), name)
        try:
            self._copy = copies.make(path)
        except OSError as error:
            self._problem = f"{path}: {error.strerror}"
        if self._copy is not None:
            self._writer = Writer(self._copy, manifest)
        return path

    def _read(self, manifest: Manifest) -> None:
        """Read this node's part, and take all parts. Collective."""
        def begin() -> None:
            with self._giving_up():
                if self._writer is not None:
                    self._writer.begin()

        def take(chunk: Chunk, data: memoryview, how: list[Read]) -> None:
            with self._giving_up():
                if self._writer is not None:
                    self._writer.write(chunk, data, how)

        parts = chunks(manifest.files, self._roll.size, manifest.others)
        source = Source(manifest.files, (part for part in parts if part.reader == self._roll.rank))
        Exchange(self._roll.comm, parts, source, self._deadline, self._late, self._remind).run(begin, take)

    def _finish(self, path: str, manifest: Manifest) -> Copy | None:
        """Return the mirror that this job, or another one on this node, has made; None if that failed."""
        with self._giving_up():
            if self._writer is not None:
                self._writer.finish()
        if self._problem:
            return None
        if self._copy is not None and (copy := copies.use_own(self._copy)):
            return copy
        until = time.monotonic() + min(OTHERS_S, self._roll.remaining_s)
        try:
            copy = wait_for(lambda: copies.share(path), until, TimeoutError, lambda _: None, OTHERS_S)
        except TimeoutError:
            self._problem = f"{path}: another job that makes it has not finished"
            return None
        if copies.fits(copy, manifest):
            return copy
        copies.release(copy, keep=False)
        self._problem = f"{path}: it is damaged, and another job uses it"
        return None

    @contextlib.contextmanager
    def _giving_up(self) -> Iterator[None]:
        """Write in this block; where that fails, this node gets no mirror, and goes on reading for the others."""
        try:
            yield
        except (OSError, ValueError) as error:
            assert self._copy is not None
            words = error.strerror if isinstance(error, OSError) else str(error)
            self._problem = f"{os.path.dirname(self._copy.path)}: {words}"
            if self._writer is not None:
                self._writer.give_up()
            self._writer = None
            copies.release(self._copy, keep=False)

    def _late(self, node: int) -> LonelyLaunchError:
        return LonelyLaunchError(
            "startup-timeout",
            found=f"{self._roll.name(node)} has not read its part of the environment in time",
            needed="a file system that answers on every node",
            do="look at that host; more time: --startup-timeout SECONDS; or start without --stage",
        )

    def _remind(self, node: int, waited_s: float) -> None:
        if self._roll.rank == 0:
            say(f"mpiddp: waiting {waited_s:.0f} s for {self._roll.name(node)} ({STAGING})")
