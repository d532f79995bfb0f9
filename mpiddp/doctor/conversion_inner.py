"""Keeps what a recipe's second script, or `bash -c`, does before the training."""

from __future__ import annotations

import re

from .batch_script import BatchScript, Launch
from .conversion_command import PARAMETER, RENDEZVOUS, SET_BY_MPIDDP, Replacement
from .conversion_launches import TASK_VARIABLES
from .shell import Command, QuoteError
from .statements import HARMLESS, Statement, find_unneeded, read_statements, references, remove_exports
from .words import format_words, read_tokens

# What a second script may do before the training so that the job script can do it: its tasks inherit it.
MOVABLE = HARMLESS | {"module", "ml", "source", ".", "conda", "mamba", "micromamba", "unset", "ulimit", "mkdir", "cd"}
OF_ONE_TASK = re.compile(r"\$0|\$!|\$\{[1-9@*]\W|SLURMD_NODENAME|hostname")


def find_inner_command(launch: Launch) -> Command | None:
    """Return the command of a script or text that a launch starts, in which the program stands."""
    length = len(launch.program_words)
    return next((command for command in launch.inner_commands
                 if tuple(command.words[len(command.words) - length:]) == launch.program_words), None)


def keep_inner_setup(script: BatchScript, launch: Launch, inner: Command, new: Replacement) -> None:
    """Keep the statements of a second script that set up the environment; others are told, and not run any more."""
    try:
        statements = [part for statement in read_statements(launch.inner_text) if not statement.is_comment
                      for part in split_list(statement, inner.text)]
    except QuoteError:
        new.checks.append(f"{launch.followed} also did what could not be read")
        return
    training = next((each for each in statements if each.contains(inner.text)), None)
    words = format_words(launch.script_words, [])
    exported = {name for each in statements for name in each.exported if not RENDEZVOUS.fullmatch(name)}
    names = SET_BY_MPIDDP | references(inner.text) - references(words) - exported
    unneeded = find_unneeded([each for each in statements if each is not training], names, words)
    ours = {statement.text for statement in read_statements(script.text)}
    is_later = False
    for statement in statements:
        if statement is training:
            is_later = True
            waits = any(each.text == "wait" for each in statements)
            if statement.kind != "command" or (statement.is_background and not waits):
                new.checks += [f"each task also ran the rest of this: {line}" for line in statement.text.splitlines()]
        elif statement in unneeded or statement.text in ("env", "set -x", "wait"):
            continue
        elif is_later or not is_movable(statement):
            new.checks += [f"each task also ran this, {'behind' if is_later else 'before'} the training: {line}"
                           for line in statement.text.splitlines()]
        elif statement.text not in ours:
            add_setup(launch, statement, new)


def split_list(statement: Statement, last: str) -> list[Statement]:
    """Return the commands of `A && B && last`, or the statement itself if it is none."""
    if statement.kind != "list" or "||" in statement.text or not statement.text.endswith(last):
        return [statement]
    return read_statements(re.sub(r"\s*&&\s*", "\n", statement.text))


def is_movable(statement: Statement) -> bool:
    """Return whether the job script can run a statement in place of each of its tasks."""
    commands = statement.commands - ({"exit"} if re.search(r"\|\| *exit\b", statement.text) else set())
    return (commands <= MOVABLE and not statement.writes and not statement.is_background
            and statement.kind != "function_definition" and not OF_ONE_TASK.search(statement.text)
            and not (TASK_VARIABLES.search(statement.text) and statement.kind != "declaration_command")
            and not ("'" in statement.text and PARAMETER.search(statement.text)))


def add_setup(launch: Launch, statement: Statement, new: Replacement) -> None:
    """Add a statement of a second script to the lines before the launch, with the arguments that the script had."""
    tokens = read_tokens(launch.text)
    is_file = launch.followed != "text" and launch.followed in tokens
    arguments = tokens[tokens.index(launch.followed) + 1:] if is_file else []
    kept = remove_exports(statement.text, SET_BY_MPIDDP)
    if TASK_VARIABLES.search(kept):
        new.checks.append(f"this had a value of its own for each node or task: {kept}")
        kept = "" if "VISIBLE_DEVICES" in kept else TASK_VARIABLES.sub("SLURM_JOB_ID", kept)
    kept = re.sub(r'"?\$\{?([1-9])\b\}?"?',
                  lambda match: "".join(arguments[int(match[1]) - 1:int(match[1])]) or '""', kept)
    if kept and launch.container and (statement.kind != "declaration_command" or launch.container == "enroot"):
        new.checks.append(f"this ran in the container, before the training: {kept.splitlines()[0]}")
    elif kept:
        new.setup += kept.split("\n")
        new.checks += [f"this holds for the rest of the script, too: {kept}"] * ("cd" in statement.commands)
