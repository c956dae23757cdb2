"""The line of the user's own file in which a process was when it crashed, hung, or called `os._exit`.

    install()           in the process: stacks go to its stderr, which is its log
    ask(pid)            to a process that hangs: it writes its stack to its log
    read(log, since)    from the log: the innermost line of the user's files, else of a library that they called

`stageline.pipeline.process.last_line` is for every process that runs a user's code: workers and trials.
"""

import faulthandler
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from stageline.pipeline.code_lines import CodeLine, innermost, is_stagelines, stack_of
from stageline.pipeline.errors import ExitCode

_DUMP = signal.SIGUSR1
_LOG = 2  # stderr
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_HEAD = re.compile(r"\(most recent call first\):$")
_EXIT = re.compile(r"^stageline: os\._exit\(.*\) was called in (?P<function>.*) \((?P<file>.*), line (?P<line>\d+)\)$")
_end_process = os._exit


def install() -> None:
    """Make this process write where it is to stderr: at a crash, at SIGUSR1, and when `os._exit` is called."""
    faulthandler.enable(_LOG, all_threads=False)
    faulthandler.unregister(_DUMP)  # in a fork, whose handlers are others than those that `faulthandler` remembers
    faulthandler.register(_DUMP, _LOG, all_threads=False)
    os._exit = _telling(lambda status: status)  # type: ignore[assignment]


@contextmanager
def exit_is_failure() -> Iterator[None]:
    """Return a context in which `os._exit` writes the place of its call, and ends the process with a failure.

    The failure replaces any status. It is for a user's code in a process whose exit code is that of the run.
    """
    before = os._exit
    os._exit = _telling(lambda status: ExitCode.FAILED)  # type: ignore[assignment]
    try:
        yield
    finally:
        os._exit = before


def _telling(status_of: Callable[[int], int]) -> Callable[[int], None]:
    """Return a replacement of `os._exit` that writes the place of its call first.

    It does so in this process, not in its forks. Called by stageline, it does what `os._exit` always does.
    """
    mine = os.getpid()

    def exit_with_its_line(status: int) -> None:
        stack = _lines(sys._getframe(1)) if os.getpid() == mine else []
        if (line := innermost(stack)) is not None:
            text = f"stageline: os._exit({status}) was called in {line}\n"
            with suppress(OSError):
                os.write(_LOG, text.encode(errors="replace"))
        _end_process(status_of(status) if stack else status)

    return exit_with_its_line


def ask(pid: int) -> None:
    """Make a process that has called `install` write the stack of its main thread to its log, even if it hangs.

    A stopped process writes the stack once it continues. A process that has not called `install` ends. Nothing is done
    for `pid` 0.
    """
    if pid > 0:
        with suppress(ProcessLookupError):
            os.kill(pid, _DUMP)


def read(log: Path, since: int = 0) -> CodeLine | None:
    """Return the last line of code told in `log` from byte `since` on.

    Returns None if there is none, or if the file cannot be read.
    """
    try:
        with log.open("rb") as file:
            file.seek(since)
            text = file.read().decode(errors="replace")
    except OSError:
        return None
    found: list[CodeLine] = []
    for line in text.splitlines():
        if _HEAD.search(line) or _EXIT.match(line):
            found = []
        if (match := _FRAME.match(line) or _EXIT.match(line)) is not None:
            found.append(CodeLine(match["file"], int(match["line"]), match["function"]))
    return innermost(found)


def _lines(frame: FrameType | None) -> list[CodeLine]:
    """Return the stack, innermost first. Returns [] if stageline itself is innermost: it exits on purpose."""
    found = list(stack_of(frame))
    return [] if found and is_stagelines(found[0].file) else found
