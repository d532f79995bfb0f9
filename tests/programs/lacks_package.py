"""Import a package that is missing on a host, or on all: `lacks_package.py [HOST]`."""

import socket
import sys
import time

if sys.argv[1:] in ([], [socket.gethostname()]):
    import nonexistent_package_x  # noqa: F401
time.sleep(600)
