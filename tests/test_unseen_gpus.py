"""GPUs that are there and that torch does not see: what tells of them, and how the job is refused."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from mpiddp.base.config import LaunchConfig
from mpiddp.base.errors import LaunchError
from mpiddp.discovery import devices as facts_devices
from mpiddp.discovery import gpus as facts_gpus
from mpiddp.discovery.devices import DeviceFacts, UnseenGpus, find_gpu_evidence
from mpiddp.discovery.gpus import Gpu, describe_hidden_gpus, describe_openable_gpus
from mpiddp.planning import gpus, job
from tests.messages import find, message
from tests.support import EXAMPLES, Mpi, check, check_hello, mpiexec
from tests.test_plan import CPU_TORCH, TORCH, host

HELLO = EXAMPLES / "hello_world.py"
TWO = {"SLURM_GPUS_ON_NODE": "2"}


class Card(NamedTuple):
    """A graphics card as the kernel tells of it."""

    driver: str
    address: str
    pci_class: str
    unique_id: str = ""


HEADLESS, DISPLAY = "0x038000", "0x030000"
INSTINCT = Card("amdgpu", "0000:c1:00.0", HEADLESS, "18f68e602b8a790f")
RYZEN = Card("amdgpu", "0000:05:00.0", DISPLAY)
PONTE_VECCHIO = Card("xe", "0000:18:00.0", HEADLESS)
LAPTOP = Card("i915", "0000:00:02.0", DISPLAY)
SECOND_DISPLAY = Card("i915", "0000:00:02.0", HEADLESS)
ARC = Card("xe", "0000:03:00.0", DISPLAY)
SERVER = Card("ast", "0000:01:00.0", DISPLAY)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder in the place of /, with no GPU in it."""
    for name, folder in (("DEV", "dev"), ("DRI", "dev/dri"), ("DRM", "drm")):
        (tmp_path / folder).mkdir()
        monkeypatch.setattr(facts_gpus, name, str(tmp_path / folder))
    return tmp_path


def add(machine: Path, cards: Sequence[Card], files: Sequence[str] = ()) -> None:
    """Put graphics cards, and files in /dev, into a machine."""
    for number, card in enumerate(cards):
        device = machine / "pci" / card.address
        (device / f"drm/renderD{128 + number}").mkdir(parents=True)
        (device / "class").write_text(f"{card.pci_class}\n")
        (device / "unique_id").write_text(f"{card.unique_id}\n")
        (machine / card.driver).mkdir(exist_ok=True)
        (device / "driver").symlink_to(machine / card.driver)
        (machine / f"drm/card{number}").mkdir()
        (machine / f"drm/card{number}/device").symlink_to(device)
        (machine / f"dev/dri/renderD{128 + number}").touch()
    for name in files:
        (machine / "dev" / name).touch()


@pytest.mark.parametrize(("cards", "files", "expected"), [
    ([], [], ""), ([], ["nvidiactl", "nvidia-uvm", "nvidia-modeset"], ""),
    ([], ["nvidiactl", "nvidia0", "nvidia1"], "2 NVIDIA GPUs (nvidia0, …)"),
    ([INSTINCT], ["kfd"], "1 AMD GPU (0000:c1:00.0)"), ([INSTINCT], [], ""), ([RYZEN], ["kfd"], ""),
    ([PONTE_VECCHIO, SERVER], [], "1 Intel GPU (0000:18:00.0)"),
    ([LAPTOP], [], ""), ([SECOND_DISPLAY], [], ""), ([ARC], [], ""), ([SERVER], [], ""),
])
def test_a_display_is_no_gpu_for_computing(
    cards: list[Card], files: list[str], expected: str, machine: Path
) -> None:
    add(machine, cards, files)
    assert describe_openable_gpus() == expected


def test_a_gpu_that_a_cgroup_denies_is_another_jobs(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add(machine, [INSTINCT], ["nvidia0", "kfd"])
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert describe_openable_gpus() == ""


@pytest.mark.parametrize(("environ", "expected"), [
    ({}, ""), ({"SLURM_JOB_ID": "7"}, ""),
    ({"SLURM_GPUS_ON_NODE": "4"}, message("launch/gpus_from_slurm", gpus="4 GPUs")),
    ({"SLURM_GPUS_ON_NODE": "4", "SLURM_GPUS_PER_TASK": "a100:1", "CUDA_VISIBLE_DEVICES": "0"},
     message("launch/gpus_from_slurm", gpus="1 GPU")),
    ({"CUDA_VISIBLE_DEVICES": "0,1"}, "CUDA_VISIBLE_DEVICES=0,1"),  # as Flux and PBS set it
    ({"CUDA_VISIBLE_DEVICES": "GPU-3a9"}, "CUDA_VISIBLE_DEVICES=GPU-3a9"),
    ({"ROCR_VISIBLE_DEVICES": "4,5"}, "ROCR_VISIBLE_DEVICES=4,5"),
    ({"CUDA_VISIBLE_DEVICES": "-1"}, ""),  # as Flux sets it for no GPU
    ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, ""),  # as Slurm does
    ({"CUDA_VISIBLE_DEVICES": "10000"}, ""),  # as HTCondor does
    ({**TWO, "CUDA_VISIBLE_DEVICES": ""}, ""),  # as a user does who wants none
    ({**TWO, "HIP_VISIBLE_DEVICES": "-1"}, ""),
])
@pytest.mark.usefixtures("machine")
def test_what_tells_of_gpus(environ: dict[str, str], expected: str) -> None:
    assert find_gpu_evidence(environ) == expected


def test_gpus_that_are_there_and_hidden_are_not_missed(machine: Path) -> None:
    add(machine, [], ["nvidia0"])
    assert find_gpu_evidence({}) == "1 NVIDIA GPU (nvidia0)"
    assert find_gpu_evidence({"CUDA_VISIBLE_DEVICES": ""}) == ""


TOO_OLD = ("The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver by "
           "downloading and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx")


@pytest.mark.parametrize(("version", "says"), [
    ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.57.02  Tue Jul 13 16:14:05 UTC 2021\nGCC version:  gcc 9.3.0",
     "470.57.02"),
    ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65  Release Build  (dvs-builder)", "580.65"),
])
def test_what_torch_and_the_driver_say(
    version: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init() -> None:
        raise RuntimeError(TOO_OLD)

    (tmp_path / "version").write_text(version)
    monkeypatch.setattr(facts_devices, "DRIVER_FILE", str(tmp_path / "version"))
    torch = SimpleNamespace(version=SimpleNamespace(cuda="12.8", hip=None), cuda=SimpleNamespace(init=init))
    assert facts_devices.find_unseen_gpus(torch, TWO) == UnseenGpus(
        message("launch/gpus_from_slurm", gpus="2 GPUs"), "CUDA 12.8",
        "The NVIDIA driver on your system is too old (found version 11040)", f"NVIDIA {says}")
    assert facts_devices.find_unseen_gpus(torch, {"CUDA_VISIBLE_DEVICES": "-1"}) is None


def test_a_torch_that_sees_no_gpu_is_refused() -> None:
    old = CPU_TORCH._replace(unseen=UnseenGpus("2 GPUs from Slurm", "CUDA 12.8", "No CUDA GPUs",
                                               "NVIDIA 470.57.02"))
    gpus.check_unseen_gpus([TORCH, TORCH], ["n1", "n2"])
    gpus.check_unseen_gpus([CPU_TORCH, CPU_TORCH], ["n1", "n2"])
    gpus.check_unseen_gpus([TORCH, old], ["n1", "n2"])  # mixed-devices says more
    with pytest.raises(LaunchError, match="no-gpu-seen") as caught:
        gpus.check_unseen_gpus([CPU_TORCH, old, old], ["n1", "n2", "n3"])
    assert caught.value.actual.splitlines() == [
        message("launch/no_gpu_seen", evidence="2 GPUs from Slurm", hosts="n[2-3]", version="2.13.0+cpu",
                build="CUDA 12.8"),
        message("launch/torch_reports", reason="No CUDA GPUs"), "driver: NVIDIA 470.57.02"]
    assert gpus.UPDATE_DRIVER in caught.value.do
    with pytest.raises(LaunchError, match="no-gpu-seen") as caught:
        gpus.check_unseen_gpus([CPU_TORCH._replace(unseen=UnseenGpus("1 AMD GPU (0000:c1:00.0)", "", "", ""))], ["n1"])
    assert caught.value.actual == message("launch/no_gpu_seen", evidence="1 AMD GPU (0000:c1:00.0)", hosts="n1",
                                          version="2.13.0+cpu", build="CPUs only")
    assert gpus.INSTALL_TORCH in caught.value.do


def test_a_job_with_gpus_and_a_torch_for_the_cpu(quick: Mpi) -> None:
    done = check(mpiexec(quick, 2, HELLO, env=TWO), 3)
    assert done.stderr.count("mpiddp: cannot start:") == 1
    assert "mpiddp: cannot start: no-gpu-seen\n" in done.stderr
    assert find("launch/no_gpu_seen", done.stderr, build="CPUs only")
    assert not done.stdout


@pytest.mark.light
def test_a_job_that_wants_no_gpu_trains_on_the_cpu(quick: Mpi) -> None:
    check_hello(mpiexec(quick, 2, "--device=cpu", HELLO, env={**TWO, "CUDA_VISIBLE_DEVICES": "0,1"}), 2)


@pytest.mark.parametrize(("environ", "expected"), [
    ({"ROCR_VISIBLE_DEVICES": "1,2", "HIP_VISIBLE_DEVICES": "2"},
     message("launch/hidden_gpus", first="ROCR_VISIBLE_DEVICES=1,2", gpus="2 GPUs", second="HIP_VISIBLE_DEVICES=2")),
    ({"ROCR_VISIBLE_DEVICES": "2", "CUDA_VISIBLE_DEVICES": "2"},  # as Slurm sets both
     message("launch/hidden_gpus", first="ROCR_VISIBLE_DEVICES=2", gpus="1 GPU", second="CUDA_VISIBLE_DEVICES=2")),
    ({"ROCR_VISIBLE_DEVICES": "1,2", "HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "2"}, ""),
    ({"ROCR_VISIBLE_DEVICES": "2", "HIP_VISIBLE_DEVICES": "-1"}, ""), ({"HIP_VISIBLE_DEVICES": "7"}, ""),
    ({"ROCR_VISIBLE_DEVICES": "7", "HIP_VISIBLE_DEVICES": "7"}, ""),  # the first list alone leaves none
])
def test_two_lists_of_amds_gpus_that_leave_none(environ: dict[str, str], expected: str, machine: Path) -> None:
    add(machine, [INSTINCT._replace(address=f"0000:c{number}:00.0") for number in range(4)])
    assert describe_hidden_gpus(environ) == expected


def test_lists_that_hide_all_gpus_are_named() -> None:
    facts = [host(0)._replace(hidden="A=1 hides B=1"), host(1)]
    with pytest.raises(LaunchError, match="hidden-gpus") as caught:
        job.plan_pre_torch(facts, LaunchConfig())
    assert caught.value.actual == "A=1 hides B=1 (on n0)"


@pytest.mark.parametrize(("facts", "warned"), [
    (TORCH._replace(nccl_version="2.27.5", unlimited_stack=True), True),
    (TORCH._replace(nccl_version="2.28.3", unlimited_stack=True), False),
    (TORCH._replace(nccl_version="2.27.5"), False), (CPU_TORCH._replace(unlimited_stack=True), False),
    (DeviceFacts(nccl_version="2.22.3", gpus=(Gpu("a", "a", "AMD Instinct MI250X"),), unlimited_stack=True), False),
])
def test_an_unlimited_stack_is_too_small_for_nccls_threads(facts: DeviceFacts, warned: bool) -> None:
    warnings = gpus.warn_unlimited_stack([facts, facts], ["n1", "n2"])
    assert warnings == [message("launch/unlimited_stack", hosts="n[1-2]", version="2.27.5")] * warned
