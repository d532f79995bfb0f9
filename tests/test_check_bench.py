"""The benchmarks of a rank: plausible results, within the time, and reports of faults of its node."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from mpiddp.base.timeouts import run_with_timeout
from mpiddp.check.bench import machine, network, rank, storage, transport
from mpiddp.check.schedule import part_s
from mpiddp.check.stats.schema import RANK_METRICS
from tests import processes
from tests.cgroups import quota
from tests.messages import find, message
from tests.support import PROGRAMS, ROOT, Mpi, check, mpiexec, need, on_path

CPU = torch.device("cpu")
ENV = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
IMAGINED = {"PYTHONPATH": f"{ROOT}:{ROOT}/tests/standins/accelerator"}
SIZED = "mkdir -p {0} && mount -t tmpfs -o size={1} tmpfs {0}"


def measured(leads: bool, budget_s: float, command: Callable[..., list[str]] = lambda *line: [*map(str, line)],
             group: Path | None = None, **variables: str) -> dict[str, Any]:
    """Return what a rank has measured in a process of its own, which `command` starts, and which enters a cgroup."""
    line = command(sys.executable, PROGRAMS / "measured.py", "leads" if leads else "follows", budget_s,
                   *[group] * (group is not None))
    found: dict[str, Any] = json.loads(check(processes.run(*line, timeout=100, env={**ENV, **variables})).stdout)
    return found


def mounted(prepare: str) -> Callable[..., list[str]]:
    """Return what runs a command in a mount namespace of its own, after a shell's `prepare`; needs root."""
    need(["root"] if os.geteuid() else [])
    return lambda *line: ["unshare", "--mount", "sh", "-c", f"{prepare} && exec \"$@\"", "sh", *map(str, line)]


@pytest.mark.alone
def test_figures_are_plausible(tmp_path: Path) -> None:
    found = measured(True, 3.0, TMPDIR=str(tmp_path))
    values = found["values"]
    assert found["told"] == []
    assert values.keys() == RANK_METRICS.keys() - {
        "device-memory", "to-device", "from-device", "device-free", "clock", "import"}
    assert 1e9 < values["matrix"] < 1e12  # of one core
    assert 1e9 < values["memory"] < 1e12
    assert values["throttled"] <= 0.02
    seen = os.statvfs("/dev/shm")
    assert values["shm-size"] == seen.f_frsize * seen.f_blocks
    assert all(1e7 < values[f"{name}-{way}"] < 1e12 for name in ("shm", "tmp", "folder") for way in ("write", "read"))
    assert all(10 < values[f"{name}-files"] < 1e7 for name in ("tmp", "folder"))
    assert found["took_s"] < 30
    assert list(tmp_path.iterdir()) == []
    assert not [one for one in [*Path("/dev/shm").iterdir(), *Path.cwd().iterdir()] if "mpiddp-" in one.name]


@pytest.mark.alone
def test_a_short_time_is_kept_and_what_does_not_fit_left_out() -> None:
    found = measured(False, 0.1)
    assert "matrix" not in found["values"]
    found = measured(True, 0.4)
    assert {"matrix", "throttled", "shm-write", "tmp-files"} <= found["values"].keys()
    assert found["took_s"] < 30


@pytest.mark.alone
@pytest.mark.thorough("test_where_nothing_is_odd_nothing_is_said")
def test_two_measurements_agree() -> None:
    """The best of one series and of another, on a machine that has other work, too."""
    for one in (rank.measure_matmul, lambda _, budget_s: rank.measure_host_memory(budget_s)):
        values = [one(CPU, 0.3) or 0.0 for _ in range(12)]
        assert max(values[::2]) / max(values[1::2]) == pytest.approx(1, abs=0.2)


@pytest.mark.alone
def test_a_product_is_what_plain_torch_computes() -> None:
    rows, times = 512, []
    one, other = torch.randn(rows, rows), torch.randn(rows, rows)
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    ours = rank.measure_matmul(CPU, 1.0)
    assert torch.equal(torch.random.get_rng_state(), before)
    end = time.perf_counter() + 1.0
    while time.perf_counter() < end:
        began = time.perf_counter()
        for _ in range(20):
            torch.mm(one, other)
        times.append((time.perf_counter() - began) / 20)
    assert ours == pytest.approx(2 * rows**3 / min(times), rel=0.3)


@pytest.mark.alone
def test_a_quota_is_seen() -> None:
    """A quarter of a CPU's time: a quarter of the products, and the cgroup tells why."""
    whole = measured(False, 2.0)["values"]
    with quota(0.25) as group:
        part = measured(False, 2.0, group=group)["values"]
    assert whole["throttled"] < 0.02
    assert 0.3 < part["throttled"] < 0.9
    assert 0.15 < part["matrix"] / whole["matrix"] < 0.5


@pytest.mark.alone
@pytest.mark.thorough("test_a_quota_is_seen")
def test_throttling_of_a_parent_counts() -> None:
    with quota(0.25) as group:
        (group / "below").mkdir()
        try:
            found = measured(False, 1.0, group=group / "below")["values"]
        finally:
            (group / "below").rmdir()
    assert found["throttled"] > 0.2


@pytest.mark.process
def test_a_full_and_a_small_folder_are_told(tmp_path: Path) -> None:
    full, small = f"{tmp_path}/full", "/dev/shm"
    prepare = " && ".join([SIZED.format(full, "100m"), f"head -c 88m /dev/zero > {full}/filler",
                           SIZED.format(small, "16m")])
    found = measured(True, 0.4, mounted(prepare), TMPDIR=full)
    assert found["told"] == [message("check/folder_small", folder="/dev/shm", size="16 MiB"),
                             message("check/folder_full", folder=full, size="12 MiB")]
    assert found["values"]["shm-size"] == 16 * 2**20
    assert "shm-write" not in found["values"] and "tmp-write" not in found["values"]


@pytest.mark.process
def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    found = measured(True, 0.4, mounted(f"{SIZED.format(tmp_path / 'fixed', '1g,ro')} && cd {tmp_path}/fixed"),
                     TMPDIR=f"{tmp_path}/fixed")
    assert found["told"] == [
        message("check/folder_not_writable", folder=tmp_path / "fixed", reason="Read-only file system")]
    assert "folder-write" not in found["values"]  # but nobody has to be able to write to a working directory


@pytest.mark.light
@pytest.mark.process
def test_no_more_than_a_small_part_of_the_free_room_is_taken(tmp_path: Path) -> None:
    """A file of 16 MiB would not fit into 5 % of 100 MiB; it could fill up what other programs need."""
    command = mounted(SIZED.format(tmp_path / "disk", "100m"))
    source = (f"from mpiddp.check.bench import storage\nstorage.FILE_BYTES = 2**40\n"
              f"one = storage.BenchmarkFolder('tmp', '{tmp_path}/disk', 'it')\nprint(storage.measure_folder(one, 0.1))")
    done = check(processes.run(*command(sys.executable, "-c", source), timeout=60, env={**ENV, **on_path(ROOT)}))
    assert "tmp-write" in done.stdout and done.stdout.endswith(", [])\n")


def test_a_missing_folder_is_told(tmp_path: Path) -> None:
    found = storage.measure_folder(storage.BenchmarkFolder("tmp", f"{tmp_path}/none", "/tmp"), 0.1)
    assert found == ({}, [message("check/folder_not_writable", folder="/tmp", reason="No such file or directory")])


@pytest.mark.light
@pytest.mark.process
def test_a_hung_file_system_is_told(tmp_path: Path) -> None:
    """FUSE whose server never answers, as a dead NFS server: the check and its end do not wait for it."""
    need(["root"] if os.geteuid() else ["/dev/fuse"] if not Path("/dev/fuse").exists() else [])
    source = ("from mpiddp.check.bench import storage\n"
              f"one = storage.BenchmarkFolder('folder', '{tmp_path}', 'the folder')\n"
              "print(storage.measure_folder(one, 0.1, 1.0))")
    done = check(processes.run("unshare", "--mount", sys.executable, str(PROGRAMS / "hung.py"), str(tmp_path),
                               sys.executable, "-c", source, timeout=60, env={**ENV, **on_path(ROOT)}))
    assert done.stdout == f"{({}, [message('check/no_response', what='the folder', seconds=1)])}\n"


def test_the_deadline_passes_answers_and_errors_on() -> None:
    assert run_with_timeout(5.0, lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        run_with_timeout(5.0, lambda: 1 / 0)
    with pytest.raises(TimeoutError):
        run_with_timeout(0.05, lambda: time.sleep(1))


class Line:
    """A transport with a clock of its own: a message waits, and takes what its size does."""

    def __init__(self, wait_s: float, rate: float, busy: Sequence[int] = (), moment_s: float = 0.0) -> None:
        """Messages with the numbers in `busy` take a moment longer."""
        self._wait_s, self._rate, self._busy, self._moment_s = wait_s, rate, busy, moment_s
        self._sent = 0
        self.now = 0.0
        self._room = bytearray(transport.MAX_MESSAGE_BYTES)

    def new_buffer(self, size: int) -> Any:
        return [0] * size

    def message_buffer(self) -> Any:
        return memoryview(self._room)

    def send(self, message: Any) -> None:
        if len(message) > network.PING_BYTES:
            self.now += self._wait_s + len(message) / self._rate
            self.now += self._moment_s * (self._sent in self._busy)
            self._sent += 1

    def receive(self, _: Any) -> None:
        pass


@pytest.mark.parametrize("nodes", [3, 64])
@pytest.mark.parametrize(("wait_s", "rate", "least"), [
    (0.004, 1.5e9, 0.35), (0.0001, 1.5e9, 0.9), (0.001, 1.2e8, 0.7), (0.0, 1.2e7, 0.99)])
def test_a_links_bandwidth_is_found_in_its_time(
    nodes: int, wait_s: float, rate: float, least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages that wait before they go show most of the bandwidth, as they are large beside what they wait."""
    line = Line(wait_s, rate)
    monkeypatch.setattr(network, "time", SimpleNamespace(monotonic=lambda: line.now))
    large = network.send_transfers(cast(Any, line), part_s(nodes), False)
    assert least * rate <= network.total_bandwidth([large]) <= rate * 1.001
    assert line.now < part_s(nodes) * 2 + 4 * network.MEBIBYTE / rate


@pytest.mark.parametrize("busy", [(0,), (1,), (2,), (3,), (6,), (7,), (8,)])
def test_a_busy_moment_hides_no_bandwidth(busy: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> None:
    line = Line(0.0005, 1.5e9, busy, moment_s=0.01)
    monkeypatch.setattr(network, "time", SimpleNamespace(monotonic=lambda: line.now))
    assert network.total_bandwidth([network.send_transfers(cast(Any, line), part_s(3), False)]) >= 0.6 * 1.5e9


def test_the_deadline_keeps_nothing_of_work_that_failed() -> None:
    """A device's memory must be free when its error has been told, and not when Python looks for cycles next."""
    class Buffer:
        pass

    held: list[weakref.ref[Buffer]] = []

    def work() -> None:
        buffer = Buffer()
        held.append(weakref.ref(buffer))
        raise RuntimeError("out of memory")

    gc.disable()
    try:
        with contextlib.suppress(RuntimeError):
            run_with_timeout(5.0, work)
        assert held[0]() is None
    finally:
        gc.enable()


def test_a_file_system_without_nameless_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As NFS: O_TMPFILE is refused there; a file's name is gone while it is written."""
    monkeypatch.setattr(os, "O_TMPFILE", os.O_DIRECTORY)  # what kernels without it make of it: EISDIR
    with storage.unnamed_file(str(tmp_path)) as file:
        assert os.write(file, b"some") == 4
        assert os.fstat(file).st_nlink == 0
        assert list(tmp_path.iterdir()) == []


def test_two_nodes_with_one_name_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers, whose processes have the same PIDs: the file of one is there while the other makes its own."""
    look = os.stat

    def meanwhile(name: str) -> os.stat_result:
        monkeypatch.setattr(os, "stat", look)
        os.close(storage.unlinked_file(str(tmp_path)))
        return look(name)

    monkeypatch.setattr(os, "stat", meanwhile)
    os.close(storage.unlinked_file(str(tmp_path)))
    assert list(tmp_path.iterdir()) == []


class Work:
    """A piece of a backend's work that notes with which timeouts it is waited for."""

    def __init__(self) -> None:
        self.waits: list[timedelta | None] = []

    def wait(self, timeout: timedelta | None = None) -> None:
        """Fail, as NCCL does, if a timeout is over."""
        self.waits.append(timeout)
        if timeout == transport.ABORT_TIMEOUT:
            raise RuntimeError("timed out in blocking wait")


def test_a_devices_work_is_waited_for_without_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL would look once in a millisecond. On a CPU, gloo's own timeout is the deadline."""
    settled: list[torch.device] = []
    monkeypatch.setattr(transport, "wait_for_device", lambda device, _: settled.append(device))
    work, cuda = Work(), torch.device("cuda", 0)
    transport.run_backend_work(lambda: cast(Any, work), cuda, time.monotonic() + 1)
    assert work.waits == [None] and settled == [cuda]
    work = Work()
    transport.run_backend_work(lambda: cast(Any, work), CPU, time.monotonic() + 1)
    assert work.waits[0] and 0.9 < work.waits[0].total_seconds() <= 1


def test_a_devices_work_that_has_no_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def settle(*_: object) -> None:
        raise TimeoutError("stuck")

    monkeypatch.setattr(transport, "wait_for_device", settle)
    work = Work()
    with pytest.raises(TimeoutError, match="stuck"):
        transport.run_backend_work(lambda: cast(Any, work), torch.device("cuda", 0), time.monotonic())
    assert work.waits == [None, transport.ABORT_TIMEOUT]


@pytest.mark.parametrize(("address", "pattern", "switch"), [
    ("s0.s4.s8.tux1", "switch.switch.switch.node", "s8"),
    ("leaf1.node.with.dots", "switch.node", "leaf1"),
    ("tux1", "node", ""),  # a site without a topology
    ("", "", ""),
    ("s0", "switch.node", ""),
])
def test_the_switch_of_a_node(address: str, pattern: str, switch: str) -> None:
    environ = {machine.ADDRESS: address, machine.PATTERN: pattern}
    assert machine.network_switch({name: value for name, value in environ.items() if value}) == switch


def test_what_a_rank_is_compared_by() -> None:
    assert machine.rank_kind(CPU, 8) == f"8 cores of {machine.processor_model()}"
    assert machine.rank_kind(CPU, 1).startswith("1 core of ")


def test_the_import_of_torch_is_as_long_as_its_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rank.torch_import_s() is None or rank.torch_import_s() > 0
    monkeypatch.setattr(rank, "begun_stages", [("import mpiddp", 0), ("import torch", 10**9), ("devices", 35 * 10**8)])
    assert rank.torch_import_s() == 2.5


class Nvml:
    """NVML whose driver answers what it is told to, and has no function for all else."""

    class NVMLError(Exception):
        """What NVML raises."""

    def __init__(self, **answers: object) -> None:
        self._answers = {f"nvmlDeviceGet{name}": value for name, value in answers.items()}

    def __getattr__(self, name: str) -> Callable[..., object]:
        def ask(*_: object) -> object:
            if name not in self._answers:
                raise self.NVMLError("Function Not Found")
            return self._answers[name]

        return ask


@pytest.mark.parametrize(("answers", "words"), [
    ({}, []),
    ({"TotalEccErrors": 0, "RetiredPagesPendingStatus": 0, "RemappedRows": (1, 0, 0, 0),
      "CurrentClocksEventReasons": 0x4 | 0x1}, []),  # its power's limit, and idle: as with any GPU
    ({"TotalEccErrors": 1200}, [message("check/memory_errors", count="1,200")]),
    ({"RetiredPagesPendingStatus": 1}, [message("check/pages_pending")]),
    ({"RemappedRows": (0, 2, 1, 1)}, [message("check/rows_pending"), message("check/row_not_remapped")]),
    ({"CurrentClocksEventReasons": 0x48},  # both bits are set if it is the temperature
     [message("check/clocks_reduced", reason="hardware thermal slowdown")]),
    ({"CurrentClocksThrottleReasons": 0x80}, [message("check/clocks_reduced", reason="hardware power brake")]),
])
def test_what_the_driver_tells(answers: dict[str, object], words: Sequence[str]) -> None:
    assert list(machine.find_faults(Nvml(**answers), "a GPU")) == list(words)


def test_a_gpu_is_found_by_its_address_or_its_uuid() -> None:
    gpu = machine.Gpu("2bd1", "2bd1", "H100", "0000:0b:00.0")
    assert machine.find_handle(Nvml(HandleByPciBusId="by address", HandleByUUID="by UUID"), gpu) == "by address"
    assert machine.find_handle(Nvml(HandleByUUID="by UUID"), gpu) == "by UUID"
    assert machine.find_handle(Nvml(), gpu) is None


def test_one_rate_is_that_of_the_best_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work that takes long in every other window, by a clock of its own."""
    pauses = itertools.cycle([0.002] * 25 + [0.02] * 5)
    now = [0.0]

    def work() -> None:
        now[0] += next(pauses)

    monkeypatch.setattr(rank, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    assert rank.best_rate(work, CPU, 0.6, 0.02) == pytest.approx(500)  # 200 of all
    assert 0.5 < now[0] < 0.7


@pytest.mark.process
def test_a_device_that_does_not_compute_or_answer_is_told() -> None:
    """An accelerator without kernels, one that hangs at its start, and one that hangs later."""
    source = """
import time, torch
from mpiddp.check.bench import rank
def measure():
    found = rank.measure_rank(torch.device('imagined', 0), True, 0.3)
    print('matrix' in found.values, 'shm-free' in found.values, found.computes, *found.reports)
measure()
rank.DEVICE_START_TIMEOUT_S = rank.DEVICE_TIMEOUT_S = 0.3
rank.start_device = lambda _: time.sleep(600)
measure()
rank.start_device = str
rank.free_memory = lambda _: time.sleep(600)
measure()
"""
    done = check(processes.run(sys.executable, "-c", source, timeout=60, env={**ENV, **IMAGINED}))
    silent = message("check/no_response", what="imagined:0", seconds=0.3)
    words = [message("check/device_broken", device="imagined:0", error=""), silent, silent]
    lines = [line for line in done.stdout.splitlines() if line.startswith(("False ", "True "))]
    assert all(line.startswith(f"False True False {one}") for line, one in zip(lines, words, strict=True)), done.stdout


@pytest.mark.thorough("test_a_device_that_does_not_compute_or_answer_is_told")
def test_a_check_waits_for_no_device(quick: Mpi) -> None:
    """Rank 0's own one hangs, and the others go on without it."""
    done = mpiexec(quick, 2, "--quick", env=IMAGINED, module="tests.programs.hanging_device")
    told = check(done, 1).stdout
    host = os.uname().nodename
    assert find("check/no_response", told, what=f"{host}: imagined:0", seconds=1)
    assert find("check/device_broken", told, device=f"{host}: imagined:1")
    assert not find("check/exclude", told)  # no node would be left
