"""What the site profile means for a job: the variables to set, and the warnings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ..discovery.site_profile import drop_empty, expand
from ..discovery.site_schema import AMD, INTEL, NVIDIA, Conditions, SiteCheck, SiteProfile, SiteVariable

CACHE_REASON = "a cache on the node itself, not on the shared file system"
BACKENDS = {NVIDIA: "nccl", AMD: "nccl", INTEL: "xccl"}  # torch's defaults


class JobConditions(NamedTuple):
    """What conditions are compared with; all of it is known before MPI_Init. `nodes` is 0 if unknown."""

    backend: str
    gpu: str
    mpi: str
    nodes: int


class SiteSetting(NamedTuple):
    """A variable that the profile has for this job.

    `former` is the value that it has already, None for none: then it is set. If the value names a variable that is not
    set, or a cache one that is empty, `missing` is that one, and nothing is set.
    """

    name: str
    value: str
    reason: str
    former: str | None = None
    missing: str = ""
    is_cache: bool = False
    harmful_if_different: bool = False

    @property
    def is_set(self) -> bool:
        """Whether mpiddp sets the variable."""
        return self.former is None and not self.missing

    @property
    def differs(self) -> bool:
        """Whether the variable has another value than the profile's."""
        return self.former is not None and not self.missing and self.former != self.value


def predict_backend(backend: str | None, device: str | None, gpu: str) -> str:
    """Return the backend of a job: the one that its options name, or that of torch for the device or GPU."""
    kinds = {"cuda": "nccl", "xpu": "xccl", "cpu": "gloo"}
    return backend or kinds.get(device or "", "") or BACKENDS.get(gpu, "gloo")


def is_met(conditions: Conditions, job: JobConditions) -> bool:
    """Return whether a job fulfils conditions; a bound on an unknown number of nodes is not fulfilled."""
    return (
        conditions.backend in ("", job.backend)
        and conditions.gpu in ("", job.gpu)
        and conditions.mpi in ("", job.mpi)
        and conditions.minimum_nodes <= job.nodes
        and (not conditions.maximum_nodes or 0 < job.nodes <= conditions.maximum_nodes)
    )


def choose_settings(profile: SiteProfile, job: JobConditions, environ: Mapping[str, str]) -> list[SiteSetting]:
    """Return the variables that a profile has for a job; of several entries for one, the first that fits counts."""
    caches = [SiteVariable(name, folder, CACHE_REASON) for name, folder in profile.caches.items()]
    settings: dict[str, SiteSetting] = {}
    for variable in (*profile.variables, *caches):
        if variable.name not in settings and is_met(variable.conditions, job):
            is_cache = variable.reason is CACHE_REASON
            value, missing = expand(variable.value, drop_empty(environ) if is_cache else environ)
            settings[variable.name] = SiteSetting(
                variable.name, value, variable.reason, environ.get(variable.name), missing, is_cache,
                harmful_if_different=variable.harmful_if_different)
    return list(settings.values())


def describe_failed_checks(
    profile: SiteProfile, job: JobConditions, environ: Mapping[str, str], exists: Callable[[str], bool]
) -> list[str]:
    """Return in words which of the profile's checks fail in a job, each with its reason."""
    failed = [(describe_failure(check, environ, exists), check.reason)
              for check in profile.checks if is_met(check.conditions, job)]
    return [f"{what}: {reason}" for what, reason in failed if what]


def describe_failure(check: SiteCheck, environ: Mapping[str, str], exists: Callable[[str], bool]) -> str:
    """Return in words how a check fails, empty if it does not, or if its path names a variable that is not set.

    Environment Modules and Lmod list what is loaded in LOADEDMODULES, as name or name/version.
    """
    if check.unset:
        return f"{check.unset}={environ[check.unset]} is set" if check.unset in environ else ""
    if check.module:
        loaded = environ.get("LOADEDMODULES", "").split(":")
        is_loaded = any(name == check.module or name.startswith(f"{check.module}/") for name in loaded)
        return "" if is_loaded else f"the module {check.module} is not loaded"
    path = expand(check.path, environ)[0]
    return f"{path} does not exist" if path and not exists(path) else ""


def warn_different_variables(profile: SiteProfile, settings: Sequence[SiteSetting]) -> list[str]:
    """Return the warning `site-variable` for each variable whose value the centre calls harmful."""
    return [f"site-variable: {setting.name}={setting.former} is set, but {profile.name} needs {setting.value}: "
            f"{setting.reason}" for setting in settings if setting.differs and setting.harmful_if_different]


def explain_settings(profile: SiteProfile, settings: Sequence[SiteSetting]) -> dict[str, str]:
    """Return a line on each variable of a profile, by its name."""
    source = f"the site profile {profile.file}"
    lines = {}
    for setting in settings:
        if setting.missing:
            line = f"{setting.name} is not set: {source} needs ${setting.missing} for it"
        elif setting.former is None:
            line = f"{setting.name}={setting.value}  from {source}: {setting.reason}"
        else:
            other = f"; {source} has {setting.value}: {setting.reason}" if setting.differs else f", and in {source}"
            line = f"{setting.name}={setting.former}  from the environment (set by the user){other}"
        lines[setting.name] = line
    return lines
