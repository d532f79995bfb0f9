"""Run a command beside a name server that knows no name, and print the names that the command's processes ask for.

    unshare --net --mount python name_server.py COMMAND...

It needs network and mount namespaces of its own: it brings loopback up, and makes /etc/resolv.conf name itself.
"""

import socket
import subprocess
import sys
import tempfile
import threading

NO_SUCH_NAME = b"\x81\x83"  # RFC 1035, 4.1.1: the flags of the answer


def serve(server):
    while True:
        query, sender = server.recvfrom(512)
        labels, at = [], 12
        while query[at]:
            labels.append(query[at + 1:at + 1 + query[at]].decode())
            at += 1 + query[at]
        print("asked for", ".".join(labels), flush=True)
        server.sendto(query[:2] + NO_SUCH_NAME + query[4:], sender)


subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
with tempfile.NamedTemporaryFile("w") as config, socket.socket(type=socket.SOCK_DGRAM) as server:
    config.write("nameserver 127.0.0.1\n")
    config.flush()
    subprocess.run(["mount", "--bind", config.name, "/etc/resolv.conf"], check=True)
    server.bind(("127.0.0.1", 53))
    threading.Thread(target=serve, args=(server,), daemon=True).start()
    sys.exit(subprocess.run(sys.argv[1:]).returncode)
