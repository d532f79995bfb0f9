"""Mount a file system that never answers on a folder, FUSE without its server, and run a command there: FOLDER COMMAND.

Needs root, and a mount namespace of its own.
"""

import ctypes
import os
import sys

folder, *command = sys.argv[1:]
door = os.open("/dev/fuse", os.O_RDWR)
os.set_inheritable(door, True)
libc = ctypes.CDLL(None, use_errno=True)
options = f"fd={door},rootmode=40000,user_id=0,group_id=0".encode()
if libc.mount(b"hung", folder.encode(), b"fuse", 0, options):
    raise OSError(ctypes.get_errno(), "mount")
os.execvp(command[0], command)
