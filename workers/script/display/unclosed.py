"""Ends the run of a line that is still open when its script ends, and says so, with where the run can go on."""

import os
import sys
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from stageline.workers.runtime.progress import Progress


class Run(Protocol):
    """What can be left open."""

    def abort(self, reason: str) -> None:
        """Ends the run with what it can save, and says where it is."""


def watch_for_close(run: Run, folder: Path, progress: Progress) -> "weakref.finalize[..., object]":
    """To be detached when `run` is closed: else it is ended when this process is, and stderr is told, as also when it
    is forgotten."""
    return weakref.finalize(run, _leave, os.getpid(), weakref.ref(run), folder, progress)


def _leave(owner: int, run: "weakref.ref[Run]", folder: Path, progress: Progress) -> None:
    if os.getpid() != owner:  # in a fork
        return
    saved = ""
    if (left := run()) is None:
        saved = f"; {_saved(folder, progress.complete)}"
    else:
        with suppress(KeyboardInterrupt):  # once more: then nothing is saved any longer
            left.abort("the script has ended without closing its line")
    print(
        f"stageline: the line of {folder} was not closed, so its weights were not kept{saved}. Use it in a `with`, or "
        "call close()",
        file=sys.stderr,
    )


def _saved(folder: Path, complete: int) -> str:
    if not complete:
        return "nothing is saved yet"
    return f"the state after {complete} steps is saved, and Line.resume({str(folder)!r}, ...) goes on there"
