"""A rank's stack, as frames, outermost first.

No I/O: a sentinel reads what its rank prints, and knows which files are Python's own.
"""

from __future__ import annotations

import enum
import json
import os
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ..base.text import CUT_STACK

FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+|\?+) in (?P<function>.*)')
LIBRARIES = ("/site-packages/", "/dist-packages/")
PYTHON = os.path.dirname(os.__file__) + "/"
OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + "/"
LAUNCHING = (
    "cli.py", "launch.py", "__main__.py", "runner/script.py", "runner/lifecycle.py", "runner/exit_hooks.py",
    "runner/embedding.py",
)
OUTERMOST, INNERMOST = 8, 32  # frames that are told
LONGEST = 300  # characters of a file, and of a function
COLLECTIVES = (  # files of torch whose functions wait for other ranks
    "torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py",
    "torch/distributed/utils.py", "torch/nn/parallel/distributed.py",
)
BACKWARD = "_engine_run_backward"
BACKWARD_NAME = "backward"
LOADER = "torch/utils/data/dataloader.py"
LOADER_WORKER = "torch/utils/data/_utils/worker.py"


class Kind(enum.Enum):
    """Whose code a frame is in."""

    SCRIPT = "s"
    LIBRARY = "l"
    PYTHON = "p"
    OURS = "m"


class Frame(NamedTuple):
    """A call: line 0 is one that is not known."""

    kind: Kind
    file: str
    line: int
    function: str

    @property
    def place(self) -> str:
        """Where it is, in words for a table."""
        return f"{os.path.basename(self.file)}:{self.line} {self.function}"


def kind_of(file: str) -> Kind:
    """Tell whose code a file has."""
    if file.startswith(OURS):
        return Kind.OURS
    if any(part in file for part in LIBRARIES):
        return Kind.LIBRARY
    if file.startswith((PYTHON, "<frozen ")):
        return Kind.PYTHON
    return Kind.SCRIPT


def read(text: str) -> list[Frame]:
    """Return the frames of a main thread from `Calls`, without those that lead to the script."""
    calls = [(found["file"], found["line"], found["function"])
             for line in text.split("\n") if (found := FRAME.fullmatch(line))]
    return of_script(calls, is_whole=not text.endswith(f"{CUT_STACK}\n"))


def from_dump(text: str, pid: int) -> list[Frame]:
    """Return the frames of a process's main thread from what `py-spy dump --json` prints, as read() does.

    Raises ValueError, TypeError or KeyError where that prints something else, such as what has gone wrong.
    """
    (main,) = (one for one in json.loads(text) if one["os_thread_id"] == pid)
    return of_script([(str(one["filename"]), str(one["line"]), str(one["name"]).rpartition(".")[2])
                      for one in main["frames"]])


def of_script(calls: Iterable[tuple[str, str, str]], is_whole: bool = True) -> list[Frame]:
    """Return the frames of files, lines and functions, the innermost first, without those that lead to the script.

    There are none if it is another thread's stack. The package of a program that was started by its name is the script.
    """
    frames = [Frame(kind_of(file), file, int(line) if line.isdigit() else 0, function)
              for file, line, function in calls]
    if frames and frames[-1].function == "_bootstrap":
        return []
    frames = without_launch(frames[::-1])
    if frames and frames[0].kind is Kind.LIBRARY and is_whole:
        inside = package_of(frames[0].file)
        frames = [one._replace(kind=Kind.SCRIPT) if one.file.startswith(inside) else one for one in frames]
    return frames


def package_of(file: str) -> str:
    """Return the folder of the package in a library that has a file, or the file of a module without one."""
    before, part, after = next((file.partition(one) for one in LIBRARIES if one in file), ("", "", file))
    top, slash, _ = after.partition("/")
    return f"{before}{part}{top}{slash}"


def without_launch(frames: Sequence[Frame]) -> list[Frame]:
    """Return frames without the outermost ones, by which Python and mpiddp come to a script."""
    begin = 0
    while begin < len(frames) and leads_on(frames[begin]):
        begin += 1
    return list(frames[begin:])


def leads_on(frame: Frame) -> bool:
    """Tell whether a frame runs the script."""
    if frame.kind is Kind.OURS:
        return frame.file[len(OURS):] in LAUNCHING
    return frame.file == "<frozen runpy>" or (frame.kind is Kind.PYTHON and os.path.basename(frame.file) == "runpy.py")


def as_lists(frames: Sequence[Frame]) -> list[tuple[str, str, int, str]]:
    """Return frames as a message's JSON carries them: of a deep stack the first ones and the last ones."""
    shown = frames if len(frames) <= OUTERMOST + INNERMOST else [*frames[:OUTERMOST], *frames[-INNERMOST:]]
    return [(kind.value, file[-LONGEST:], line, function[-LONGEST:]) for kind, file, line, function in shown]


def from_lists(found: Iterable[Any]) -> tuple[Frame, ...]:
    """Return the frames of a message; raise ValueError or TypeError for anything else."""
    return tuple(Frame(Kind(kind), str(file), int(line), str(function)) for kind, file, line, function in found)


def as_text(frames: Sequence[Frame]) -> str:
    """Return frames as JSON."""
    return json.dumps(as_lists(frames), ensure_ascii=False)  # of which the message around it makes ASCII


def from_text(text: str) -> tuple[Frame, ...]:
    """Return the frames of as_text(), none of an empty text; raise ValueError or TypeError for anything else."""
    return from_lists(json.loads(text)) if text else ()


def essential(frames: Sequence[Frame]) -> tuple[tuple[str, int, str], ...]:
    """Return what tells a place from others: the script's lines, and which functions of libraries they have called.

    Libraries poll, and are now at one line and now at another.
    """
    last = max((at for at, one in enumerate(frames) if one.kind is not Kind.PYTHON), default=-1)
    return tuple((one.file, one.line if one.kind is Kind.SCRIPT else 0, one.function)
                 for at, one in enumerate(frames) if one.kind is not Kind.PYTHON or at == last + 1)


def after_script(frames: Sequence[Frame]) -> Sequence[Frame]:
    """Return the frames of what the script's innermost line has called."""
    last = max((at for at, one in enumerate(frames) if one.kind is Kind.SCRIPT), default=-1)
    return frames[last + 1:]


def collective(frames: Sequence[Frame]) -> str:
    """Return the collective in which a stack ends, BACKWARD_NAME where DDP or FSDP make it; empty for none."""
    called = [one for one in after_script(frames) if one.kind is not Kind.PYTHON]
    if not called:
        return ""
    if called[-1].function == BACKWARD:
        return BACKWARD_NAME
    if called[-1].kind is Kind.OURS:
        return "should_stop" if called[0].function == "should_stop" else ""
    if not any(part in called[-1].file for part in COLLECTIVES):
        return ""
    public = [one.function for one in called
              if any(part in one.file for part in COLLECTIVES) and not one.function.startswith("_")]
    return public[-1] if public else called[-1].function


def waits_in_torch(frames: Sequence[Frame]) -> bool:
    """Tell whether a stack ends in torch's own code: what a rank does there may be to wait for its GPU."""
    libraries = [one for one in after_script(frames) if one.kind is not Kind.PYTHON]
    return bool(libraries) and "/torch/" in libraries[-1].file


def waits_for_loader(frames: Sequence[Frame]) -> bool:
    """Tell whether a stack waits for a DataLoader's workers."""
    return any(LOADER in one.file and one.function in ("_try_get_data", "_get_data") for one in after_script(frames))


def is_idle_worker(frames: Sequence[Frame]) -> bool:
    """Tell whether a stack is a DataLoader worker's that waits for work."""
    libraries = [one for one in frames if one.kind is not Kind.PYTHON]
    return bool(libraries) and LOADER_WORKER in libraries[-1].file and libraries[-1].function == "_worker_loop"


def in_words(frames: Sequence[Frame]) -> str:
    """Return a stack in one line: the script's frames, at most three, and what the last of them has called."""
    script = [one for one in frames if one.kind is Kind.SCRIPT]
    shown = [one.place for one in (script if len(script) <= 3 else [script[0], *script[-2:]])]
    if len(script) > 3:
        shown.insert(1, "…")
    called = after_script(frames)
    if name := collective(frames):
        shown.append(name)
    elif called:
        shown.append(called[0].function if called[0].kind is not Kind.OURS else "mpiddp")
    return " → ".join(shown)
