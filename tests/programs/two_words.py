"""Say hello if the command line has come here as it was written: `two_words.py 'two words'`."""

import os
import runpy
import sys
from pathlib import Path

assert sys.argv[1:] == ["two words"], sys.argv
assert os.environ.get("NCCL_SAID", "seven eight") == "seven eight"
runpy.run_path(str(Path(__file__).parents[2] / "examples/hello_world.py"))
if "NCCL_SAID" in os.environ:
    print(f"rank {os.environ['RANK']} has NCCL_SAID\n", end="", flush=True)
