"""The machine that figures were measured on: processor, cores, versions."""

import os
import platform
import subprocess
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


def commit() -> str:
    """Return the commit of this checkout, with "-dirty" after it if files have changed since; "" without git."""
    git = ("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return platform.processor() or platform.machine()
    named = (line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line)
    return next(named, platform.machine())
