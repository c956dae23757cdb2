"""Starts real processes of stageline in milliseconds: each is a fork of one process that has imported torch already.

    pytest  ──request, with the files for its output──>  fork server (one thread)
       │                                                     └── forks each process: a command, or a whole trial
       └── parent of every command: a process whose own parent has exited becomes a child of pytest

The processes, sockets, signals and files are those of any run; only the imports are saved.
"""

import array
import atexit
import ctypes
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TextIO

from stageline.pipeline.process.child import Child
from stageline.workers.launch.template import Template
from support.action_log import Place
from support.paths import importing_tests

# The process, and after how many of its actions, or for the broker messages, it is killed; or at which place.
Kill = tuple[str, int | Place]
_SUBREAPER = 36  # of prctl(2)


class ForkedCommand(Child):
    """A command of `stageline` in a process of its own, whose result is not known, with its output."""

    def __init__(self, pid: int, stdout: TextIO, stderr: TextIO) -> None:
        super().__init__(pid)
        self.stdout = stdout
        self.stderr = stderr

    def communicate(self) -> tuple[str, str]:
        """Everything it still writes to stdout and to stderr, once it has exited."""
        with ThreadPoolExecutor(2) as readers:
            stdout, stderr = readers.map(lambda stream: stream.read(), (self.stdout, self.stderr))
        self.wait()
        return stdout, stderr

    def close(self) -> None:
        self.wait()
        self.stdout.close()
        self.stderr.close()


class ForkServer:
    """The tests' end of the fork server. Several threads may use it at once."""

    def __init__(self) -> None:
        become_subreaper()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "support.forked", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**importing_tests(), "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        atexit.register(self.close)

    def start(self, arguments: Sequence[str], folder: Path, environment: Mapping[str, str]) -> ForkedCommand:
        """Starts `stageline` with these arguments, in `folder`, in a session of its own."""
        return self._start({"arguments": arguments, "folder": str(folder), "environment": dict(environment)})

    def start_logged(
        self, arguments: Sequence[str], folder: Path, environment: Mapping[str, str], output: int
    ) -> Child:
        """The same, or after the word "script" a user's script; all that it writes goes to the descriptor `output`."""
        request = {"arguments": list(arguments), "folder": str(folder), "environment": dict(environment)}
        return Child(int(self._ask(request, output, output)["pid"]))

    def call(self, function: str, *arguments: object) -> ForkedCommand:
        """Starts a process that calls `function`, "support.producer_process:main", with these arguments as text."""
        words = [*map(str, arguments)]
        environment = dict(os.environ)
        return self._start(
            {"function": function, "arguments": words, "folder": os.getcwd(), "environment": environment}
        )

    def spawn(self, arguments: Sequence[str], log: TextIO) -> ForkedCommand:
        """A `Spawn`: starts `stageline` in this folder; all that it writes goes to `log`."""
        request = {"arguments": list(arguments), "folder": os.getcwd(), "environment": dict(os.environ)}
        answer = self._ask(request, log.fileno(), log.fileno())
        return ForkedCommand(int(answer["pid"]), log, log)

    def train(
        self,
        plan: Path,
        *sets: str,
        folder: Path,
        kills: Sequence[Kill] = (),
        resume: bool = False,
        spares: int = 0,
    ) -> dict[str, Any]:
        """Runs `plan` as `stageline train` would; returns code, reason, and the broker's last status as `facts`.

        Each of `kills` is carried out once: the first of a process in its first generation, the second in its second.
        The run's action log is in `folder`. Also returned is what a run must not leave behind: `orphans` (processes)
        and `left` (temporary files). Raises RuntimeError if the run could not be carried out.
        """
        temporary = Path(tempfile.mkdtemp(prefix="trial-", dir="/tmp"))  # short: it holds sockets
        places = {"plan": str(plan), "folder": str(folder), "temporary": str(temporary)}
        try:
            answer = self._ask({**places, "sets": sets, "kills": kills, "resume": resume, "spares": spares})
            left = sorted(str(path.relative_to(temporary)) for path in temporary.rglob("*"))
        finally:
            shutil.rmtree(temporary)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return {**answer, "left": left}

    def close(self) -> None:
        if self._process.returncode is None:
            self._socket.close()
            self._process.wait(timeout=60)  # it may still be loading torch

    def _start(self, request: dict[str, Any]) -> ForkedCommand:
        stdout, stdout_of_process = os.pipe()
        stderr, stderr_of_process = os.pipe()
        answer = self._ask(request, stdout_of_process, stderr_of_process)
        os.close(stdout_of_process)
        os.close(stderr_of_process)
        return ForkedCommand(int(answer["pid"]), os.fdopen(stdout), os.fdopen(stderr))

    def _ask(self, request: dict[str, Any], *files: int) -> dict[str, Any]:
        """Sends a request with open files; returns the answer."""
        mine, theirs = socket.socketpair()
        with mine:
            with theirs:
                passed = array.array("i", [theirs.fileno(), *files])
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, passed)]
                self._socket.sendmsg([json.dumps(request).encode()], rights)
            with mine.makefile() as answer:
                text = answer.read()
        if not text:
            raise RuntimeError("the process that was forked for this request exited without an answer")
        found: dict[str, Any] = json.loads(text)
        return found


class ServedTemplate(Template):
    """Counterpart of `Template` for a command in the test's own process: the fork server forks its trials."""

    def __init__(self, fork_server: ForkServer) -> None:
        super().__init__()
        become_subreaper()
        self._fork_server = fork_server

    def __call__(self, arguments: Sequence[str], log: TextIO) -> Any:
        return self._fork_server.spawn(arguments, log) if arguments[0] == "trial" else super().__call__(arguments, log)

    def warm(self) -> None:
        """Not needed: most tests of a command in the test's own process start no run."""


def become_subreaper() -> None:
    """Makes descendants of this process that lose their parent children of this process."""
    if ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0):
        raise OSError("prctl(PR_SET_CHILD_SUBREAPER) failed")
