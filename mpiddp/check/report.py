"""What rank 0 makes of a check: the verdict, the table, and the files that were asked for."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from ..environment import Environment
from ..facts import schedulers, software
from ..facts.files import reason
from ..plan.words import folded
from ..say import answer, say, warn
from ..show.files import note_suspects, write_json
from . import ODD, PASSES, CheckOptions
from .bench.channels import serving
from .bench.timeouts import within
from .controller import Controller
from .history import History
from .progress import Progress
from .record import as_json
from .rpc import RpcController
from .stats import findings as all_findings
from .stats.schema import Finding, Measurements
from .table import EXCLUDE, lines

WRITING_S = 20.0  # a file, in a folder that may be slow
DRAWING_S = 120.0  # with the import of matplotlib, from a file system that may be slow


def inspect(ranks: RpcController, env: Environment, asked: CheckOptions, patience_s: float) -> int:
    """Let all ranks measure, show what was found, and return the exit status: ODD where something is odd.

    Raises LonelyLaunchError where a rank has not begun after `patience_s`.
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
    lost = answer("\n".join([head(env.backend), *lines(measured, findings, notes, exclusion())]))
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
    return ", ".join([time.strftime("%Y-%m-%d %H:%M"), *([f"job {job}"] if job else []), backend, software.stack("")])


def keep(measured: Measurements, findings: Sequence[Finding], notes: Sequence[str], asked: CheckOptions) -> None:
    """Write the files that were asked for; warn of those whose folders do not answer."""
    suspects = [(host, one.words) for one in findings for host in one.hosts]
    files: tuple[tuple[str, float, Callable[[], None]], ...] = (
        (asked.suspects, WRITING_S, lambda: note_suspects(asked.suspects, suspects)),
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
        say(f"mpiddp.check: cannot draw {path}: {error} (pip install matplotlib)")
    except Exception as error:  # a library that draws may raise anything
        words = reason(error, path) if isinstance(error, OSError) else error
        say(f"mpiddp.check: cannot draw {path}: {words}")


def nodes_of(measured: Measurements) -> str:
    """Return the nodes in words."""
    return folded(one.host for one in measured.ranks)
