"""The template process: it has imported torch, and every process of a run is a fork of it, at work within milliseconds.

train ──starts, once──> template ──forks──> trials, broker, workers, replacements, spares

The template imports libraries that the user's files import before anything else, so that each is imported once:

data.py     import torch
            from sklearn.datasets import load_digits       sklearn.datasets
            os.environ["..."] = "1"                        from here on, the file decides how

If the template is killed, running processes go on, and `train` starts another.
"""

import ast
import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from time import monotonic
from typing import Protocol, TextIO

from stageline.broker.ledger.losses import describe_status
from stageline.pipeline.plan import Plan
from stageline.pipeline.process.fork import Fork
from stageline.pipeline.process.lifeline import LifelineOwner
from stageline.workers.disk.owned_folder import OwnedFolder

from .forking import IMPORT, ForkedProcess, send_request

REST = 5.0  # seconds between two templates that end by themselves
EXIT_TIMEOUT = 2.0  # seconds for the template to exit at the end
PROGRAM = "stageline.workers.cli.template"  # the module that it runs
_SET_SUBREAPER, _GET_SUBREAPER = 36, 37  # of prctl(2)


class TemplateProcess(Protocol):
    """As `subprocess.Popen` has it."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...


class Template(AbstractContextManager["Template"]):
    """A `Spawn`. Its process is started with the first request, or by `warm`.

    `sockets`: a folder for sockets, removed once all processes that were forked have ended, even if this one is killed.
    """

    def __init__(self) -> None:
        self._was_subreaper = _become_subreaper(True)
        self._lifeline = LifelineOwner()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed on leaving the context
        self._folder: OwnedFolder | None = None
        self._running: _Running | None = None
        self._started = float("-inf")
        self._libraries: Sequence[str] = ()

    def __call__(self, arguments: Sequence[str], log: TextIO) -> ForkedProcess:
        ask = partial(self._ask, [*arguments, "--lifeline", str(self._lifeline.end)], log)
        return ForkedProcess(ask, self._give_up, log)

    def __exit__(self, *_: object) -> None:
        """The processes that were forked have ended."""
        with self._errors, self._folder or nullcontext():
            self._lifeline.close()
            if self._folder is not None:
                self._folder.leave()
            if self._running is not None:
                self._running.end()
        _become_subreaper(self._was_subreaper)

    def abandon(self) -> None:
        """Ends the template process at once, for a process that ends at once itself; what was forked ends by itself."""
        if self._running is not None:
            self._running.kill()
        if self._folder is not None:
            self._folder.__exit__()

    def warm(self) -> None:
        """Starts the template process, unless it runs, so that the next request need not wait for it."""
        if (self._running is None or self._running.ended) and monotonic() - self._started >= REST:
            self._start()

    def preload(self, libraries: Sequence[str]) -> None:
        """Modules that the template process imports before it forks from now on; those that it lacks it leaves out."""
        self._libraries = libraries
        if self._running is not None and not self._running.ended:
            self._ask_for_libraries(self._running)

    @property
    def sockets(self) -> Path:
        self._folder = self._folder or OwnedFolder()
        return self._folder.path

    @property
    def gone(self) -> str:
        """Why no process can be started any more; "" as long as one can: this template is started again."""
        return ""

    @property
    def pid(self) -> int:
        """Of the template process; 0 if there is none."""
        return self._running.process.pid if self._running is not None else 0

    def _ask(self, arguments: Sequence[str], log: TextIO, report: int) -> None:
        """Raises OSError if there is no template, or it is gone."""
        running = self._start() if self._running is None or self._running.ended else self._running
        running.asked = True
        send_request(running.requests, arguments, log.fileno(), report)

    def _give_up(self) -> str:
        """Ends a template that has not forked in time; returns the last line that one has written."""
        if self._running is not None:
            self._running.process.kill()
        self._errors.seek(0)
        return "".join(self._errors.read().decode(errors="replace").strip().splitlines()[-1:])

    def _start(self) -> "_Running":
        if self._running is not None:
            self._running.end()
        self._started = monotonic()
        self._folder = self._folder or OwnedFolder()
        requests, theirs = socket.socketpair()
        with theirs:
            passed = theirs.fileno(), self._lifeline.end, self._folder.lock
            process = self._execute([*map(str, passed), str(self._folder.path)], passed)
        self._running = _Running(process, requests)
        self._ask_for_libraries(self._running)
        return self._running

    def _ask_for_libraries(self, running: "_Running") -> None:
        if self._libraries:
            with suppress(OSError), open(os.devnull) as nothing:  # if it is gone, another is started
                send_request(running.requests, [IMPORT, *self._libraries], nothing.fileno(), nothing.fileno())

    def _execute(self, arguments: Sequence[str], passed: Sequence[int]) -> TemplateProcess:
        """Starts a process that runs `PROGRAM` with `arguments`, and has the open descriptors `passed`."""
        return subprocess.Popen(  # noqa: S603  # our own module
            [sys.executable, "-P", "-m", PROGRAM, *arguments],
            pass_fds=passed,
            stdin=subprocess.DEVNULL,
            stdout=self._errors,
            stderr=self._errors,
            start_new_session=True,
            env={"PYTHONHASHSEED": "0", **os.environ},  # a set has one order in all processes, also once resumed
        )


@dataclass(slots=True)
class _Running:
    """A template process, and the socket for requests to it."""

    process: TemplateProcess
    requests: socket.socket
    asked: bool = False

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def kill(self) -> None:
        """For signal handlers too: without the lock that `subprocess` may hold."""
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.process.pid, signal.SIGKILL)
            os.waitpid(self.process.pid, 0)

    def end(self) -> None:
        """It removes the sockets before it ends; one that has forked nothing may still be importing torch."""
        self.requests.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(EXIT_TIMEOUT if self.asked else 0.0)
        self.process.kill()
        self.process.wait()


def _become_subreaper(on: bool) -> bool:
    """Whether descendants that lose their parent become children of this process, so that their exit status is known;
    returns what held before. Linux alone knows this."""
    if not sys.platform.startswith("linux"):
        return False
    prctl, before = ctypes.CDLL(None).prctl, ctypes.c_int()
    prctl(_GET_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    prctl(_SET_SUBREAPER, int(on), 0, 0, 0)
    return bool(before.value)


_LOG = 2  # stderr of this process, which its template writes to as well


class ForkedTemplate(Template):
    """Forks with the first request, or by `warm`, which comes before this process starts a thread."""

    def warm(self) -> None:
        if self._running is None:
            self._start()

    @property
    def gone(self) -> str:
        if self._running is None or (status := self._running.process.poll()) is None:
            return ""
        how = describe_status(status)
        return f"the process that has the script's model and functions (pid {self.pid}) {how}, and no other has them"

    def _ask(self, arguments: Sequence[str], log: TextIO, report: int) -> None:
        if self.gone:
            raise ProcessLookupError(self.gone)
        super()._ask(arguments, log, report)

    def _execute(self, arguments: Sequence[str], passed: Sequence[int]) -> Fork:
        return Fork(partial(_serve, arguments), _LOG, passed)

    def _give_up(self) -> str:
        super()._give_up()
        return self.gone


def _serve(arguments: Sequence[str]) -> int:
    code: int = import_module(PROGRAM).main(arguments)
    return code


SAFE = frozenset({"numpy", "scipy", "sklearn"})  # they start no thread of their own that a fork would lack


def libraries_of(plan: Plan) -> list[str]:
    """The names of modules of `SAFE` libraries, each once. A file that cannot be read names none: the trial tells."""
    folder = plan.file.parent if plan.file else Path()
    references = (plan.model.factory, plan.data.source, plan.data.dataset)
    files = dict.fromkeys(folder / each.rpartition(":")[0] for each in references if each and ".py:" in each)
    return list(dict.fromkeys(name for file in files for name in imported_first(_text(file)) if _top(name) in SAFE))


def imported_first(text: str) -> Iterator[str]:
    """The modules that a file imports before its first statement of another kind."""
    try:
        statements = ast.parse(text).body
    except (SyntaxError, ValueError):
        return
    for statement in statements:
        match statement:
            case ast.Import(names):
                yield from (each.name for each in names)
            case ast.ImportFrom(module=str(module), level=0):
                yield module
            case ast.Expr(ast.Constant()):
                continue
            case _:
                return


def _top(module: str) -> str:
    return module.partition(".")[0]


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""
