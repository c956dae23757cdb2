"""The benchmark's model, whose workers record every other block of steps: times of actions, and waits with causes.

    blocks     0     1     2     3     4
    recorded   yes   no    yes   no    yes

There is no such option: the functions that record are replaced in each worker, and put back.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from time import time
from typing import Any

from torch import nn
from workload import build as build_plain

from stageline.pipeline.program import Program
from stageline.workers.runtime import progress as recording
from stageline.workers.runtime.idle import Done, IdleTime
from stageline.workers.runtime.progress import Progress

_NOTED = ("lacks", "awaits", "ends", "lap", "note", "taken")  # methods of IdleTime
_PLAIN: dict[str, Callable[..., Any]] = {name: getattr(IdleTime, name) for name in _NOTED}
_times_of, _closed = recording.times_of, Progress.closed


def build(width: int, layers: int, block: int, folder: str) -> nn.Sequential:
    """The same model. From here on this process records every other `block` of steps, and notes their ends."""

    def closed(self: Progress, stage: int, step: int, *of: float | None) -> None:
        _closed(self, stage, step, *of)
        if (step + 1) % block == 0:
            _record(self, (step + 1) // block % 2 == 0)
            if stage == self.last:
                with (Path(folder) / "blocks").open("a") as file:
                    file.write(f"{time()!r}\n")

    Progress.closed = closed  # type: ignore[method-assign, assignment]
    return build_plain(width, layers)


def _record(progress: Progress, on: bool) -> None:
    for name, plain in _PLAIN.items():
        setattr(IdleTime, name, plain if on else _nothing)
    recording.times_of = _times_of if on else _no_times
    if on:
        progress.idle.taken(time())  # the block that was not recorded is no wait


def _nothing(self: IdleTime, *of: object) -> tuple[()]:
    return ()


def _no_times(done: Iterable[Done], program: Program | None) -> bytes:
    return b""
