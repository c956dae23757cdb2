"""Usage of a tree of processes, thread by thread, as Linux counts it in /proc: processor time in nanoseconds."""

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

_MINOR_FAULTS, _MAJOR_FAULTS = 7, 9  # fields of /proc/PID/stat, counted from the one after the name


@dataclass(frozen=True, slots=True)
class Usage:
    """Since the threads began. `ran` and `waited`: by thread, the nanoseconds that it had a processor, and those that
    it was ready and had none; `switches`: how often it was given one; `faults`: of pages, by process."""

    ran: Counter[int]
    waited: Counter[int]
    switches: Counter[int]
    faults: Counter[int]

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(*(mine + theirs for mine, theirs in zip(self._parts, other._parts, strict=True)))

    def since(self, before: "Usage") -> "Usage":
        """Of the threads that were there `before`."""
        return Usage(
            *(
                Counter({key: now[key] - old[key] for key in now if key in old})
                for now, old in zip(self._parts, before._parts, strict=True)
            )
        )

    def busiest(self, count: int) -> list[int]:
        """The threads that ran for the longest time."""
        return [thread for thread, _ in self.ran.most_common(count)]

    @property
    def _parts(self) -> tuple[Counter[int], ...]:
        return self.ran, self.waited, self.switches, self.faults


def nothing() -> Usage:
    return Usage(Counter(), Counter(), Counter(), Counter())


def usage(process: psutil.Process) -> Usage:
    """Of the process and all that it has started."""
    found = nothing()
    for each in tree(process):
        folder = Path(f"/proc/{each.pid}")
        with suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(") ")[2].split()
            found.faults[each.pid] = int(fields[_MINOR_FAULTS]) + int(fields[_MAJOR_FAULTS])
            for task in (folder / "task").iterdir():
                with suppress(OSError):  # a thread may have ended
                    ran, waited, switches = map(int, (task / "schedstat").read_text().split())
                    thread = int(task.name)
                    found.ran[thread], found.waited[thread], found.switches[thread] = ran, waited, switches
    return found


def tree(process: psutil.Process) -> Iterator[psutil.Process]:
    """The process, and all that it has started."""
    with suppress(psutil.NoSuchProcess):
        yield process
        yield from process.children(recursive=True)
