"""The two pictures of README.md: `python -m tests.pictures trace.json` draws them, with a trace that a job has written.

The map is drawn by mpiddp itself, of four nodes that are described here; no such machine was used.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from mpiddp.base.config import LaunchConfig, Script
from mpiddp.discovery.host import HostFacts
from mpiddp.planning.job import plan_dry_run
from mpiddp.reporting.map import draw_svg
from tests import test_cores, test_dry_run, test_gpus, test_plan
from tests.support import ROOT

MAP, TRACE = (ROOT / ".github" / name for name in ("map.svg", "trace.svg"))
COLOURS = {"import torch": "#c6dbef", "script": "#a1d99b", "MPI_Init": "#fdd0a2", "exit": "#bdbdbd"}
WAITING, OTHERS = "#f7fbff", "#d9d9d9"
WIDTH, LEFT, TOP, LANE = 640, 110, 28, 26  # pixels


def described_nodes() -> list[HostFacts]:
    """Return the facts of four nodes with four GPUs each; Slurm gave the job 48 of the third one's 64 cores."""
    facts = []
    for node in range(4):
        cpus = range(48 if node == 2 else 64)
        nics = (test_plan.LO, test_plan.nic("ib0", f"10.1.0.{node + 1}", "10.1.0.0/16", speed=200_000))
        gpus = tuple(gpu._replace(uuid=f"GPU-{node}{index}", board=f"GPU-{node}{index}")
                     for index, gpu in enumerate(test_gpus.A100_NODE))
        ranks = test_cores.ranks(test_cores.A100_NODE, *[cpus] * 4, allowed=cpus, node=node)
        facts += [rank._replace(hostname=f"n{17 + node:03}", node=4 * node, interfaces=nics)
                  for rank in test_dry_run.with_gpus(gpus, ranks)]
    return facts


def map_svg() -> str:
    """Return the picture of the map."""
    return draw_svg(plan_dry_run(described_nodes(), LaunchConfig(Script("train.py")))[0]) + "\n"


def trace_svg(trace: dict[str, list[dict[str, object]]]) -> str:
    """Return a trace as bars, a line for each rank, as a viewer of Chrome's trace format shows it."""
    import drawsvg

    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    names = {event["pid"]: event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"}
    scale = WIDTH / max(event["ts"] + event["dur"] for event in events)
    picture = drawsvg.Drawing(LEFT + WIDTH + 12, TOP + LANE * len(names) + 26, font_family="sans-serif")
    picture.append(drawsvg.Rectangle(0, 0, picture.width, picture.height, fill="white"))
    for second in range(int(WIDTH / scale / 1e6) + 1):
        left = LEFT + second * 1e6 * scale
        picture.append(drawsvg.Line(left, TOP - 6, left, picture.height - 20, stroke="#ddd"))
        picture.append(drawsvg.Text(f"{second} s", 11, left, picture.height - 6, text_anchor="middle", fill="#333"))
    for lane, name in names.items():
        picture.append(drawsvg.Text(name, 12, LEFT - 8, TOP + LANE * lane + 14, text_anchor="end", fill="#333"))
    for event in events:
        left, width = round(LEFT + event["ts"] * scale, 1), round(event["dur"] * scale, 1)
        top, name = TOP + LANE * event["pid"], event["name"]
        fill = COLOURS.get(name, WAITING if name.startswith("wait: ") else OTHERS)
        picture.append(drawsvg.Rectangle(left, top, width, LANE - 6, fill=fill, stroke="#777", stroke_width=0.4))
        if width > 6 * len(name):
            picture.append(drawsvg.Text(name, 11, left + width / 2, top + 14, text_anchor="middle", fill="#333"))
    for number, (name, fill) in enumerate({**COLOURS, "waiting": WAITING, "other stages": OTHERS}.items()):
        left = LEFT + 108 * number
        picture.append(drawsvg.Rectangle(left, 5, 10, 10, fill=fill, stroke="#777", stroke_width=0.4))
        picture.append(drawsvg.Text(name, 11, left + 15, 14, fill="#333"))
    return str(picture.as_svg()) + "\n"


if __name__ == "__main__":
    MAP.write_text(map_svg())
    TRACE.write_text(trace_svg(json.loads(Path(sys.argv[1]).read_text())))
