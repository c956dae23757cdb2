"""Keeper of one worker: a small process that starts it, watches its alive file, and starts it again by its exit code.

    keeper ──starts──> worker, in a session of its own: Ctrl-C reaches the keeper alone
      ├── SIGINT, SIGTERM and SIGHUP are passed on; after one of them, no worker is started again
      ├── the alive file gets old: the worker hangs. It tells where it is, and is killed
      └── the worker ends: by `afterwards`, the keeper ends with its exit code, or starts another after a pause

This process imports neither torch nor the command line: it takes a few megabytes.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from time import monotonic, sleep

from stageline.pipeline.errors import ExitCode, documented
from stageline.pipeline.exit_codes import EXIT_CODES, Afterwards, afterwards
from stageline.pipeline.process import last_line, streams
from stageline.pipeline.process.child import Interpreter
from stageline.pipeline.process.kept import has_said_over, link

POLL = 0.1  # seconds between two looks at the worker
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds before a worker is started again, doubling each time
STEADY = 120.0  # seconds of work after which the pauses begin again
STARTING = 300.0  # seconds until the first sign of life, in which torch and the plan are loaded
TELL = 1.0  # seconds for a worker that hangs to write where it is
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Next:
    """Decision after the end of a worker.

    Attributes:
        pause: Seconds until another is started; None to end.
        code: Exit code of the keeper, if it ends.
        said: The decision for people.
    """

    pause: float | None
    code: int
    said: str


class Restarts:
    """Pauses before a worker is started again."""

    def __init__(self) -> None:
        """Begin with the shortest pause."""
        self._pause = FIRST_PAUSE

    def next(self, status: int, worked: float, *, over: bool, told: bool, hung: float | None = None) -> Next:
        """Return what follows from the end of a worker.

        Args:
            status: Exit status of the worker as `subprocess` gives it: negative if a signal has killed the worker.
            worked: Seconds for which the worker was there.
            over: True if the worker has said that the run is over.
            told: True if the keeper was told to end.
            hung: Seconds without a sign of life after which the keeper has killed it; None if it has not.
        """
        why = f"the worker {_ended(status, hung)} after {worked:.0f} s"
        code = int(documented(status)) if status >= 0 else int(ExitCode.INTERRUPTED if told else ExitCode.FAILED)
        then = afterwards(status if status >= 0 else None, over=over)
        if told or then in (Afterwards.FINAL, Afterwards.ELSEWHERE):
            ends = "a signal has ended both" if told else "the run is over" if over else str(then)
            return Next(None, code, f"{why}: {ends}")
        if worked >= STEADY:
            self._pause = FIRST_PAUSE
        pause = self._lengthen()
        return Next(pause, code, f"{why}: it is started again in {pause:g} s")

    def not_started(self, error: OSError) -> Next:
        """Return what follows if no process can be started: the machine may have memory or descriptors again later."""
        pause = self._lengthen()
        said = f"the worker cannot be started: {error}. It is tried again in {pause:g} s"
        return Next(pause, int(ExitCode.FAILED), said)

    def _lengthen(self) -> float:
        """Return the pause before the next start; the one after it is longer."""
        pause, self._pause = self._pause, min(LONGEST_PAUSE, 2 * self._pause)
        return pause


class AliveFile(AbstractContextManager["AliveFile"]):
    """The file that the worker touches: one that the user has named, or one without a name, which leaves nothing.

    Attributes:
        path: The path by which the worker opens it.
        descriptors: Descriptors that the worker inherits for that.
    """

    def __init__(self, path: str) -> None:
        """Take the user's `path`, or, with "", make a file."""
        self._file = None if path else tempfile.TemporaryFile()  # noqa: SIM115  # as long as the keeper is there
        self.descriptors = [] if self._file is None else [self._file.fileno()]
        self.path = os.path.abspath(path) if path else f"/dev/fd/{self.descriptors[0]}"

    def __exit__(self, *_: object) -> None:
        """Close the file, if it is the keeper's own."""
        if self._file is not None:
            self._file.close()

    def modified(self) -> float | None:
        """Return the time of the newest sign; None before the first one."""
        try:
            return os.stat(self.path).st_mtime
        except OSError:
            return None


class AliveWatch:
    """Watch of an alive file, by its time of modification alone.

    Time that this process did not run, as in a suspended machine, does not count.
    """

    def __init__(self, modified: Callable[[], float | None], hung: float) -> None:
        """Begin with a worker that has yet to give a sign.

        Args:
            modified: Returns the time of modification; None if there is no file.
            hung: Seconds without a sign after which a worker hangs.
        """
        self._modified, self._hung = modified, hung
        self._seen, self._bound = modified(), max(hung, STARTING)
        self._looked: float | None = None
        self.silence = 0.0  # seconds without a sign

    def hangs(self, now: float) -> bool:
        """Return True if the worker has given no sign for too long; `now` is of a clock that is never set back."""
        found, before = self._modified(), self._looked
        self.silence += 0.0 if before is None else min(now - before, 10 * POLL)
        self._looked = now
        if found != self._seen:
            self._seen, self.silence, self._bound = found, 0.0, self._hung
        return self.silence >= self._bound


class Keeper:
    """A keeper with the worker that it has started last."""

    def __init__(self, arguments: Sequence[str], alive: AliveFile, hung: float) -> None:
        """Pass signals on from now on.

        Args:
            arguments: Arguments of `stageline worker`.
            alive: The alive file.
            hung: Seconds without a sign of life after which the worker hangs.
        """
        self._arguments, self._alive, self._hung = arguments, alive, hung
        self._restarts = Restarts()
        self._told = False
        self._worker: Interpreter | None = None
        for number in PASSED_ON:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as by nohup
                signal.signal(number, lambda number, frame: self._pass_on(number))

    def run(self) -> int:
        """Keep a worker until its end is final; return the exit code."""
        while True:
            found = self._work()
            _say(found.said)
            if found.pause is None:
                return found.code
            if not self._rest(found.pause):
                _say("a signal has ended the keeper, before another start")
                return ExitCode.INTERRUPTED

    def _work(self) -> Next:
        """Start a worker; return what follows from its end."""
        watch = AliveWatch(self._alive.modified, self._hung)
        try:
            mine, worker = self._start()
        except OSError as error:
            return self._restarts.not_started(error)
        with mine:
            began, hung = monotonic(), None
            while (status := worker.poll()) is None:
                if hung is None and watch.hangs(monotonic()):
                    hung = watch.silence
                    self._end(worker)
                sleep(POLL)
            worked = monotonic() - began
            if status:
                _kill_group(worker.pid)  # what it has left behind may hold memory, ports or a GPU
            return self._restarts.next(status, worked, over=has_said_over(mine), told=self._told, hung=hung)

    def _start(self) -> tuple[socket.socket, Interpreter]:
        """Return the keeper's end of a link, and a new worker at the other. Raises `OSError` if there can be none."""
        with ExitStack() as failed:
            mine, theirs = map(failed.enter_context, link())
            own = ["--kept", str(theirs.fileno()), "--alive-file", self._alive.path]
            words, keep = ["worker", *self._arguments, *own], [theirs.fileno(), *self._alive.descriptors]
            self._worker = worker = Interpreter("stageline", words, keep, start_new_session=True)
            if self._told:  # while it was started
                worker.send_signal(signal.SIGTERM)
            failed.pop_all()
        theirs.close()
        return mine, worker

    def _end(self, worker: Interpreter) -> None:
        """Have a worker that hangs tell where it is, then kill it with what it has started."""
        last_line.ask(worker.pid)
        with suppress(subprocess.TimeoutExpired):
            worker.wait(TELL)
        if worker.poll() is None:
            _kill_group(worker.pid)

    def _rest(self, seconds: float) -> bool:
        """Wait before another start; return False if a signal has come."""
        until = monotonic() + seconds
        while not self._told and (left := until - monotonic()) > 0:
            sleep(min(POLL, left))
        return not self._told

    def _pass_on(self, number: int) -> None:
        self._told = True
        if self._worker is not None:
            self._worker.send_signal(number)


def _kill_group(number: int) -> None:
    """Kill the processes of a group. As long as there is one, no process gets the number of the group."""
    with suppress(OSError):  # there is none
        os.killpg(number, signal.SIGKILL)


def _ended(status: int, hung: float | None) -> str:
    if hung is not None:
        return f"hung, without a sign of life for {hung:.0f} s, and was killed"
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}" if -status in list(signal.Signals) else "was killed"
    return f"ended with exit code {status} ({EXIT_CODES[documented(status)].meaning})"


def _say(text: str) -> None:
    print(f"stageline: {text}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str]) -> int:
    """Keep a worker.

    Args:
        arguments: Seconds without a sign of life after which it hangs, the path of the alive file or "", and the
            arguments of `stageline worker`.
    """
    streams.keep_open()
    hung, path, *words = arguments
    with AliveFile(path) as alive:
        return Keeper(words, alive, float(hung)).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
