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

from ..base.config import LaunchConfig
from ..base.errors import EndTimeoutError
from ..base.files import stream_of, write
from ..base.stderr import say
from ..base.termination import (
    abort,
    c_exit,
    c_int,
    flush,
    flush_files,
    flush_streams,
    hard_exit,
    let_through,
    run_exit_functions,
)
from ..base.text import shortened
from ..failure import exception
from ..failure.rank import RankIdentity
from ..failure.report import format_error_file, print_failure
from ..failure.root_cause import MAX_STACK_CHARS, Report, ReportKind, RootCause
from ..output import index
from ..output.redirect import Outlet, Output, keeping_open, let_flush_fail
from ..planning.environment import Endpoint
from ..sentinel.client import SentinelHandle
from ..sentinel.protocol import Ruling
from . import teardown
from .signal_dispositions import give_signals_back, silence_handlers

EXITED = "ended by SystemExit, with a status that only Python knows, while other ranks waited for it"
MOST_ATTEMPTS = 20
WRITING_S = 0.5  # for --error-file, where there is no sentinel to write it
ASKING_S, ASKING_FAILED_S = 1.0, 0.1  # for the relay to say whether the log has lost something


class Ending:
    """Ends the process that made it, but none of the processes that it forked."""

    def __init__(
        self, mpi: Any, sentinel: SentinelHandle, member: RankIdentity, output: Output, config: LaunchConfig
    ) -> None:
        """Keep what belongs to this process."""
        self._mpi, self._sentinel, self._member, self._output = mpi, sentinel, member, output
        self._python_exit, self._full = config.python_exit, config.full_traceback
        self._pid = os.getpid()
        self._outflow = -1  # a socket by which the sentinel reaches the relay
        self._ruling: Ruling | None = None
        self._asking = threading.RLock()
        self._attempts = 0  # to ask the sentinel; a signal's handler may break one off
        self._shown = self._told = False
        self.status = 0  # that this process will exit with, as far as is known
        self._noted: int | None = None  # in the index of the logs
        self._leave: Callable[[], object] = bool
        self._replaced_exit = hard_exit
        self._loaded: frozenset[str] = frozenset()  # the modules that were there before the script
        self.main: dict[str, Any] | None = None  # the globals of a program with its own main()
        self._has_script = False  # whose modules are to be dropped
        self._unwritten = ""  # why its stdout or stderr could not be flushed
        self._limit: threading.Thread | None = None

    def is_ours(self) -> bool:
        """Tell whether this is the rank's process, and not a child of it."""
        return os.getpid() == self._pid

    def join(self, endpoint: Endpoint) -> None:
        """Let the sentinel meet the others': from now on it may ask this process to end itself."""
        self._sentinel.join(self._member, endpoint, self._end_as_told)

    def direct(self, outlet: Outlet) -> None:
        """Send this process's output to an outlet from now on."""
        self._outflow = self._output.begin(outlet)

    @property
    def terminal(self) -> int:
        """The descriptor of the terminal's stderr, wherever this process's own leads."""
        return self._output.terminal

    def watch_script(self, leave: Callable[[], object]) -> None:
        """Prepare for the script: notice whatever ends this process.

        If the script calls os._exit(0), `leave` is called first, because the launcher would take that for
        a crash. With another status it fails as by sys.exit(). Its objects are left as they are, as by Python.
        """
        faulthandler.disable()
        give_signals_back()
        if not self._python_exit:
            self._loaded = teardown.note_loaded()
        self.watch(leave)

    def watch(self, leave: Callable[[], object]) -> None:
        """Notice whatever ends this process, as watch_script() says."""
        self._sentinel.watch_script(self._outflow)
        if self._outflow >= 0:
            os.close(self._outflow)  # the sentinel has it
        self._leave, self._has_script = leave, True

        @functools.wraps(hard_exit)
        def _exit(status: int) -> NoReturn:
            status = c_int(status)
            if self.is_ours():
                self._has_script = False
                if status & 0xFF:
                    self.fail(exception.report_exit(status, sys._getframe(1), self._member.rank, self._member.host))
                leave()
                c_exit(self._output.status(0))
            hard_exit(status)

        os._exit = self._replaced_exit = _exit

    def finish(self, status: int = 0, at_end: Callable[[], object] = bool) -> NoReturn:
        """End this process in order, without the interpreter's slow tear-down; the script's forked children, too.

        As in Python, threads are joined first, then atexit functions are called, then the script's modules are
        dropped; those of libraries are not. After that this rank leaves the job: a script's objects may still use
        it. A script that handles signals may do so while others are waited for, and keeps its modules until then.
        `at_end` is called in this rank while the modules are still there. At last C's exit functions run, the last one
        registered first, down to those that skip_exit_functions() skips.
        """
        atexit.unregister(self._leave)
        run_exit_functions()
        if self.is_ours():
            at_end()
        if teardown.is_handling_signals():
            flush_files()
        else:
            self.drop_script()
        self._leave()
        self.drop_script()
        status = self._output.status(status, self._unwritten or flush())
        self._note(status)
        c_exit(status)

    def drop_script(self) -> None:
        """Drop the script's modules, if that is still to be done; its objects, such as open files, go with them.

        Signals are handled no more if they were, because the script's handlers lack their modules then.
        """
        if not self._has_script:
            return
        self._has_script = False
        if teardown.is_handling_signals():
            silence_handlers()
        self._unwritten = flush()
        with keeping_open():
            teardown.drop(self._loaded, self._limit, self.main)
        flush()

    def left(self, by_exit: str | None = None) -> None:
        """Tell that the script has come to its end: all that it has written is on its way.

        `by_exit` is the line at which it raised a SystemExit of which nobody knows the status, None for no such.
        """
        flush()
        self._sentinel.script_ended(None if by_exit is None else Report(
            self._member.rank, self._member.host, ReportKind.ERROR, EXITED, 1, by_exit))

    def missing(self) -> str:
        """Return in words which ranks have not come to the script's end, empty where that is not known."""
        return self._sentinel.missing()

    def has_lost_log(self) -> bool:
        """Tell whether the log has lost some of what was written so far, as far as that is known."""
        flush()
        return self._output.log_lost(ASKING_S) >= 0

    def close(self) -> bool:
        """End the relay and the sentinel of this process, which has left the job; tell whether output was lost."""
        lost = self._output.end(in_order=True)
        self._note(self._output.status(self.status))
        self._sentinel.dismiss()
        return lost

    def release(self) -> None:
        """Let this process go on without a job."""
        if os._exit is self._replaced_exit:
            os._exit = hard_exit
        self._output.end(in_order=True)
        self._sentinel.release()
        if self.close():
            let_flush_fail()

    @property
    def failed(self) -> bool:
        """Tell whether the job ends because of what this rank has said."""
        return self._ruling is not None

    def fail_by(self, error: BaseException) -> int:
        """End the job because the script raised, with the status that Python gives that; a child ends only itself.

        Before that, the script's sys.excepthook, threads and atexit functions have --abort-grace to end. With
        `python_exit` the interpreter runs them: then return the status, and call end_failed() as the last of them.
        """
        if not self.is_ours():
            exception.print_exception(error, self._full)
            exception.release_frames(error)
            self.finish(exception.find_script_status(error))
        error = self.report(error)
        assert self._ruling
        self._speak(self._ruling, error)
        if not self._shown:
            with contextlib.suppress(BaseException):  # of the hook
                exception.run_user_hook(error)
        if not self._python_exit:
            with contextlib.suppress(BaseException):  # the reason is told already
                run_exit_functions()
            exception.release_frames(error)
            self.end_failed()
        return self._ruling.status

    def report(self, error: BaseException) -> BaseException:
        """Tell the job that the script raised; this process lives no longer than --abort-grace from now on.

        Return the error. If a signal's handler raises meanwhile, as torch's does when a DataLoader's worker has
        died, return that one.
        """
        while not self.failed:
            try:
                ruling = self._ask(exception.report_exception(error, self._member.rank, self._member.host))
                self._limit = threading.Timer(self._member.grace_s, self._cut_off, (ruling, error))
                self._limit.daemon = True
                with contextlib.suppress(RuntimeError):  # if no thread can be started, the sentinel ends us
                    self._limit.start()
            except BaseException as other:
                error = other
        return error

    def end_failed(self) -> NoReturn:
        """End the job after fail_by(), when this process has nothing more to do."""
        assert self._ruling
        with contextlib.suppress(BaseException):
            self.drop_script()
        self._sentinel.through()
        flush_streams()
        self._output.end()
        self._note(self.status or self._ruling.status)
        if self._told:
            let_through()
        else:  # if ranks exit by themselves, Slurm kills the one that is late
            flush()
        if not self._ruling.abort:
            time.sleep(self._member.grace_s + 1)  # the rank that aborts ends this one
        self.end_job(self._ruling.status)

    def fail_leaving(self, error: BaseException, shown: bool = False, where: str = "") -> NoReturn:
        """End the job because this rank could not leave it in order; its threads and atexit functions have ended.

        `shown` tells that the error is on the screen already. `where` is its line, if its traceback lacks it.
        """
        if isinstance(error, EndTimeoutError):
            self.fail(Report(self._member.rank, self._member.host, ReportKind.SECONDARY, str(error), 1))
        report = exception.report_exception(error, self._member.rank, self._member.host)
        where = where if error.__context__ is None else ""
        self.fail(report._replace(where=where or report.where), None if shown else error)

    def fail(self, report: Report, error: BaseException | None = None) -> NoReturn:
        """End the job at once; say why, unless another rank failed first."""
        while not self.failed:
            with contextlib.suppress(BaseException):  # of a signal's handler
                self._ask(report)
        assert self._ruling
        self._speak(self._ruling, error)
        if error is not None:
            exception.release_frames(error)
        self.end_failed()

    def _end_as_told(self, status: int) -> NoReturn:
        """End the job because the sentinel has told so, wherever the script is."""
        flush_files()
        self.end_job(status)

    def end_job(self, status: int) -> NoReturn:
        """End the job on every rank with a status; see `Member.exits`."""
        self._output.settle()
        if self._noted is None:
            self._note(status)
        if not self._member.exits:
            abort(self._mpi, status)
        hard_exit(status)

    def _ask(self, report: Report) -> Ruling:
        """Return what follows from this rank's failure; only its first report counts."""
        with self._asking:
            self._attempts += 1
            if self._attempts > MOST_ATTEMPTS:
                self._ruling = self._ruling or Ruling(RootCause(report), report.status, True)
            if self._ruling is None:
                if threading.current_thread() is threading.main_thread():
                    signal.signal(signal.SIGINT, signal.SIG_IGN)  # MPICH's launcher sends it to a failed job's ranks
                flush()
                self.status = report.status
                ruling = self._sentinel.report(report)
                silence_handlers()
                self._ruling = ruling
            return self._ruling

    def _speak(self, ruling: Ruling, error: BaseException | None) -> None:
        """Print the error and the report, if this rank has to."""
        if (verdict := ruling.verdict) is None or self._told:
            return
        stack = exception.format_exception(error) if error is not None and not verdict.outside else ""
        if stack and error is not None:
            self._shown = True
            exception.print_exception(error, self._full)
            self._output.reveal(stack)
        self._tell(verdict, stack)

    def _tell(self, verdict: RootCause, stack: str = "") -> None:
        """Print the report."""
        if self._told:
            return
        self._told = True
        after_s = time.monotonic() - self._sentinel.start
        lost = self._output.log_lost(ASKING_FAILED_S)
        words = print_failure(verdict, self._member, after_s, lost, self._output.say)
        self._output.reveal(words)
        index.note_end(self._member.log, is_first=verdict.first.rank == self._member.rank)
        error_record = ""
        if self._member.error_file:
            error_record = format_error_file(verdict, self._member, shortened(stack, MAX_STACK_CHARS))
        is_stream = stream_of(self._member.error_file) >= 0  # of this process alone
        if (not self._sentinel.told("" if is_stream else error_record) or is_stream) and error_record:
            writing = threading.Thread(target=write, args=(self._member.error_file, error_record), daemon=True)
            with contextlib.suppress(RuntimeError):  # no thread can be started
                writing.start()
                writing.join(WRITING_S)

    def _note(self, status: int) -> None:
        """Note this process's exit status in the index of the logs."""
        if self.is_ours() and status != self._noted:
            self._noted = status
            index.note_end(self._member.log, status)

    def _cut_off(self, ruling: Ruling, error: BaseException) -> NoReturn:
        """End the job now: --abort-grace is over."""
        if ruling.verdict is not None:
            stack = exception.format_exception(error)
            if stack and not self._shown:
                say(stack)
            self._tell(ruling.verdict, stack)
            who = f"rank {self._member.rank} on {self._member.host}"
            say(f"mpiddp: {who} is cut off in what it does at its end, {self._member.grace_s:g} s after it failed; "
                "for more time: --abort-grace SECONDS")
        let_through()
        self.end_job(ruling.status)
