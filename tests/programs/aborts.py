"""End the job, whose reason is told already, or not: the second argument says which; the first is the status."""

import ctypes
import sys

from mpi4py import MPI

from mpiddp.base.termination import abort

ctypes.CDLL(None).printf(b"in C's buffer\n")
abort(MPI, int(sys.argv[1]), reason_printed=sys.argv[2] == "told")
