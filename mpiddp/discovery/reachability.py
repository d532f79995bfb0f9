"""Which hosts do not answer: probed by rank 0's agent while its rank waits in MPI_Init, and between attempts."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence

from ..systems.schedulers import SLURM

MAX_PROBES = 64  # at a time


def find_unreachable(hosts: Sequence[str], timeout_s: float) -> list[str]:
    """Return the hosts whose Slurm daemon does not answer, of those that can be probed within `timeout_s`.

    If no host answers, none is returned: the probes themselves are lost, for example in a firewall.
    """
    answers = probe_hosts({host: (host, SLURM.daemon_port) for host in hosts}, timeout_s / 2, timeout_s)
    return [host for host, has_answered in answers.items() if not has_answered] if any(answers.values()) else []


def probe_hosts(
    addresses: Mapping[str, tuple[str, int]], each_s: float, all_s: float | None = None, refusal_counts: bool = True
) -> dict[str, bool]:
    """Return by name which hosts take a connection within `each_s`, of those that can be probed within `all_s`.

    A refused connection counts as an answer with `refusal_counts`. A host with an unknown name counts as reachable,
    because nothing is known about it.
    """
    from concurrent.futures import ThreadPoolExecutor, wait

    def has_answered(address: tuple[str, int]) -> bool:
        try:
            socket.create_connection(address, timeout=each_s).close()
        except ConnectionRefusedError:
            return refusal_counts
        except socket.gaierror:
            return True
        except OSError:
            return False
        return True

    pool = ThreadPoolExecutor(MAX_PROBES)
    probes = {pool.submit(has_answered, address): name for name, address in addresses.items()}
    done, _ = wait(probes, all_s)
    pool.shutdown(wait=False, cancel_futures=True)
    return {name: probe.result() for probe, name in probes.items() if probe in done}
