"""The processes of a script's run."""

import os


def processes(folder: str) -> dict[str, int]:
    """The pids of the run's processes by the names of their logs."""
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            log = os.readlink(f"/proc/{pid}/fd/2")
        except OSError:
            continue
        if log.startswith(os.path.abspath(folder)):
            found[os.path.basename(log).removesuffix(".log")] = int(pid)
    return found
