"""A process that the template forks: asked for at once, known once it has started, and its result."""

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import TextIO

from stageline.pipeline.errors import ExitCode
from stageline.workers.process.system.spawn import wait_for_end

from .forking import NOT_FORKED, parse_report

START_TIMEOUT = 120.0  # seconds for a template to import torch and to fork; after that it is replaced
ATTEMPTS = 3  # requests for one process, if templates end before they fork it


class ForkedProcess:
    """A `SpawnedProcess`. `ask` sends the request with the pipe for its report, or raises OSError; `give_up` ends a
    template that hangs, and returns why templates end; `log` is told if the process cannot be started."""

    def __init__(self, ask: Callable[[int], None], give_up: Callable[[], str], log: TextIO) -> None:
        self.pid = 0
        self.returncode: int | None = None
        self.result: int | None = None
        self._ask = ask
        self._give_up = give_up
        self._log = log
        self._attempts = 0
        self._request()

    def poll(self) -> int | None:
        if self.returncode is None and not self.pid:
            self._look_for_start()
        if self.returncode is None and self.pid:
            self._look_for_end()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises `subprocess.TimeoutExpired`; `timeout` in seconds."""
        return wait_for_end(self.poll, timeout)

    def send_signal(self, sig: int) -> None:
        """A process that has not started yet will not."""
        if self.poll() is not None:
            return
        if self.pid:
            with suppress(ProcessLookupError):
                os.kill(self.pid, sig)
        else:
            self._end(-sig)

    def kill(self) -> None:
        self.send_signal(9)

    def _request(self) -> None:
        self._attempts += 1
        self._reported, self._asked = b"", monotonic()
        self._pipe, theirs = os.pipe()
        os.set_blocking(self._pipe, False)
        with suppress(OSError):  # then no process has the other end, which shows at the next look
            self._ask(theirs)
        os.close(theirs)

    def _look_for_start(self) -> None:
        over = self._read()
        self.pid = parse_report(self._reported)[0] or 0
        if self.pid:
            return
        if self._reported == NOT_FORKED:
            self._end(ExitCode.FAILED)
        elif over and self._attempts < ATTEMPTS:
            os.close(self._pipe)
            self._request()
        elif over:
            reason = f"the process that forks it ended {ATTEMPTS} times: {self._give_up()}"
            print(f"stageline: not started: {reason}", file=self._log, flush=True)
            self._end(ExitCode.FAILED)
        elif monotonic() - self._asked > START_TIMEOUT:
            self._asked = monotonic()
            self._give_up()

    def _look_for_end(self) -> None:
        """Where no process can adopt another's, the exit status of one that reports no result is unknown."""
        try:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            ended, code = bool(pid), os.waitstatus_to_exitcode(status)
        except ChildProcessError:
            ended, code = not _runs(self.pid), None
        if ended:
            end_group(self.pid)
            self._read()
            self.result = parse_report(self._reported)[1]
            self._end(next(each for each in (code, self.result, ExitCode.FAILED) if each is not None))

    def _end(self, code: int) -> None:
        os.close(self._pipe)
        self.returncode = int(code)

    def _read(self) -> bool:
        """Reads what has been reported; whether no more can come."""
        with suppress(BlockingIOError):
            while data := os.read(self._pipe, 4096):
                self._reported += data
            return True
        return False


def end_group(leader: int) -> None:
    """Ends what a process that has just ended has left: processes that the user's code has forked."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
