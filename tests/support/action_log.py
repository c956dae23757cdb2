"""What every process of a run did, and when, in one file that all of them write: also those that are killed.

A line is one write to a file opened for appending, so it is there whole or not at all, in the order of the writes.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

FILE = "diary.jsonl"
ACTION, DONE, CHECKPOINT, SPOKE, KILLED = "action", "done", "checkpoint", "spoke", "killed"


@dataclass(frozen=True, slots=True)
class Entry:
    """`who` ("worker-1", "broker") in its `life` (0: the first) did `what`, at `when`, in seconds of one clock for all.

    ACTION has begun and DONE has ended: `action` of `step`. CHECKPOINT: that of `step` is complete. SPOKE: the broker
    has answered for the first time. KILLED: it is about to be.
    """

    who: str
    life: int
    what: str
    when: float
    step: int = 0
    action: str = ""


def read(folder: Path) -> list[Entry]:
    return [Entry(*json.loads(line)) for line in (folder / FILE).read_text().splitlines()]


def keep(folder: Path, who: str, life: int, on_done: Callable[[], None]) -> Callable[[str], None]:
    """Has this process write down what it does; `on_done` is called after each action, or sentence of the broker.

    Returns what writes a line more.
    """
    file = os.open(folder / FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def write(what: str, step: int = 0, action: str = "") -> None:
        os.write(file, f"{json.dumps([who, life, what, monotonic(), step, action])}\n".encode())

    (_watch_broker if who == "broker" else _watch_worker)(write, on_done)
    return write


def _watch_worker(write: Callable[..., None], on_done: Callable[[], None]) -> None:
    from stageline.workers.runtime.progress import Progress

    computing, done = Progress.computing, Progress.done

    def begun(self: Progress, instruction: Any, now: float) -> None:
        write(ACTION, instruction.step, str(instruction.action))
        computing(self, instruction, now)

    def ended(self: Progress, instruction: Any, now: float) -> None:
        done(self, instruction, now)
        write(DONE, instruction.step, str(instruction.action))
        on_done()

    Progress.computing, Progress.done = begun, ended  # type: ignore[method-assign]


def _watch_broker(write: Callable[..., None], on_done: Callable[[], None]) -> None:
    from stageline.broker.coordinator.coordinator import Coordinator

    handle, complete = Coordinator.handle, -1

    def handled(self: Coordinator, *arguments: Any) -> Any:
        nonlocal complete
        answer = handle(self, *arguments)
        if complete < 0:
            write(SPOKE)
        if self.crew.checkpoints.complete > complete:
            complete = self.crew.checkpoints.complete
            write(CHECKPOINT, complete)
        on_done()
        return answer

    Coordinator.handle = handled  # type: ignore[method-assign]
