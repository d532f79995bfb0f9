"""Files that a job script names: which of them are here, which the script makes, and which only one node has."""

from __future__ import annotations

import difflib
import os
import re

from .batch_script import Command, Launch
from .context import Context

MAKERS = ("cp", "rsync", "tar", "unzip", "git", "wget", "curl", "sbcast", "ln", "mkdir", "touch", "mv", "cat", "tee",
          "python", "python3", "srun", "conda", "uv", "pip", "apptainer", "singularity", "virtualenv", "hf",
          "huggingface-cli", "envsubst", "sed", "echo", "printf")
NODE_FOLDERS = re.compile(r"(/tmp|/var/tmp|/dev/shm|/local(scratch|_scratch|disk)?|/scratch/local|/mnt/nvme|/lscratch)"
                          r"(/|$)|\$\{?(TMPDIR|SLURM_TMPDIR|LOCAL_SCRATCH|LOCALSCRATCH|JOB_TMPDIR)\b")


def find_similar_file(context: Context, path: str) -> str:
    """Return the name of the file in the folder of a path that has nearly its name, empty for none."""
    names = difflib.get_close_matches(os.path.basename(path), context.host.list_names(os.path.dirname(path)), 1, 0.8)
    return next(iter(names), "")


def is_here(context: Context, folder: str | None, path: str) -> bool:
    """Return whether a file exists, is made by the script, or cannot be looked for."""
    if "$" in path or "*" in path or (folder is None and not os.path.isabs(path)):
        return True
    base = context.script.options.get("chdir", "")
    if NODE_FOLDERS.match(path) or ("$" in base and not os.path.isabs(path)):
        return True
    if any(map(context.host.exists, list_places(context, folder, path))):
        return True
    trainings = {launch.text for launch in context.script.trainings}
    return any(makes_file(command, path) for command in context.script.commands
               if command.words[0] in MAKERS and command.text not in trainings)


def list_places(context: Context, folder: str | None, path: str) -> list[str]:
    """Return where a file may be that a job looks for in a folder."""
    places = [os.path.join(context.script.options.get("chdir", ""), folder or "", path)]
    if folder in ("", "."):
        places.append(os.path.join(os.path.dirname(context.script.path), path))
    return places


def read_training(context: Context, launch: Launch) -> str:
    """Return the text of a training script, empty if it is not here."""
    places = list_places(context, launch.folder, launch.script) if launch.script else []
    return next(filter(None, map(context.host.read, places)), "")


def makes_file(command: Command, path: str) -> bool:
    """Return whether a command that makes files names a file, or a folder above it."""
    name, parent = os.path.basename(path), os.path.basename(os.path.dirname(path))
    words = [word for word in command.words[1:] if word != path or command.words[0] == "mkdir"]
    return any(name in word or (parent and parent in word) or path.startswith(f"{word.rstrip('/')}/") for word in words
               ) or any(name in output for output in command.outputs)
