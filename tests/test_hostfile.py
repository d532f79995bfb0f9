"""Jobs on the hosts of a file, without a scheduler: daemons start by ssh, as in a login."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest

from tests import processes
from tests.messages import find
from tests.support import (
    DEADLINE_S,
    EXAMPLES,
    MPIS,
    ROOT,
    Done,
    Mpi,
    check,
    check_hello,
    first_of,
    need,
    scratch,
    single_node_environ,
)

# In ssh's place. The other host is this machine by another name.
AGENT = """\
#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
host=$1; shift
exec unshare --uts sh -c 'hostname "$0"; exec env -i HOME="$HOME" PATH=/usr/bin:/bin sh -c "$1"' "$host" "$*"
"""
OPTIONS = {
    "openmpi4": "--mca plm rsh --mca plm_rsh_agent {agent} --hostfile {hosts} -x PYTHONPATH",
    "openmpi5": "--prtemca plm ssh --prtemca plm_ssh_agent {agent} --hostfile {hosts} -x PYTHONPATH",
    "mpich": "-launcher ssh -launcher-exec {agent} -f {hosts} -n 2",
}
# Both hosts have all addresses of this machine, and Open MPI drops a connection from another one than it expects.
ON_LOOPBACK = {"OMPI_MCA_btl_tcp_if_include": "lo"}
PYTHON = ("python", "-m", "mpiddp")
pytestmark = [pytest.mark.mpi, pytest.mark.light]


@functools.cache
def write_agent() -> Path:
    """Write the agent, once in this process: a file that is open for writing cannot be executed."""
    agent = Path(scratch(), f"agent-{os.getpid()}")
    agent.write_text(AGENT)
    agent.chmod(0o755)
    return agent


def run(mpi: Mpi, *command: str, **variables: str) -> Done:
    """Run the command of a launcher with a host file; the launcher runs on the first of its two hosts."""
    need(mpi.missing() + ["root"] * (os.geteuid() != 0))
    hosts = Path(scratch(), f"hosts-{mpi.name}-{os.getpid()}")
    slots = " slots=1" if mpi.name.startswith("openmpi") else ":1"
    hosts.write_text(f"localhost{slots}\nfar{slots}\n")
    options = OPTIONS[mpi.name].format(agent=write_agent(), hosts=hosts).split()
    return processes.run(str(mpi.mpiexec), *options, *command, timeout=DEADLINE_S, cwd=ROOT,
                         env={**single_node_environ(mpi), **ON_LOOPBACK, "MPIDDP_INTERFACE": find_interface(),
                              **variables})


def find_interface() -> str:
    """Return the interface of the default route: others come and go with the cluster of other tests."""
    routes = [line.split() for line in Path("/proc/net/route").read_text().splitlines()]
    names = [name for name, destination, *_ in routes if destination == "00000000"]
    need([] if names else ["a default route"])
    return names[0]


@pytest.mark.parametrize(("mpi", "options"), first_of([
    (MPIS["openmpi4"], ("-x", "PATH")), (MPIS["openmpi5"], ("-x", "PATH")), (MPIS["mpich"], ()),
]))
def test_hosts_of_a_file(mpi: Mpi, options: tuple[str, ...]) -> None:
    done = run(mpi, *options, *PYTHON, str(EXAMPLES / "hello_world.py"))
    check_hello(done, 2)
    assert "mpiddp 0" in done.stderr
    assert " on 2 nodes" in done.stderr


@pytest.mark.parametrize(("name", "value"), first_of([
    ("SHOW", "0"), ("PREFIX", "[{rank}] "), ("STOP_BEFORE", "60")]))
def test_a_variable_that_reaches_the_launchers_own_host_alone(name: str, value: str) -> None:
    variable, mpi = f"MPIDDP_{name}", MPIS["openmpi4"]
    done = check(run(mpi, "-x", "PATH", *PYTHON, "-c", "pass", **{variable: value}), 3)
    (found,) = find("launch/options_differ", done.stderr, other="not set", rank="rank 1 on far")
    assert found["option"].split()[-1].removesuffix("_s") == name.lower()
    check(run(mpi, "-x", "PATH", "-x", variable, *PYTHON, "-c", "pass", **{variable: value}))
