"""What the site profile means for a job: the variables to set, and the warnings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..discovery.site_profile import SiteProfile, SiteVariable, expand

CACHE_REASON = "a cache on the node itself, not on the shared file system"


class SiteSetting(NamedTuple):
    """A variable that the profile has for this job, with its `value` here; a cache is a folder to make.

    `former` is the value that it has already, None for none: then it is set. If the value names a variable that is not
    set, `missing` is that one, and nothing is set.
    """

    name: str
    value: str
    variable: SiteVariable
    former: str | None
    missing: str
    is_cache: bool

    @property
    def is_set(self) -> bool:
        """Whether mpiddp sets the variable."""
        return self.former is None and not self.missing

    @property
    def differs(self) -> bool:
        """Whether the variable has another value than the profile's."""
        return self.former is not None and not self.missing and self.former != self.value


def choose_settings(profile: SiteProfile, environ: Mapping[str, str]) -> list[SiteSetting]:
    """Return the variables that a profile has for a job."""
    caches = {name: SiteVariable(folder, CACHE_REASON) for name, folder in profile.caches.items()}
    settings = []
    for name, variable in {**profile.variables, **caches}.items():
        value, missing = expand(variable.value, environ)
        settings.append(SiteSetting(name, value, variable, environ.get(name), missing, name in caches))
    return settings


def warn_different_variables(profile: SiteProfile, settings: Sequence[SiteSetting]) -> list[str]:
    """Return the warning `site-variable` for each variable whose value the centre calls harmful."""
    return [f"site-variable: {setting.name}={setting.former} is set, but {profile.name} needs {setting.value}: "
            f"{setting.variable.reason}"
            for setting in settings if setting.differs and setting.variable.harmful_if_different]


def explain_settings(profile: SiteProfile, settings: Sequence[SiteSetting]) -> dict[str, str]:
    """Return a line on each variable of a profile, by its name."""
    source = f"the site profile {profile.file}"
    lines = {}
    for setting in settings:
        reason = setting.variable.reason
        if setting.missing:
            line = f"{setting.name} is not set: {source} needs ${setting.missing} for it"
        elif setting.former is None:
            line = f"{setting.name}={setting.value}  from {source}: {reason}"
        else:
            other = f"; {source} has {setting.value}: {reason}" if setting.differs else f", and in {source}"
            line = f"{setting.name}={setting.former}  from the environment (set by the user){other}"
        lines[setting.name] = line
    return lines
