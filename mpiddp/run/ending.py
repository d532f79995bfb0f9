"""How a rank ends: itself in order, or its whole job where it failed."""

from __future__ import annotations

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

from ..exits import abort, c_exit, flush, flush_streams, hard_exit, let_through, run_exit_functions
from ..plan.environment import Endpoint
from ..plan.member import Member
from ..plan.verdict import CONSEQUENCE, OWN, Report, Verdict
from ..say import say
from ..sentinel.handle import Ruling, Sentinel
from ..show.report import tell
from . import failure
from .handlers import give_signals_back, silence_handlers
from .output import Output, let_flush_fail

MOST_ATTEMPTS = 20


class Ending:
    """Ends the process that made it, and none that it forked."""

    def __init__(self, mpi: Any, sentinel: Sentinel, member: Member, output: Output, python_exit: bool) -> None:
        """Take what belongs to this process; `python_exit` leaves its exit to the interpreter."""
        self._mpi, self._sentinel, self._member, self._output = mpi, sentinel, member, output
        self._python_exit = python_exit
        self._pid = os.getpid()
        self._ruling: Ruling | None = None
        self._asking = threading.RLock()
        self._attempts = 0  # to ask; a signal's handler may break one off
        self._shown = self._told = False

    def is_ours(self) -> bool:
        """Tell whether this is the rank's process and no child of it."""
        return os.getpid() == self._pid

    def join(self, endpoint: Endpoint) -> None:
        """Let the sentinel meet the others': from now on it may ask this process to end itself."""
        self._sentinel.join(self._member, endpoint, self.end_job)

    def watch_script(self, leave: Callable[[], None], shown: bool, prefix: bool) -> None:
        """Begin with the script: its output goes where it shall, and whatever ends this process is noticed.

        The output is shown on the terminal if `shown`, each line with rank and host if `prefix`.
        A script that calls os._exit(0) calls `leave` first, since the launcher would take that for a
        crash; with another status it fails as by sys.exit().
        """
        self.direct_output(shown, prefix)
        faulthandler.disable()
        give_signals_back()
        self.watch(leave)

    def direct_output(self, shown: bool, prefix: bool) -> None:
        """Send this process's output where it shall go: see watch_script()."""
        member = self._member
        self._output.begin(shown, member.log, f"[{member.rank} {member.host}] " if prefix else "",
                           f"rank {member.rank} on {member.host}")

    def watch(self, leave: Callable[[], None]) -> None:
        """Notice from now on whatever ends this process: see watch_script()."""
        self._sentinel.watch_script()

        @functools.wraps(hard_exit)
        def _exit(status: int) -> NoReturn:
            if self.is_ours():
                if status & 0xFF:
                    self.fail(Report(self._member.rank, self._member.host, OWN, f"os._exit({status})", status & 0xFF,
                                     failure.line_at(sys._getframe(1))))
                leave()
                c_exit(self._output.status(0))
            hard_exit(status)

        os._exit = _exit

    def finish(self, status: int = 0) -> NoReturn:
        """End this process in order, a child that the script forked too, without the interpreter's slow tear-down.

        As Python does first, threads are joined and atexit functions called, that which leaves the
        job among them; modules are not torn down. Then C's own exit functions run, from the last that
        was registered to the first, or to skip_exit_functions().
        """
        run_exit_functions()
        c_exit(self._output.status(status, flush()))

    def left(self) -> None:
        """Tell that the script has come to its end."""
        self._sentinel.left()

    def close(self) -> bool:
        """End what is beside this process, which has left the job, and tell whether output was lost."""
        lost = self._output.end()
        self._sentinel.dismiss()
        return lost

    def release(self) -> None:
        """Let this process go on, which has left the job."""
        os._exit = hard_exit
        self._sentinel.release()
        if self.close():
            let_flush_fail()

    @property
    def failed(self) -> bool:
        """Tell whether the job ends because of what this rank has said."""
        return self._ruling is not None

    def fail_by(self, error: BaseException) -> int:
        """End the job because the script raised, with the status that Python gives it; a child, only itself.

        Threads and atexit functions have --abort-grace to end before. Returns the status where they are left
        to the interpreter's own exit, in which end_failed() has to be called last.
        """
        if not self.is_ours():
            failure.show(error)
            self.finish(failure.status_of(error))
        error = self.accuse(error)
        assert self._ruling
        self._speak(self._ruling, error)
        if not self._python_exit:
            with contextlib.suppress(BaseException):  # the reason is told already
                run_exit_functions()
            self.end_failed()
        return self._ruling.status

    def accuse(self, error: BaseException) -> BaseException:
        """Tell the job that the script raised, and let this process live no longer than --abort-grace from now on.

        Returns what it raised: where a signal's handler raises meanwhile, as torch's does for a DataLoader's
        worker that has died, that came last.
        """
        while not self.failed:
            try:
                ruling = self._ask(failure.describe(error, self._member.rank, self._member.host))
                limit = threading.Timer(self._member.grace_s, self._cut_off, (ruling, error))
                limit.daemon = True
                with contextlib.suppress(RuntimeError):  # without a thread it is for the sentinel to end us
                    limit.start()
            except BaseException as other:
                error = other
        return error

    def end_failed(self) -> NoReturn:
        """End the job after fail_by(), when all that this process does at its end is done."""
        assert self._ruling
        self._sentinel.through()
        flush_streams()
        self._output.end()
        if self._told:
            let_through()
        else:  # where ranks exit by themselves, Slurm kills one that is later than the others
            flush()
        if not self._ruling.abort:
            time.sleep(self._member.grace_s + 1)  # until the one that aborts has ended this rank
        self.end_job(self._ruling.status)

    def fail_leaving(self, error: BaseException, shown: bool = False, where: str = "") -> NoReturn:
        """End the job because this rank could not leave it in order; what a process does at its end was done before.

        `shown` tells that what was raised is on the screen already, `where` where that was, if it is not known.
        """
        if isinstance(error, TimeoutError):  # it has waited in vain for others
            report = Report(self._member.rank, self._member.host, CONSEQUENCE, str(error), 1)
        else:
            report = failure.describe(error, self._member.rank, self._member.host)
            report = report._replace(where=report.where or where)
        self.fail(report, None if shown or isinstance(error, TimeoutError) else error)

    def fail(self, report: Report, error: BaseException | None = None) -> NoReturn:
        """End the job at once, and say why if no other rank failed first."""
        while not self.failed:
            with contextlib.suppress(BaseException):  # of a signal's handler
                self._ask(report)
        assert self._ruling
        self._speak(self._ruling, error)
        self.end_failed()

    def end_job(self, status: int) -> NoReturn:
        """End the job on every rank with a status, in which the others may help (see `Member.exits`)."""
        if not self._member.exits:
            abort(self._mpi, status)
        hard_exit(status)

    def _ask(self, report: Report) -> Ruling:
        """Return what follows from this rank's failure; the first that it reports counts."""
        with self._asking:
            self._attempts += 1
            if self._attempts > MOST_ATTEMPTS:
                self._ruling = self._ruling or Ruling(Verdict(report), report.status, True)
            if self._ruling is None:
                if threading.current_thread() is threading.main_thread():
                    signal.signal(signal.SIGINT, signal.SIG_IGN)  # MPICH's launcher sends it to a failed job's ranks
                flush()
                ruling = self._sentinel.ask(report)
                silence_handlers()
                self._ruling = ruling
            return self._ruling

    def _speak(self, ruling: Ruling, error: BaseException | None) -> None:
        """Print what was raised and the job's last words, if it is for this rank to do."""
        if (verdict := ruling.verdict) is None or self._told:
            return
        stack = failure.callstack(error) if error is not None and not verdict.outside else ""
        if stack and error is not None:
            self._shown = True
            failure.show(error)
            self._output.reveal(stack)
        self._tell(verdict, stack)

    def _tell(self, verdict: Verdict, stack: str = "") -> None:
        """Print the job's last words."""
        if self._told:
            return
        self._told = True
        after_s = time.monotonic() - self._sentinel.start
        self._output.reveal(tell(verdict, self._member, after_s, self._member.error_file, stack))
        self._sentinel.spoken()

    def _cut_off(self, ruling: Ruling, error: BaseException) -> NoReturn:
        """End the job now: --abort-grace is over."""
        if ruling.verdict is not None:
            stack = failure.callstack(error)
            if stack and not self._shown:
                say(stack)
            self._tell(ruling.verdict, stack)
            who = f"rank {self._member.rank} on {self._member.host}"
            say(f"mpiddp: {who} is cut off in what it does at its end, {self._member.grace_s:g} s after it failed; "
                "for more time: --abort-grace SECONDS")
        let_through()
        self.end_job(ruling.status)
