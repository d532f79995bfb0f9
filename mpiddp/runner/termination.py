"""How a rank ends: alone and in order, or with the whole job because it failed."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from ..agent.client import AgentClient
from ..agent.protocol import EndDecision
from ..base.config import LaunchConfig
from ..base.errors import EndTimeoutError
from ..base.files import parse_stream_path, write_file
from ..base.ranks import RankIdentity
from ..base.stderr import LAUNCHER_FORWARDING_S, write_line
from ..base.termination import (
    abort,
    c_exit,
    flush,
    flush_and_wait,
    flush_files,
    flush_streams,
    hard_exit,
    run_exit_functions,
    to_c_int,
)
from ..base.text import truncate_middle
from ..base.timeouts import run_briefly
from ..failure import exception
from ..failure.report import format_error_file, print_failure
from ..failure.root_cause import MAX_STACK_CHARS, Report, ReportKind, RootCause
from ..output import index
from ..output.redirect import Output, OutputTarget, keep_streams_open, make_flush_fail
from ..planning.environment import Endpoint
from ..where import progress
from . import teardown
from .signals import ignore_clean_exits, mute_handlers, restore_dispositions

UNKNOWN_EXIT_CAUSE = "raised SystemExit (exit status unknown) while other ranks waited for it"
MAX_REPORT_ATTEMPTS = 20  # a signal's handler may interrupt each
ERROR_FILE_TIMEOUT_S = 0.5  # to write --error-file without an agent
LOSS_QUERY_TIMEOUT_S, LOSS_QUERY_FAILED_TIMEOUT_S = 1.0, 0.1  # for the relay's answer; the latter if the rank failed


class Termination:
    """Ends the process that created it; processes that it forked only end themselves."""

    def __init__(
        self, mpi: Any, agent: AgentClient, member: RankIdentity, output: Output, config: LaunchConfig
    ) -> None:
        self._mpi, self._agent, self._member, self._output = mpi, agent, member, output
        self._python_exit, self._full = config.python_exit, config.full_traceback
        self._pid = os.getpid()
        self.status = 0  # with which this process will exit, as far as is known
        self.main_globals: dict[str, Any] | None = None  # of a program with its own main()
        self._relay_socket = -1  # over which the agent reaches the relay
        self._leave: Callable[[], object] = bool
        self._exit_hook = hard_exit  # what os._exit is
        self._loaded: frozenset[str] = frozenset()  # the modules before the script
        self._has_script = False  # whose modules are to be dropped
        self._flush_error = ""  # of stdout or stderr
        self._recorded_status: int | None = None  # in the index of the logs
        # If this rank fails:
        self._decision: EndDecision | None = None
        self._decision_lock = threading.RLock()
        self._report_attempts = 0
        self._traceback_printed = self._report_printed = False
        self._grace_timer: threading.Thread | None = None

    def is_own_process(self) -> bool:
        """Return whether this is the rank's own process, not one that it has forked."""
        return os.getpid() == self._pid

    def join_agents(self, endpoint: Endpoint) -> None:
        """Register this rank's agent with the coordinator; from now on it may ask this process to end itself."""
        self._agent.register(self._member, endpoint, self._end_on_request)

    def redirect_output(self, target: OutputTarget) -> None:
        """Send this process's output to a target from now on."""
        self._relay_socket = self._output.start(target)

    @property
    def terminal(self) -> int:
        """The descriptor of the terminal's stderr, even if this process's own stderr is redirected."""
        return self._output.terminal_fd

    def watch_script(self, leave: Callable[[], object]) -> None:
        """Watch how this process ends, from the start of the script on; see watch_process()."""
        faulthandler.disable()
        restore_dispositions()
        if not self._python_exit:
            self._loaded = teardown.freeze_loaded()
        self.watch_process(leave)

    def watch_process(self, leave: Callable[[], object]) -> None:
        """Watch how this process ends, until release().

        If the program calls os._exit(0), `leave` is called first, because launchers treat such an exit as a crash. With
        another status it fails as by sys.exit(). Its objects are not destroyed, as under Python.
        """
        self._agent.watch_script(self._relay_socket)
        if self._relay_socket >= 0:
            os.close(self._relay_socket)  # the agent has it
        self._leave, self._has_script = leave, True

        @functools.wraps(hard_exit)
        def _exit(status: int) -> NoReturn:
            status = to_c_int(status)
            if self.is_own_process():
                self._has_script = False
                if status & 0xFF:
                    rank, host = self._member.rank, self._member.host
                    self.fail(exception.make_exit_report(status, sys._getframe(1), rank, host))
                leave()
                c_exit(self._output.exit_status(0))
            hard_exit(status)

        os._exit = self._exit_hook = _exit

    def release(self) -> None:
        """Undo watch_process(); this process continues without a job."""
        if os._exit is self._exit_hook:
            os._exit = hard_exit
        self._output.finish()
        self._agent.detach()
        if self.close():
            make_flush_fail()

    # In order

    def finish(self, status: int = 0, at_end: Callable[[], object] = bool) -> NoReturn:
        """End this process in order, without the interpreter's slow tear-down; also in a child that the script forked.

        As in Python, threads are joined first, then atexit functions are called, then the script's modules are dropped;
        those of libraries are not. After that this rank leaves the job: a script's objects may still use it. A script
        that handles signals may do so while this rank waits for others, and keeps its modules until then. `at_end` is
        called in this rank while the modules still exist. Finally C's exit functions run, the last one registered
        first, down to those that skip_exit_functions() skips.
        """
        atexit.unregister(self._leave)
        run_exit_functions()  # which a handler may still cut short by sys.exit(0)
        ignore_clean_exits()
        if self.is_own_process():
            at_end()
        if teardown.is_handling_signals():
            flush_files()
        else:
            self.drop_script()
        self._leave()
        self.drop_script()
        status = self._output.exit_status(status, self._flush_error or flush())
        self._record_status(status)
        c_exit(status)

    def drop_script(self) -> None:
        """Drop the script's modules, unless that is done; its objects, such as open files, go with them.

        Then signals are no longer handled, because the script's handlers would lack their modules.
        """
        if not self._has_script:
            return
        self._has_script = False
        if teardown.is_handling_signals():
            mute_handlers()
        self._flush_error = flush()
        with keep_streams_open():
            teardown.drop_modules(self._loaded, self._grace_timer, self.main_globals)
        flush()

    def announce_script_end(self, exit_line: str | None = None) -> None:
        """Report to the agents that the script has ended; its output is flushed before.

        `exit_line` is the line at which it raised a SystemExit of unknown status, None if it did not.
        """
        flush()
        self._agent.report_script_ended(None if exit_line is None else Report(
            self._member.rank, self._member.host, ReportKind.ERROR, UNKNOWN_EXIT_CAUSE, 1, exit_line))

    def describe_unfinished(self) -> str:
        """Return the ranks whose script has not ended, with their places, as text; empty if they are unknown."""
        return self._agent.unfinished_ranks()

    def has_lost_log(self) -> bool:
        """Return whether the log has lost some of what was written so far, as far as is known."""
        self._flush_error = flush() or self._flush_error
        return self._output.query_log_loss(LOSS_QUERY_TIMEOUT_S) >= 0

    def exits_nonzero(self) -> bool:
        """Return whether this rank, which ends in order, will exit with another status than 0, as far as is known."""
        return bool(self._flush_error) or self._output.exit_status(self.status) != 0

    def flush_output(self) -> None:
        """Wait, not for long, until the terminal shows what all ranks have written, if that is folded."""
        self._output.flush()

    def close(self) -> bool:
        """End the relay and the agent of this process after it left the job; return whether output was lost."""
        is_lost = self._output.finish()
        self._record_status(self._output.exit_status(self.status))
        self._agent.dismiss()
        return is_lost

    # By a failure

    @property
    def has_failed(self) -> bool:
        """Whether the job ends because of this rank's report."""
        return self._decision is not None

    def fail_by_exception(self, error: BaseException) -> int:
        """End the job because the script raised, with Python's status for that; a forked child ends only itself.

        Before that, the script's sys.excepthook, threads and atexit functions have --abort-grace to end. With
        `python_exit` the interpreter runs them: then this returns the status, and end_after_failure() has to be the
        last atexit function.
        """
        if not self.is_own_process():
            exception.print_exception(error, self._full)
            exception.release_frames(error)
            self.finish(exception.find_script_status(error))
        error = self.report_exception(error)
        assert self._decision
        self._print_failure(self._decision, error)
        if not self._traceback_printed:
            with contextlib.suppress(BaseException):  # of the hook
                exception.run_user_hook(error)
        if not self._python_exit:
            with contextlib.suppress(BaseException):  # the reason is printed already
                run_exit_functions()
            exception.release_frames(error)
            self.end_after_failure()
        return self._decision.status

    def report_exception(self, error: BaseException) -> BaseException:
        """Report that the script raised; this process lives no longer than --abort-grace from now on.

        Returns the error, or the one that a signal's handler raises meanwhile, as torch's does when a DataLoader's
        worker has died; but not an exit.
        """
        while not self.has_failed:
            try:
                report = exception.make_report(error, self._member.rank, self._member.host)
                decision = self._request_decision(report)
                self._grace_timer = threading.Timer(self._member.grace_s, self._on_grace_expired, (decision, error))
                self._grace_timer.daemon = True
                with contextlib.suppress(RuntimeError):  # if no thread can be started, the agent ends us
                    self._grace_timer.start()
            except BaseException as other:
                error = error if isinstance(other, SystemExit) else other
        return error

    def fail_at_end(self, error: BaseException, is_printed: bool = False, where: str = "") -> NoReturn:
        """End the job because this rank could not leave it in order; its threads and atexit functions have ended.

        If the error `is_printed`, it is not printed again. `where` is its line, if its traceback lacks it.
        """
        if isinstance(error, EndTimeoutError):
            self.fail(Report(self._member.rank, self._member.host, ReportKind.SECONDARY, str(error), 1))
        report = exception.make_report(error, self._member.rank, self._member.host)
        where = where if error.__context__ is None else ""
        self.fail(report._replace(where=where or report.where), None if is_printed else error)

    def fail(self, report: Report, error: BaseException | None = None) -> NoReturn:
        """End the job at once; print the reason, unless another rank failed first."""
        while not self.has_failed:
            with contextlib.suppress(BaseException):  # of a signal's handler
                self._request_decision(report)
        assert self._decision
        self._print_failure(self._decision, error)
        if error is not None:
            exception.release_frames(error)
        self.end_after_failure()

    def end_after_failure(self) -> NoReturn:
        """End the job when this rank, which has failed, has nothing more to do."""
        assert self._decision
        with contextlib.suppress(BaseException):
            self.drop_script()
        self._agent.report_cleanup_done()
        flush_streams()
        self._output.finish()
        self._record_status(self.status or self._decision.status)
        flush()
        if self._report_printed:  # else do not wait: if ranks exit by themselves, Slurm kills late ones
            time.sleep(LAUNCHER_FORWARDING_S)
        if not self._decision.abort:
            time.sleep(self._member.grace_s + 1)  # the rank that aborts ends this one
        self.end_job(self._decision.status)

    def end_job(self, status: int) -> NoReturn:
        """End the job on every rank with a status; see `RankIdentity.exits`."""
        self._output.flush()
        if self._recorded_status is None:
            self._record_status(status)
        if not self._member.exits:
            abort(self._mpi, status)
        hard_exit(status)

    def _end_on_request(self, status: int) -> NoReturn:
        """End the job at the agent's request, wherever the script is."""
        flush_files()
        self.end_job(status)

    def _request_decision(self, report: Report) -> EndDecision:
        """Report this rank's failure, and return what the coordinator decides; only the first report counts."""
        with self._decision_lock:
            self._report_attempts += 1
            if self._report_attempts > MAX_REPORT_ATTEMPTS:
                self._decision = self._decision or EndDecision(RootCause(report), report.status, True)
            if self._decision is None:
                if threading.current_thread() is threading.main_thread():
                    signal.signal(signal.SIGINT, signal.SIG_IGN)  # MPICH's launcher sends it to a failed job's ranks
                flush()
                self.status = report.status
                decision = self._agent.report_failure(report)
                mute_handlers()
                self._decision = decision
            return self._decision

    def _print_failure(self, decision: EndDecision, error: BaseException | None) -> None:
        """Print the traceback and the report, if this rank has to."""
        if (verdict := decision.verdict) is None or self._report_printed:
            return
        stack = exception.format_exception(error) if error is not None and not verdict.outside else ""
        if stack and error is not None:
            self._traceback_printed = True
            exception.print_exception(error, self._full)
            self._output.tee_to_terminal(stack)
        self._print_report(verdict, stack)

    def _print_report(self, verdict: RootCause, stack: str = "") -> None:
        """Print the report, write --error-file, and tell the agent that the reason is printed."""
        if self._report_printed:
            return
        self._report_printed = True
        after_s = time.monotonic() - self._agent.start
        lost = self._output.query_log_loss(LOSS_QUERY_FAILED_TIMEOUT_S)
        self._output.tee_to_terminal(print_failure(verdict, self._member, after_s, lost, self._output.print_unfolded))
        index.try_update_record(self._member.log, is_first=verdict.first.rank == self._member.rank)
        path = self._member.error_file
        stack = truncate_middle(stack, MAX_STACK_CHARS)
        error_record = format_error_file(verdict, self._member, progress.step_count(), stack) if path else ""
        is_stream = parse_stream_path(path) >= 0  # of this process alone
        if (not self._agent.report_printed("" if is_stream else error_record) or is_stream) and error_record:
            run_briefly(lambda: write_file(path, error_record), ERROR_FILE_TIMEOUT_S)

    def _record_status(self, status: int) -> None:
        """Record this process's exit status in the index of the logs."""
        if self.is_own_process() and status != self._recorded_status:
            self._recorded_status = status
            index.try_update_record(self._member.log, status)

    def _on_grace_expired(self, decision: EndDecision, error: BaseException) -> NoReturn:
        """End the job now: --abort-grace is over."""
        if decision.verdict is not None:
            stack = exception.format_exception(error)
            if stack and not self._traceback_printed:
                write_line(stack)
            self._print_report(decision.verdict, stack)
            write_line(f"mpiddp: ending rank {self._member.rank} on {self._member.host}: its cleanup took longer than "
                       f"{self._member.grace_s:g} s (raise --abort-grace to allow more)")
        flush_and_wait()
        self.end_job(decision.status)
