"""Run a script in the five ways, see what it did, and tell what differs from plain Python."""

from __future__ import annotations

import bz2
import gzip
import lzma
import re
import shutil
import sqlite3
import subprocess
import tarfile
import tempfile
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests import processes
from tests.holds import Hold
from tests.support import DEADLINE_S, MPIS, VENVS, mpiexec_command, single_node_environ

from .catalogue import Script

PLAIN, TORCHRUN, ONE_RANK, TWO_RANKS = "python", "torchrun", "mpiddp, 1 rank", "mpiddp, 2 ranks"
HELD = "mpiddp.run, 2 ranks"
WAYS = (PLAIN, TORCHRUN, ONE_RANK, TWO_RANKS, HELD)
QUICK = MPIS["mpich"]
NAME = "odd.py"
LONGEST = 100  # characters of a text that a table shows
FRAME = re.compile(r"\s|Traceback|$|During handling|The above exception")  # lines that differ by who runs a script
RANK_PREFIX = re.compile(r"\[rank\d+\]: ", re.M)  # torch's hook puts it before the lines of a traceback
ADDRESS = re.compile(r"0x[0-9a-f]+|tmp\w{8}")
FATAL_PREFIX = re.compile(r"(Fatal Python error: ){2,}")  # faulthandler's first write, of two ranks at once
PYTHON_ERROR = re.compile(r"\w[\w.]*(Error|Exception|Interrupt|Exit|Group)\b|Exception ignored|Fatal Python|\w+Warning")


class Result(NamedTuple):
    """What a script did: its exit status as a shell has it, what it printed, and its files' contents, for each rank."""

    status: int
    stdout: str
    stderr: str
    folders: tuple[dict[str, str], ...]

    @property
    def errors(self) -> Counter[str]:
        """Return the lines on stderr in which Python says what went wrong, or the script says something."""
        return Counter(ADDRESS.sub("…", line) for line in self.stderr.splitlines() if not FRAME.match(line))


def command(way: str) -> list[str]:
    """Return what starts a script in a way."""
    python = str(QUICK.python)
    return {
        PLAIN: [python],
        TORCHRUN: [str(VENVS / "base/bin/torchrun"), "--standalone", "--nproc-per-node=1"],
        ONE_RANK: [python, "-m", "mpiddp", "--quiet"],
        TWO_RANKS: [*mpiexec_command(QUICK, 2), "-m", "mpiddp", "--quiet"],
    }[way]


def run_all(script: Script, hold: Hold) -> dict[str, Result]:
    """Run a script in each way."""
    return {way: run_held(script, hold) if way == HELD else run(script, way) for way in WAYS}


def run(script: Script, way: str) -> Result:
    """Run a script in a way but HELD; one that does not end in time is ended, and says so."""
    env = processes.marked(single_node_environ(QUICK))
    return run_in_folder(script, command(way), env, 2 if way == TWO_RANKS else 1, lambda: processes.leftovers(env))


def run_held(script: Script, hold: Hold) -> Result:
    """Run a script in a hold's two ranks."""
    with hold.lock:
        own = processes.with_mark(hold.environ[processes.MARK])
        return run_in_folder(script, hold.command("--quiet"), hold.environ, 2,
                             lambda: processes.leftovers(hold.environ, own))


def run_in_folder(
    script: Script, words: list[str], env: dict[str, str], ranks: int, find_left: Callable[[], list[str]]
) -> Result:
    """Run a script by a command, in a folder that is removed then."""
    folder = Path(tempfile.mkdtemp(prefix="mpiddp-scripts-"))
    try:
        (folder / NAME).write_text(script.text)
        for name, text in script.modules.items():
            (folder / name).write_text(text)
        for rank in range(ranks):
            (folder / str(rank)).mkdir()
        done = run_bytes([*words, NAME], env, folder)
        left = find_left()
        stderr = RANK_PREFIX.sub("", done.stderr.decode(errors="backslashreplace").replace(f"{folder}/", ""))
        stderr = FATAL_PREFIX.sub(r"\1", stderr)
        stderr += "".join(f"LeftRunningError: {line}\n" for line in left)
        status = done.returncode if done.returncode >= 0 else 128 - done.returncode
        return Result(status, done.stdout.decode(errors="backslashreplace"), stderr,
                      tuple(contents(folder / str(rank)) for rank in range(ranks)))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_bytes(arguments: list[str], env: dict[str, str], folder: Path) -> subprocess.CompletedProcess[bytes]:
    """Run a command to its end; what it prints need not be text, nor come from itself: a child may outlive it."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = processes.start(arguments, env, folder, stdout=out, stderr=err)
        try:
            process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            err.write(b"TimeoutError: it has not ended\n")
        finally:
            processes.end_tree(process.pid)
            process.wait(DEADLINE_S)
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(arguments, process.returncode, out.read(), err.read())


def contents(folder: Path) -> dict[str, str]:
    """Return what the files below a folder hold, by their names; of an archive what is packed in it."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = ADDRESS.sub("…", str(path.relative_to(folder)))
        found[name] = content(path) if path.is_file() else "folder"
    return found


def content(path: Path) -> str:
    """Return what a file holds, or that it cannot be read."""
    openers = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    try:
        if path.suffix in openers:
            with openers[path.suffix](path) as packed:
                return repr(packed.read())
        if path.suffix in (".zip", ".pt"):
            with zipfile.ZipFile(path) as archive:
                return repr({name: archive.read(name) for name in archive.namelist()})
        if path.suffix == ".tar":
            with tarfile.open(path) as tape:
                return repr(tape.getnames())
        if path.suffix == ".db":
            with sqlite3.connect(path) as base:
                return repr(base.execute("select * from t").fetchall())
    except (OSError, EOFError, zipfile.BadZipFile, tarfile.TarError, sqlite3.Error, lzma.LZMAError):
        return "not readable"
    return repr(path.read_bytes())


def differences(plain: Result, other: Result) -> list[str]:
    """Return in words how what a script did differs from what it did under plain Python; empty if it does not.

    With two ranks each does what the one does under plain Python. Their lines on stdout may be mixed: then their
    characters are compared. On stderr nothing may be missing, and no error be there that is not there without. If the
    script fails, one rank may be ended by the other before it has done anything.
    """
    ranks = len(other.folders)
    begun = [folder for folder in other.folders if folder] if plain.status else []
    found = []
    if other.status != plain.status:
        found.append(f"status {other.status}, not {plain.status}")
    if Counter(other.stdout) != Counter(plain.stdout * ranks):
        found.append(f"stdout {shown(other.stdout)}, not {shown(plain.stdout)}")
    found += [f"stderr lacks {shown(line)}" for line in plain.errors - other.errors]
    found += [f"stderr has {shown(line)}" for line in other.errors.keys() - plain.errors if PYTHON_ERROR.match(line)]
    for name in sorted({name for folder in (*plain.folders, *other.folders) for name in folder}):
        expected = plain.folders[0].get(name, "not there")
        values = {folder.get(name, "not there") for folder in begun or other.folders} - {expected}
        found += [f"file {name} {shown(value)}, not {shown(expected)}" for value in sorted(values)]
    return found


def shown(text: str) -> str:
    """Return a text on one line, the end of a long one left out."""
    text = text if text.isprintable() else repr(text)[1:-1]
    return f"`{text if len(text) <= LONGEST else f'{text[:LONGEST]}…'}`" if text else "nothing"
