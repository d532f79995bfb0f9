"""The map of a job: plain functions, and the one that real jobs print."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from mpiddp.base.text import format_ranges
from mpiddp.discovery.gpus import Gpu
from mpiddp.planning.job import Placement
from mpiddp.reporting.map import draw_svg, fold_devices, format_map, list_records, shorten_model
from tests.cluster import Cluster
from tests.messages import find, message
from tests.support import EXAMPLES, MPIS, Mpi, check, mpiexec, srun

pytestmark = pytest.mark.light

HELLO = EXAMPLES / "hello_world.py"


def h100(rank: int) -> Gpu:
    uuid = f"GPU-{rank:08x}-0000"
    return Gpu(uuid, uuid, "NVIDIA H100 80GB HBM3", "0000:1b:00.0", 0)


def node(number: int, ranks: int = 8, threads: int = 14, interface: str = "ib0") -> list[Placement]:
    """Return the seats of one node of eight ranks' room."""
    first = number * 8
    return [Placement(first + local, first, f"n{number:04}", f"cuda:{local}", h100(first + local),
                      frozenset(range(14 * local, 14 * local + 14)), (local // 4,), threads, interface)
            for local in range(ranks)]


def test_a_thousand_alike_nodes_and_two_odd_ones() -> None:
    seats = [seat for number in range(1000) for seat in node(number)]
    seats += [*node(1000, threads=1), *node(1001, interface="eth0")]
    found = format_map(seats)
    assert len(found) == 4
    assert max(map(len, found)) <= 100
    assert found[0].split() == ["host", "ranks", "device", "cores", "numa", "threads", "interface"]
    assert found[1].split() == ["n[0000-0999]", "0-7999", "cuda:0-7", "H100", "14", "each", "0-1", "14", "ib0"]
    assert found[2].split()[0] == "n1000"
    assert found[3].split()[0] == "n1001"


def test_the_ranks_of_a_single_node_have_a_line_each() -> None:
    found = format_map(node(3, ranks=2))
    assert [line.split() for line in found[1:]] == [
        ["n0003", "24", "cuda:0", "H100", "00000018", "0-13", "0", "14", "ib0"],
        ["n0003", "25", "cuda:1", "H100", "00000019", "14-27", "0", "14", "ib0"]]


def test_a_single_core_is_no_count() -> None:
    """`cores 0` would read as none at all."""
    one = [seat._replace(cpus=frozenset([seat.rank])) for seat in node(0, ranks=2)]
    head, *rows = format_map(one)
    assert [row[head.index("cores"):head.index("numa")].strip() for row in rows] == ["core 0", "core 1"]


def test_a_hundred_kinds_of_nodes_are_counted() -> None:
    seats = [seat for number in range(100) for seat in node(number, threads=number + 1)]
    found = format_map(seats)
    assert len(found) == 12
    assert found[-1].strip() == "and 90 more"


def test_no_line_is_longer_than_100_columns() -> None:
    long = [one._replace(host=f"gpu-node-with-a-long-name-{one.rank % 7}", interface="enp129s0f0np0", numa=(0, 2, 4, 6),
                         cpus=frozenset(range(0, 224, 2))) for number in range(9) for one in node(number)]
    assert max(map(len, format_map(long[:8]) + format_map(long))) <= 100


def test_a_model_is_a_word() -> None:
    names = ["NVIDIA A100-SXM4-80GB", "Tesla V100-SXM2-32GB", "AMD Instinct MI250X", "NVIDIA GeForce RTX 4090", ""]
    assert [shorten_model(Gpu("GPU-a", "GPU-a", name)) for name in names] == ["A100", "V100", "MI250X", "4090", ""]
    assert shorten_model(Gpu("MIG-b", "GPU-a", "NVIDIA A100-SXM4-40GB MIG 1g.5gb")) == "1g.5gb"
    assert shorten_model(None) == ""


def test_ranges_and_devices() -> None:
    assert format_ranges([8, 0, 1, 2, 3, 2]) == "0-3,8"
    assert format_ranges([]) == ""
    assert fold_devices(["cpu", "cpu"]) == "cpu"
    assert fold_devices(["cuda:0", "cuda:1", "cuda:3"]) == "cuda:0-1,3"


def test_records_are_plain() -> None:
    assert json.loads(json.dumps(list_records(node(1, ranks=1)))) == [
        {"rank": 8, "host": "n0001", "node": 8, "device": "cuda:0",
         "gpu": {"uuid": "GPU-00000008-0000", "board": "GPU-00000008-0000", "name": "NVIDIA H100 80GB HBM3",
                 "pci": "0000:1b:00.0", "numa": 0}, "cpus": list(range(14)), "numa": [0],
         "threads": 14, "interface": "ib0", "pid": 0}]


def test_the_picture_has_a_cell_for_each_rank_of_each_kind_of_node() -> None:
    seats = [seat for number in range(1000) for seat in node(number)]
    root = ElementTree.fromstring(draw_svg([*seats, *node(1000, threads=1)]))
    texts = [(one.text, one.get("fill")) for one in root.iter("{http://www.w3.org/2000/svg}text")]
    assert ("n[0000-0999] (1,000 nodes)", "#333") in texts
    assert ("n1000", "#c00") in texts
    assert texts.count(("NUMA 0, 14 threads", "#333")) == 4
    assert texts.count(("NUMA 0, 1 thread", "#c00")) == 4
    assert ("CPUs 98-111", "#333") in texts


def test_a_map_of_another_kind_is_refused(quick: Mpi) -> None:
    done = mpiexec(quick, 2, "--map", "map.png", HELLO)
    assert done.returncode == 2
    assert done.stderr.count(message("launch/invalid_map_file", value="'map.png'")) == 1


@pytest.mark.thorough("a job prints its map")
def test_a_job_draws_its_map(quick: Mpi, tmp_path: Path) -> None:
    check(mpiexec(quick, 2, "--map", tmp_path / "map.svg", HELLO))
    assert "rank 1" in (tmp_path / "map.svg").read_text()
    done = check(mpiexec(quick, 2, "--map", tmp_path / "none" / "map.json", HELLO))
    assert done.stderr.count("cannot write") == 1


def test_a_job_prints_its_map_unless_it_shall_be_quiet(quick: Mpi) -> None:
    shown = check(mpiexec(quick, 2, HELLO)).stderr.splitlines()
    at = next(i for i, line in enumerate(shown) if re.match("mpiddp .*: 2 ranks on 1 node", line))
    assert shown[at + 1].split()[:3] == ["host", "ranks", "device"]
    assert [line.split()[1:3] for line in shown[at + 2:at + 4]] == [["0", "cpu"], ["1", "cpu"]]
    assert "ranks" not in check(mpiexec(quick, 2, "--quiet", HELLO)).stderr


@pytest.mark.thorough("the same on one node")
@pytest.mark.parametrize(("option", "is_there"), [("--interface=lo", True), ("--interface=nosuch0", False)])
def test_a_job_of_one_node_reads_its_interfaces_if_one_is_named(quick: Mpi, option: str, is_there: bool) -> None:
    done = check(mpiexec(quick, 2, option, HELLO))
    warnings = find("launch/interface_unused", done.stderr, options=option)
    assert ["lo 127.0.0.1" in fields["interfaces"] for fields in warnings] == [True] * (not is_there)


def test_the_map_of_three_nodes_in_a_file(cluster: Cluster) -> None:
    file = Path("/tmp/map.json")  # node1's own
    read = f"import json; print(json.dumps(json.load(open('{file}'))))"
    done = check(srun(cluster, MPIS["openmpi4"], "-N3 --ntasks-per-node=2", "--map", file, HELLO))
    assert re.search(r"^  node\[1-3\] +0-5 +cpu +\d+ each +0 +\d+ +eth0$", done.stderr, re.MULTILINE), done.stderr
    found = json.loads(check(cluster.run("srun", "-w", "node1", "-n1", "python3", "-c", read, timeout=60)).stdout)
    assert [(one["rank"], one["host"], one["interface"]) for one in found] == [
        (rank, f"node{rank // 2 + 1}", "eth0") for rank in range(6)]
