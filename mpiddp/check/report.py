"""The results of a check on rank 0: compare, print the table, write the files."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ..base.files import append_suspects, write_json
from ..base.stderr import print_answer, warn
from ..base.timeouts import run_with_timeout
from ..base.version import __version__
from ..discovery import host, schedulers
from . import EXIT_OUTLIERS, CheckOptions
from .stats import findings as all_findings
from .stats.schema import LINK_METRICS, RANK_METRICS, CheckFinding, Link, Measurements, Passes
from .table import EXCLUDE, render

JSON_UNITS = {"B/s": "bytes_per_s", "FLOP/s": "flop_per_s", "B": "bytes", "s": "s", "1/s": "per_s", "": "share"}
WRITE_TIMEOUT_S = 20.0  # of a file, in a folder that may be slow


def report_results(measured: Measurements, backend: str, pairwise: str, options: CheckOptions) -> int:
    """Print and write the results, and return the exit status.

    `pairwise` is the part of the backend that serves the device; empty if it cannot measure links between two ranks.
    """
    findings = all_findings.find_all(measured)
    notes = all_findings.notes(measured, pairwise or backend)
    if not options.nodes_only and not pairwise:
        notes.insert(0, f"links between ranks were not measured: {backend} is not supported, only gloo and NCCL")
    if options.quick:
        notes.insert(0, "--quick makes a single pass, which can be wrong: repeat without it before you report a node")
    scheduler, job = schedulers.find_scheduler(os.environ), schedulers.name_logs(os.environ)
    header = ", ".join([time.strftime("%Y-%m-%d %H:%M"), *([f"job {job}"] if job else []), backend,
                        host.describe_software("")])
    exclude = (scheduler and scheduler.exclude) or EXCLUDE
    status = print_answer("\n".join([header, *render(measured, findings, notes, exclude)]))
    write_files(measured, findings, notes, options)
    return EXIT_OUTLIERS if findings else status


def write_files(
    measured: Measurements, findings: Sequence[CheckFinding], notes: Sequence[str], options: CheckOptions
) -> None:
    """Write the files of the options; warn if a folder does not respond."""
    suspects = [(host, finding.text) for finding in findings for host in finding.hosts]
    files: tuple[tuple[str, Callable[[], None]], ...] = (
        (options.suspects, lambda: append_suspects(options.suspects, suspects)),
        (options.json, lambda: write_json(options.json, as_json(measured, findings, notes))))
    for path, write in files:
        try:
            if path:
                run_with_timeout(WRITE_TIMEOUT_S, write)
        except TimeoutError:
            warn([f"{path} was not written: no response within {WRITE_TIMEOUT_S:g} s"])


def as_json(measured: Measurements, findings: Sequence[CheckFinding], notes: Sequence[str]) -> dict[str, Any]:
    """Return the content of the --json file, which README.md describes; a metric without measurements has no key."""
    incomplete = measured.incomplete_allreduce
    return {
        "versions": _versions(),
        "ranks": [info._asdict() for info in measured.ranks],
        "by_rank": {_json_name(name): [{"rank": rank, "values": values} for rank, values in sorted(by_rank.items())]
                    for name, by_rank in measured.by_rank.items()},
        "links": links_as_json(measured.links),
        "inside_links": links_as_json(measured.inside_links),
        "mpi_links": links_as_json(measured.mpi_links),
        "all_reduce": [{"size_bytes": size, "time_s": time_s} for size, time_s in sorted(measured.allreduce.items())],
        "incomplete_all_reduce": incomplete and {"size_bytes": incomplete[0], "ranks_completed": incomplete[1]},
        "reports": [{"rank": rank, "lines": lines} for rank, lines in sorted(measured.reports.items()) if lines],
        "lost": [{"rank": rank, "reason": reason} for rank, reason in sorted(measured.lost.items())],
        "unreachable": [list(pair) for pair in sorted(measured.unreachable)],
        "unreachable_inside": [list(pair) for pair in sorted(measured.unreachable_inside)],
        "findings": [finding._asdict() | {"subject": finding.subject.value} for finding in findings],
        "notes": list(notes),
    }


def links_as_json(metrics: Mapping[str, Mapping[Link, Passes]]) -> dict[str, list[dict[str, Any]]]:
    """Return the values of each link by metric."""
    return {_json_name(name): [{"from": link[0], "to": link[1], "values": values}
                              for link, values in sorted(links.items())] for name, links in metrics.items()}


def _json_name(name: str) -> str:
    # with the unit: shm_write_bytes_per_s
    metric = RANK_METRICS.get(name) or LINK_METRICS[name]
    return f"{name.replace('-', '_')}_{JSON_UNITS[metric.unit]}"


def _versions() -> dict[str, str]:
    installed = {"mpiddp": __version__, "python": platform.python_version()}
    for package in ("torch", "mpi4py"):
        try:
            installed[package] = version(package)
        except PackageNotFoundError:
            continue
    return installed
