"""Apply the site profile to this rank before MPI_Init, and keep what that was for warnings and --explain."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any, NamedTuple

from ..base.config import LaunchConfig
from ..base.files import find_risk, format_os_error, resolve_path
from ..discovery.site_profile import SiteProfile, expand_folder, load_site
from ..options.site import find_option_problems
from .prepare import set_env

if TYPE_CHECKING:
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


def apply_site(config: LaunchConfig) -> None:
    """Set the variables of the site profile that are not set yet."""
    global applied
    site = load_site(os.environ)
    if site.profile is not None:
        applied = apply_profile(site.profile, config)
    elif site.problem:
        applied = AppliedSite(warnings=(f"site-profile: {site.problem}",))


def apply_profile(profile: SiteProfile, config: LaunchConfig) -> AppliedSite:
    """Set the variables of a profile that are not set yet, and return what it means for this rank."""
    from ..planning.site import choose_settings, warn_different_variables  # only a profile needs them

    settings = choose_settings(profile, os.environ)
    problems = [*find_option_problems(profile.options), *config.site_conflicts]
    if not config.log_dir and (problem := expand_folder(profile.log_folder, os.environ)[1]):
        problems.append(f"log_folder is not used: {problem}")
    new = {}
    for setting in settings:
        if setting.is_set and setting.is_cache and (problem := make_cache_folder(setting.value)):
            problems.append(f"{setting.name} is not set: cannot use {setting.value}: {problem}")
        elif setting.is_set:
            new[setting.name] = setting.value
    set_env(new)
    warnings = [f"site-profile: {profile.file}: {problem}" for problem in problems]
    return AppliedSite(profile, tuple(settings), (*warnings, *warn_different_variables(profile, settings)))


def make_cache_folder(folder: str) -> str:
    """Make a folder that only this user can write to, unless it exists, and return why that fails, empty if not."""
    if not os.path.isabs(folder):
        return "it is not an absolute path"
    check = functools.partial(find_risk, job_folder=True)
    try:
        resolve_path(os.path.join(folder, "file"), check, CACHE_MODE)
    except OSError as error:
        return format_os_error(error, folder)
    return ""
