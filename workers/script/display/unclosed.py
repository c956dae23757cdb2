"""Says at a script's end that a line was not closed, and where its run can go on."""

import os
import sys
import weakref
from pathlib import Path

from stageline.workers.runtime.progress import Progress


def watch_for_close(run: object, folder: Path, progress: Progress) -> "weakref.finalize[[int, Path, Progress], object]":
    """To be detached when `run` is closed: else, when it is forgotten or this process ends, stderr is told."""
    return weakref.finalize(run, _tell, os.getpid(), folder, progress)


def _tell(owner: int, folder: Path, progress: Progress) -> None:
    if os.getpid() == owner:  # not in a fork
        print(unclosed_line(folder, progress.complete), file=sys.stderr)


def unclosed_line(folder: Path, complete: int) -> str:
    """For people. `complete`: the newest complete checkpoint."""
    saved = (
        f"the state after {complete} steps is saved, and Line(the same arguments, resume={str(folder)!r}) goes on there"
        if complete
        else "nothing is saved yet"
    )
    return (
        f"stageline: the line of {folder} was not closed, so its weights were not kept; {saved}. Use it in a `with`, "
        "or call close()"
    )
