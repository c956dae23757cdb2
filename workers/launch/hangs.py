"""Workers that hang, lost or still loading: each is asked where it is, and killed, so that another can be started."""

import signal
import socket
from collections.abc import Iterable, Mapping
from time import monotonic, sleep

from stageline.workers.process.system import last_line
from stageline.workers.process.system.spawn import SpawnedProcess
from stageline.workers.runs.result import Facts

from .children import Children

LOST_TIMEOUT = 1.0  # seconds for a lost worker to exit by itself, before it is killed
TELL_TIMEOUT = 0.5  # seconds for a worker that hangs to tell where it is


def on_this_machine(rows: Iterable[Facts]) -> list[Facts]:
    """Return the rows of a status whose processes run here: another machine may have given their pids to others."""
    here = socket.gethostname()
    return [row for row in rows if row.get("host") == here]


class Hangs:
    """Of the workers among `children`. Times are monotonic, in seconds."""

    def __init__(self, children: Children) -> None:
        self._children = children
        self._joined: set[int] = set()  # the pids that the broker knows
        self._since: dict[int, float] = {}  # by pid: from when on a worker hangs that is to be killed
        self._asked: set[int] = set()  # the pids of those that were asked where they are
        self._why: dict[int, str] = {}  # by pid: why a worker was killed, if the broker does not know

    def has_joined(self, process: SpawnedProcess) -> bool:
        return process.pid in self._joined

    def look(self, facts: Facts, started: Mapping[str, float], now: float) -> None:
        """`facts` is the broker's new status; `started`: when each process was started, by name.

        A lost worker that hangs does not learn that it is lost. Its process must end before it is restarted.
        """
        rows = on_this_machine((*facts.get("workers", ()), *facts.get("spares", ())))
        self._joined |= {row["pid"] for row in rows}
        for lost in on_this_machine(facts.get("recovering", ())):
            self._since.setdefault(lost["pid"], now - lost["since"])
        loading = self._children.local.loading
        for name, process in self._children.workers.items():
            late = now - started.get(name, now) > loading and not self.has_joined(process)
            if late and process.poll() is None:
                self._since.setdefault(process.pid, now)
                self._why[process.pid] = f"since it had not joined within {loading:g} s (recovery.loading)"

    def end(self, now: float) -> None:
        """Asks those that hang where they are, and kills those that were asked before."""
        for process in self._children.workers.values():
            since = now - self._since.get(process.pid, now)
            if since > LOST_TIMEOUT - TELL_TIMEOUT and process.pid not in self._asked and process.poll() is None:
                self._asked.add(process.pid)
                last_line.ask(process.pid)
            elif since > LOST_TIMEOUT:
                process.send_signal(signal.SIGKILL)

    def detail(self, name: str, process: SpawnedProcess) -> str:
        """What is known of the end of a process that returned no result, continuing a sentence about it."""
        line = self._children.last_code_line(name) if process.result is None else None
        return ", ".join(part for part in (self._why.get(process.pid, ""), f"in {line}" if line else "") if part)

    def where(self, facts: Facts) -> dict[str, str]:
        """Where workers are that were lost and go on: "in forward (model.py, line 12)". By name."""
        rows = on_this_machine(facts.get("workers", ()))
        lost = {row["pid"] for row in rows if row.get("standing") == "lost"}
        workers = self._children.workers.items()
        going = {name: process for name, process in workers if process.pid in lost and process.poll() is None}
        for process in going.values():
            last_line.ask(process.pid)
        deadline, found = monotonic() + TELL_TIMEOUT, dict[str, str]()
        while len(found) < len(going) and monotonic() < deadline:
            sleep(0.02)
            lines = {name: self._children.last_code_line(name) for name in going}
            found = {name: f"in {line}" for name, line in lines.items() if line is not None}
        return found
