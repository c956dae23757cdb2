"""Actions of all processes of a run with times, in one file that all of them append to, up to the moment of a kill.

A line is one write to a file opened for appending, so it is there whole or not at all, in the order of the writes.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

FILE = "actions.jsonl"
ACTION, DONE, EVALUATED, JUDGED, KEEPING, CHECKPOINT, ANSWERED, KILLED = (
    "action",
    "done",
    "evaluated",
    "judged",
    "keeping",
    "checkpoint",
    "answered",
    "killed",
)


@dataclass(frozen=True, slots=True)
class Entry:
    """`process` ("worker-1", "broker") in its `generation` (0: the first) did `what`, at `when`, in seconds of one
    clock for all processes.

    ACTION has begun and DONE has ended: `action` of `step`. EVALUATED: an action of evaluated batch `step` has ended.
    JUDGED: the verdict on round `step` is known, and told.
    KEEPING: rows of the prefix cache are written, but not marked yet as being there. CHECKPOINT: that of `step` is
    complete. ANSWERED: the broker has handled its first message. KILLED: the process is
    about to kill itself.
    """

    process: str
    generation: int
    what: str
    when: float
    step: int = 0
    action: str = ""


class Place(NamedTuple):
    """Where a process is when it makes the entry `what` of `action` of `step`, for the `times`th time."""

    what: str
    step: int = 0
    action: str = ""
    times: int = 1


class Arrival:
    """Calls `there` when a process has come to the `place`."""

    def __init__(self, place: Place, there: Callable[[], None]) -> None:
        self._place, self._there, self._left = place, there, place.times

    def passes(self, what: str, step: int, action: str) -> None:
        if (what, step, action) == self._place[:3]:
            self._left -= 1
            if not self._left:
                self._there()


def read(folder: Path) -> list[Entry]:
    whole, _, _ = (folder / FILE).read_text().rpartition("\n")  # a line that is being written does not count yet
    return [Entry(*json.loads(line)) for line in whole.splitlines()]


def record(
    folder: Path,
    process: str,
    generation: int,
    on_done: Callable[[], None],
    on_entry: Callable[[str, int, str], None] = lambda what, step, action: None,
) -> Callable[[str], None]:
    """Has this process record its actions; `on_done` is called after each action, or each message of the broker, and
    `on_entry` after each entry, with what it says.

    Returns the function that records one entry more.
    """
    file = os.open(folder / FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def write(what: str, step: int = 0, action: str = "") -> None:
        os.write(file, f"{json.dumps([process, generation, what, monotonic(), step, action])}\n".encode())
        on_entry(what, step, action)

    (_record_broker if process == "broker" else _record_worker)(write, on_done)
    return write


def _record_worker(write: Callable[..., None], on_done: Callable[[], None]) -> None:
    from stageline.workers.runtime.progress import Progress

    computing, done, evaluated, judged = Progress.computing, Progress.done, Progress.evaluated, Progress.judged

    def begun(self: Progress, instruction: Any, now: float) -> None:
        write(ACTION, instruction.step, str(instruction.action))
        computing(self, instruction, now)

    def ended(self: Progress, instruction: Any, now: float) -> None:
        done(self, instruction, now)
        write(DONE, instruction.step, str(instruction.action))
        on_done()

    def ended_evaluation(self: Progress, now: float) -> None:
        evaluated(self, now)
        assert self.instruction is not None
        write(EVALUATED, self.instruction.step, str(self.instruction.action))
        on_done()

    def knows_verdict(self: Progress, number: int, now: float) -> None:
        judged(self, number, now)
        write(JUDGED, number)
        on_done()

    Progress.computing, Progress.done = begun, ended  # type: ignore[method-assign]
    Progress.evaluated, Progress.judged = ended_evaluation, knows_verdict  # type: ignore[method-assign]
    _record_kept_rows(write)


def _record_kept_rows(write: Callable[..., None]) -> None:
    from stageline.workers.extras.prefix_cache.cache import PrefixCache

    checksum = PrefixCache._sum

    def summed(self: PrefixCache, sample: int) -> int:
        write(KEEPING)
        return checksum(self, sample)

    PrefixCache._sum = summed  # type: ignore[method-assign]


def _record_broker(write: Callable[..., None], on_done: Callable[[], None]) -> None:
    from stageline.broker.coordinator.coordinator import Coordinator

    handle, complete = Coordinator.handle, -1

    def handled(self: Coordinator, *arguments: Any) -> Any:
        nonlocal complete
        answer = handle(self, *arguments)
        if complete < 0:
            write(ANSWERED)
        if self.run.checkpoints.complete > complete:
            complete = self.run.checkpoints.complete
            write(CHECKPOINT, complete)
        on_done()
        return answer

    Coordinator.handle = handled  # type: ignore[method-assign]
