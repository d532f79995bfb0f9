"""Files that options name, opened without blocking and without trusting other users' entries; a user's folders."""

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
from typing import BinaryIO, NamedTuple

from .stderr import write_line

STREAM_PATH = re.compile(r"/dev/(std(?:in|out|err))|/(?:dev|proc/self)/fd/(\d+)")
STREAM_NAMES = ("stdin", "stdout", "stderr")
MEMORY_DEVICES = 1  # the major number of /dev/null and /dev/full (admin-guide/devices.txt of Linux)
MAX_LINKS = 40  # that the kernel follows in a path (man 7 path_resolution)
FOLDER_MODE = 0o775  # of a folder that is made, less the umask: not everybody can write to it
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
FILE_KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a folder"}
NOBODY = 65534  # to whom a server may give root's files, or all (man 5 exports, root_squash and all_squash)


class PathStep(NamedTuple):
    """A name in a path: the state of its folder and of its own entry, and how many names follow."""

    folder: os.stat_result
    entry: os.stat_result
    names_left: int

    @property
    def is_foreign(self) -> bool:
        """Whether the entry belongs to another user than this one and root.

        A server may give files to nobody, root's (man 5 exports, root_squash) or all; a link of nobody's may be
        anybody's.
        """
        is_squashed = self.entry.st_uid == NOBODY and not stat.S_ISLNK(self.entry.st_mode)
        return self.entry.st_uid not in find_trusted_users() and not is_squashed

    @property
    def has_open_folder(self) -> bool:
        """Whether other users can write to the folder."""
        return bool(self.folder.st_mode & OTHERS_WRITE) or self.folder.st_uid not in find_trusted_users()


PathCheck = Callable[[PathStep], str]  # returns why the entry must not be used, empty if it may


def find_trusted_users() -> frozenset[int]:
    """Return the users who may own what is used: this one, root, and the one to whom "/" belongs.

    A container that a user has made shows files of the host's root as nobody's, and "/" is one of them.
    """
    return frozenset({0, os.geteuid(), os.stat(os.sep).st_uid})


def open_for_writing(path: str, append: bool = False, keep: bool = False, job_folder: bool = False) -> int:
    """Open a file, which is made if need be and emptied unless `append` or `keep`, and return its descriptor.

    With `job_folder` the file's folder is the job's own: it is created, with those above it. Raises OSError:

    - as os.open() does;
    - for anything but a regular file, a device such as /dev/null, and a standard stream: a FIFO may block for ever;
    - if other users can write to a folder, for an entry of theirs that is a link or a hard link, which may lead to a
      file of ours; if everybody can write, or in the job's own folder, for any file or folder of another user. Entries
      of root count as this user's, and so do files and folders of their folder's owner, or of nobody: a file system
      may give all files to one user;
    - if a folder of the path was replaced while the file was opened.
    """
    flags = os.O_WRONLY | os.O_CREAT | (os.O_APPEND if append else 0 if keep else os.O_TRUNC)
    return open_checked(path, flags, functools.partial(find_risk, job_folder=job_folder), FOLDER_MODE * job_folder)


def find_risk(step: PathStep, job_folder: bool = False) -> str:
    """Return why a file must not be written because of a name in its path (see open_for_writing()); empty if it may."""
    is_strict = step.folder.st_mode & stat.S_IWOTH or (job_folder and step.names_left < 2)
    has_other_owner = is_strict and step.entry.st_uid != step.folder.st_uid
    if step.has_open_folder and step.is_foreign and (has_other_owner or stat.S_ISLNK(step.entry.st_mode)):
        return f"belongs to {user_name(step.entry.st_uid)}, and other users can write to its folder"
    if step.has_open_folder and stat.S_ISREG(step.entry.st_mode) and step.entry.st_nlink > 1:
        return "has a second name (a hard link), and other users can write to its folder"
    return ""


def open_for_reading(path: str) -> int:
    """Open any user's file and return its descriptor; raise OSError, also for a FIFO."""
    return open_checked(path, os.O_RDONLY, lambda _: "")


def check_protected(path: str) -> None:
    """Raise OSError if a user other than this one and root could replace this folder by another one.

    A folder's sticky bit protects the names in it (man 1 chmod).
    """
    def check(step: PathStep) -> str:
        if step.folder.st_uid not in find_trusted_users():
            return f"is in a folder of {user_name(step.folder.st_uid)}"
        if step.has_open_folder and not step.folder.st_mode & stat.S_ISVTX:
            return "can be replaced by other users, who can write to its folder"
        return f"belongs to {user_name(step.entry.st_uid)}" if step.has_open_folder and step.is_foreign else ""

    os.lstat(resolve_path(path, check))


def open_checked(path: str, flags: int, check: PathCheck, folder_mode: int = 0, mode: int = 0o666) -> int:
    """Return the descriptor of a file if every name in its path passes the check.

    The file is checked again once it is open, before it is emptied: others may have replaced it, or a folder of its
    path. What is made gets its mode less the umask; with a `folder_mode` of 0 no folder is made.
    """
    path = resolve_path(path, check, folder_mode)
    if (stream := parse_stream_path(path)) >= 0:
        return os.dup(stream)
    safe = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    while True:
        try:
            check_kind(os.lstat(path))  # to open a FIFO may fail
            file = os.open(path, flags & ~(os.O_CREAT | os.O_EXCL | os.O_TRUNC) | safe)
        except FileNotFoundError:
            if not flags & os.O_CREAT:
                raise
            with contextlib.suppress(FileExistsError):  # somebody has just made it
                return check_place(os.open(path, flags | os.O_EXCL | safe, mode), path)
            continue
        check_place(file, path)
        try:
            check_kind(state := os.fstat(file))
            if why := check(PathStep(os.stat(os.path.dirname(path)), state, 0)):
                raise PermissionError(errno.EPERM, f"it {why}", path)
            if flags & os.O_TRUNC and stat.S_ISREG(state.st_mode):
                os.ftruncate(file, 0)
        except OSError:
            os.close(file)
            raise
        return file


def check_place(file: int, path: str) -> int:
    """Return a descriptor if its file is where a path without links leads; else close it, and raise PermissionError."""
    if os.readlink(f"/proc/self/fd/{file}") != path:
        os.close(file)
        raise PermissionError(errno.EPERM, "a folder of its path was replaced while it was opened", path)
    return file


def check_kind(state: os.stat_result) -> None:
    """Raise OSError for what is neither a regular file nor a device of the memory."""
    if not stat.S_ISREG(state.st_mode) and os.major(state.st_rdev) != MEMORY_DEVICES:
        kind = FILE_KINDS.get(stat.S_IFMT(state.st_mode), "a device")
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file")


def resolve_path(path: str, check: PathCheck, folder_mode: int = 0) -> str:
    """Return the path of a file or folder without links, if every name on the way passes the check; else raise OSError.

    The last name need not exist. With a `folder_mode`, missing folders are made. A standard stream stays as it is.
    """
    reached, names, links = os.sep, os.path.abspath(path).split(os.sep)[1:], 0
    while names and parse_stream_path(os.path.join(reached, *names)) < 0:
        folder, name = reached, names.pop(0)
        reached = os.path.join(folder, name)
        try:
            entry = os.lstat(reached)
        except FileNotFoundError:
            if not names:
                break
            if not folder_mode:
                raise
            with contextlib.suppress(FileExistsError):
                os.mkdir(reached, folder_mode)
            entry = os.lstat(reached)
        if why := check(PathStep(os.stat(folder), entry, len(names))):
            raise PermissionError(errno.EPERM, f"it {why}", reached)
        if stat.S_ISLNK(entry.st_mode):
            if (links := links + 1) > MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            target = os.readlink(reached)
            names[:0] = filter(None, target.split(os.sep))
            reached = os.sep if os.path.isabs(target) else folder
        elif names and not stat.S_ISDIR(entry.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), reached)
    return os.path.join(reached, *names)


def parse_stream_path(path: str) -> int:
    """Return the descriptor in a path such as /dev/stderr or /dev/fd/5, -1 if it names a file."""
    match = STREAM_PATH.fullmatch(path)
    return -1 if match is None else STREAM_NAMES.index(match[1]) if match[1] else int(match[2])


def format_os_error(error: OSError, path: str) -> str:
    """Return why a file cannot be opened or written, with the path of what prevents it if that is not the file."""
    why = error.strerror or str(error)
    return why if error.filename in (None, path) else f"{error.filename}: {why}"


def user_name(uid: int) -> str:
    """Return a user's name, or the number if it has none."""
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def user_folder(environ: Mapping[str, str], variable: str, *usual: str, site: str = "") -> str:
    """Return the user's mpiddp folder: in the folder that a variable names, in `site`, or in `usual` below home.

    A relative path in the variable does not count (XDG Base Directory Specification). Without a home folder, nothing
    can be made in the folder returned.
    """
    folder = environ.get(variable, "")
    if not os.path.isabs(folder):
        folder = site or os.path.join(os.path.expanduser("~"), *usual)
    return os.path.join(folder if os.path.isabs(folder) else os.devnull, "mpiddp")


class FolderClaim(NamedTuple):
    """A folder that only the launch `run_id` may use, in a job that Slurm has restarted `restarts` times.

    A dangling link in the folder holds the run id: making it is atomic, on NFS, too (man 2 symlink). It is made only in
    a folder of this user, as by open_for_writing().
    """

    folder: str
    restarts: int
    run_id: str

    @property
    def link(self) -> str:
        """The path of the link."""
        return f"{self.folder}/.run-{self.restarts}"

    def acquire(self) -> bool:
        """Claim the folder; return False if another launch has it, and True also if that cannot be determined."""
        check = functools.partial(find_risk, job_folder=True)
        try:
            folder = os.path.dirname(resolve_path(f"{self.folder}/new", check, FOLDER_MODE))
            os.symlink(self.run_id, os.path.join(folder, os.path.basename(self.link)))
        except OSError:
            with contextlib.suppress(OSError):  # no link: whoever writes to the folder reports the reason
                return os.readlink(self.link) == self.run_id
        return True

    def release(self) -> None:
        """Give the folder back, if it is claimed."""
        with contextlib.suppress(OSError):
            if os.readlink(self.link) == self.run_id:
                os.unlink(self.link)
                os.rmdir(self.folder)


def claim_free_folder(wanted: str, restarts: int, run_id: str, numbers: Iterator[int]) -> FolderClaim:
    """Claim the first folder that no other launch has: the one wanted, or one with the next of the `numbers`."""
    candidates = (FolderClaim(f"{wanted}-{number}" if number > 1 else wanted, restarts, run_id) for number in numbers)
    return next(filter(FolderClaim.acquire, candidates))


def list_names(folder: str, prefix: str = "") -> list[str]:
    """Return the names in a folder that begin with `prefix`; none if it cannot be read."""
    try:
        return [name for name in os.listdir(folder) if name.startswith(prefix)]
    except OSError:
        return []


def read_text(path: str) -> str:
    """Return the text of a file of the kernel, empty if it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape", newline="\n") as file:
            return file.read().strip()
    except OSError:
        return ""


def read_number(path: str) -> int:
    """Return the number in a file of the kernel, -1 if it has none."""
    try:
        return int(read_text(path))
    except ValueError:
        return -1


def read_stat(pid: int) -> tuple[str, list[str]]:
    """Return a process's name, and the fields of /proc/PID/stat after it (man 5 proc); raise OSError if hidden."""
    with open(f"/proc/{pid}/stat", "rb") as file:  # a name may be invalid UTF-8
        text = file.read().decode(errors="replace")
    name, _, fields = text.partition(" (")[2].rpartition(") ")
    return name, fields.split()


@contextlib.contextmanager
def replace_file(path: str, part: str, job_folder: bool = False) -> Iterator[BinaryIO]:
    """Yield a new file, `part`, that replaces `path` atomically at the end of the block, or is removed on an error.

    See open_for_writing() for `job_folder`.
    """
    try:
        with open(open_for_writing(part, job_folder=job_folder), "wb") as file:
            yield file
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise


def write_json(path: str, content: object) -> None:
    """Write a file that the user asked for, or print why that failed."""
    write_file(path, json.dumps(content))


def write_file(path: str, content: str) -> None:
    """Write a file that the user asked for, or print why that failed."""
    if why := try_write_file(path, content):
        write_line(why)


def try_write_file(path: str, content: str) -> str:
    """Write a file that the user asked for, and return why that failed, empty if it did not."""
    try:
        with open(open_for_writing(path), "w", encoding="utf-8", errors="replace") as file:
            file.write(content)
    except OSError as error:
        return f"mpiddp: cannot write {path}: {format_os_error(error, path)}"
    return ""


def append_suspects(path: str, suspects: Iterable[tuple[str, str]]) -> None:
    """Append a line for each node that should be excluded: time, host and evidence, separated by tabs."""
    now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    lines = [f"{now}\t{host}\t{' '.join(evidence.split())}\n" for host, evidence in suspects]
    try:
        with open(open_for_writing(path, append=True), "a", encoding="utf-8", errors="replace") as file:
            file.write("".join(lines))
    except OSError as error:
        write_line(f"mpiddp: cannot write {path}: {format_os_error(error, path)}")


def file_identity(descriptor: int) -> tuple[int, int]:
    """Return the device and inode of an open file."""
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino
