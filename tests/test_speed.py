"""What makes a start quick changes nothing that a script, or MPI, could see."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mpiddp.facts import fabric
from mpiddp.facts.library import Library
from mpiddp.join.initialise import transports
from mpiddp.plan.transports import left_out
from tests import processes
from tests.support import (
    DEADLINE_S,
    MPIS,
    PROGRAMS,
    Mpi,
    alone,
    check,
    mpiexec,
    mpiexec_command,
    single_node_environ,
)


@pytest.mark.parametrize(("chosen", "found"), [
    ({}, {"btl": "^uct,openib,ofi", "mtl": "^ofi,psm,psm2"}),
    ({"btl": "^smcuda,ofi", "mtl": "^ofi", "pml": "^ucx"}, {"btl": "^smcuda,ofi,uct,openib", "mtl": "^ofi,psm,psm2"}),
    ({"btl": "self,tcp"}, {"mtl": "^ofi,psm,psm2"}),
    ({"pml": "cm", "mtl": "psm2"}, {}),
    ({"pml": "ob1"}, {}),
    ({"mtl_ofi_provider_include": "tcp"}, {}),
    ({"mca_base_param_files": "one.conf"}, {}),
], ids=str)
def test_what_open_mpi_leaves_out(chosen: dict[str, str], found: dict[str, str]) -> None:
    assert left_out(variables(chosen)) == variables(found)


def variables(parameters: dict[str, str]) -> dict[str, str]:
    """Return parameters as the variables that set them."""
    return {f"OMPI_MCA_{name}": value for name, value in parameters.items()}


def test_a_users_own_file_of_parameters_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fabric, "has_fabric", bool)
    monkeypatch.setenv("HOME", str(tmp_path))
    loaded = Library("Open MPI", (4, 1), "", frozenset())
    assert transports(loaded).keys() == {"OMPI_MCA_btl", "OMPI_MCA_mtl"}
    (tmp_path / ".openmpi").mkdir()
    (tmp_path / ".openmpi" / "mca-params.conf").write_text("btl = self,tcp\n")
    assert transports(loaded) == {}


@pytest.mark.parametrize(("name", "spared"), [("openmpi4", "psm2"), ("openmpi5", "ofi")])
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


def test_the_collector_stays_as_a_program_has_it(quick: Mpi) -> None:
    told = check(alone(quick, "-c", "import gc; gc.disable(); gc.freeze(); import mpiddp; mpiddp.init_process_group(); "
                       "print(gc.isenabled(), gc.get_freeze_count() > 0)")).stdout
    assert told == "False True\n"
