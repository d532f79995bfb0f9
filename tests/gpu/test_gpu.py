"""What mpiddp does with real GPUs. Each test's first line is its row in the table that tests/gpu/run prints."""

from __future__ import annotations

import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mpiddp.discovery.devices import read_driver_version
from mpiddp.discovery.gpus import describe_openable_gpus
from tests import processes
from tests.gpu.conftest import TIMEOUT_S, Start, command, found, visible
from tests.support import EXAMPLES, ROOT, check, free_port

pytestmark = [pytest.mark.gpu, pytest.mark.alone]
PROGRAMS = ROOT / "tests/gpu/programs"
FIRST = PROGRAMS / "first_step.py"
RUNS = 3
SAID = re.compile(r"^rank (\d+): (\S+) bound to (\S+) on (cuda:\d+) (\S+) sum (\d+)$", re.MULTILINE)
Note = Callable[[str], None]


def asked(what: str) -> list[str]:
    """Return the lines that nvidia-smi answers; skip where there is none."""
    if shutil.which("nvidia-smi") is None:
        pytest.skip("needs the command nvidia-smi")
    done = subprocess.run(["nvidia-smi", *what.split()], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.splitlines()


def used_mib(ranks: int) -> int:
    """Return the memory in use on the GPUs of so many ranks, in MiB; skip where nobody tells."""
    ids = ",".join(f"GPU-{uuid}" for uuid, _ in found()[:ranks])
    told = asked(f"--query-gpu=memory.used --format=csv,noheader,nounits --id={ids}")
    if not all(line.isdecimal() for line in told):
        pytest.skip(f"nvidia-smi does not tell the memory in use: {told}")
    return sum(map(int, told))


def test_group(ranks: int, start: Start, note: Note) -> None:
    """NCCL group, bound to each rank's device before the script."""
    done = check(start(ranks, FIRST))
    said = sorted(SAID.findall(done.stdout))
    assert [(backend, bound, current, total) for _, backend, bound, current, _, total in said] == [
        ("nccl", f"cuda:{rank}", f"cuda:{rank}", str(ranks)) for rank in range(ranks)]
    assert len({uuid for *_, uuid, _ in said}) == ranks
    assert re.search(rf"{ranks} ranks? on 1 node, nccl on cuda, ", done.stderr), done.stderr
    note(f"{ranks} ranks, {', '.join(bound for _, _, bound, *_ in said)}")


def test_first_all_reduce(ranks: int, env: dict[str, str], note: Note) -> None:
    """Enter to the first all-reduce, beside torchrun (medians of three runs in turn)."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}",
                f"--master-port={free_port()}", str(FIRST)]
    times: dict[str, list[float]] = {"mpiddp": [], "torchrun": []}
    for _ in range(RUNS):
        for name, line in (("mpiddp", command(ranks, "--quiet", FIRST)), ("torchrun", torchrun)):
            began = time.time()
            done = check(processes.run(*line, timeout=TIMEOUT_S, env=env))
            times[name].append(float(done.stdout.partition("done ")[2].split()[0]) - began)
    ours, peer = (statistics.median(one) for one in times.values())
    note(f"{ours:.2f} s, torchrun {peer:.2f} s: ratio {ours / peer:.2f}")
    assert ours < peer


@pytest.mark.usefixtures("ranks")
def test_what_tells_of_gpus(note: Note) -> None:
    """GPUs and driver without torch, as `no-gpu-seen` names them."""
    assert re.fullmatch(r"\d+ NVIDIA GPUs? \(nvidia\d+.*\)", describe_openable_gpus())
    assert re.fullmatch(r"NVIDIA \d+\.\d+(\.\d+)?", read_driver_version())
    note(f"{describe_openable_gpus()}, driver {read_driver_version()}")


@pytest.mark.usefixtures("ranks")
def test_duplicate_gpu(start: Start, note: Note) -> None:
    """Two ranks that are shown the same GPU."""
    done = start(2, FIRST, CUDA_VISIBLE_DEVICES=visible(1)[0])
    assert done.returncode == 3
    assert done.stderr.count("mpiddp: cannot start: duplicate-gpu") == 1, done.stderr
    note("refused: duplicate-gpu")


def test_too_few_gpus(several: int, start: Start, note: Note) -> None:
    """One rank more than GPUs."""
    done = start(several + 1, FIRST, CUDA_VISIBLE_DEVICES=",".join(visible(several)))
    assert done.returncode == 3
    assert done.stderr.count("mpiddp: cannot start: too-few-gpus") == 1, done.stderr
    note("refused: too-few-gpus")


@pytest.mark.usefixtures("ranks")
def test_share_gpus(start: Start, note: Note) -> None:
    """Two ranks on one GPU with --share-gpus."""
    done = check(start(2, "--share-gpus", PROGRAMS / "shared.py", CUDA_VISIBLE_DEVICES=visible(1)[0]))
    assert sorted(done.stdout.splitlines()) == ["rank 0: gloo sum 2", "rank 1: gloo sum 2"]
    note("gloo, sum of both")


def test_visible_devices(ranks: int, start: Start, note: Note) -> None:
    """CUDA_VISIBLE_DEVICES by index and by UUID, the last GPU first."""
    uuids = [uuid for uuid, _ in found()[:ranks]]
    for names in (visible(ranks), [f"GPU-{uuid}" for uuid in uuids]):
        done = check(start(ranks, FIRST, CUDA_VISIBLE_DEVICES=",".join(reversed(names))))
        assert [uuid for *_, uuid, _ in sorted(SAID.findall(done.stdout))] == uuids[::-1]
    note("as listed")


@pytest.mark.usefixtures("ranks")
def test_mig(start: Start, note: Note) -> None:
    """A rank for each MIG instance."""
    slices = re.findall(r"UUID: (MIG-[^)]+)\)", "\n".join(asked("-L")))
    if not slices:
        pytest.skip("needs a GPU in MIG mode")
    done = check(start(len(slices), "--backend=gloo", PROGRAMS / "shared.py"))
    assert len(done.stdout.splitlines()) == len(slices)
    note(f"{len(slices)} ranks")


def test_exit(ranks: int, start: Start, note: Note) -> None:
    """Exit without CUDA's tear-down: what is left on the GPUs a second later."""
    time.sleep(2)  # what jobs before this one had is free again
    before = used_mib(ranks)
    done = check(start(ranks, PROGRAMS / "memory.py"))
    time.sleep(1)
    assert done.stdout.count("READY") == ranks
    left = used_mib(ranks) - before
    assert left < 64
    note(f"{max(left, 0)} MiB")


def failed(done: processes.subprocess.CompletedProcess[str], words: str) -> str:
    """Return the first line of a job's report; fail unless there is one, with these words."""
    said = re.findall(r"^mpiddp: failed: (.*)$", done.stderr, re.MULTILINE)
    assert len(said) == 1, done.stderr
    assert re.search(words, said[0]), said
    return str(said[0])


def since_ready(done: processes.subprocess.CompletedProcess[str], ended: float) -> float:
    """Return the seconds from the last rank's READY to a job's end."""
    return ended - max(map(float, re.findall(r"READY (\S+)", done.stdout)))


def test_killed(several: int, start: Start, note: Note) -> None:
    """A rank is killed inside a NCCL all-reduce."""
    done = start(several, PROGRAMS / "goes_wrong.py", "killed")
    seconds = since_ready(done, time.time()) - 1
    failed(done, rf"^rank {several - 1} .*SIGKILL")
    assert done.returncode == 137
    assert seconds < 10
    note(f"named, status 137, {seconds:.1f} s")


@pytest.mark.parametrize("how", ["stopped", "sleeps"])
def test_stuck(several: int, start: Start, note: Note, how: str) -> None:
    """A rank that does not come to a NCCL all-reduce, --group-timeout 10."""
    done = start(several, "--group-timeout", 10, PROGRAMS / "goes_wrong.py", how)
    seconds = since_ready(done, time.time())
    line = failed(done, rf"^rank {several - 1} .*is stopped" if how == "stopped" else r"^rank \d")
    assert done.returncode != 0
    assert seconds < 60
    note(f"{how}: {seconds:.0f} s, \"{line}\"")


def test_watchdog(ranks: int, start: Start, note: Note) -> None:
    """NCCL's watchdog ends a rank whose collective takes too long, --group-timeout 5; torch 2.11 took 70 s for it."""
    done = start(ranks, "--group-timeout", 5, PROGRAMS / "goes_wrong.py", "waits")
    seconds = since_ready(done, time.time())
    line = failed(done, r"^rank \d")
    assert done.returncode != 0
    assert seconds < TIMEOUT_S
    note(f"{seconds:.0f} s, status {done.returncode}, \"{line}\"")


def test_out_of_memory(ranks: int, start: Start, note: Note) -> None:
    """A GPU's memory does not suffice."""
    done = start(ranks, PROGRAMS / "goes_wrong.py", "memory")
    seconds = since_ready(done, time.time())
    line = failed(done, rf"^rank {ranks - 1} .*OutOfMemoryError")
    assert done.returncode == 1
    assert seconds < 15
    note(f"\"{line[:60]}…\", {seconds:.1f} s")


def test_requeue(ranks: int, env: dict[str, str], tmp_path: Path, note: Note) -> None:
    """A training with NCCL that is stopped by SIGUSR1, and goes on when it is started again."""
    import torch

    def weights(file: Path) -> list[torch.Tensor]:
        return list(torch.load(file, map_location="cpu")["model"].values())

    whole, parts, script = tmp_path / "whole.pt", tmp_path / "parts.pt", tmp_path / "resume.py"
    source = (EXAMPLES / "resume.py").read_text()
    assert source.count("range(first[0], 10)") == 1
    script.write_text(source.replace("range(first[0], 10)", "range(first[0], 200)"))  # long enough to be stopped
    check(processes.run(*command(ranks, script, whole), timeout=TIMEOUT_S, env=env))
    with processes.start(command(ranks, script, parts), env, stdout=subprocess.PIPE,
                         stderr=subprocess.PIPE) as job:
        deadline = time.monotonic() + TIMEOUT_S
        while not parts.exists() and time.monotonic() < deadline:  # the first epoch is over
            time.sleep(0.01)
        job.send_signal(signal.SIGUSR1)
        said = job.communicate(timeout=TIMEOUT_S)
    assert job.returncode == 75, said
    check(processes.run(*command(ranks, script, parts), timeout=TIMEOUT_S, env=env))
    same = all(torch.equal(one, other) for one, other in zip(weights(whole), weights(parts), strict=True))
    note(f"status 75, then to the end; weights {'the same to the bit' if same else 'differ from those of a whole run'}")
