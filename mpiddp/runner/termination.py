"""How a rank ends, before Python's own exit: in order together with the others, or because it has failed."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import mmap
import os
import sys
import threading
from collections.abc import Callable
from importlib import import_module
from typing import NoReturn

from ..agent.client import AgentClient
from ..agent.protocol import AllFinished
from ..base.config import LaunchConfig
from ..base.errors import LaunchError
from ..base.ranks import RankIdentity
from ..base.termination import abort, abort_at_exit, exit_by_c, flush, flush_files, hard_exit, to_c_int
from ..failure import exception
from ..failure.root_cause import Report, ReportKind
from ..planning.environment import Endpoint
from ..systems.statuses import EXIT_CANNOT_START
from .signals import HandlerGuard, restore_dispositions

RESERVE_BYTES = 16 * 2**20  # of address space, for the report of a rank that has no more


class Termination:
    """Ends the process that created it, a rank; processes that it forked only end themselves."""

    def __init__(self, agent: AgentClient, member: RankIdentity, config: LaunchConfig, can_abort: bool = False) -> None:
        """`can_abort`: Open MPI's mpirun has started this rank."""
        self._agent, self._member = agent, member
        self._full = config.full_traceback
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._can_abort, self._aborts_at_exit = can_abort, False
        self._failed_status: int | None = None  # the job's, once it ends because of this rank's report
        self._has_printed = False  # the traceback
        self._reserve = mmap.mmap(-1, RESERVE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # never touched

    def is_own_process(self) -> bool:
        """Return whether this is the rank's own process, not one that it has forked."""
        return os.getpid() == self._pid

    def join_agents(self, endpoint: Endpoint) -> None:
        """Register this rank's agent with the coordinator; from now on the ranks end together."""
        self._agent.register(self._member, endpoint)

    def begin_script(self, leave: Callable[[], object]) -> None:
        """Let the agent see the script from its start on.

        If it calls os._exit(0), `leave` is called first, because launchers treat an exit without MPI_Finalize as
        a crash. With another status it fails as by sys.exit(). What is loaded by now is excluded from garbage
        collections: so the one at the end takes 1 ms instead of 100.
        """
        faulthandler.disable()
        restore_dispositions()
        for name in ("traceback", "mpiddp.failure.workers"):  # a rank that fails may have no descriptor left
            import_module(name)
        gc.freeze()
        self._agent.begin_script()

        @functools.wraps(hard_exit)
        def _exit(status: int) -> NoReturn:
            status = to_c_int(status)
            if self.is_own_process():
                if status & 0xFF:
                    self._reserve.close()
                    HandlerGuard()
                    report = functools.partial(
                        exception.make_exit_report, status, sys._getframe(1), self._member.rank, self._member.host)
                    exception.call_safely(lambda: self.fail(report()), None)
                    exception.call_safely(leave, None)
                else:
                    leave()
                if self._aborts_at_exit:
                    exit_by_c(status)
            hard_exit(status)

        os._exit = _exit

    # In order

    def await_all_finished(self, calls: int) -> AllFinished | None:
        """Report that the script has finished, and return when all ranks' have; None if the job ends instead.

        A handler of the script's may meanwhile raise SystemExit(0), which changes nothing: its exit functions have run.
        """
        flush()
        while True:
            try:
                end = self._agent.await_all_finished(calls)
                return end if isinstance(end, AllFinished) else None
            except SystemExit as error:
                if exception.find_script_status(error):
                    raise

    def leave(self, status: int) -> None:
        """Tell the agent that this rank has left MPI and the job, and ends with a status."""
        self._agent.leave(status)

    # By a failure

    @property
    def has_failed(self) -> bool:
        """Whether the job ends because of this rank's report."""
        return self._failed_status is not None

    def fail_by_exception(self, error: BaseException, advice: str = "") -> int:
        """End the job because the script raised; return the status with which this process has to end.

        The report ends its cause with `advice`, if there is any.
        The script's sys.excepthook, threads and atexit functions have --abort-grace to end. A process that the script
        has forked only prints its exception.
        """
        self._reserve.close()
        if not self.is_own_process():
            exception.print_exception(error, self._full)
            return exception.find_script_status(error)
        guard = HandlerGuard()
        for _ in range(2):  # once more if the memory ends meanwhile, for example
            if self._failed_status is None:
                exception.call_safely(lambda: self._report(error, advice, guard), None)
        guard.end()
        if not self._has_printed:
            with contextlib.suppress(BaseException):  # of the hook
                exception.run_user_hook(error)
        if isinstance(error, SystemExit):  # others are sys.last_value
            exception.release_frames(error)
        return exception.find_script_status(error) if self._failed_status is None else self._failed_status

    def _report(self, error: BaseException, advice: str, guard: HandlerGuard) -> None:
        report = exception.make_report(error, self._member.rank, self._member.host)
        report = report._replace(cause="; ".join(filter(None, (report.cause, advice))))
        self.fail(report, functools.partial(self._print, error, guard))

    def _print(self, error: BaseException, guard: HandlerGuard) -> str:
        """Print the traceback of this rank, which was the first to fail, and return it as Python would print it.

        The script's own sys.excepthook can be interrupted by its handlers.
        """
        if self._has_printed:
            return ""
        self._has_printed = True
        from ..failure.traceback import is_default_hook  # as in exception.py

        guard.is_active = is_default_hook(sys.excepthook)
        exception.print_exception(error, self._full)
        guard.is_active = True
        flush()
        return exception.format_exception(error)

    def fail(self, report: Report, print_stack: Callable[[], str] = str) -> int:
        """End the job for the reason in `report`, and return the job's status; see AgentClient.report_failure()."""
        with self._lock:
            if self._failed_status is None:
                flush()
                self._failed_status = self._agent.report_failure(report, print_stack)
            return self._failed_status

    def abort(self) -> None:
        """End the job by Open MPI's MPI_Abort, if that is what started it; the last act of a rank that has failed.

        Open MPI's mpirun would take two seconds to end, and would print a page, if the agents exited by themselves.
        C's exit() does it, after Python's own end.
        """
        if not (self._can_abort and self.is_own_process()):
            return
        HandlerGuard()  # the agent ends the rank's children meanwhile
        for act in (flush_files, flush):  # Python's end, which closes them, may be cut short
            exception.call_safely(act, None)
        status = self._agent.await_abort(self._member.grace_s)
        if status is None:
            return
        MPI = sys.modules["mpi4py.MPI"]
        self._aborts_at_exit = exception.call_safely(lambda: abort_at_exit(MPI, status), False)
        if not self._aborts_at_exit:
            abort(MPI, status)

    def refuse(self, error: LaunchError, text: str) -> NoReturn:
        """Print why this rank cannot start, and end the job."""
        self._agent.show_text(text)
        report = Report(self._member.rank, self._member.host, ReportKind.ERROR, error.name, EXIT_CANNOT_START)
        self._failed_status = self._agent.report_refusal(report)
        flush()
        hard_exit(EXIT_CANNOT_START)
