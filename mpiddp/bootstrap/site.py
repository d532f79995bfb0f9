"""Apply the site profile to this rank before MPI_Init, and keep what that was for warnings and --explain."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any, NamedTuple

from ..base.config import LaunchConfig
from ..base.files import find_risk, format_os_error, walk_path
from ..discovery.gpus import find_gpu_kind
from ..discovery.launchers import count_nodes
from ..discovery.site_profile import expand_folder, load_site
from ..options.site import find_option_problems
from .prepare import set_env

if TYPE_CHECKING:
    from ..discovery.site_schema import SiteProfile
    from ..planning.site import SiteSetting

CACHE_MODE = 0o700  # of a cache folder that is made


class AppliedSite(NamedTuple):
    """The profile as this rank has used it: the variables, and the warnings that come of it."""

    profile: SiteProfile | None = None
    settings: tuple[SiteSetting, ...] = ()
    warnings: tuple[str, ...] = ()

    def list_facts(self) -> dict[str, Any]:
        """Return what rank 0 must know, by the fields of HostFacts."""
        if self.profile is None:
            return {"site_warnings": self.warnings}
        return {"site_warnings": self.warnings, "site_file": self.profile.file,
                "site_options": {**self.profile.options, "log-dir": self.profile.log_folder}}

    def explain(self, config: LaunchConfig) -> dict[str, str]:
        """Return a line on each variable and option of the profile, by its name."""
        if self.profile is None:
            return {}
        from ..planning.site import explain_settings

        options = {option: f"{option}  from the site profile {self.profile.file}" for option in config.site_options}
        return explain_settings(self.profile, self.settings) | options


applied = AppliedSite()  # by this process


def apply_site(config: LaunchConfig, mpi_library: str) -> None:
    """Set the variables of the site profile that are not set yet, for a job with this MPI library."""
    global applied
    site = load_site(os.environ)
    if site.profile is not None:
        applied = apply_profile(site.profile, config, mpi_library)
    elif site.problem:
        applied = AppliedSite(warnings=(f"site-profile: {site.problem}",))


def apply_profile(profile: SiteProfile, config: LaunchConfig, mpi_library: str) -> AppliedSite:
    """Set the variables of a profile that are not set yet, and return what it means for this rank."""
    from ..planning import site  # only a profile needs it

    gpu = find_gpu_kind()
    backend = site.predict_backend(config.backend, config.device, gpu)
    job = site.JobConditions(backend, gpu, mpi_library, count_nodes(os.environ))
    settings = site.choose_settings(profile, job, os.environ)
    warnings = [f"site-profile: {profile.file}: {problem}" for problem in find_option_problems(profile.options)]
    warnings += [f"site-profile: {profile.file}: {conflict}" for conflict in config.site_conflicts]
    log_problem = expand_folder(profile.log_folder, os.environ)[1]
    if log_problem and any("--log-dir" in conflict for conflict in config.site_conflicts):
        warnings.append(f"site-profile: {profile.file}: [folders] log is not used: {log_problem}")
    new = {}
    for setting in settings:
        if setting.is_set and setting.is_cache and (problem := make_cache_folder(setting.value)):
            warnings.append(f"site-profile: {setting.name} is not set: cannot use {setting.value}: {problem}")
        elif setting.is_set:
            new[setting.name] = setting.value
    set_env(new)
    warnings += site.warn_different_variables(profile, settings)
    warnings += [f"site-check: {failure}"
                 for failure in site.describe_failed_checks(profile, job, os.environ, os.path.exists)]
    return AppliedSite(profile, tuple(settings), tuple(warnings))


def make_cache_folder(folder: str) -> str:
    """Make a folder that only this user can write to, unless it exists, and return why that fails, empty if not."""
    if not os.path.isabs(folder):
        return "it is not an absolute path"
    check = functools.partial(find_risk, job_folder=True)
    try:
        with walk_path(os.path.join(folder, "file"), check, CACHE_MODE):
            return ""
    except OSError as error:
        return format_os_error(error, folder)
