"""Run a command as a rank, and forward its output: `small_agent.py CONFIG COMMAND...`.

CONFIG is JSON: what ForwardConfig has, and `folder`: then the agent has its configuration when a file `early` is there,
and makes one called `configured`.
"""

import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from mpiddp.base.ranks import LogPlan
from mpiddp.base.stderr import set_writer, write_all, write_line
from mpiddp.ipc.event_loop import EventLoop
from mpiddp.output import forwarder
from mpiddp.output.forwarder import RankOutput
from mpiddp.output.log import RankLog
from mpiddp.output.protocol import ForwardConfig
from mpiddp.output.writer import WriterThread

options = {"log": "", "prefix": "", "shown": True, "folder": "", "stall_s": 10.0, "report": "", "log_hangs": False,
           **json.loads(sys.argv[1])}
forwarder.STALL_TIMEOUT_S = options["stall_s"]
if options["log_hangs"]:
    RankLog.write = lambda *_: time.sleep(600)


def on_error(error):
    raise error


def configure():
    if not options["folder"] or Path(options["folder"], "early").exists():
        output.configure(ForwardConfig(
            LogPlan(options["log"]), options["prefix"], "rank 3 on n07", options["shown"]))
        if options["folder"]:
            Path(options["folder"], "configured").touch()
    else:
        loop.set_timer("configure", 0.02, configure)


def end():
    lines.flush(loop.stop)
    loop.set_timer("end", 1.0, loop.stop)


def on_rank_end():
    rank.wait()
    output.flush(report)


def report():
    if options["report"]:
        write_line(options["report"])
        output.log_text(options["report"])
    output.finish(end)


pipes = {1: os.pipe(), 2: os.pipe()}
loop = EventLoop(on_error)
lines = WriterThread(loop)
set_writer(lambda descriptor, data: lines.submit(partial(write_all, descriptor, data), len(data)))
output = RankOutput(loop, {stream: ends[0] for stream, ends in pipes.items()}, "rank 3")
configure()
rank = subprocess.Popen(sys.argv[2:], stdout=pipes[1][1], stderr=pipes[2][1])
for _, write_end in pipes.values():
    os.close(write_end)
loop.watch_process(rank.pid, on_rank_end)
loop.run()
os._exit(120 if output.has_lost_output or output.lost_from >= 0 else rank.returncode)
