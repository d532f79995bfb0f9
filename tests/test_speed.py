"""What makes a start quick changes nothing that a script, or MPI, could see."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mpiddp.discovery.mpi import read_mca_parameters
from mpiddp.planning.environment import exclude_components
from tests import processes
from tests.support import (
    DEADLINE_S,
    MPIS,
    PROGRAMS,
    Mpi,
    alone,
    check,
    first_of,
    mpiexec,
    mpiexec_command,
    single_node_environ,
)


@pytest.mark.parametrize(("chosen", "found"), [
    ({}, {"btl": "^ofi", "mtl": "^ofi,psm,psm2"}),
    ({"btl": "^uct,openib,ofi", "mtl": "^ofi", "pml": "^ucx"}, {"btl": "^uct,openib,ofi", "mtl": "^ofi,psm,psm2"}),
    ({"btl": "self,tcp"}, {"mtl": "^ofi,psm,psm2"}),
    ({"pml": "cm", "mtl": "psm2"}, {}),
    ({"pml": "ob1"}, {}),
    ({"mtl_ofi_provider_include": "tcp"}, {}),
], ids=str)
def test_what_open_mpi_leaves_out(chosen: dict[str, str], found: dict[str, str]) -> None:
    assert exclude_components(chosen) == found


def test_variables_win_over_files(tmp_path: Path) -> None:
    for folder, line in ((".openmpi", "mtl = ^ofi # a comment"), ("etc", "mtl=^psm\n#btl = tcp\npml = ^ucx")):
        (tmp_path / folder).mkdir()
        name = "mca-params.conf" if folder == ".openmpi" else "openmpi-mca-params.conf"
        (tmp_path / folder / name).write_text(f"{line}\n")
    environ = {"HOME": str(tmp_path), "OMPI_MCA_pml": "ob1", "OPAL_PREFIX": str(tmp_path)}
    found = read_mca_parameters(environ, "/nowhere/lib/libmpi.so.40")
    assert {name: found[name] for name in ("mtl", "pml")} == {"mtl": "^ofi", "pml": "ob1"}
    one = tmp_path / "one.conf"
    one.write_text("btl = self,tcp\n")
    assert read_mca_parameters({"OMPI_MCA_mca_base_param_files": str(one)}, "/nowhere/lib/libmpi.so.40") == {
        "btl": "self,tcp", "mca_base_param_files": str(one)}


@pytest.mark.mpi
@pytest.mark.parametrize(("name", "spared"), first_of([("openmpi4", "psm2"), ("openmpi5", "ofi")]))
def test_open_mpi_looks_for_no_network_that_is_not_there(name: str, spared: str) -> None:
    """A script sees nothing of that: no variable, no thread, and a collector and an inspect module as ever."""
    mpi, program = MPIS[name], PROGRAMS / "traces.py"
    env = {"OMPI_MCA_btl_base_verbose": "10", "OMPI_MCA_mtl_base_verbose": "10"}
    plain = check(processes.run(*mpiexec_command(mpi, 1, program), timeout=DEADLINE_S,
                                env={**single_node_environ(mpi), **env}))
    ours = check(mpiexec(mpi, 1, program, env=env))
    assert ours.stdout == plain.stdout
    words = re.compile(rf"component {spared}\b")
    assert (bool(words.search(plain.stderr)), bool(words.search(ours.stderr))) == (True, False)


@pytest.mark.light
def test_the_collector_stays_as_a_program_has_it(quick: Mpi) -> None:
    told = check(alone(quick, "-c", "import gc; gc.disable(); gc.freeze(); import mpiddp; mpiddp.init_process_group(); "
                       "print(gc.isenabled(), gc.get_freeze_count() > 0)")).stdout
    assert told == "False True\n"
