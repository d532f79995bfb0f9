"""Files that options name, opened without waiting and without trusting what others put there; folders of one user."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from .stderr import write_line

STREAM = re.compile(r"/dev/(std(?:in|out|err))|/(?:dev|proc/self)/fd/(\d+)")
STREAMS = ("stdin", "stdout", "stderr")
MEMORY_DEVICES = 1  # the major number of /dev/null and /dev/full (admin-guide/devices.txt of Linux)
MOST_LINKS = 40  # that the kernel follows in a path (man 7 path_resolution)
FOLDER_MODE = 0o775  # of a folder that is made, less what the umask takes away: not everybody can write to it
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a folder"}
LOOK = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


class Step(NamedTuple):
    """A name on the way to a file: the state of its folder and its own, and how many names follow.

    `trusted` are the users who may own what is used: this one, and root.
    """

    folder: os.stat_result
    own: os.stat_result
    left: int
    trusted: frozenset[int]

    @property
    def foreign(self) -> bool:
        """Whether this belongs to another user than this one and root."""
        return self.own.st_uid not in self.trusted

    @property
    def others_write(self) -> bool:
        """Whether other users can write to the folder."""
        return bool(self.folder.st_mode & OTHERS_WRITE) or self.folder.st_uid not in self.trusted


Judge = Callable[[Step], str]  # returns why it must not be used, empty if it may


class Place(NamedTuple):
    """Where a file is, or can be made: an open folder, the file's name there and its path; it is open as `there`.

    `there` allows nothing but looking (O_PATH), and is -1 where there is no file.
    """

    folder: int
    name: str
    path: str
    there: int


def open_for_writing(path: str, append: bool = False, keep: bool = False, job_folder: bool = False) -> int:
    """Open a file, which is made if need be and emptied unless `append` or `keep`, and return its descriptor.

    With `job_folder` the file's folder is the job's own: it is made, too, and so are those above it. Raises OSError:

    - as os.open() does;
    - for anything but a regular file, a device such as /dev/null, and a standard stream: a FIFO may block for ever;
    - where other users can write to a folder, for what one of them has put there: a link, or a second name of a file,
      which may be ours; where everybody can write, for any file or folder of another user, too. The job's own folder,
      and what is in it, has to be this user's. Files and folders of root's are as good as this user's, and those of
      whom a file system gives this user's files to.
    """
    flags = os.O_WRONLY | os.O_CREAT | (os.O_APPEND if append else 0 if keep else os.O_TRUNC)
    return opened(path, flags, functools.partial(distrust, job_folder=job_folder), FOLDER_MODE * job_folder)


def distrust(step: Step, job_folder: bool = False) -> str:
    """Return why a file must not be written, by a name on the way to it, as open_for_writing() has it; or nothing."""
    strict = step.folder.st_mode & stat.S_IWOTH or (job_folder and step.left < 2)
    if step.others_write and step.foreign and (strict or stat.S_ISLNK(step.own.st_mode)):
        return f"belongs to {user(step.own.st_uid)}, and others than you can write to its folder"
    if step.others_write and stat.S_ISREG(step.own.st_mode) and step.own.st_nlink > 1:
        return "has a second name (a hard link), and others than you can write to its folder"
    return ""


def open_for_reading(path: str) -> int:
    """Open a file that is there, whoever has written it, and return its descriptor; raise OSError for a FIFO, too."""
    return opened(path, os.O_RDONLY, lambda _: "")


def check_protected(path: str) -> None:
    """Raise OSError where a user other than this one and root could put another folder in the place of this one.

    A folder's sticky bit protects the names in it (man 1 chmod).
    """
    def judge(step: Step) -> str:
        if step.folder.st_uid not in step.trusted:
            return f"lies in a folder of {user(step.folder.st_uid)}"
        if step.others_write and not step.folder.st_mode & stat.S_ISVTX:
            return "can be replaced by others than you, who can write to its folder"
        return f"belongs to {user(step.own.st_uid)}" if step.others_write and step.foreign else ""

    with reached(path, judge) as place:
        if place.there < 0:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


def opened(path: str, flags: int, judge: Judge, folder_mode: int = 0, mode: int = 0o666) -> int:
    """Return the descriptor of a file, if every name on the way to it may be used.

    What is made gets its mode less what the umask takes away; with a `folder_mode` of 0 no folder is made.
    """
    while True:
        with reached(path, judge, folder_mode) as place:
            if place.there < 0:
                with contextlib.suppress(FileExistsError):  # somebody has just made it
                    return os.open(place.name, flags | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode,
                                   dir_fd=place.folder)
                continue
            about = os.fstat(place.there)
            if place.folder < 0:
                return os.dup(place.there)
            if not stat.S_ISREG(about.st_mode) and os.major(about.st_rdev) != MEMORY_DEVICES:
                kind = KINDS.get(stat.S_IFMT(about.st_mode), "a device")
                raise OSError(errno.EINVAL, f"it is {kind}, and no regular file")
            return os.open(f"/proc/self/fd/{place.there}", flags & ~os.O_CREAT | os.O_CLOEXEC)


@contextlib.contextmanager
def reached(path: str, judge: Judge, folder_mode: int = 0) -> Iterator[Place]:
    """Go to a file, name by name from open folder to open folder: nobody can exchange what was judged.

    Of a standard stream `there` is the stream, and `folder` -1. With a `folder_mode`, folders that are not there are
    made.
    """
    if (stream := stream_of(path)) >= 0:
        yield Place(-1, "", path, stream)
        return
    at, names, links = os.sep, os.path.abspath(path).split(os.sep)[1:], 0
    there = folder = root = os.open(at, LOOK | os.O_DIRECTORY)
    held = [root]
    # A container that a user has made shows files of the host's root as nobody's, and "/" is one of them.
    trusted = frozenset({0, os.geteuid(), os.fstat(root).st_uid})
    try:
        while names:
            name = names.pop(0)
            at = os.path.join(at, name)
            there = entry(folder, name, bool(names), folder_mode)
            if there < 0:
                break
            held.append(there)
            step = Step(os.fstat(folder), os.fstat(there), len(names), trusted)
            if judge(step) and is_given_to(step.own.st_uid, folder):
                step = step._replace(trusted=trusted | {step.own.st_uid})
            if why := judge(step):
                raise PermissionError(errno.EPERM, f"it {why}", at)
            if stat.S_ISLNK(step.own.st_mode):
                target, at = os.readlink("", dir_fd=there), os.path.dirname(at)
                if not names and (stream := stream_of(os.path.join(at, target))) >= 0:
                    yield Place(-1, "", path, stream)
                    return
                if (links := links + 1) > MOST_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
                names[:0] = filter(None, target.split(os.sep))
                if os.path.isabs(target):
                    at, folder = os.sep, root
            elif names:
                folder = there
        yield Place(folder, os.path.basename(at), at, there)
    except OSError as error:
        error.filename = at
        raise
    finally:
        for descriptor in held:
            os.close(descriptor)


def is_given_to(owner: int, folder: int) -> bool:
    """Tell whether what this user makes in a folder belongs to another one, as NFS and FUSE may have it.

    So does what root makes where the server squashes root (man 5 exports), as in many containers.
    """
    name = f".mpiddp-{os.urandom(8).hex()}"
    try:
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
    except OSError:
        return False
    try:
        return os.fstat(file).st_uid == owner  # nobody can have put another file in its place
    finally:
        os.close(file)
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=folder)


def entry(folder: int, name: str, is_folder: bool, folder_mode: int) -> int:
    """Return an open name in a folder, to look at: a link itself, a folder with what is mounted there, or a file.

    Returns -1 for a file that is not there. With a `folder_mode`, a folder that is not there is made.
    """
    flags = LOOK | os.O_DIRECTORY if is_folder else LOOK  # of a folder: an automounter mounts what is to be there
    try:
        return os.open(name, flags, dir_fd=folder)
    except NotADirectoryError:
        there = os.open(name, LOOK, dir_fd=folder)
        if stat.S_ISLNK(os.fstat(there).st_mode):
            return there
        os.close(there)
        raise
    except FileNotFoundError:
        if not is_folder:
            return -1
        if not folder_mode:
            raise
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, folder_mode, dir_fd=folder)
        return os.open(name, flags, dir_fd=folder)


def stream_of(path: str) -> int:
    """Return the descriptor that a path names, as /dev/stderr or /dev/fd/5 does, -1 for that of a file."""
    found = STREAM.fullmatch(path)
    return -1 if found is None else STREAMS.index(found[1]) if found[1] else int(found[2])


def reason(error: OSError, path: str) -> str:
    """Return in words why a file cannot be opened or written, with what is in the way if that is not the file."""
    words = error.strerror or str(error)
    return words if error.filename in (None, path) else f"{error.filename}: {words}"


def user(number: int) -> str:
    """Return a user's name, or the number where it has none."""
    import pwd

    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"


def user_folder(environ: Mapping[str, str], variable: str, *usual: str) -> str:
    """Return the user's mpiddp folder in that of a variable, or in `usual` below the home folder.

    A variable that is not absolute does not count (XDG Base Directory Specification): each process would take it for
    another one. Where the user has no home folder either, nothing can be made in what is returned.
    """
    folder = environ.get(variable, "")
    if not os.path.isabs(folder):
        folder = os.path.join(os.path.expanduser("~"), *usual)
    return os.path.join(folder if os.path.isabs(folder) else os.devnull, "mpiddp")


class Claim(NamedTuple):
    """A folder of the launch `run_id` alone, in a job that Slurm has started again for `restarts` times.

    A link in the folder, which leads nowhere, has the run id: making it is atomic, on NFS, too (man 2 symlink).
    It is made in a folder of this user's alone, as open_for_writing() has it.
    """

    folder: str
    restarts: int
    run_id: str

    @property
    def mark(self) -> str:
        """The link."""
        return f"{self.folder}/.run-{self.restarts}"

    def make(self) -> bool:
        """Claim the folder; return False if another launch has it, True too if nobody can tell."""
        judge = functools.partial(distrust, job_folder=True)
        try:
            with reached(f"{self.folder}/new", judge, FOLDER_MODE) as place:
                os.symlink(self.run_id, os.path.basename(self.mark), dir_fd=place.folder)
        except OSError:
            with contextlib.suppress(OSError):  # there is none, and whoever writes tells what is in the way
                return os.readlink(self.mark) == self.run_id
        return True

    def drop(self) -> None:
        """Give the folder back, if it is claimed."""
        with contextlib.suppress(OSError):
            if os.readlink(self.mark) == self.run_id:
                os.unlink(self.mark)
                os.rmdir(self.folder)


def free_claim(wanted: str, restarts: int, run_id: str, numbers: Iterator[int]) -> Claim:
    """Claim the first folder that no other launch has: the one that is wanted, or that with one of the `numbers`."""
    candidates = (Claim(f"{wanted}-{number}" if number > 1 else wanted, restarts, run_id) for number in numbers)
    return next(filter(Claim.make, candidates))


def names(folder: str, prefix: str = "") -> list[str]:
    """Return the names in a folder that begin with `prefix`; none if there is no such folder."""
    try:
        return [name for name in os.listdir(folder) if name.startswith(prefix)]
    except OSError:
        return []


def text(path: str) -> str:
    """Return what a file of the kernel says, nothing if it is not there."""
    try:
        with open(path, errors="surrogateescape", newline="\n") as file:
            return file.read().strip()
    except OSError:
        return ""


def number(path: str) -> int:
    """Return the number in a file of the kernel, -1 if there is none."""
    try:
        return int(text(path))
    except ValueError:
        return -1


def write_json(path: str, content: object) -> None:
    """Write a file that was asked for, or say why that cannot be done."""
    write(path, json.dumps(content))


def write(path: str, content: str) -> None:
    """Write a file that was asked for, or say why that cannot be done."""
    if why := written(path, content):
        write_line(why)


def written(path: str, content: str) -> str:
    """Write a file that was asked for, and return why that cannot be done, empty if it is done."""
    try:
        with open(open_for_writing(path), "w", encoding="utf-8", errors="replace") as file:
            file.write(content)
    except OSError as error:
        return f"mpiddp: cannot write {path}: {reason(error, path)}"
    return ""


def note_suspects(path: str, found: Iterable[tuple[str, str]]) -> None:
    """Append a line for each node that should be left out: time, host and what speaks against it, with tabs between."""
    now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    lines = [f"{now}\t{host}\t{' '.join(evidence.split())}\n" for host, evidence in found]
    try:
        with open(open_for_writing(path, append=True), "a", encoding="utf-8", errors="replace") as file:
            file.write("".join(lines))
    except OSError as error:
        write_line(f"mpiddp: cannot write {path}: {reason(error, path)}")
