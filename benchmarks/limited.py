"""The model of benchmarks/workload.py, made by a worker whose memory is limited."""

import sys
from pathlib import Path

from torch import nn
from workload import build as build_plain

from stageline.workers.disk import memory as mapped_files


def build(width: int, layers: int, group: str, ahead: bool) -> nn.Sequential:
    """`layers` are those of one stage. From here on, what the worker of stage 1 takes counts in `group`, the folder of
    a control group of Linux. Unless `ahead`, no file is read before it is used."""
    if sys.argv[1:2] == ["worker"] and sys.argv[sys.argv.index("--index") + 1] == "1":
        (Path(group) / "cgroup.procs").write_text("0")
    if not ahead:
        mapped_files._advise = None
    return build_plain(width, layers)
