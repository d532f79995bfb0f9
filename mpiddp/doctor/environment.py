"""What is so on this host: MPI and its launcher, torch's build, packages, limits, folders, caches, the site profile.

Neither MPI nor torch is started in this process.
"""

from __future__ import annotations

import ast
import getpass
import importlib.metadata
import importlib.util
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ..base.errors import PACKAGE_FOLDER, LaunchError
from ..base.files import read_text
from ..base.stderr import print_answer
from ..discovery.gpus import DRIVER_FILE, list_openable_gpus
from ..discovery.host import SHM_FOLDER, describe_missing_shm, read_shm_bytes
from ..discovery.launchers import LaunchFacts
from ..discovery.mpi import Library
from ..discovery.schedulers import list_mpi_interfaces
from ..discovery.site_profile import load_site
from ..options.parser import terminal_width
from ..options.site import find_option_problems
from ..planning.compatibility import check_compatibility, list_fitting_options
from ..planning.problems import FEW_OPEN_FILES, SMALL_SHM_BYTES
from ..planning.site import choose_settings, warn_different_variables
from ..staging.manifest import Mount, mount_of, mounts
from ..supervise.command import identify_launcher
from ..systems import launchers
from ..systems.launchers import Launcher
from ..where.registry import registry_folder
from .findings import MIN_WIDTH, Finding, Severity, count_severities, format_severity, wrap

COMMAND_TIMEOUT_S = 20.0  # for loading the MPI library, which may be on a slow file system
# The oldest NVIDIA driver for each major version of CUDA (CUDA Toolkit Release Notes, "CUDA Driver").
OLDEST_DRIVERS = {"11": "450.80.02", "12": "525.60.13", "13": "580"}
NCCL_WITH_OWN_STACKS = "2.28"  # see planning/gpus.py, warn_unlimited_stack
LOAD_CODE = """\
import json, sys
sys.path.append(sys.argv[1])
from mpiddp.base.errors import LaunchError
from mpiddp.discovery import mpi
try:
    mpi.load_mpi()
    library = mpi.identify_library()
    print(json.dumps([library.name, library.version, library.path, sorted(library.interfaces)]))
except LaunchError as error:
    print(json.dumps({"name": error.name, "found": error.actual, "do": error.do}))
"""


class TorchBuild(NamedTuple):
    """An installed torch: its version, and the versions of CUDA, ROCm and XPU that it is built for, empty for none."""

    version: str
    cuda: str = ""
    hip: str = ""
    xpu: str = ""

    @property
    def target(self) -> str:
        """What it is built for, in words."""
        kinds = ("CUDA", self.cuda), ("ROCm", self.hip), ("Intel GPUs", self.xpu)
        return next((f"{name} {version}" for name, version in kinds if version), "CPUs only")

    def supports(self, vendor: str) -> bool:
        """Return whether it can use GPUs of a vendor."""
        return bool({"NVIDIA": self.cuda, "AMD": self.hip, "Intel": self.xpu}[vendor])


class Cache(NamedTuple):
    """A cache of compiled code: the variables that name its folder, each with what follows in it, and the usual one.

    `vendor` is that of the GPUs for which it exists, empty for any.
    """

    owner: str
    variables: tuple[tuple[str, str], ...]
    usual: str
    vendor: str = ""


CACHES = (
    Cache("Triton", (("TRITON_CACHE_DIR", ""), ("TRITON_HOME", ".triton/cache")), "~/.triton/cache"),
    Cache("Inductor", (("TORCHINDUCTOR_CACHE_DIR", ""),), ""),
    Cache("MIOpen", (("MIOPEN_USER_DB_PATH", ""),), "~/.config/miopen", "AMD"),
    Cache("MIOpen", (("MIOPEN_CUSTOM_CACHE_DIR", ""),), "~/.cache/miopen", "AMD"),
    Cache("CUDA", (("CUDA_CACHE_PATH", ""),), "~/.nv/ComputeCache", "NVIDIA"),
)
HUGGING_FACE = Cache("Hugging Face", (("HF_HOME", ""), ("XDG_CACHE_HOME", "huggingface")), "~/.cache/huggingface")


def main(as_json: bool = False) -> int:
    """Print what is so on this host; return 1 if something is to be looked at, else 0."""
    findings = inspect_host(os.environ)
    has_colours = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    status = print_answer(format_json(findings) if as_json else format_lines(
        findings, terminal_width(), has_colours))
    return status or int(any(finding.severity > Severity.NOTE for finding in findings))


def format_json(findings: Sequence[Finding]) -> str:
    """Return findings as records for tools."""
    return json.dumps([finding.as_record() for finding in findings], indent=2)


def format_lines(findings: Sequence[Finding], width: int, has_colours: bool) -> str:
    """Return each finding in lines no wider than the terminal, and how many there are."""
    lines = ["this host (not a job script):"]
    longest = max(len(finding.rule) for finding in findings)
    for finding in findings:
        text, name = ": ".join(filter(None, (finding.message, finding.reason))), finding.severity.name.lower()
        first, *others = wrap("; ".join(filter(None, (text, finding.advice))), max(width, MIN_WIDTH),
                              f"{name:<7}  {finding.rule:<{longest}}  ")
        lines += [first.replace(name, format_severity(finding.severity, has_colours), 1), *others]
    return "\n".join([*lines, f"this host: {count_severities(findings)}"])


def inspect_host(environ: Mapping[str, str]) -> list[Finding]:
    """Return what is so on this host, the worst first."""
    build, gpus = find_torch_build(), {vendor: len(devices) for vendor, devices in list_openable_gpus().items()}
    library = load_library()
    findings = [
        *(inspect_launchers(library, environ) if isinstance(library, Library) else [library]),
        *judge_torch(build, gpus, parse_driver_version(read_text(DRIVER_FILE))),
        *judge_packages(read_requirements, read_installed_version),
        *judge_limits(read_limit(resource.RLIMIT_NOFILE), read_limit(resource.RLIMIT_STACK),
                      read_limit(resource.RLIMIT_CORE), find_nccl_version()),
        *judge_shared_memory(describe_missing_shm(), read_shm_bytes()),
        *inspect_folders(environ),
        *inspect_site(environ),
        *judge_caches({**choose_site_variables(environ), **environ}, build, mounts()),
    ]
    return sorted(findings, key=lambda finding: -finding.severity)


def load_library() -> Library | Finding:
    """Return the library that mpi4py loads, or why it loads none; another process loads it, without MPI_Init."""
    try:
        done = subprocess.run([sys.executable, "-c", LOAD_CODE, os.path.dirname(PACKAGE_FOLDER)], capture_output=True,
                              stdin=subprocess.DEVNULL, encoding="utf-8", errors="replace", timeout=COMMAND_TIMEOUT_S)
        answer = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return Finding("mpi-library", Severity.ERROR, None,
                       f"mpi4py did not load its library within {COMMAND_TIMEOUT_S:.0f} s")
    except (IndexError, ValueError):  # the process crashed
        lines = done.stderr.strip().splitlines()
        return Finding("mpi-library", Severity.ERROR, None,
                       f"loading mpi4py ends Python with status {done.returncode}", "; ".join(lines[-1:]))
    if isinstance(answer, dict):
        return Finding(answer["name"], Severity.ERROR, None, answer["found"].replace("\n", " "),
                       advice=answer["do"].replace("\n", " "))
    name, version, path, interfaces = answer
    return Library(name, tuple(version), path, frozenset(interfaces))


def inspect_launchers(library: Library, environ: Mapping[str, str]) -> list[Finding]:
    """Return what is so with the launchers in PATH for a library."""
    programs = {row.words[0]: path for row in launchers.LAUNCHERS if row.program and row.command
                and (path := shutil.which(row.words[0], path=environ.get("PATH")))}
    mpiexec = next((programs[row.words[0]] for row in launchers.LAUNCHERS
                    if row.is_mpiexec and row.words[0] in programs), "")
    lister = find_lister()
    return judge_launchers(library, mpiexec, identify_mpiexec(mpiexec), [*programs],
                           list_mpi_interfaces(lister) if lister.words[0] in programs else [])


def find_lister() -> Launcher:
    """Return the launcher that lists its interfaces to MPI."""
    return next(row for row in launchers.LAUNCHERS if row.ask_interfaces)


def identify_mpiexec(program: str) -> Launcher:
    """Return the kind of an mpirun or mpiexec at a path."""
    return identify_launcher(program, os.path.realpath(program), read_output(program, "--version") if program else "")


def read_output(*command: str) -> str:
    """Return what a command prints, empty if it cannot be started or takes too long."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True,
                              encoding="utf-8", errors="replace", timeout=COMMAND_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout + done.stderr


def judge_launchers(
    library: Library, mpiexec: str, kind: Launcher, programs: Sequence[str], mpi_types: Sequence[str]
) -> list[Finding]:
    """Return what is so with a library and the launchers in PATH.

    `mpiexec` is the path of an MPI's launcher of a `kind`, empty for none; `mpi_types` are the interfaces that
    another launcher lists.
    """
    lister = find_lister()
    findings = [Finding("mpi-library", Severity.NOTE, None, f"mpi4py loads {library}")]
    if not programs:
        return [*findings, Finding("launcher", Severity.WARNING, None, "no launcher is in PATH",
                                   "something has to start the ranks", "module load the MPI that mpi4py uses")]
    if mpiexec:
        facts = LaunchFacts(kind, 0, 2, kind.own, has_pmi_library=False)
        try:
            check_compatibility(facts if kind.name else None, library)
        except LaunchError as error:
            findings.append(Finding("launcher", Severity.WARNING, None,
                                    f"{mpiexec} is {kind.name}, but mpi4py loads {library.title}",
                                    "mpiddp refuses to start with it", suggest_launcher(error)))
        else:
            findings.append(Finding("launcher", Severity.NOTE, None, f"{mpiexec} is in PATH"))
    if mpi_types:
        fitting = [option for option in list_fitting_options(lister, library, mpi_types)
                   if option in map(lister.interface.format, mpi_types)]
        if fitting:
            findings.append(Finding(lister.command, Severity.NOTE, None,
                                    f"{library.title} starts with {lister.command} {fitting[0]}"))
        else:
            wanted = " or ".join(list_fitting_options(lister, library)) or "another MPI library"
            findings.append(Finding(
                lister.command, Severity.WARNING, None,
                f"this {lister.command} has no {lister.interface.partition('=')[0]} that fits {library.title} "
                f"({', '.join(mpi_types)})", f"it needs {wanted}",
                f"start with {launchers.MPIRUN.command} in the job script"))
    return findings


def suggest_launcher(error: LaunchError) -> str:
    """Return which launcher to use instead: the environment's own, if it is only not in PATH."""
    folder = os.path.dirname(sys.executable)
    own, activate = os.path.join(folder, launchers.HYDRA.command), os.path.join(folder, "activate")
    if not os.path.exists(own):
        return error.do.replace("\n", " ")
    return f"source {activate}" if os.path.exists(activate) else f"start with {own}"


def find_torch_build() -> TorchBuild | None:
    """Return the build of the torch that Python would import, None without torch; torch is not imported."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    return parse_torch_version(read_text(os.path.join(os.path.dirname(spec.origin), "version.py")))


def parse_torch_version(source: str) -> TorchBuild:
    """Return the build that torch's version.py describes."""
    values: dict[str, str] = {}
    for statement in ast.parse(source).body:
        if isinstance(statement, (ast.Assign, ast.AnnAssign)) and isinstance(statement.value, ast.Constant):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            values |= {target.id: str(statement.value.value or "")
                       for target in targets if isinstance(target, ast.Name)}
    return TorchBuild(*(values.get(name, "") for name in ("__version__", "cuda", "hip", "xpu")))


def parse_driver_version(text: str) -> str:
    """Return the version of NVIDIA's driver from its file in /proc, empty for none."""
    match = re.search(r"Kernel Module .*?(\d+\.\d+(?:\.\d+)?)\s", f"{text}\n")
    return match[1] if match else ""


def judge_torch(build: TorchBuild | None, gpus: Mapping[str, int], driver: str) -> list[Finding]:
    """Return what is so with torch's build; `gpus` are the numbers of GPUs here, by vendor."""
    if build is None:
        return [Finding("torch", Severity.ERROR, None, f"torch is not installed for {sys.executable}",
                        advice="activate the environment in which you installed mpiddp")]
    findings = []
    for vendor, count in gpus.items():
        here = f"{count} {vendor} GPU{'s' * (count > 1)}"
        if build.supports(vendor):
            findings.append(Finding("torch", Severity.NOTE, None,
                                    f"torch {build.version} is built for {build.target}; this host has {here}"))
        else:
            findings.append(Finding(
                "torch-build", Severity.ERROR, None,
                f"this host has {here}, but torch {build.version} is built for {build.target}",
                "training would run on the CPU", f"install torch's wheel for {vendor} GPUs (pytorch.org, Get Started)"))
    if not gpus:
        findings.append(Finding("torch", Severity.NOTE, None,
                                f"torch {build.version} is built for {build.target}; this host has no GPU",
                                "" if any((build.cuda, build.hip, build.xpu)) else
                                "right on a login node only if the job uses another torch"))
    oldest = OLDEST_DRIVERS.get(build.cuda.partition(".")[0], "")
    if driver and oldest and parse_version(driver) < parse_version(oldest):
        findings.append(Finding("driver", Severity.ERROR, None,
                                f"NVIDIA's driver {driver} is too old for CUDA {build.cuda}, for which torch is built",
                                f"it needs driver {oldest} or newer",
                                "install torch's wheel for an older CUDA, or ask the centre for a newer driver"))
    return findings


def parse_version(text: str) -> tuple[int, ...]:
    """Return the numbers at the beginning of a version."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, match[0].split("."))) if match else ()


def read_requirements(package: str) -> list[str]:
    """Return what a package requires, in pip's syntax; nothing if it is not installed."""
    try:
        return importlib.metadata.requires(package) or []
    except importlib.metadata.PackageNotFoundError:
        return []


def read_installed_version(package: str) -> str:
    """Return the version of an installed package, empty if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def judge_packages(requires: Callable[[str], list[str]], installed: Callable[[str], str]) -> list[Finding]:
    """Return which installed packages do not fit: too old for mpiddp, missing, or not the version that torch needs."""
    findings = []
    for package in ("mpiddp", "torch"):
        for requirement in requires(package):
            match = re.match(r"([\w.-]+)\s*(>=|==)?\s*([\d.]*)", requirement)
            if match is None or "extra ==" in requirement:
                continue
            name, sign, version = match.groups()
            present = installed(name)
            if not present:
                if package == "mpiddp" and ";" not in requirement:
                    findings.append(Finding("package-missing", Severity.ERROR, None, f"{name} is not installed",
                                            "mpiddp needs it", f"pip install '{requirement}'"))
                continue
            is_old = sign == ">=" and parse_version(present) < parse_version(version)
            if is_old or (sign == "==" and parse_version(present) != parse_version(version)):
                findings.append(Finding("package-version", Severity.WARNING, None,
                                        f"{name} {present} is installed, but {package} needs {sign}{version}",
                                        advice=f"pip install '{name}{sign}{version}'"))
    return findings


def find_nccl_version() -> str:
    """Return the version of the NCCL that pip has installed for torch, empty for none."""
    return next(filter(None, (read_installed_version(f"nvidia-nccl-cu{major}") for major in OLDEST_DRIVERS)), "")


def read_limit(kind: int) -> int:
    """Return the limit that counts for this process."""
    return resource.getrlimit(kind)[0]


def judge_limits(open_files: int, stack: int, core: int, nccl: str) -> list[Finding]:
    """Return which limits of processes do not fit; RLIM_INFINITY stands for no limit."""
    findings = []
    if 0 <= open_files < FEW_OPEN_FILES:
        findings.append(Finding("open-files", Severity.WARNING, None, f"the limit of open files is {open_files}",
                                "DataLoader workers and connections to other ranks need more", "ulimit -n 65536"))
    if stack == resource.RLIM_INFINITY and nccl and parse_version(nccl) < parse_version(NCCL_WITH_OWN_STACKS):
        findings.append(Finding("stack", Severity.WARNING, None, "the stack size is unlimited",
                                f"NCCL {nccl} may then crash on large NVLink systems such as GB200", "ulimit -s 8192"))
    if core != 0:
        findings.append(Finding("core-files", Severity.NOTE, None, "core files are allowed",
                                "those of a whole job can fill the file system", "ulimit -c 0"))
    return findings


def judge_shared_memory(why_not: str, size: int) -> list[Finding]:
    """Return what is wrong with /dev/shm: that it is missing, for the reason `why_not`, or too small."""
    if why_not:
        return [Finding("shared-memory", Severity.ERROR, None, why_not, "MPICH and DataLoader workers need /dev/shm",
                        "in a container, mount one (--shm-size=8g), or bind the host's")]
    if size < SMALL_SHM_BYTES:
        return [Finding("shared-memory", Severity.WARNING, None, f"{SHM_FOLDER} has {size // 2**20} MiB",
                        "DataLoader workers and MPI need more", "in a container: --shm-size=8g, or bind the host's")]
    return []


def inspect_folders(environ: Mapping[str, str]) -> list[Finding]:
    """Return which of the user's folders cannot be written."""
    home = environ.get("HOME") or os.path.expanduser("~")
    findings = []
    if not os.access(home, os.W_OK | os.X_OK):
        findings.append(Finding("home", Severity.WARNING, None, f"the home folder {home} cannot be written here",
                                "libraries keep caches there, and fail or warn",
                                "export HOME, or HF_HOME, TRITON_HOME and XDG_CACHE_HOME, to a folder that can"))
    state = registry_folder()
    if not os.access(nearest_folder(state), os.W_OK | os.X_OK):
        findings.append(Finding("state-folder", Severity.WARNING, None, f"{state} cannot be made or written",
                                "python -m mpiddp.where finds running jobs there",
                                "export XDG_STATE_HOME to a folder that all nodes see"))
    return findings


def nearest_folder(path: str) -> str:
    """Return the path, or the nearest folder above it that exists, without links."""
    path = os.path.abspath(path)
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return os.path.realpath(path)


def inspect_site(environ: Mapping[str, str]) -> list[Finding]:
    """Return what is so with the site profile, and what it says about this host."""
    site = load_site(environ)
    if site.profile is None:
        return [Finding("site-profile", Severity.WARNING, None, site.problem)] if site.problem else []
    profile = site.profile
    lines = [*warn_different_variables(profile, choose_settings(profile, environ)),
             *find_option_problems(profile.options)]
    return [Finding("site-profile", Severity.NOTE, None, f"{profile.file} is the profile of {profile.name}",
                    f"help: {profile.contact}"),
            *(Finding("site-profile", Severity.WARNING, None, line.removeprefix("site-variable: ")) for line in lines)]


def choose_site_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the site profile sets in a job."""
    profile = load_site(environ).profile
    settings = choose_settings(profile, environ) if profile else []
    return {setting.name: setting.value for setting in settings if setting.is_set}


def judge_caches(environ: Mapping[str, str], build: TorchBuild | None, mounted: Sequence[Mount]) -> list[Finding]:
    """Return which caches are on a shared file system; `environ` is the environment of a job."""
    findings = []
    for cache in CACHES:
        if build is None or (cache.vendor and not build.supports(cache.vendor)):
            continue
        if cache.owner == "CUDA" and environ.get("CUDA_CACHE_DISABLE") == "1":
            continue
        folder = find_cache_folder(cache, environ)
        mount = mount_of(nearest_folder(folder), mounted)
        if mount.is_shared:
            findings.append(Finding(
                "shared-cache", Severity.WARNING, None,
                f"{cache.owner}'s cache {folder} is on a shared file system ({mount.file_system})",
                "all ranks write many small files there, and wait for each other's locks",
                f"export {cache.variables[0][0]}=/tmp/$USER/{cache.owner.lower()}"))
    folder = find_cache_folder(HUGGING_FACE, environ)
    if folder.startswith(os.path.join(expand_home("~", environ), "")):
        findings.append(Finding("hugging-face", Severity.NOTE, None,
                                f"Hugging Face's cache {folder} is in the home folder",
                                "models and data sets can fill its quota",
                                "export HF_HOME=$SCRATCH/huggingface (a folder with more space that all nodes see)"))
    return findings


def find_cache_folder(cache: Cache, environ: Mapping[str, str]) -> str:
    """Return the folder of a cache."""
    for variable, rest in cache.variables:
        if environ.get(variable):
            return os.path.abspath(os.path.join(environ[variable], rest))
    usual = cache.usual or os.path.join(environ.get("TMPDIR") or tempfile.gettempdir(), f"torchinductor_{user()}")
    return expand_home(usual, environ)


def expand_home(path: str, environ: Mapping[str, str]) -> str:
    """Return a path with the home folder for a ~ at its beginning."""
    return path.replace("~", environ.get("HOME") or os.path.expanduser("~"), 1) if path.startswith("~") else path


def user() -> str:
    """Return the user's name, or the number of one without a name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
