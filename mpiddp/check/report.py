"""Rank 0's check: measure, compare, print the table, write the files."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ..base.files import append_suspects, format_os_error, write_json
from ..base.ranks import JobEnv
from ..base.stderr import print_answer, warn, write_line
from ..base.text import fold_hosts
from ..base.version import __version__
from ..discovery import host, schedulers
from . import EXIT_OUTLIERS, PASSES, CheckOptions, drawing
from .bench.network import pairwise_backend
from .bench.timeouts import run_with_timeout
from .controller import Controller
from .history import History
from .rpc import RpcController
from .stats import findings as all_findings
from .stats.schema import LINK_METRICS, RANK_METRICS, Finding, Link, Measurements, Passes
from .table import EXCLUDE, render

JSON_UNITS = {"B/s": "bytes_per_s", "FLOP/s": "flop_per_s", "B": "bytes", "s": "s", "1/s": "per_s", "": "share"}
WRITE_TIMEOUT_S = 20.0  # of a file, in a folder that may be slow
DRAW_TIMEOUT_S = 120.0  # including the import of matplotlib from a file system that may be slow


def run_check(ranks: RpcController, env: JobEnv, options: CheckOptions, startup_timeout_s: float) -> int:
    """Run the check, print and write its results, and return the exit status.

    Raises LocalLaunchError if a rank is not ready within `startup_timeout_s`.
    """
    notes = []
    backend = pairwise_backend(env.backend, env.device)
    if not options.nodes_only and not backend:
        options = options._replace(nodes_only=True)
        notes.append(f"links between ranks were not measured: {env.backend} is not supported, only gloo and NCCL")
    controller = Controller(ranks, env.world_size, startup_timeout_s)
    controller.compare_clocks()
    measured = controller.run_passes(1 if options.quick else PASSES, not options.nodes_only)
    history = History(options.history, {info.host for info in measured.ranks}) if options.history else None
    findings = [*all_findings.find_all(measured), *(history.compare(measured) if history else ())]
    notes += all_findings.notes(measured, backend or env.backend)
    if options.quick:
        notes.insert(0, "--quick makes a single pass, which can be wrong: repeat without it before you report a node")
    scheduler, job = schedulers.find_scheduler(os.environ), schedulers.name_logs(os.environ)
    header = ", ".join([time.strftime("%Y-%m-%d %H:%M"), *([f"job {job}"] if job else []), env.backend,
                        host.describe_software("")])
    exclude = (scheduler and scheduler.exclude) or EXCLUDE
    status = print_answer("\n".join([header, *render(measured, findings, notes, exclude)]))
    warn(history.append(measured) if history else ())
    write_files(measured, findings, notes, options)
    return EXIT_OUTLIERS if findings else status


def write_files(
    measured: Measurements, findings: Sequence[Finding], notes: Sequence[str], options: CheckOptions
) -> None:
    """Write the files of the options; warn if a folder does not respond."""
    suspects = [(host, finding.text) for finding in findings for host in finding.hosts]
    files: tuple[tuple[str, float, Callable[[], None]], ...] = (
        (options.suspects, WRITE_TIMEOUT_S, lambda: append_suspects(options.suspects, suspects)),
        (options.json, WRITE_TIMEOUT_S, lambda: write_json(options.json, as_json(measured, findings, notes))),
        (options.svg, DRAW_TIMEOUT_S, lambda: draw(options.svg, measured, findings)))
    for path, limit_s, write in files:
        try:
            if path:
                run_with_timeout(limit_s, write)
        except TimeoutError:
            warn([f"{path} was not written: no response within {limit_s:g} s"])


def draw(path: str, measured: Measurements, findings: Sequence[Finding]) -> None:
    """Draw the picture, or print why that failed."""
    title = f"{len(measured.ranks):,} ranks on {fold_hosts(info.host for info in measured.ranks)}"
    try:
        drawing.write_picture(path, measured, findings, title)
    except ImportError as error:
        write_line(f"mpiddp.check: cannot draw {path}: {error} (pip install matplotlib)")
    except Exception as error:  # matplotlib may raise anything
        reason = format_os_error(error, path) if isinstance(error, OSError) else error
        write_line(f"mpiddp.check: cannot draw {path}: {reason}")


def as_json(measured: Measurements, findings: Sequence[Finding], notes: Sequence[str]) -> dict[str, Any]:
    """Return the content of the --json file.

    Ranks are in rank order. `ways` and `by_mpi` go from node to node, `inside` from rank to rank; `values` has one
    value for each pass. A metric without measurements has no key.
    """
    incomplete = measured.incomplete_allreduce
    return {
        "versions": _versions(),
        "ranks": [info._asdict() for info in measured.ranks],
        "own": {_json_name(name): [{"rank": rank, "values": values} for rank, values in sorted(by_rank.items())]
                for name, by_rank in measured.by_rank.items()},
        "ways": links_as_json(measured.links),
        "inside": links_as_json(measured.inside_links),
        "by_mpi": links_as_json(measured.mpi_links),
        "told": [{"rank": rank, "words": lines} for rank, lines in sorted(measured.reports.items())],
        "lost": [{"rank": rank, "words": doing} for rank, doing in sorted(measured.lost.items())],
        "all_reduce": [{"size_bytes": size, "time_s": time_s} for size, time_s in sorted(measured.allreduce.items())],
        "all_reduce_without_end": incomplete and {"size_bytes": incomplete[0], "ranks_through": incomplete[1]},
        "claims": [{"rank": rank, **{_json_name(name): rate for name, rate in claims.items()}}
                   for rank, claims in sorted(measured.claims.items())],
        "unmet": [list(pair) for pair in sorted(measured.unreachable)],
        "unmet_inside": [list(pair) for pair in sorted(measured.unreachable_inside)],
        "findings": [{"subject": finding.subject.value, "words": finding.text, "hosts": finding.hosts,
                      "nodes": finding.nodes, "ways": finding.links, "quantity": finding.metric,
                      "ratio": finding.ratio} for finding in findings],
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
