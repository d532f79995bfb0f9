"""`python -m mpiddp.doctor --site FILE`: checks a site profile, and shows what it does on three example nodes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..base.errors import EXIT_USAGE
from ..base.stderr import print_answer, write_line
from ..base.text import format_columns
from ..discovery.site_schema import NO_GPU, ProfileError, SiteCheck, SiteProfile, read_profile
from ..options.site import find_option_problems
from ..planning.site import JobConditions, SiteSetting, choose_settings, is_met, predict_backend
from .environment import user

MANY_NODES = 64  # of the largest example


class ExampleNode(NamedTuple):
    """A node for which the effect of a profile is shown."""

    title: str
    job: JobConditions


def main(path: str) -> int:
    """Check the profile in a file; return 0 if it is right, 1 if not, 2 if there is no such file."""
    file = os.path.abspath(path)
    if not os.path.exists(file):
        write_line(f"mpiddp.doctor: --site {path}: there is no such file")
        return EXIT_USAGE
    try:
        profile = read_profile(file)
        problems = find_option_problems(profile.options)
    except ProfileError as error:
        problems = error.problems
    if problems:
        write_line("\n".join([*(f"{file}: {problem}" for problem in problems),
                              f"{len(problems)} problem{'s' * (len(problems) > 1)}"]))
        return 1
    return print_answer("\n".join(describe_profile(profile, example_environ())))


def describe_profile(profile: SiteProfile, environ: Mapping[str, str]) -> list[str]:
    """Return in words what a profile does."""
    whom = ", ".join(filter(None, (profile.contact, profile.link)))
    lines = [f"{profile.file} is right: the profile of {profile.name} ({whom})"]
    for title, text in (
        ("start", profile.launch_line), ("scheduler's options", " ".join(profile.launch_options)),
        ("logs", profile.log_folder), ("state", profile.state_folder), ("staging", profile.staging_folder),
        ("mpiddp's options", " ".join(f"--{name}={value}" for name, value in profile.options.items())),
    ):
        lines += [f"  {title}: {text}"] if text else []
    for node in choose_examples(profile):
        lines.append(f"{node.title}:")
        settings = choose_settings(profile, node.job, environ)
        rows = [describe_setting(setting) for setting in settings]
        rows += [(describe_check(check), check.reason)
                 for check in profile.checks if is_met(check.conditions, node.job)]
        lines += format_columns(rows) if rows else ["  nothing"]
    return lines


def describe_setting(setting: SiteSetting) -> tuple[str, str]:
    """Return a variable with its value, and its reason."""
    if setting.missing:
        return f"{setting.name} is not set", f"because ${setting.missing} is not set"
    return f"{setting.name}={setting.value}", setting.reason


def describe_check(check: SiteCheck) -> str:
    """Return what a check needs."""
    if check.path:
        return f"{check.path} must exist"
    return f"{check.unset} must not be set" if check.unset else f"module {check.module} must be loaded"


def choose_examples(profile: SiteProfile) -> Sequence[ExampleNode]:
    """Return a login node, the node of a small job, and one of a large job, as the profile's conditions have them."""
    conditions = [variable.conditions for variable in profile.variables]
    gpu = next((condition.gpu for condition in conditions if condition.gpu not in ("", NO_GPU)), "nvidia")
    mpi = next((condition.mpi for condition in conditions if condition.mpi), "Open MPI")
    backends = (condition.backend for condition in conditions if condition.backend)
    backend = next(backends, predict_backend(None, None, gpu))
    return (
        ExampleNode(f"A login node without GPUs, {mpi}", JobConditions("gloo", NO_GPU, mpi, 1)),
        ExampleNode(f"A job on 1 node, {gpu} GPUs, {backend}, {mpi}", JobConditions(backend, gpu, mpi, 1)),
        ExampleNode(f"A job on {MANY_NODES} nodes, {gpu} GPUs, {backend}, {mpi}",
                    JobConditions(backend, gpu, mpi, MANY_NODES)),
    )


def example_environ() -> dict[str, str]:
    """Return the variables that the values of a profile may name."""
    return {"SLURM_JOB_ID": "4711", "SLURM_JOB_ACCOUNT": "project", "USER": user(), **os.environ}
