"""Another sentinel takes the place of one that is killed; the rank notices that, and tells it what there is to know."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import time

from ..say import write_all
from .asking import Answers, Stacks
from .ends import Ends, file_of, has_ended, miss, miss_no_more, open_ends, spawn_sentinel
from .messages import END_SIGNAL, Bye, Coordinate, Failed, Join, ScriptEnded, Stage, Watched
from .outflow import Outflow
from .wire import Wire

Told = Coordinate | Join | ScriptEnded | Failed | Stacks | Answers | Outflow  # what another sentinel has to be told
SETTLING_S = 10.0  # between two sentinels that are gone; sooner than that, none takes their place


class Succession:
    """Keeps what outlives a sentinel that is killed: what it was told, and its connection to the coordinator.

    `wire` and `life` are the rank's ends, `signals` is where a sentinel reads the numbers of signals. `began_s` is when
    the watch began, on time.monotonic()'s clock.
    """

    def __init__(self, wire: Wire, life: int, signals: int, watched: Watched, began_s: float) -> None:
        self.number = 0  # of sentinels that were replaced
        self._wire, self._signals, self._watched, self._began_s = wire, signals, watched, began_s
        self._files: dict[int, tuple[int, int]] = {}  # what our descriptors lead to: a script may close all that it has
        self._life = self._kept(life)
        self._stderr = -1  # as the launcher gave it
        with contextlib.suppress(OSError):
            self._stderr = self._kept(fcntl.fcntl(2, fcntl.F_DUPFD_CLOEXEC, 3))
        self._told: list[tuple[Told, int]] = []  # each with its descriptor
        self._connection = -1  # to the coordinator, which the sentinel has, too: see `Reached`
        self._on = False
        self._replaced_s = -1e9

    def note(self, message: Told, descriptor: int = -1) -> None:
        """Note what another sentinel has to be told, in this order, and the descriptor that goes with it."""
        self._told.append((message, self._kept(descriptor)))

    def begin(self) -> None:
        """Miss the sentinel from now on."""
        self._on = True
        miss(self._life)
        self.replace_if_gone()

    def stop(self) -> None:
        """Miss it no more."""
        self._on = False
        if self._is_ours(self._life):
            miss_no_more(self._life)

    def close(self) -> None:
        """Close what is kept, in this process alone."""
        self._on = False
        for descriptor in list(self._files):
            self._close(descriptor)
        self._life = self._connection = self._stderr = -1
        self._told = []

    def replace_if_gone(self) -> None:
        """Start another sentinel, if there is none any more, and tell it what the one before knew.

        Meanwhile the connection to the coordinator, or its port, is open: this process has it, too. If a handler of the
        script raises, END_SIGNAL comes once more.
        """
        if not self._on or not self._is_ours(self._life) or not has_ended(self._life):
            return
        self._on = False  # a handler, or another thread, does not begin the same
        mask: set[signal.Signals | int] | None = None
        try:
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # handlers that are due run here
            if self._replace():
                self.begin()
        except BaseException:
            self._on = True
            os.kill(os.getpid(), END_SIGNAL)
            raise
        finally:
            if mask is not None:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def take_leave(self) -> None:
        """Tell the coordinator in the place of a sentinel that is gone that this rank leaves in order."""
        self._keep_connection()
        if self._is_ours(self._connection):
            connection = Wire(socket.socket(fileno=os.dup(self._connection)))
            connection.send(Bye())
            connection.close()

    def _replace(self) -> bool:
        """Start another sentinel, and tell whether that went well."""
        self._keep_connection()
        ours = None
        try:
            ours = self._spawn()
            self._wire.replace(ours.wire)
        except Exception as error:
            if ours is not None:
                ours.close()
            self._say(f"is gone, and no other is started ({error}): this rank is not watched any more")
            return False
        except BaseException:
            if ours is not None:
                ours.close()
            raise
        self._close(self._life)
        self._life = self._kept(ours.life)
        self._wire.send(Stage(""))
        for message, descriptor in self._told:
            self._wire.send(message, descriptor if self._is_ours(descriptor) else -1)
        self._say("is gone; another one watches this rank now")
        self._replaced_s = time.monotonic()
        self.number += 1
        return True

    def _spawn(self) -> Ends:
        if time.monotonic() - self._replaced_s < SETTLING_S:
            raise OSError("so was the one before")
        ours, its = open_ends()
        try:
            spawn_sentinel(its, self._signals, self._stderr if self._is_ours(self._stderr) else 2, self._watched,
                           self._began_s)
        except BaseException:  # what was started ends by itself: it was told nothing
            ours.close()
            raise
        finally:
            its.close()
        return ours

    def _say(self, words: str) -> None:
        """Print where the launcher reads, whatever the script has made of its own stderr."""
        with contextlib.suppress(OSError):
            descriptor = self._stderr if self._is_ours(self._stderr) else 2
            write_all(descriptor, f"mpiddp: the sentinel of {self._watched.who} {words}\n".encode(errors="replace"))

    def _keep_connection(self) -> None:
        if (descriptor := self._wire.take_descriptor()) >= 0:
            self._close(self._connection)
            self._connection = self._kept(descriptor)

    def _kept(self, descriptor: int) -> int:
        if descriptor >= 0:
            self._files[descriptor] = file_of(descriptor)
        return descriptor

    def _is_ours(self, descriptor: int) -> bool:
        """Tell whether a descriptor is still what it was."""
        with contextlib.suppress(OSError):
            return descriptor in self._files and self._files[descriptor] == file_of(descriptor)
        return False

    def _close(self, descriptor: int) -> None:
        if self._is_ours(descriptor):
            os.close(descriptor)
        self._files.pop(descriptor, None)
