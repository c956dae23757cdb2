"""Fits a plan to machines: places of stages, what they recompute and offload.

May import `schedule`, `plan` and `errors`.

Machines: read `hosts.py`; then `fit.py`, which finds chains of stages, and chooses among them by simulated time.

Memory: read `memory_load.py`, the options of a stage and what the process of a worker takes; then
`memory_choosing.py`, which takes the cheapest combination that fits, says for which workers the limit is tight, and
what stands in the way if no combination fits.
"""

from .fit import ComparedWay, HostFit, HostFitStage, LayerTimes, NoFit, fit
from .hosts import Hosts, read_hosts
from .memory_choosing import Shortfall, cheapest, shortfalls, tight_workers
from .memory_load import Moved, StageLoad, StageOption, Switches, WorkerRoom, added_nanoseconds, moved_bytes

__all__ = [
    "ComparedWay",
    "HostFit",
    "HostFitStage",
    "Hosts",
    "LayerTimes",
    "Moved",
    "NoFit",
    "Shortfall",
    "StageLoad",
    "StageOption",
    "Switches",
    "WorkerRoom",
    "added_nanoseconds",
    "cheapest",
    "fit",
    "moved_bytes",
    "read_hosts",
    "shortfalls",
    "tight_workers",
]
