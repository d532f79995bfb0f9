"""The doctor's look at a host: MPI and its launcher, torch's build, packages, limits, folders, caches, the profile."""

from __future__ import annotations

import json
import os
import re
import resource
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from mpiddp.discovery.mpi import Library
from mpiddp.discovery.site_profile import load_profile
from mpiddp.doctor import environment
from mpiddp.doctor.environment import (
    TorchBuild,
    expand_home,
    find_torch_build,
    format_json,
    format_lines,
    inspect_folders,
    inspect_launchers,
    inspect_site,
    judge_caches,
    judge_launchers,
    judge_limits,
    judge_packages,
    judge_shared_memory,
    judge_torch,
    load_library,
    nearest_folder,
    parse_driver_version,
    parse_torch_version,
)
from mpiddp.doctor.findings import Finding, Severity
from mpiddp.staging.manifest import Mount
from mpiddp.systems.launchers import HYDRA, MPIRUN, NO_LAUNCHER, PALS
from mpiddp.systems.mpi_libraries import CRAY_PMI, PMI, PMIX
from tests.messages import find, message
from tests.support import MPIS, Mpi, alone, need

MPICH = Library("MPICH", (5, 0, 2), "/env/lib/libmpi.so.12", frozenset({PMI}))
OMPI = Library("Open MPI", (5, 0, 11), "/env/lib/libmpi.so.40", frozenset({PMIX}))
CRAY_MPICH = Library("Cray MPICH", (8, 1, 32), "/opt/cray/libmpi.so.12", frozenset({CRAY_PMI, PMI, PMIX}))
CPU, CUDA, ROCM = TorchBuild("2.9.0+cpu"), TorchBuild("2.9.0+cu128", "12.8"), TorchBuild("2.9.0+rocm6.4", hip="6.4")
MOUNTS = [Mount("/", "ext4", frozenset()), Mount("/home", "nfs4", frozenset()), Mount("/tmp", "tmpfs", frozenset())]


def shown(findings: list[Finding]) -> list[tuple[str, str]]:
    """Return the severities and messages of findings."""
    return [(finding.severity.name, finding.message) for finding in findings]


@pytest.mark.parametrize(("library", "kind", "programs", "types", "rest"), [
    (MPICH, HYDRA, ["mpiexec"], [], [("NOTE", message("site/launcher", path="/bin/mpiexec"))]),
    (OMPI, MPIRUN, ["mpirun"], [], [("NOTE", message("site/launcher", path="/bin/mpiexec"))]),
    (MPICH, MPIRUN, ["mpirun"], [], [("WARNING", message(
        "site/foreign_launcher", path="/bin/mpiexec", launcher="Open MPI's mpirun", library="MPICH 5.0.2"))]),
    (OMPI, HYDRA, ["mpiexec"], [], [("WARNING", message(
        "site/foreign_launcher", path="/bin/mpiexec", launcher="MPICH's or Intel MPI's mpiexec",
        library="Open MPI 5.0.11"))]),
    (CRAY_MPICH, PALS, ["mpiexec"], [], [("NOTE", message("site/launcher", path="/bin/mpiexec"))]),
    (MPICH, NO_LAUNCHER, [], [], [("WARNING", message("site/no_launcher"))]),
    (OMPI, None, ["srun"], ["none", "pmix"],
     [("NOTE", message("site/srun_fits", library="Open MPI 5.0.11", option="--mpi=pmix"))]),
    (CRAY_MPICH, None, ["srun"], ["cray_shasta", "none", "pmi2"],
     [("NOTE", message("site/srun_fits", library="Cray MPICH 8.1.32", option="--mpi=cray_shasta"))]),
    (MPICH, None, ["srun"], ["none", "pmix"],
     [("WARNING", message("site/srun_lacks", library="MPICH 5.0.2", types="none, pmix"))]),
    (MPICH, None, ["srun"], [], []),
])
def test_the_library_and_the_launchers_in_path(
    library: Library, kind: environment.LauncherCommand | None, programs: list[str], types: list[str],
    rest: list[tuple[str, str]],
) -> None:
    mpiexec = "/bin/mpiexec" if kind not in (None, NO_LAUNCHER) else ""
    findings = judge_launchers(library, mpiexec, kind or NO_LAUNCHER, programs, types)
    assert shown(findings) == [("NOTE", message("site/library", library=library)), *rest]


VERSION_FILES = [
    ("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = None\n", TorchBuild("2.13.0+cpu")),
    ("from typing import Optional\n__version__ = '2.9.0+cu128'\ndebug = False\ncuda: Optional[str] = '12.8'\n",
     TorchBuild("2.9.0+cu128", "12.8")),
    ("__version__ = '2.4.0'\ncuda = None\nhip = '6.1.40091-a8d'\n", TorchBuild("2.4.0", "", "6.1.40091-a8d")),
    ("xpu: Optional[str] = '20250101'\n", TorchBuild("", xpu="20250101")), ("", TorchBuild("")),
]


@pytest.mark.parametrize(("source", "build"), VERSION_FILES)
def test_torchs_build_is_read_from_its_file(source: str, build: TorchBuild) -> None:
    assert parse_torch_version(source) == build


@pytest.mark.parametrize(("text", "version"), [
    ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023\nGCC version: gcc 12",
     "535.129.03"),
    ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (root@x)", "580.65.06"),
    ("", "")])
def test_the_drivers_version(text: str, version: str) -> None:
    assert parse_driver_version(text) == version


@pytest.mark.parametrize(("build", "gpus", "driver", "found"), [
    (None, {}, "", [("ERROR", message("site/no_torch", python=sys.executable))]),
    (CPU, {}, "", [("NOTE", message("site/torch_fits", version=CPU.version, target="CPUs only", gpus="no GPU"))]),
    (CUDA, {}, "", [("NOTE", message("site/torch_fits", version=CUDA.version, target="CUDA 12.8", gpus="no GPU"))]),
    (CUDA, {"NVIDIA": 4}, "535.1", [
        ("NOTE", message("site/torch_fits", version=CUDA.version, target="CUDA 12.8", gpus="4 NVIDIA GPUs"))]),
    (CPU, {"NVIDIA": 1}, "", [
        ("ERROR", message("site/torch_build", version=CPU.version, target="CPUs only", gpus="1 NVIDIA GPU"))]),
    (CUDA, {"AMD": 8}, "", [
        ("ERROR", message("site/torch_build", version=CUDA.version, target="CUDA 12.8", gpus="8 AMD GPUs"))]),
    (ROCM, {"AMD": 8}, "", [
        ("NOTE", message("site/torch_fits", version=ROCM.version, target="ROCm 6.4", gpus="8 AMD GPUs"))]),
    (CUDA, {"Intel": 6}, "", [
        ("ERROR", message("site/torch_build", version=CUDA.version, target="CUDA 12.8", gpus="6 Intel GPUs"))]),
    (TorchBuild("2.11", "13.0"), {"NVIDIA": 1}, "570.86", [
        ("NOTE", message("site/torch_fits", version="2.11", target="CUDA 13.0", gpus="1 NVIDIA GPU")),
        ("ERROR", message("site/old_driver", driver="570.86", cuda="13.0"))]),
    (CUDA, {"NVIDIA": 1}, "525.60.11", [
        ("NOTE", message("site/torch_fits", version=CUDA.version, target="CUDA 12.8", gpus="1 NVIDIA GPU")),
        ("ERROR", message("site/old_driver", driver="525.60.11", cuda="12.8"))]),
])
def test_torchs_build_against_gpus_and_driver(
    build: TorchBuild | None, gpus: Mapping[str, int], driver: str, found: list[tuple[str, str]]
) -> None:
    assert shown(judge_torch(build, gpus, driver)) == found


def test_packages_that_do_not_fit() -> None:
    required = {
        "mpiddp": ["mpi4py>=4.1", "torch>=2.4", "psutil>=5.9", "setproctitle", "numpy; extra == 'examples'"],
        "torch": ["nvidia-nccl-cu12==2.27.3; platform_system == 'Linux'", "nvidia-cublas-cu12==12.8.4.1; x", "jinja2",
                  "triton==3.5.0; x"]}
    installed = {"mpi4py": "4.1.2", "torch": "2.3.1+cu121", "setproctitle": "1.3", "nvidia-nccl-cu12": "2.21.5",
                 "triton": "3.5.0"}
    findings = judge_packages(required.__getitem__, lambda name: installed.get(name, ""))
    assert shown(findings) == [
        ("WARNING", message("site/wrong_package", item="torch", version="2.3.1+cu121", package="mpiddp",
                            needed=">=2.4")),
        ("ERROR", message("site/missing_package", item="psutil")),
        ("WARNING", message("site/wrong_package", item="nvidia-nccl-cu12", version="2.21.5", package="torch",
                            needed="==2.27.3"))]


def test_the_packages_of_this_environment_fit() -> None:
    assert judge_packages(environment.read_requirements, environment.read_installed_version) == []
    assert environment.read_requirements("torch")


NO_LIMIT = resource.RLIM_INFINITY


@pytest.mark.parametrize(("limits", "found"), [
    ((1024, 8 << 20, 0, ""), []), ((NO_LIMIT, NO_LIMIT, 0, ""), []), ((4096, NO_LIMIT, 0, "2.28.3"), []),
    ((512, 8 << 20, 0, "2.21.5"), [("WARNING", message("site/few_files", limit=512))]),
    ((1024, NO_LIMIT, 0, "2.21.5"), [("WARNING", message("site/unlimited_stack"))]),
    ((1024, 8 << 20, NO_LIMIT, ""), [("NOTE", message("site/core_files"))])])
def test_limits(limits: tuple[int, int, int, str], found: list[tuple[str, str]]) -> None:
    assert shown(judge_limits(*limits)) == found


def test_shared_memory() -> None:
    assert judge_shared_memory("", 2**30) == []
    assert shown(judge_shared_memory("", 64 * 2**20)) == [("WARNING", message("site/small_shm", size=64))]
    assert shown(judge_shared_memory("there is none", 0)) == [("ERROR", "there is none")]


def test_folders_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert inspect_folders({"HOME": str(tmp_path)}) == []
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/sys/x")
    assert shown(inspect_folders({"HOME": "/proc/sys"})) == [
        ("WARNING", message("site/home_unwritable", folder="/proc/sys")),
        ("WARNING", message("site/state_unwritable", folder="/proc/sys/x/mpiddp"))]


def caches(environ: Mapping[str, str], build: TorchBuild | None) -> list[str]:
    """Return the caches on a shared file system, by owner and folder."""
    lines = "\n".join(finding.message for finding in judge_caches({"HOME": "/home/me", **environ}, build, MOUNTS))
    return [f"{fields['owner']} {fields['folder']}" for fields in find("site/shared_cache", lines, kind="nfs4")]


def test_caches_on_a_shared_file_system() -> None:
    assert caches({"TMPDIR": "/tmp"}, CUDA) == ["Triton /home/me/.triton/cache", "CUDA /home/me/.nv/ComputeCache"]
    assert caches({"TMPDIR": "/tmp"}, ROCM) == ["Triton /home/me/.triton/cache", "MIOpen /home/me/.config/miopen",
                                                "MIOpen /home/me/.cache/miopen"]
    assert caches({"TMPDIR": "/home/me/tmp", "TRITON_HOME": "/dev/shm/me", "CUDA_CACHE_DISABLE": "1"}, CUDA) == [
        f"Inductor /home/me/tmp/torchinductor_{environment.user()}"]
    assert caches({"TMPDIR": "/tmp", "TRITON_HOME": "/home/x", "CUDA_CACHE_PATH": "/tmp/c"}, CUDA) == [
        "Triton /home/x/.triton/cache"]
    assert caches({"HOME": "/root"}, None) == []


def test_folders_with_relative_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TMPDIR may be relative, and ~ stays in a path without HOME for a user whom the system does not know."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", dict[int, str]().__getitem__)
    assert expand_home("~/.cache", {}) == "~/.cache"
    assert {*map(nearest_folder, ("nonexist/a", "~/.cache", ""))} == {os.path.realpath(tmp_path)}
    assert caches({"TMPDIR": "nonexist", "HOME": ""}, CUDA) == []


def test_hugging_faces_cache_in_the_home_folder() -> None:
    for environ, folder in (({}, "/home/me/.cache/huggingface"), ({"XDG_CACHE_HOME": "/scratch"}, "")):
        found = judge_caches({"HOME": "/home/me", **environ}, None, MOUNTS)
        assert shown(found) == [("NOTE", message("site/hugging_face_at_home", folder=folder))] * bool(folder)


def test_the_site_profile_on_this_host(tmp_path: Path) -> None:
    (file := tmp_path / "site.toml").write_text(
        'name = "Testbed"\ncontact = "help"\n[options]\nstal = 1\n'
        '[variables.A]\nvalue = "1"\nreason = "r"\nharmful_if_different = true\n')
    file.chmod(0o644)
    site = {"MPIDDP_SITE": str(file)}
    findings = shown(inspect_site({**site, "A": "2"}))
    assert findings[0] == ("NOTE", message("site/profile_here", file=file, site="Testbed"))
    assert [severity for severity, _ in findings[1:]] == ["WARNING"] * 2
    assert environment.choose_site_variables(site) == {"A": "1"}
    file.chmod(0o666)
    load_profile.cache_clear()
    assert [severity for severity, _ in shown(inspect_site(site))] == ["WARNING"]
    assert inspect_site({"MPIDDP_SITE": ""}) == []


def test_findings_are_lines_and_records() -> None:
    findings = [Finding("torch-build", Severity.ERROR, None, "it does not fit", "it is slow", "install another"),
                Finding("core", Severity.NOTE, None, "it is so")]
    lines = [message("site/first_line"), "error    torch-build  it does not fit: it is",
             "                      slow; install another",
             "note     core         it is so", message("site/last_line", findings="1 error, 1 note")]
    assert format_lines(findings, 44, has_colours=False).splitlines() == lines
    coloured = format_lines(findings, 44, has_colours=True)
    assert coloured != "\n".join(lines) == re.sub(r"\033\[[\d;]*m", "", coloured)
    assert json.loads(format_json(findings))[1] == {
        "rule": "core", "severity": "note", "line": None, "message": "it is so", "reason": "", "advice": "",
        "write": []}


RUN = """
import sys
from mpiddp.doctor.__main__ import main
status = main(["--json"])
assert not {"torch", "mpi4py"} & set(sys.modules)
sys.exit(status)
"""


@pytest.mark.process
@pytest.mark.parametrize("mpi", [pytest.param(mpi, id=name) for name, mpi in MPIS.items()])
def test_a_host_with_each_mpi(mpi: Mpi) -> None:
    """The process of the doctor loads neither MPI nor torch; the environment's own launcher is in PATH."""
    need(mpi.missing())
    done = alone(mpi, "-c", RUN, env={"MPIDDP_SITE": "", "XDG_STATE_HOME": "/tmp"})
    findings = json.loads(done.stdout)
    severities = [Severity[finding["severity"].upper()] for finding in findings]
    assert severities == sorted(severities, reverse=True)
    assert done.returncode == int(severities[0] > Severity.NOTE)
    (library,) = [finding["message"] for finding in findings if finding["rule"] == "mpi-library"]
    assert find("site/library", library)
    assert not [finding for finding in findings if finding["rule"] == "launcher" and finding["severity"] != "note"]


@pytest.mark.process
def test_a_library_that_crashes_or_hangs_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "LOAD_CODE", "import os; os.abort()")
    found = load_library()
    assert isinstance(found, Finding)
    assert found.message == message("site/library_crash", status=-6)
    monkeypatch.setattr(environment, "LOAD_CODE", "import time; time.sleep(100)")
    monkeypatch.setattr(environment, "COMMAND_TIMEOUT_S", 1)
    found = load_library()
    assert isinstance(found, Finding)
    assert found.message == message("site/library_timeout", limit=1)


@pytest.mark.process
def test_an_environment_without_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "LOAD_CODE", "import sys; sys.modules['mpi4py'] = None\n" + environment.LOAD_CODE)
    found = load_library()
    assert isinstance(found, Finding)
    assert (found.rule, found.severity) == ("no-mpi4py", Severity.ERROR)


@pytest.mark.process
def test_launchers_are_found_in_path(tmp_path: Path) -> None:
    (program := tmp_path / "mpirun").write_text("#!/bin/sh\necho 'mpirun (Open MPI) 4.1.4'\n")
    program.chmod(0o755)
    findings = inspect_launchers(MPICH, {"PATH": str(tmp_path)})
    assert message("site/foreign_launcher", path=program, launcher="Open MPI's mpirun",
                   library="MPICH 5.0.2") in [finding.message for finding in findings]
    assert message("site/no_launcher") in [finding.message for finding in inspect_launchers(MPICH, {"PATH": "/none"})]


def test_this_environments_torch_is_found_without_import() -> None:
    build = find_torch_build()
    assert build is not None
    assert build.version.startswith("2.")
