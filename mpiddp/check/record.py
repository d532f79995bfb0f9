"""The file of `--json`: all that a check has measured, with units in the names."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ..version import __version__
from .stats.schema import LINK_METRICS, RANK_METRICS, Finding, Link, Measurements, Passes

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
