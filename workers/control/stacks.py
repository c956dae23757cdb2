"""Stacks of this process's threads, for `stageline stack`: read by the control thread, so no debugger is attached."""

import sys
import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from traceback import StackSummary, walk_stack
from types import FrameType

from stageline.broker.control.answers import LONGEST_PLACE, MOST_FRAMES, MOST_THREADS, StackFrame, ThreadStack
from stageline.broker.control.peek import Peeked, ShowStacks

_CUT = "..."


def shown_stacks(request: ShowStacks, *, bare: bool = False) -> Peeked:
    """Return the stacks of all threads but the calling one, without the incarnation.

    A thread goes on while its stack is read; what it computes outside of Python is the line that called it.

    Args:
        request: Question to answer.
        bare: True to leave out lines of code, and all of a file's path but its name.
    """
    return Peeked(0, request.id, threads=list(islice(_stacks(bare=bare), MOST_THREADS)))


def _stacks(*, bare: bool) -> Iterator[ThreadStack]:
    running = sys._current_frames()
    main, own = threading.main_thread().ident, threading.get_ident()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident in sorted(running, key=lambda each: (each != main, each)):
        if ident != own:
            name = "main" if ident == main else names.get(ident, f"thread {ident}, not of Python")
            yield _stack(name, running[ident], bare=bare)


def _stack(name: str, frame: FrameType, *, bare: bool) -> ThreadStack:
    depth = sum(1 for _ in walk_stack(frame))
    found = StackSummary.extract(islice(walk_stack(frame), MOST_FRAMES), capture_locals=False)
    frames = [
        StackFrame(
            file=_end(Path(each.filename).name if bare else each.filename),
            line=each.lineno or 0,
            function=_start(each.name),
            text="" if bare else _start(each.line or ""),
        )
        for each in reversed(found)
    ]
    return ThreadStack(thread=_start(name), left_out=max(0, depth - len(frames)), frames=frames)


def _start(text: str) -> str:
    return text if len(text) <= LONGEST_PLACE else text[: LONGEST_PLACE - len(_CUT)] + _CUT


def _end(path: str) -> str:
    return path if len(path) <= LONGEST_PLACE else _CUT + path[len(_CUT) - LONGEST_PLACE :]
