"""Template process: it has imported torch, and all processes of a run are its forks, at work within milliseconds.

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
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from time import monotonic
from typing import TextIO

from stageline.broker.ledger.member import describe_status
from stageline.pipeline.plan import Plan
from stageline.pipeline.process.child import Child, Fork, Interpreter
from stageline.pipeline.process.lifeline import LifelineOwner
from stageline.workers.disk.owned_folder import OwnedFolder

from .forking import IMPORT, ForkedProcess, send_request

REST = 5.0  # seconds between two templates that end by themselves
EXIT_TIMEOUT = 2.0  # seconds for the template to exit at the end
PROGRAM = "stageline.workers.cli.template"  # the module that it runs
SAFE = frozenset({"numpy", "scipy", "sklearn"})  # libraries that start no thread which a fork would lack
_LOG = 2  # stderr of this process, which a fork of it that is a template writes to as well
_SET_SUBREAPER, _GET_SUBREAPER = 36, 37  # of prctl(2)


class Template(AbstractContextManager["Template"]):
    """`Spawn` that forks a template process, which is started with the first request, or by `warm`.

    Attributes:
        sockets: Folder for sockets, removed once all forked processes have ended, even if this one is killed.
    """

    def __init__(self) -> None:
        """Make the folder for sockets, and adopt descendants that lose their parent."""
        self._was_subreaper = _become_subreaper(True)
        self._lifeline = LifelineOwner()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed on leaving the context
        self._running: _Running | None = None
        self._started = float("-inf")
        self._libraries: Sequence[str] = ()
        self._folder = OwnedFolder()
        self.sockets = self._folder.path

    def __call__(self, arguments: Sequence[str], log: TextIO) -> ForkedProcess:
        """Request a process that runs the command `arguments` and writes to `log`."""
        ask = partial(self._ask, [*arguments, "--lifeline", str(self._lifeline.end)], log)
        return ForkedProcess(ask, self._give_up, log)

    def __exit__(self, *_: object) -> None:
        """End the template process, after the processes that were forked."""
        with self._errors, self._folder:
            self._lifeline.close()
            self._folder.leave()
            if self._running is not None:
                self._running.end()
        _become_subreaper(self._was_subreaper)

    def abandon(self) -> None:
        """End the template process at once, for a process that ends at once itself; its forks end by themselves."""
        if self._running is not None:
            self._running.process.kill()
        self._folder.__exit__()

    def warm(self) -> None:
        """Start the template process, unless it runs, so that the next request need not wait for it."""
        if not self.gone and not self._runs and monotonic() - self._started >= REST:
            self._start()

    def preload(self, libraries: Sequence[str]) -> None:
        """Have the template process import modules before it forks from now on; modules that it lacks are left out."""
        self._libraries = libraries
        if self._running is not None and self._runs:
            self._running.preload(libraries)

    @property
    def gone(self) -> str:
        """Reason why no process can be started any more. "": this template is started again if it ends."""
        return ""

    @property
    def pid(self) -> int:
        """Process id of the template process; 0 if there is none."""
        return self._running.process.pid if self._running is not None else 0

    @property
    def _runs(self) -> bool:
        return self._running is not None and self._running.process.poll() is None

    def _ask(self, arguments: Sequence[str], log: TextIO, report: int) -> None:
        """Request a process. Raises OSError if there is no template, or it is gone."""
        running = self._running if self._running is not None and self._runs else self._start()
        running.ask(arguments, log.fileno(), report)

    def _give_up(self) -> str:
        """End a template that has not forked in time; return why none can be started, or the template's last line."""
        if self._running is not None:
            self._running.process.kill()
        self._errors.seek(0)
        return self.gone or "".join(self._errors.read().decode(errors="replace").strip().splitlines()[-1:])

    def _start(self) -> "_Running":
        if self._running is not None:
            self._running.end()
        self._started = monotonic()
        requests, theirs = socket.socketpair()
        with theirs:
            passed = theirs.fileno(), self._lifeline.end, self._folder.lock
            process = self._execute([*map(str, passed), str(self.sockets)], passed)
        self._running = _Running(process, requests)
        self._running.preload(self._libraries)
        return self._running

    def _execute(self, arguments: Sequence[str], passed: Sequence[int]) -> Child:
        """Start a process that runs `PROGRAM` with `arguments`, and has the open descriptors `passed`."""
        return Interpreter(
            PROGRAM,
            arguments,
            passed,
            stdout=self._errors,
            stderr=self._errors,
            start_new_session=True,
            env={"PYTHONHASHSEED": "0", **os.environ},  # a set has one order in all processes, also once resumed
        )


class ForkedTemplate(Template):
    """Template process that is a fork of this one: its forks have this process's objects, such as a script's model.

    It is forked once, with the first request, or by `warm`, which comes before this process starts a thread. If it is
    killed, the processes that it forked go on, but none can be started in place of another.
    """

    @property
    def gone(self) -> str:
        """Reason why no process can be started any more: the template has ended; "" while it runs."""
        if self._running is None or (status := self._running.process.poll()) is None:
            return ""
        how = describe_status(status)
        return f"the process that has the script's model and functions (pid {self.pid}) {how}, and no other has them"

    def _start(self) -> "_Running":
        if self.gone:
            raise ProcessLookupError(self.gone)
        return super()._start()

    def _execute(self, arguments: Sequence[str], passed: Sequence[int]) -> Child:
        return Fork(lambda: int(import_module(PROGRAM).main(arguments)), _LOG, passed)


class _Running:
    """Template process, and the socket for requests to it."""

    def __init__(self, process: Child, requests: socket.socket) -> None:
        self.process = process
        self._requests = requests
        self._asked = False

    def ask(self, arguments: Sequence[str], log: int, report: int) -> None:
        """Request a process. Raises OSError if the template is gone."""
        self._asked = True
        send_request(self._requests, arguments, log, report)

    def preload(self, libraries: Sequence[str]) -> None:
        """Request imports; a template that is gone is ignored, since the next one is asked, too."""
        if libraries:
            with suppress(OSError), open(os.devnull) as nothing:
                send_request(self._requests, [IMPORT, *libraries], nothing.fileno(), nothing.fileno())

    def end(self) -> None:
        """End the template process, which removes the sockets first.

        A template that has forked nothing is killed at once, since it may still be importing torch.
        """
        self._requests.close()
        self.process.end(EXIT_TIMEOUT if self._asked else 0.0)


def _become_subreaper(on: bool) -> bool:
    """Switch adoption of descendants that lose their parent by this process, which then knows their exit status.

    Returns True if it was on before. Only Linux has it.
    """
    if not sys.platform.startswith("linux"):
        return False
    prctl, before = ctypes.CDLL(None).prctl, ctypes.c_int()
    prctl(_GET_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    prctl(_SET_SUBREAPER, int(on), 0, 0, 0)
    return bool(before.value)


def libraries_of(plan: Plan) -> list[str]:
    """Return the modules of `SAFE` libraries that the plan's files import first, each once."""
    folder = plan.file.parent if plan.file else Path()
    references = (plan.model.factory, plan.data.source, plan.data.dataset)
    files = dict.fromkeys(folder / each.rpartition(":")[0] for each in references if each and ".py:" in each)
    names = dict.fromkeys(name for file in files for name in imported_first(file))
    return [name for name in names if name.partition(".")[0] in SAFE]


def imported_first(file: Path) -> Iterator[str]:
    """Yield the modules that a file imports before its first statement of another kind.

    Yields nothing for a file that cannot be read, or is no Python: the trial tells.
    """
    try:
        statements = ast.parse(file.read_text(encoding="utf-8")).body
    except (OSError, SyntaxError, ValueError):
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
