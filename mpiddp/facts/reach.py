"""Which hosts do not answer. Rank 0's sentinel asks when its rank waits in MPI_Init, which does not say for whom."""

from __future__ import annotations

import socket
from collections.abc import Sequence

SLURMD_PORT = 6818  # slurm.conf, SlurmdPort; a host that refuses the connection is there as well
AT_ONCE = 64


def out_of_reach(hosts: Sequence[str], timeout_s: float) -> list[str]:
    """Return the hosts that do not answer although others do, of those that can be asked in this time.

    If no host answers, the questions themselves do not arrive, because of a firewall, for example.
    """
    from concurrent.futures import ThreadPoolExecutor, wait

    def answers(host: str) -> bool:
        try:
            socket.create_connection((host, SLURMD_PORT), timeout=timeout_s / 2).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
        return True

    pool = ThreadPoolExecutor(AT_ONCE)
    asked = {pool.submit(answers, host): host for host in hosts}
    done, _ = wait(asked, timeout_s)
    pool.shutdown(wait=False, cancel_futures=True)
    silent = {asked[one] for one in done if not one.result()}
    return [host for host in hosts if host in silent] if len(silent) < len(done) else []
