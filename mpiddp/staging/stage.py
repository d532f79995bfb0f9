"""--stage: one rank of each node reads a share of the environment, all ranks use the mirror on their node."""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from ..base.config import LaunchConfig
from ..base.files import list_names
from ..base.polling import poll_until
from ..base.ranks import RankPosition
from ..base.stderr import warn, write_line
from ..base.text import fold_hosts, join_names
from ..base.timeline import begin_stage
from ..bootstrap.rollcall import MAX_STAGGER_S, Rendezvous
from ..discovery.runtime import hostname
from . import access_trace, mirror
from .access_trace import AccessTrace, Tracer
from .broadcast import broadcast, list_all, prefetching, read_chunk
from .manifest import (
    Chunk,
    File,
    Folder,
    Manifest,
    Range,
    environment_roots,
    folders_of,
    manifest_of,
    name_of,
    node_of,
    plan_chunks,
    readers_of,
)
from .mirror import Lease, Writer, has_all, use

STAGING = "staging"
LOOKING = "looking at its environment"
WHERE_IT_LIES = "it is read where it lies"
ALREADY = "not-staged: a program with its own main() has imported its environment already"
FEW_MORE = 0.02  # a mirror that lacks so little of what is wanted is used as it is
OTHER_JOB_TIMEOUT_S = 60.0  # to finish the mirror that it has begun on this node

Wanted = tuple[frozenset[str], dict[str, tuple[Range, ...]]]  # paths to be copied, and ranges to be prefetched
Value = TypeVar("Value")


class Outcome(NamedTuple):
    """Where a node's mirror lies, or why there is none, and which files were left out."""

    path: str = ""
    refused: str = ""
    left: tuple[str, ...] = ()


class Staged:
    """A rank's part: the mirror that it uses, if any, and on rank 0 the record of what this start opens."""

    def __init__(self, used: Lease | None, tracer: Tracer | None, record: str, known: AccessTrace, keep: bool) -> None:
        self._lease, self._tracer, self._record, self._known, self._keep = used, tracer, record, known, keep
        self._pid = os.getpid()

    def remember(self) -> None:
        """Add to the record what was opened; if that fails, the next start does without."""
        if self._tracer is None:
            return
        trace = self._tracer.trace()
        if not trace.paths <= self._known.paths:
            self._known = self._known.merge(trace)
            try:
                access_trace.write(self._record, self._known)
            except OSError as error:
                warn([f"stage-record: cannot keep what a start opens in {self._record}: {error.strerror}"])
                self._tracer = None

    def end(self) -> None:
        """Remember what was opened and release the mirror; nothing in a process that the rank has forked."""
        if os.getpid() == self._pid:
            self.remember()
            if self._lease is not None:
                mirror.release(self._lease, self._keep)
                self._lease = None


staged: Staged | None = None  # in this process


def remember() -> None:
    """Add to the record what this start has opened, with --stage."""
    if staged is not None:
        staged.remember()


def stage(roll: Rendezvous, place: RankPosition, config: LaunchConfig) -> None:
    """Let this rank find its environment in a mirror on its node until the process ends. Collective.

    Raises LocalLaunchError if a node has not read its share in time.
    """
    global staged
    if config.script is None:
        warn([ALREADY] if place.rank == 0 else [])
        return
    is_leader = place.local_rank == 0
    roots: tuple[str, ...] = roll.exchange(LOOKING, environment_roots() if is_leader else None, common_roots)
    if not roots:
        return
    begin_stage(STAGING)
    tracer, record, known = None, "", AccessTrace()
    if place.rank == 0:
        tracer, record = Tracer(roots), access_trace.record_of(roots, os.environ)
        known = access_trace.read(record)
        if not known.paths:
            tracer.listen()
            if not config.quiet:
                write_line("mpiddp: --stage: this start records what it opens; the next one is staged")
    used, outcome = None, None
    with node_leaders(roll, is_leader) as leaders:
        if leaders is not None:
            loaded = tracer.loaded() if tracer and not config.stage_keep else frozenset()
            used, outcome = NodeLeader(leaders, roots, config).run(known, loaded)
    path = roll.exchange(STAGING, (place.node_rank, outcome), lambda outcomes: mirrors_of(outcomes, roll.hosts))
    if used is None and path:
        used = mirror.lease_whole(path)
    if used is not None:
        use(used, roots)
        if tracer is not None:
            tracer.mirror = os.path.realpath(used.root)
    staged = Staged(used, tracer, record, known, config.stage_keep)
    atexit.register(staged.end)  # runs after the rank has left its job: what is registered later comes first


def common_roots(found: Sequence[dict[str, tuple[int, int]] | None]) -> list[tuple[str, ...]]:
    """Return for each rank the roots that all nodes see alike; on rank 0."""
    nodes = [roots for roots in found if roots is not None]
    same = tuple(root for root, mark in nodes[0].items() if all(node.get(root) == mark for node in nodes))
    odd = sorted({root for node in nodes for root in node} - {*same})
    if odd:
        warn([f"not-staged: not all nodes see the same folder: {join_names(odd)}; {WHERE_IT_LIES}"])
    elif not same:
        warn(["not-staged: Python's environment is on no shared file system: there is nothing to stage"])
    return [same] * len(found)


def mirrors_of(found: Sequence[tuple[int, Outcome | None]], hosts: Sequence[str]) -> list[str]:
    """Return for each rank where its node's mirror lies, empty for none; on rank 0, which warns of what was refused."""
    outcomes = {node: (host, outcome) for host, (node, outcome) in zip(hosts, found, strict=True) if outcome}
    for reason in sorted({outcome.refused for _, outcome in outcomes.values()} - {""}):
        where = [host for host, outcome in outcomes.values() if outcome.refused == reason]
        nodes = f" (on {fold_hosts(where)})" if len(where) < len(outcomes) else ""
        warn([f"not-staged: {reason}{nodes}; {WHERE_IT_LIES}"])
    if left := sorted({path for _, outcome in outcomes.values() for path in outcome.left}):
        warn([f"not-staged: changed while it was read, or unreadable: {join_names(left)}; {WHERE_IT_LIES}"])
    return [outcomes[node][1].path for node, _ in found]


@contextlib.contextmanager
def node_leaders(roll: Rendezvous, is_leader: bool) -> Iterator[Rendezvous | None]:
    """Return a roll call of each node's local rank 0 for this block; None on other ranks. Collective."""
    from mpi4py import MPI

    comm = roll.comm.Split(0 if is_leader else MPI.UNDEFINED, roll.rank)
    if not is_leader:
        yield None
        return
    leaders = Rendezvous(comm, roll.remaining_s, time.monotonic())
    comm.Free()
    leaders.job_ranks, leaders.hosts = zip(*leaders.comm.allgather((roll.rank, hostname())), strict=True)
    yield leaders
    leaders.close()


class NodeLeader:
    """Gets a mirror of the environment's roots onto its node, together with the leaders of the other nodes."""

    def __init__(self, roll: Rendezvous, roots: tuple[str, ...], config: LaunchConfig) -> None:
        self._roll, self._roots, self._keep = roll, roots, config.stage_keep
        self._targets = mirror.target_dirs(config.stage, os.environ)
        self._deadline = time.monotonic() + roll.remaining_s + min(roll.rank, MAX_STAGGER_S)
        self._refused = ""  # why this node gets no mirror
        self._writer: Writer | None = None
        self._lease: Lease | None = None  # of the mirror that is used or written

    def run(self, known: AccessTrace, loaded: frozenset[str]) -> tuple[Lease | None, Outcome]:
        """Return this node's mirror, leased, and what came of it. Collective.

        Rank 0 knows what former starts have opened, and what all ranks have loaded already.
        """
        paths, ranges = self._shared(self._wanted(known, loaded) if self._roll.rank == 0 else None)
        if not paths:
            return None, Outcome()
        with prefetching(ranges):
            readers = readers_of(sorted(paths), self._roll.size)
            manifest = self._manifest(readers)
            path = self._begin(manifest)
            if self._any(self._writer is not None):
                self._broadcast(manifest, readers)
            if not self._refused and (self._writer is not None or self._lease is None):
                self._finish(path, manifest, paths)
        if self._lease is None:
            return None, Outcome(refused=self._refused)
        return self._lease, Outcome(self._lease.path, left=tuple(self._writer.left) if self._writer else ())

    def _wanted(self, known: AccessTrace, loaded: frozenset[str]) -> Wanted:
        """Return what is to be staged, for which a former mirror on this node may do."""
        uncopied = {path for path, touched in known.touched.items()
                    if not touched.is_worth_copying(self._roll.size, self._keep)}
        paths = known.paths - loaded - uncopied
        if not paths:
            return paths, {}
        stamps = (mirror.stamped(os.path.join(own, name)) or frozenset() for own in self._own_folders()
                  for name in list_names(own, f"{name_of(self._roots)}-"))
        former = min(stamps, key=lambda stamp: len(paths - stamp), default=frozenset())
        if len(paths - former) <= FEW_MORE * len(paths):
            paths = former
        return paths, {path: touched.ranges for path, touched in known.touched.items() if path not in paths | loaded}

    def _own_folders(self) -> list[str]:
        return [own for own in map(mirror.own_folder, self._targets) if mirror.is_private(own)]

    def _shared(self, value: Value | None) -> Value:
        """Return rank 0's value when all have come to ask for it."""
        self._roll.exchange(STAGING, None, lambda facts: [None] * len(facts))
        found: Value = self._roll.comm.bcast(value)
        return found

    def _any(self, own: bool) -> bool:
        """Tell whether that is so on any node."""
        return self._roll.exchange(STAGING, own, lambda facts: [any(facts)] * len(facts))

    def _manifest(self, readers: dict[str, int]) -> Manifest:
        """Return what is to be staged as it is now: each node looks at a part of it."""
        own, nodes = self._roll.rank, self._roll.size
        manifest: Manifest | None = None
        files = [path for path, reader in readers.items() if reader == own]
        folders = [folder for folder in folders_of(readers, self._roots) if node_of(folder, nodes) == own]

        def merge(parts: Sequence[Sequence[File | Folder]]) -> list[None]:
            nonlocal manifest
            manifest = manifest_of(self._roots, [one for part in parts for one in part])
            return [None] * nodes

        self._roll.exchange("looking at files", list_all(files, folders, self._roots), merge)
        found: Manifest = self._roll.comm.bcast(manifest)
        return found

    def _begin(self, manifest: Manifest) -> str:
        """Return where the mirror lies or will lie, "" for nowhere; be ready to write it, unless another job does."""
        name = f"{name_of(self._roots)}-{manifest.fingerprint()}"
        for own in self._own_folders():
            mirror.tidy(own, name)
            path = os.path.join(own, name)
            if former := mirror.lease_whole(path):
                if has_all(former, manifest):
                    self._lease = former
                    return path
                mirror.release(former, keep=False)
        folder, self._refused = mirror.choose_target(self._targets, sum(file.size for file in manifest.files))
        if self._refused:
            return ""
        path = os.path.join(mirror.own_folder(folder), name)
        try:
            self._lease = mirror.create(path)
        except OSError as error:
            self._refused = f"{path}: {error.strerror}"
        if self._lease is not None:
            self._writer = Writer(self._lease, manifest)
        return path

    def _broadcast(self, manifest: Manifest, readers: dict[str, int]) -> None:
        """Read this node's share, and write all shares. Collective."""
        def write(chunk: Chunk, buffer: memoryview) -> None:
            self._attempt(lambda writer: writer.write(chunk, buffer))

        broadcast(self._roll, plan_chunks(manifest.files, self._roll.size, readers), self._deadline,
                  lambda chunk: read_chunk(manifest.files, chunk), lambda: self._attempt(Writer.begin), write)

    def _attempt(self, write: Callable[[Writer], object]) -> None:
        """Write; if that fails, this node gets no mirror, and goes on reading for the others."""
        if self._writer is None or self._lease is None:
            return
        try:
            write(self._writer)
        except (OSError, ValueError) as error:
            words = error.strerror if isinstance(error, OSError) else str(error)
            self._refused = f"{os.path.dirname(self._lease.path)}: {words}"
            mirror.release(self._lease, keep=False)
            self._writer = self._lease = None

    def _finish(self, path: str, manifest: Manifest, paths: frozenset[str]) -> None:
        """Lease the mirror that this job, or another one on this node, has made."""
        self._attempt(lambda writer: writer.finish(paths))
        if self._refused:
            return
        if self._lease is not None:
            os.close(self._lease.lock)
        until = time.monotonic() + min(OTHER_JOB_TIMEOUT_S, self._roll.remaining_s)
        try:
            self._lease = poll_until(lambda: mirror.lease_whole(path), until, TimeoutError, lambda _: None, math.inf)
        except TimeoutError:
            self._lease, self._refused = None, f"{path}: another job that makes it has not finished"
            return
        if self._writer is None and not has_all(self._lease, manifest):
            mirror.release(self._lease, keep=False)
            self._lease, self._refused = None, f"{path}: it is damaged, and another job uses it"
