"""Which hosts do not answer. Rank 0's sentinel asks when its rank waits in MPI_Init, which does not say for whom."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence

SLURMD_PORT = 6818  # slurm.conf, SlurmdPort
AT_ONCE = 64


def out_of_reach(hosts: Sequence[str], timeout_s: float) -> list[str]:
    """Return the hosts that do not answer although others do, of those that can be asked in this time.

    If no host answers, the questions themselves do not arrive, because of a firewall, for example.
    """
    found = ask({host: (host, SLURMD_PORT) for host in hosts}, timeout_s / 2, timeout_s)
    return [host for host, answers in found.items() if not answers] if any(found.values()) else []


def ask(
    addresses: Mapping[str, tuple[str, int]], each_s: float, all_s: float | None = None, refusal_counts: bool = True
) -> dict[str, bool]:
    """Return by name which hosts take a connection within `each_s`, of those that can be asked within `all_s`.

    With `refusal_counts`, a host that refuses it has answered, too. So has one whose name is unknown here: nothing is
    known of it.
    """
    from concurrent.futures import ThreadPoolExecutor, wait

    def answers(address: tuple[str, int]) -> bool:
        try:
            socket.create_connection(address, timeout=each_s).close()
        except ConnectionRefusedError:
            return refusal_counts
        except socket.gaierror:
            return True
        except OSError:
            return False
        return True

    pool = ThreadPoolExecutor(AT_ONCE)
    asked = {pool.submit(answers, address): name for name, address in addresses.items()}
    done, _ = wait(asked, all_s)
    pool.shutdown(wait=False, cancel_futures=True)
    return {name: one.result() for one, name in asked.items() if one in done}
