"""The values of options, from the words that a command line or a variable gives: each as its kind, or an error."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..base.config import AUTO_FOLDER, DEFAULT_PREFIX, OutputFilter
from ..base.text import fill_fields

if TYPE_CHECKING:
    from datetime import timedelta

LONGEST_S = 10**9  # of 31 years
UNITS, LEAST_BYTES = {"K": 2**10, "M": 2**20, "G": 2**30}, 4096
CHECKS = ("warn", "strict")
TRUE, FALSE = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


def seconds(text: str) -> float:
    """Return a positive number of seconds."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number of seconds, got {text!r}") from None
    if not 0 < value <= LONGEST_S:
        raise argparse.ArgumentTypeError(f"must be greater than 0 and at most {LONGEST_S:,}, got {text}")
    return value


def timeout(text: str) -> timedelta:
    """Return a positive number of seconds, as torch takes it."""
    from datetime import timedelta  # seldom needed

    return timedelta(seconds=seconds(text))


def whole(text: str) -> int:
    """Return a number that is not negative."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a rank, got {text!r}")
    return int(text)


def positive(text: str) -> int:
    """Return a number greater than 0."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be a number greater than 0, got {text!r}")
    return int(text)


def size(text: str) -> int:
    """Return a number of bytes, with K, M and G for 1024 and its powers."""
    number = text[:-1] if text[-1:] in tuple(UNITS) else text
    if not number.isdecimal() or (found := int(number) * UNITS.get(text[-1], 1)) < LEAST_BYTES:
        raise argparse.ArgumentTypeError(
            f"must be a number of bytes from {LEAST_BYTES} on, as in 100M (K, M, G), got {text!r}")
    return found


def stage(text: str) -> str:
    """Return a folder as an absolute path, AUTO as it is; as for a flag, 1 means that, and 0 none."""
    if text.lower() in FALSE:
        return ""
    return AUTO_FOLDER if text == AUTO_FOLDER or text.lower() in TRUE else os.path.abspath(text)


def port(text: str) -> int:
    """Return a port after which there is another one."""
    if not text.isdecimal() or not 0 < int(text) < 65535:
        raise argparse.ArgumentTypeError(f"must be a port from 1 to 65534, got {text!r}")
    return int(text)


def ranks(text: str) -> OutputFilter:
    """Return the ranks that are shown."""
    words = text.split(",")
    if text in ("all", "none", "fold"):
        return OutputFilter(all_ranks=text != "none", folded=text == "fold")
    local = [word.removeprefix("local-") for word in words if word.startswith("local-")]
    found = [word for word in words if not word.startswith("local-")]
    if not all(word.isdecimal() for word in (*local, *found)):
        raise argparse.ArgumentTypeError(f"must be all, none, fold, or ranks as in 0,4,local-0, got {text!r}")
    return OutputFilter(False, frozenset(map(int, found)), frozenset(map(int, local)))


def chosen(text: str) -> str | None:
    """Return a name, None where the choice is left to torch or to mpiddp."""
    return None if text in ("", "auto") else text


def interface(text: str) -> str | None:
    """Return a description of network interfaces, None for none; networks among them are checked."""
    for part in text.split(","):
        if "/" in part:
            import ipaddress  # seldom needed

            try:
                ipaddress.ip_network(part, strict=False)
            except ValueError:
                raise argparse.ArgumentTypeError(
                    f"must be names of interfaces, or networks such as 10.1.0.0/16, got {part!r}") from None
    return text or None


def absolute(path: str) -> str:
    """Return a path that is the same from every working directory, empty for none."""
    return os.path.abspath(path) if path else ""


def prefix(text: str) -> str:
    """Return a prefix with fields; truths, as flags' variables have them, stand for the usual one, or for none."""
    if text.lower() in (*TRUE, *FALSE):
        return DEFAULT_PREFIX if text.lower() in TRUE else ""
    from datetime import datetime  # seldom needed

    try:  # as a rank does, and the process that passes its output on
        fill_fields(text, {"rank": 0, "local_rank": 0, "host": ""}).format(time=datetime.now().astimezone())
    except Exception as error:
        why = f"there is no {error}" if isinstance(error, KeyError) else error
        raise argparse.ArgumentTypeError(
            f"may have the fields rank, local_rank, host and time, as in '{DEFAULT_PREFIX}', got {text!r}: {why}"
        ) from None
    return text


def map_file(text: str) -> str:
    """Return the path of a file of a kind that a map can be."""
    if text and not text.endswith((".json", ".svg")):
        raise argparse.ArgumentTypeError(f"must end in .json or .svg, got {text!r}")
    return absolute(text)


def check(text: str) -> str:
    """Return how nodes are checked, empty for not; truths, as flags' variables have them, stand for warnings."""
    if text not in CHECKS and text.lower() not in (*TRUE, *FALSE):
        raise argparse.ArgumentTypeError(f"must be warn, strict or 0, got {text!r}")
    return text if text in CHECKS else CHECKS[0] if text.lower() in TRUE else ""


def option_name(text: str) -> str:
    """Return the name of an option of the script's own."""
    if text and not text.startswith("--"):
        raise argparse.ArgumentTypeError(f"must be an option's name such as --local-rank, got {text!r}")
    return text


def either(usual: str, other: str) -> Callable[[str], bool]:
    """Return the kind of an option that has one of two words: whether it is the other one."""
    def is_other(text: str) -> bool:
        if text not in (usual, other):
            raise argparse.ArgumentTypeError(f"must be {usual} or {other}, got {text!r}")
        return text == other

    return is_other
