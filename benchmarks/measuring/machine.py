"""The machine that figures were measured on: processor, cores, versions."""

import os
import platform
from pathlib import Path

import torch
import zmq


def machine() -> dict[str, object]:
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "libzmq": zmq.zmq_version(),
    }


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return platform.processor() or platform.machine()
    named = (line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line)
    return next(named, platform.machine())
