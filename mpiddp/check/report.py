"""What rank 0 makes of a check: the verdict, the table, and the files that were asked for."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ..base.files import append_suspects, format_os_error, write_json
from ..base.ranks import JobEnv
from ..base.stderr import print_answer, warn, write_line
from ..base.text import fold_hosts
from ..base.version import __version__
from ..discovery import host, schedulers
from . import ODD, PASSES, CheckOptions
from .bench.network import serving
from .bench.timeouts import within
from .controller import Controller, Progress
from .history import History
from .rpc import RpcController
from .stats import findings as all_findings
from .stats.schema import LINK_METRICS, RANK_METRICS, Finding, Link, Measurements, Passes
from .table import EXCLUDE, lines

SUFFIXES = {"B/s": "bytes_per_s", "FLOP/s": "flop_per_s", "B": "bytes", "s": "s", "1/s": "per_s", "": "share"}
UNREDUCED = ("size_bytes", "ranks_through")
Links = dict[str, dict[Link, Passes]]


def as_json(measured: Measurements, findings: Sequence[Finding], notes: Sequence[str]) -> dict[str, Any]:
    """Return what goes into the file.

    Ranks stand in the order of their numbers. `ways` and `by_mpi` go from node to node, `inside` from rank to rank; of
    values there is one for each pass. A metric that nobody has measured has no key.
    """
    return {
        "versions": versions(),
        "ranks": [who._asdict() for who in measured.ranks],
        "own": {named(name): [{"rank": rank, "values": values} for rank, values in sorted(some.items())]
                for name, some in measured.own.items()},
        "ways": links_as_json(measured.links),
        "inside": links_as_json(measured.inside),
        "by_mpi": links_as_json(measured.by_mpi),
        "told": [{"rank": rank, "words": words} for rank, words in sorted(measured.reports.items())],
        "lost": [{"rank": rank, "words": words} for rank, words in sorted(measured.lost.items())],
        "all_reduce": [{"size_bytes": size, "time_s": seconds} for size, seconds in sorted(measured.allreduce.items())],
        "all_reduce_without_end": measured.incomplete_allreduce
        and dict(zip(UNREDUCED, measured.incomplete_allreduce, strict=True)),
        "claims": [{"rank": rank, **{named(name): value for name, value in some.items()}}
                   for rank, some in sorted(measured.claims.items())],
        "unmet": [list(pair) for pair in sorted(measured.unreachable)],
        "unmet_inside": [list(pair) for pair in sorted(measured.unreachable_inside)],
        "findings": [finding_as_json(one) for one in findings],
        "notes": list(notes),
    }


def finding_as_json(finding: Finding) -> dict[str, Any]:
    """Return a finding by the file's names."""
    return {"subject": finding.subject, "words": finding.words, "hosts": finding.hosts, "nodes": finding.nodes,
            "ways": finding.links, "quantity": finding.metric, "ratio": finding.ratio}


def links_as_json(found: Links) -> dict[str, list[dict[str, Any]]]:
    """Return the values of each link, by metric."""
    return {named(name): [{"from": one, "to": two, "values": values} for (one, two), values in sorted(some.items())]
            for name, some in found.items()}


def named(name: str) -> str:
    """Return a metric's name with its unit: shm_write_bytes_per_s."""
    metric = RANK_METRICS.get(name) or LINK_METRICS[name]
    return f"{name.replace('-', '_')}_{SUFFIXES[metric.unit]}"


def versions() -> dict[str, str]:
    """Return the versions of mpiddp, Python, and the packages that measure, as rank 0 has them."""
    found = {"mpiddp": __version__, "python": platform.python_version()}
    for package in ("torch", "mpi4py"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


WRITING_S = 20.0  # a file, in a folder that may be slow
DRAWING_S = 120.0  # with the import of matplotlib, from a file system that may be slow


def inspect(ranks: RpcController, env: JobEnv, asked: CheckOptions, patience_s: float) -> int:
    """Let all ranks measure, show what was found, and return the exit status: ODD where something is odd.

    Raises LocalLaunchError where a rank has not begun after `patience_s`.
    """
    notes = []
    backend = serving(env.backend, env.device)
    if not asked.nodes_only and not backend:
        asked = asked._replace(nodes_only=True)
        notes.append(f"links between ranks are measured over gloo and NCCL, not over {env.backend}")
    history = History(asked.history) if asked.history else None
    controller = Controller(ranks, env.world_size, patience_s, Progress())
    controller.compare_clocks()
    measured = controller.run(1 if asked.quick else PASSES, not asked.nodes_only)
    findings = [*all_findings.find(measured), *(history.compare(measured) if history else ())]
    notes += all_findings.notes(measured, backend or env.backend)
    if asked.quick:
        notes.insert(0, "--quick is a single pass, which may err: check again without it before a node is given back")
    lost = print_answer("\n".join([head(env.backend), *lines(measured, findings, notes, exclusion())]))
    warn(history.keep(measured) if history else ())
    keep(measured, findings, notes, asked)
    return ODD if findings else lost


def exclusion() -> str:
    """Return the option by which the job's scheduler, or mpiddp.supervise, leaves hosts out, with {} for them."""
    scheduler = schedulers.find_scheduler(os.environ)
    return (scheduler and scheduler.exclude) or EXCLUDE


def head(backend: str) -> str:
    """Return a line of when and with what a check was made, for whoever reads its table later."""
    job = schedulers.name_logs(os.environ)
    return ", ".join([time.strftime("%Y-%m-%d %H:%M"), *([f"job {job}"] if job else []), backend,
                      host.describe_software("")])


def keep(measured: Measurements, findings: Sequence[Finding], notes: Sequence[str], asked: CheckOptions) -> None:
    """Write the files that were asked for; warn of those whose folders do not answer."""
    suspects = [(host, one.words) for one in findings for host in one.hosts]
    files: tuple[tuple[str, float, Callable[[], None]], ...] = (
        (asked.suspects, WRITING_S, lambda: append_suspects(asked.suspects, suspects)),
        (asked.json, WRITING_S, lambda: write_json(asked.json, as_json(measured, findings, notes))),
        (asked.svg, DRAWING_S, lambda: draw(asked.svg, measured, findings)))
    for path, limit_s, write in files:
        try:
            if path:
                within(limit_s, write)
        except TimeoutError:
            warn([f"{path} is not written: it has not answered within {limit_s:g} s"])


def draw(path: str, measured: Measurements, findings: Sequence[Finding]) -> None:
    """Draw the picture, or say why that cannot be done."""
    from . import drawing

    try:
        drawing.write(path, measured, findings, f"{len(measured.ranks):,} ranks on {nodes_of(measured)}")
    except ImportError as error:
        write_line(f"mpiddp.check: cannot draw {path}: {error} (pip install matplotlib)")
    except Exception as error:  # a library that draws may raise anything
        words = format_os_error(error, path) if isinstance(error, OSError) else error
        write_line(f"mpiddp.check: cannot draw {path}: {words}")


def nodes_of(measured: Measurements) -> str:
    """Return the nodes in words."""
    return fold_hosts(one.host for one in measured.ranks)
