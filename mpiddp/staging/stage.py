"""--stage: one rank of each node reads a share of the environment; all ranks use the mirror on their node."""

from __future__ import annotations

import atexit
import contextlib
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
from .broadcast import broadcast, inspect_paths, prefetching, read_chunk
from .manifest import (
    Chunk,
    File,
    Folder,
    Manifest,
    Range,
    assign_readers,
    environment_name,
    environment_roots,
    make_manifest,
    parent_folders,
    plan_chunks,
    reader_of,
)
from .mirror import MirrorLease, MirrorWriter, is_complete, redirect_imports

STAGING = "staging"
FINDING_ROOTS = "inspecting its environment"
USING_ORIGINALS = "using the original files"
ENVIRONMENT_LOADED = "not-staged: a program with its own main() has already imported its environment"
MAX_MISSING_SHARE = 0.02  # of the paths: a mirror that lacks less is reused, as making a new one takes longer
OTHER_JOB_TIMEOUT_S = 60.0  # for another job to finish its mirror on this node

Plan = tuple[frozenset[str], dict[str, tuple[Range, ...]]]  # paths to copy, and ranges of files to prefetch
Value = TypeVar("Value")


class Outcome(NamedTuple):
    """A node's mirror, or why there is none, and the left-out files."""

    path: str = ""
    problem: str = ""
    left_out: tuple[str, ...] = ()


class StagedEnvironment:
    """A rank's state: the lease of its mirror, if there is one, and on rank 0 the record of the files opened."""

    def __init__(self, lease: MirrorLease | None, tracer: Tracer | None, record: str, known: AccessTrace,
                 keep: bool) -> None:
        self._lease, self._tracer, self._record, self._known, self._keep = lease, tracer, record, known, keep
        self._pid = os.getpid()

    def update_record(self) -> None:
        """Add the opened files to the record; warn if that fails."""
        if self._tracer is None:
            return
        trace = self._tracer.trace()
        if not trace.paths <= self._known.paths:
            self._known = self._known.merge(trace)
            try:
                access_trace.write_record(self._record, self._known)
            except OSError as error:
                warn([f"stage-record: cannot save the list of opened files to {self._record}: {error.strerror}"])
                self._tracer = None

    def end(self) -> None:
        """Update the record and release the mirror, but not in a forked process."""
        if os.getpid() == self._pid:
            try:
                self.update_record()
            finally:
                if self._lease is not None:
                    mirror.release(self._lease, self._keep)
                    self._lease = None


staged: StagedEnvironment | None = None  # in this process


def update_record() -> None:
    """With --stage, add the files that this start has opened to the record."""
    if staged is not None:
        staged.update_record()


def stage(rendezvous: Rendezvous, place: RankPosition, config: LaunchConfig) -> None:
    """Make this rank import its environment from a mirror on its node until the process ends. Collective.

    Raises LocalLaunchError if a node does not read its share in time.
    """
    global staged
    if config.script is None:
        warn([ENVIRONMENT_LOADED] if place.rank == 0 else [])
        return
    is_leader = place.local_rank == 0
    own_roots = environment_roots() if is_leader else None
    roots: tuple[str, ...] = rendezvous.exchange(FINDING_ROOTS, own_roots, common_roots)
    if not roots:
        return
    begin_stage(STAGING)
    tracer, record, known = None, "", AccessTrace()
    if place.rank == 0:
        tracer, record = Tracer(roots), access_trace.record_path(roots, os.environ)
        known = access_trace.read_record(record)
        if not known.paths:
            tracer.watch_opens()
            if not config.quiet:
                write_line("mpiddp: --stage: this run only records which files to stage; the next one is staged")
    lease, outcome = None, None
    with node_leaders(rendezvous, is_leader) as leaders:
        if leaders is not None:
            loaded = tracer.loaded_files() if tracer and not config.stage_keep else frozenset()
            lease, outcome = NodeLeader(leaders, roots, config).run(known, loaded)
    path = rendezvous.exchange(
        STAGING, (place.node_rank, outcome), lambda outcomes: mirror_paths(outcomes, rendezvous.hosts))
    if lease is None and path:
        lease = mirror.acquire_shared(path)
    if lease is not None:
        redirect_imports(lease, roots)
        if tracer is not None:
            tracer.mirror = os.path.realpath(lease.root)
    staged = StagedEnvironment(lease, tracer, record, known, config.stage_keep)
    atexit.register(staged.end)


def common_roots(facts: Sequence[dict[str, tuple[int, int]] | None]) -> list[tuple[str, ...]]:
    """Return for each rank the roots that are the same on all nodes; called on rank 0, which warns about others."""
    nodes = [roots for roots in facts if roots is not None]
    same = tuple(root for root, status in nodes[0].items() if all(node.get(root) == status for node in nodes))
    different = sorted({root for node in nodes for root in node} - {*same})
    if different:
        warn([f"not-staged: nodes see different folders at {join_names(different)}; {USING_ORIGINALS}"])
    elif not same:
        warn(["not-staged: Python's environment is not on a shared file system"])
    return [same] * len(facts)


def mirror_paths(facts: Sequence[tuple[int, Outcome | None]], hosts: Sequence[str]) -> list[str]:
    """Return for each rank its node's mirror, "" for none; called on rank 0, which warns about problems."""
    outcomes = {node: (host, outcome) for host, (node, outcome) in zip(hosts, facts, strict=True) if outcome}
    for problem in sorted({outcome.problem for _, outcome in outcomes.values()} - {""}):
        affected = [host for host, outcome in outcomes.values() if outcome.problem == problem]
        nodes = f" (on {fold_hosts(affected)})" if len(affected) < len(outcomes) else ""
        warn([f"not-staged: {problem}{nodes}; {USING_ORIGINALS}"])
    if left_out := sorted({path for _, outcome in outcomes.values() for path in outcome.left_out}):
        warn([f"not-staged: files changed during copying or are unreadable: {join_names(left_out)}; {USING_ORIGINALS}"])
    return [outcomes[node][1].path for node, _ in facts]


@contextlib.contextmanager
def node_leaders(rendezvous: Rendezvous, is_leader: bool) -> Iterator[Rendezvous | None]:
    """Yield a rendezvous of each node's local rank 0; None on other ranks. Collective."""
    from mpi4py import MPI

    from ..bootstrap.mpi_communicator import MpiCommunicator

    comm = rendezvous.comm.Split(0 if is_leader else MPI.UNDEFINED, rendezvous.rank)
    if not is_leader:
        yield None
        return
    leaders = Rendezvous(MpiCommunicator(comm), rendezvous.remaining_s, time.monotonic())
    comm.Free()
    leaders.job_ranks, leaders.hosts = zip(*leaders.comm.allgather((rendezvous.rank, hostname())), strict=True)
    yield leaders
    leaders.close()


class NodeLeader:
    """Makes a mirror of the environment's roots on its node, together with the leaders of the other nodes."""

    def __init__(self, rendezvous: Rendezvous, roots: tuple[str, ...], config: LaunchConfig) -> None:
        self._rendezvous, self._roots, self._keep = rendezvous, roots, config.stage_keep
        self._targets = mirror.target_dirs(config.stage, os.environ)
        self._deadline = time.monotonic() + rendezvous.remaining_s + min(rendezvous.rank, MAX_STAGGER_S)
        self._problem = ""  # why this node gets no mirror
        self._writer: MirrorWriter | None = None
        self._lease: MirrorLease | None = None  # of the mirror in use or being written

    def run(self, known: AccessTrace, loaded: frozenset[str]) -> tuple[MirrorLease | None, Outcome]:
        """Return the lease of this node's mirror, and the outcome. Collective.

        On rank 0, `known` is the trace of earlier starts, and `loaded` the files that all ranks have already loaded.
        """
        paths, ranges = self._from_rank_0(self._plan(known, loaded) if self._rendezvous.rank == 0 else None)
        if not paths:
            return None, Outcome()
        with prefetching(ranges):
            readers = assign_readers(sorted(paths), self._rendezvous.size)
            manifest = self._manifest(readers)
            path = self._acquire(manifest)
            if self._any_node(self._writer is not None):
                self._broadcast(manifest, readers)
            if not self._problem and (self._writer is not None or self._lease is None):
                self._finish(path, manifest, paths)
        if self._lease is None:
            return None, Outcome(problem=self._problem)
        return self._lease, Outcome(self._lease.path, left_out=tuple(self._writer.left_out) if self._writer else ())

    def _plan(self, known: AccessTrace, loaded: frozenset[str]) -> Plan:
        """Return the paths to stage: if an existing mirror on this node has almost all of them, exactly its paths."""
        uncopied = {path for path, touched in known.touched.items()
                    if not touched.is_worth_copying(self._rendezvous.size, self._keep)}
        paths = known.paths - loaded - uncopied
        if not paths:
            return paths, {}
        stamps = (mirror.read_stamp(os.path.join(folder, name)) or frozenset() for folder in self._mirrors_folders()
                  for name in list_names(folder, f"{environment_name(self._roots)}-"))
        existing = min(stamps, key=lambda stamp: len(paths - stamp), default=frozenset())
        if len(paths - existing) <= MAX_MISSING_SHARE * len(paths):
            paths = existing
        return paths, {path: touched.ranges for path, touched in known.touched.items() if path not in paths | loaded}

    def _mirrors_folders(self) -> list[str]:
        return [folder for folder in map(mirror.mirrors_folder, self._targets) if mirror.is_private(folder)]

    def _from_rank_0(self, value: Value | None) -> Value:
        """Return rank 0's value. Collective."""
        self._rendezvous.exchange(STAGING, None, lambda facts: [None] * len(facts))
        shared: Value = self._rendezvous.comm.bcast(value)
        return shared

    def _any_node(self, value: bool) -> bool:
        return self._rendezvous.exchange(STAGING, value, lambda facts: [any(facts)] * len(facts))

    def _manifest(self, readers: dict[str, int]) -> Manifest:
        """Return the manifest of the files in their current state; each node inspects its share."""
        own, nodes = self._rendezvous.rank, self._rendezvous.size
        manifest: Manifest | None = None
        files = [path for path, reader in readers.items() if reader == own]
        folders = [folder for folder in parent_folders(readers, self._roots) if reader_of(folder, nodes) == own]

        def merge(parts: Sequence[Sequence[File | Folder]]) -> list[None]:
            nonlocal manifest
            manifest = make_manifest(self._roots, [entry for part in parts for entry in part])
            return [None] * nodes

        self._rendezvous.exchange("inspecting files", inspect_paths(files, folders, self._roots), merge)
        shared: Manifest = self._rendezvous.comm.bcast(manifest)
        return shared

    def _acquire(self, manifest: Manifest) -> str:
        """Acquire an existing mirror, or a new one unless another job is writing it; return its path, "" if none."""
        name = f"{environment_name(self._roots)}-{manifest.fingerprint()}"
        for folder in self._mirrors_folders():
            mirror.remove_leftovers(folder, name)
            path = os.path.join(folder, name)
            if existing := mirror.acquire_shared(path):
                if is_complete(existing, manifest):
                    self._lease = existing
                    return path
                mirror.release(existing, keep=False)
        target, self._problem = mirror.choose_target(self._targets, sum(file.size for file in manifest.files))
        if self._problem:
            return ""
        path = os.path.join(mirror.mirrors_folder(target), name)
        try:
            self._lease = mirror.acquire_new(path)
        except OSError as error:
            self._problem = f"{path}: {error.strerror}"
        if self._lease is not None:
            self._writer = MirrorWriter(self._lease, manifest)
        return path

    def _broadcast(self, manifest: Manifest, readers: dict[str, int]) -> None:
        """Read this node's share and write all shares. Collective."""
        def write(chunk: Chunk, buffer: memoryview) -> None:
            self._write(lambda writer: writer.write(chunk, buffer))

        broadcast(self._rendezvous, plan_chunks(manifest.files, self._rendezvous.size, readers), self._deadline,
                  lambda chunk: read_chunk(manifest.files, chunk), lambda: self._write(MirrorWriter.begin), write)

    def _write(self, write: Callable[[MirrorWriter], object]) -> None:
        """Write; if that fails, this node gets no mirror but still reads for the others."""
        if self._writer is None or self._lease is None:
            return
        try:
            write(self._writer)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            self._problem = f"{os.path.dirname(self._lease.path)}: {reason}"
            mirror.release(self._lease, keep=False)
            self._writer = self._lease = None

    def _finish(self, path: str, manifest: Manifest, paths: frozenset[str]) -> None:
        """Acquire a lease of the mirror that this job or another job on this node has written."""
        self._write(lambda writer: writer.finish(paths))
        if self._problem:
            return
        if self._lease is not None:
            os.close(self._lease.lock)
        until = time.monotonic() + min(OTHER_JOB_TIMEOUT_S, self._rendezvous.remaining_s)
        try:
            self._lease = poll_until(lambda: mirror.acquire_shared(path), until)
        except TimeoutError:
            self._lease, self._problem = None, f"{path}: another job has not finished writing it"
            return
        if self._writer is None and not is_complete(self._lease, manifest):
            mirror.release(self._lease, keep=False)
            self._lease, self._problem = None, f"{path} is damaged, and another job is using it"
