"""The output of a check: the table and the files, from made-up measurements."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from mpiddp.check import command, report
from mpiddp.check.stats.schema import CheckFinding, RankInfo, Subject, no_measurements
from mpiddp.check.stats.text import three_digits
from mpiddp.check.table import MAX_LINES, MAX_WIDTH, render
from mpiddp.systems import schedulers
from tests import processes
from tests.fabrics import fabric, found, many, three
from tests.messages import message
from tests.support import PROGRAMS, ROOT, check, first_of, need, on_path


def names(count: int) -> list[str]:
    return [f"n{node:03}: slow" for node in range(count)]


def senders(count: int) -> list[CheckFinding]:
    """Return findings of the first nodes, each of which sends slowly to the last one."""
    return [CheckFinding(Subject.NODE, words, (f"n{node:03}",), (node,), ((node, 63),), "bandwidth", 0.5)
            for node, words in enumerate(names(count))]


@pytest.mark.parametrize("nodes", first_of([1, 2, 3, 64, 256, 1024], 5))
def test_a_table_is_small_at_any_size(nodes: int) -> None:
    figures = fabric(nodes, 8, seed=nodes)
    odd = [CheckFinding(Subject.NODE, f"n{node}: sends slowly", (figures.ranks[node * 8].host,), (node,), ((node, 0),),
                   "bandwidth") for node in range(1, nodes)]
    for findings in ([], odd[:1], odd):
        shown = render(figures, findings, ["a note " * 40] * 9)
        assert len(shown) <= MAX_LINES
        assert max(map(len, shown)) <= MAX_WIDTH
        assert any("all-reduce" in line for line in shown)


def test_odd_nodes_come_first_and_are_marked() -> None:
    figures = many(64)
    shown = render(figures, *found(figures))
    rows = [line.split() for line in shown[5:11]]
    assert {row[0] for row in rows[:5]} == {"n014", "n017", "n021", "n042", "n051"}
    assert rows[5][:2] == ["59", "others"]
    by_host = {row[0]: row for row in rows[:5]}
    assert [at for at, cell in enumerate(by_host["n017"]) if "*" in cell] == [10, 11]  # sends and receives
    assert [at for at, cell in enumerate(by_host["n021"]) if "*" in cell] == [2]  # the matrix product
    assert float(by_host["n021"][2].rstrip("*")) < 0.8 * float(rows[5][4])  # its worst rank's, not the median
    assert shown[-1] == message("check/exclude", option="--exclude=n[017,021,042]")
    assert render(figures, *found(figures), schedulers.FLUX.exclude)[-1] == message(
        "check/exclude", option="--requires='not hosts:n[017,021,042]'")


def test_alike_nodes_have_one_row_and_nothing_is_odd() -> None:
    shown = render(fabric(64), [], [])
    assert [line.split()[0] for line in shown if line.startswith("n[")] == ["n[000-063]"]
    assert shown[-1] == message("check/no_findings")
    assert not any("*" in line for line in shown)


def test_what_has_no_row_is_counted() -> None:
    shown = render(fabric(64), senders(30), [])
    assert message("check/more_nodes", count=20) in shown
    told = sum(line in names(30) for line in shown)
    assert message("check/more_findings", count=30 - told) in shown
    assert shown[-1] == message("check/exclude", option="--exclude=n[000-029]")


def test_more_hosts_than_a_line_takes_are_counted() -> None:
    scattered = [one._replace(hosts=(f"gpu{7 * at:04}",)) for at, one in enumerate(senders(40))]
    assert render(fabric(64), scattered, [])[-1] == message("check/too_many_hosts", count=40)


def test_nodes_behind_an_odd_switch_share_a_row() -> None:
    nodes, links = tuple(range(16)), tuple((node, 40) for node in range(16))
    odd = CheckFinding(Subject.SWITCH, "switch s1: slow", (), nodes, links, "bandwidth")
    rows = [line.split() for line in render(fabric(64), [odd], []) if line.startswith("n[")]
    assert [row[0] for row in rows] == ["n[000-015]", "n[016-063]"]


def test_a_finding_without_a_column_marks_the_host() -> None:
    odd = CheckFinding(Subject.NODE, "n002: its clock is 3 s ahead", ("n002",), (2,), (), "clock")
    assert any(line.startswith("n002* ") for line in render(fabric(3), [odd], []))


def test_kinds_have_letters() -> None:
    figures = fabric(4, 2)
    other = tuple(who._replace(kind="NVIDIA A100") if who.node == 3 else who for who in figures.ranks)
    shown = render(figures._replace(ranks=other), [], [])
    assert shown[0] == "4 nodes, 8 ranks: A is NVIDIA H100 80GB HBM3, B is NVIDIA A100"
    assert [line.split()[:3] for line in shown[5:7]] == [["n[000-002]", "0-5", "A"], ["n003", "6-7", "B"]]


def test_nodes_alone_have_neither_ways_nor_an_all_reduce() -> None:
    figures = fabric(3)._replace(links={}, inside_links={}, mpi_links={}, allreduce={})
    shown = render(figures, [], [])
    assert not any(word in line for word in ("sends", "latency", "all-reduce", "inside") for line in shown)
    assert any("product" in line for line in shown)


def test_nothing_measured_is_a_table_all_the_same() -> None:
    nothing = no_measurements((RankInfo("n0", 0, 0),))._replace(lost={0: "the matrix product"})
    assert render(nothing, [], [])[0] == "1 node, 1 rank"
    assert [line.split() for line in render(nothing, [], []) if line.startswith("n0")] == [["n0", "0"]]


def test_numbers_have_three_digits() -> None:
    assert [three_digits(value) for value in (0.0, 0.00123, 0.0123, 1.2, 13.24, 312.4, 999.6, 1843)] == [
        "0.000", "0.0012", "0.012", "1.20", "13.2", "312", "1,000", "1,840"]


def test_variables_are_a_checks_defaults() -> None:
    assert command.parse_arguments([], {"MPIDDP_SHARE_GPUS": "1"})[1].share_gpus


@pytest.mark.light
@pytest.mark.process
def test_a_folder_that_hangs_takes_its_files_and_not_the_table(tmp_path: Path) -> None:
    """FUSE whose server never answers: the table is there, and each file is warned of by its name."""
    need(["root"] if os.geteuid() else ["/dev/fuse"] if not Path("/dev/fuse").exists() else [])
    program = """
import sys
from mpiddp.check import CheckOptions, report
from tests.fabrics import three
report.WRITE_TIMEOUT_S = 0.5
report.report_results(three(), "gloo", "gloo", CheckOptions(False, False, f"{sys.argv[1]}/json", f"{sys.argv[1]}/bad"))
"""
    done = processes.run("unshare", "--mount", sys.executable, str(PROGRAMS / "hung.py"), str(tmp_path), sys.executable,
                         "-c", program, str(tmp_path), timeout=60, env={**os.environ, **on_path(ROOT)})
    said = check(done).stderr.splitlines()
    assert message("check/exclude", option="--exclude=n001") in done.stdout
    warnings = [message("check/file_not_written", file=tmp_path / name, seconds=0.5) for name in ("bad", "json")]
    assert said == [f"mpiddp: warning: {warning}" for warning in warnings]


def test_the_file_has_units_in_its_names() -> None:
    written = report.as_json(three(), *found(three()))
    assert written["by_rank"]["matrix_flop_per_s"][0]["rank"] == 0
    assert written["links"]["latency_s"][0].keys() == {"from", "to", "values"}
    assert written["all_reduce"][0].keys() == {"size_bytes", "time_s"}
    assert written["findings"][0]["hosts"] == ("n001",)
    assert written["findings"][0].keys() == {"subject", "text", "hosts", "nodes", "links", "metric", "ratio"}
    assert json.loads(json.dumps(written))["ranks"][0]["host"] == "n000"
    assert written["versions"].keys() >= {"mpiddp", "python", "torch"}
