"""Requests for processes to the template process, and the forks that serve them.

    train                               template
      │ ── request: the command's arguments, its log, the pipe for its report ──> fork
      │ <───────────────────── report: "pid 4711", and at its end "result 0" ───── process, in a session of its own

The template forks twice, and the first fork exits at once: so the process belongs to `train` from the beginning, which
has its exit status even if the template is killed.
"""

import gc
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import TextIO

from stageline.pipeline.errors import ExitCode
from stageline.pipeline.process.child import Child

IMPORT = "import"  # the first word of a request for no process: the template is to import the modules that follow
_LENGTH = 4  # bytes that say how long a request is
_FILES = 2  # that come with a request: the log and the pipe
NOT_FORKED = b"not forked\n"


@dataclass(frozen=True, slots=True)
class CommandToRun:
    """Task of a forked process: run `arguments`, and report its result to the descriptor `report`."""

    arguments: list[str]
    report: int
    pid: int

    def finish(self, code: int) -> None:
        """Report the exit code of the command, but only from this process: not from a fork of the user's code."""
        if os.getpid() == self.pid:
            with suppress(OSError):  # the process that asked for it is gone
                os.write(self.report, b"result %d\n" % code)


def send_request(requests: socket.socket, arguments: Sequence[str], log: int, report: int) -> None:
    """Request a process. Raises OSError if the template is gone.

    Args:
        requests: Socket to the template.
        arguments: Arguments of the command.
        log: Descriptor of the log.
        report: Descriptor of the pipe for its report.
    """
    text = json.dumps(list(arguments)).encode()
    socket.send_fds(requests, [len(text).to_bytes(_LENGTH, "big")], [log, report])
    requests.sendall(text)


def parse_report(report: bytes) -> tuple[int | None, int | None]:
    """Return the pid and the result in a process's report so far; None for what is not yet reported."""
    found: dict[bytes, int] = {}
    for line in report.splitlines(keepends=True):
        word, _, number = line.partition(b" ")
        if line.endswith(b"\n") and word in (b"pid", b"result"):
            found[word] = int(number)
    return found.get(b"pid"), found.get(b"result")


def fork_on_request(
    requests: socket.socket, import_modules: Callable[[Sequence[str]], None] = lambda names: None
) -> CommandToRun | None:
    """Fork a process for each request; return its task in that process, and None in this one at the end.

    This process must have no threads: a fork would lack them, and locks that they hold would stay locked.
    """
    _share_memory()
    while (received := _receive(requests)) is not None:
        arguments, log, report = received
        if arguments[0] == IMPORT:
            import_modules(arguments[1:])
            _share_memory()
        elif _fork_orphan(log, report):
            requests.close()
            _become_own_process(arguments, log, report)
            os.close(log)
            return CommandToRun(arguments, report, os.getpid())
        os.close(log)
        os.close(report)
    return None


def _share_memory() -> None:
    """Freeze the present objects, so that garbage collections in forks do not copy their memory."""
    gc.collect()
    gc.freeze()


def _receive(requests: socket.socket) -> tuple[list[str], int, int] | None:
    """Return the next request, None once the other side is gone."""
    with suppress(ConnectionError):
        start, files, _, _ = socket.recv_fds(requests, _LENGTH, _FILES)
        if len(start) == _LENGTH and len(files) == _FILES:
            length, text = int.from_bytes(start, "big"), b""
            while len(text) < length and (more := requests.recv(length - len(text))):
                text += more
            for fd in files:
                os.set_inheritable(fd, False)  # not for what a user's code starts
            return json.loads(text), *files
    return None


def _fork_orphan(log: int, report: int) -> bool:
    """Fork a process, and return True in it. If that fails, its log says why."""
    try:
        between = os.fork()
    except OSError as error:
        _tell_failure(error, log, report)
        return False
    if between:
        os.waitpid(between, 0)
        return False
    between = os.getpid()
    try:
        if os.fork():
            os._exit(0)
    except OSError as error:
        _tell_failure(error, log, report)
        os._exit(0)
    while os.getppid() == between:  # it exits now
        time.sleep(0.0005)
    return True


def _tell_failure(error: OSError, log: int, report: int) -> None:
    os.write(log, f"stageline: this process could not be started: {error.strerror}\n".encode())
    os.write(report, NOT_FORKED)


def _become_own_process(arguments: Sequence[str], log: int, report: int) -> None:
    """Begin a session with streams of its own; end at once if this process is not wanted any more."""
    os.setsid()
    try:
        os.write(report, b"pid %d\n" % os.getpid())
    except OSError:
        os._exit(0)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.argv[:] = ["stageline", *arguments]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if drawn := sys.modules.get("numpy.random"):  # else all processes would draw the same; `random` sees to it itself
        drawn.seed()


START_TIMEOUT = 120.0  # seconds for a template to import torch and to fork; after that it is replaced
ATTEMPTS = 3  # requests for one process, if templates end before they fork it


class ForkedProcess(Child):
    """Process that a template forks: requested at once, known once it has started, and its result."""

    def __init__(self, ask: Callable[[int], None], give_up: Callable[[], str], log: TextIO) -> None:
        """Request the process.

        Args:
            ask: Sends the request with the pipe for its report, or raises OSError.
            give_up: Ends a template that hangs, and returns why templates end.
            log: File that says why the process could not be started.
        """
        super().__init__()
        self._ask = ask
        self._give_up = give_up
        self._log = log
        self._attempts = 0
        self._request()

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended; a process that has not started yet will not start."""
        if self.poll() is None and not self.pid:
            os.close(self._pipe)
            self.returncode = -number
        else:
            super().send_signal(number)

    def _request(self) -> None:
        self._attempts += 1
        self._reported, self._asked = b"", monotonic()
        self._pipe, theirs = os.pipe()
        os.set_blocking(self._pipe, False)
        with suppress(OSError):  # then no process has the other end, which shows at the next look
            self._ask(theirs)
        os.close(theirs)

    def _look(self) -> int | None:
        code = None if self.pid else self._look_for_start()
        if self.pid:
            code = self._look_for_end()
        if code is not None:
            os.close(self._pipe)
        return code

    def _look_for_start(self) -> int | None:
        """Learn the pid, or return the exit code of a process that cannot be started."""
        over = self._read()
        self.pid = parse_report(self._reported)[0] or 0
        if self.pid:
            return None
        if self._reported == NOT_FORKED:
            return int(ExitCode.FAILED)
        if over and self._attempts == ATTEMPTS:
            reason = f"the process that forks it ended {ATTEMPTS} times: {self._give_up()}"
            print(f"stageline: not started: {reason}", file=self._log, flush=True)
            return int(ExitCode.FAILED)
        if over:
            os.close(self._pipe)
            self._request()
        elif monotonic() - self._asked > START_TIMEOUT:
            self._asked = monotonic()
            self._give_up()
        return None

    def _look_for_end(self) -> int | None:
        """Return the exit status, None while the process runs.

        Where no process can adopt another's, the status of a process without a result is unknown.
        """
        try:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            ended, code = bool(pid), os.waitstatus_to_exitcode(status)
        except ChildProcessError:
            ended, code = not _runs(self.pid), None
        if not ended:
            return None
        end_group(self.pid)
        self._read()
        self.result = parse_report(self._reported)[1]
        return next(int(each) for each in (code, self.result, ExitCode.FAILED) if each is not None)

    def _read(self) -> bool:
        """Read the report so far; return True if no more can come."""
        with suppress(BlockingIOError):
            while data := os.read(self._pipe, 4096):
                self._reported += data
            return True
        return False


def end_group(leader: int) -> None:
    """End processes that the user's code has forked in a process that has just ended."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
