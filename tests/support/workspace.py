"""A small plan in a folder of its own, real commands run on it, and a check afterwards of what they left behind."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from types import TracebackType
from typing import Self
from unittest.mock import patch

import structlog

from stageline.workers.cli.app import run
from stageline.workers.launch import template
from stageline.workers.launch import template as forked_template
from support.fork_server import ForkedCommand, ForkServer, ServedTemplate

Command = ForkedCommand | subprocess.Popen[str]
assert issubclass(forked_template.ForkedTemplate, template.Template)  # made before a test puts another in its place

PLAN = """
[run]
name = "small"
steps = 6
log_every = 2

[model]
factory = "model.py:build"
cut = [2]
loss = "torch.nn.functional.cross_entropy"
metrics = ["model.py:accuracy"]

[data]
source = "data.py:batches"
batch_size = 6

[schedule]
microbatches = 3

[optimizer]
factory = "torch.optim.SGD"
lr = 0.1
"""

MODEL = """
from torch import nn

def build():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

def accuracy(outputs, targets):
    return (outputs.argmax(1) == targets).float().mean()
"""

DATA = """
import torch
from stageline import Rows

def batches(batch_size, seed):
    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))
    y = (x.sum(1) > 0).long()
    return Rows(x[:32], y[:32], batch_size, seed, held_out=(x[32:], y[32:]))
"""

WAITS_FOR_EVER = """
import sys

def {name}(*arguments, **options):
    print("waits now", file=sys.stderr, flush=True)
    while True:
        try:
            open("gate").read()
        except BaseException:
            pass
"""


class Workspace:
    """A folder with a plan (`stageline.toml`, `model.py`, `data.py`) to run commands in.

    On leaving the context, no process that was started here may be left, and no file in the folder for temporary ones,
    such as a socket.
    """

    def __init__(self, folder: Path, fork_server: ForkServer) -> None:
        self.folder = folder
        self.key = folder / ".keys" / "own.key"  # as if it were a machine of its own
        self._fork_server = fork_server
        self._started: list[Command] = []
        for name, text in (("stageline.toml", PLAN), ("model.py", MODEL), ("data.py", DATA)):
            (folder / name).write_text(text)

    def __enter__(self) -> Self:
        self.temporary = Path(tempfile.mkdtemp(prefix="workspace-", dir="/tmp"))  # short: it holds sockets
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        left = {pid: words for pid, words in self.kill().items() if words}  # without words it is exiting
        for command in self._started:
            command.wait()
            for stream in (command.stdout, command.stderr):
                if stream is not None:
                    stream.close()
        files = [str(path) for path in self.temporary.rglob("*") if not path.is_dir() and not _is_probe(path)]
        shutil.rmtree(self.temporary)
        if kind is None:
            assert not left, f"still running: {left}"
            assert not files, f"left behind: {files}"

    def start(self, *arguments: str, cold: bool = False, **environment: str) -> Command:
        """A command in a process of its own, forked, or `cold`: with its own interpreter, which imports torch."""
        own = {"TMPDIR": str(self.temporary), "STAGELINE_KEY_FILE": str(self.key)}
        complete = {**os.environ, **own, **environment}
        started = self._start_cold(arguments, complete) if cold else self._fork(arguments, complete)
        self._started.append(started)
        return started

    def command(self, *arguments: str, cold: bool = False, **environment: str) -> "subprocess.CompletedProcess[str]":
        """The same, to its end."""
        process = self.start(*arguments, cold=cold, **environment)
        stdout, stderr = process.communicate()
        return subprocess.CompletedProcess(arguments, process.wait(), stdout, stderr)

    def here(self, *arguments: str) -> int:
        """Runs a command in this process, in the folder of the workspace; returns its exit code."""
        key = patch.dict(os.environ, STAGELINE_KEY_FILE=str(self.key))
        with contextlib.chdir(self.folder), self.forking(), key:
            try:
                return run(arguments)
            finally:
                structlog.reset_defaults()  # a command logs to what is stderr now, and will be closed after the test

    def forking(self) -> contextlib.AbstractContextManager[object]:
        """Lets the fork server fork the trials of runs that this process starts: no template loads torch for them."""
        return patch.object(template, "Template", partial(ServedTemplate, self._fork_server))

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def runs(self) -> list[Path]:
        """The folders of the runs so far."""
        return sorted((self.folder / "runs").glob("*"))

    def processes(self) -> list[int]:
        """All processes that were started here, also by those started here: their working directory is the folder."""
        return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit() and self._is_ours(path)]

    def worker(self, index: int) -> int:
        """The pid of a worker."""
        return self.process(f"worker-{index}")

    def process(self, name: str) -> int:
        """The pid of a process of a run, which its log is named after."""
        logs = {pid: (Path("/proc") / str(pid) / "fd" / "2").readlink().name for pid in self.processes()}
        return next(pid for pid, log in logs.items() if log == f"{name}.log")

    def kill(self) -> dict[int, str]:
        """Ends them with SIGKILL; returns their command lines, by pid."""
        found = {pid: _command_line(pid) for pid in self.processes()}
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return found

    def _is_ours(self, process: Path) -> bool:
        try:
            return (process / "cwd").readlink() == self.folder
        except OSError:  # it has exited, or belongs to another user
            return False

    def _fork(self, arguments: Sequence[str], environment: Mapping[str, str]) -> Command:
        return self._fork_server.start(arguments, self.folder, environment)

    def _start_cold(self, arguments: Sequence[str], environment: Mapping[str, str]) -> Command:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "stageline", *arguments],
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


def _is_probe(path: Path) -> bool:
    """Return True if `path` is how `tempfile` tries out a folder: a process interrupted meanwhile leaves it behind."""
    return (
        path.is_file() and path.read_bytes() in (b"", b"blat") and re.fullmatch(r"[a-z0-9_]{8}", path.name) is not None
    )


def until(stream: Iterable[str], text: str) -> str:
    """Reads lines of a command's output up to the first one that holds `text`; returns that line."""
    seen = []
    for line in stream:
        if text in line:
            return line
        seen.append(line)
    raise AssertionError(f"the output ended without {text!r}: {''.join(seen)}")


def wait_for(look: Callable[[], bool]) -> None:
    """Looks until it is so, with pauses: what is waited for needs the core."""
    deadline = monotonic() + 60
    while not look():
        assert monotonic() < deadline, "that did not happen"
        sleep(0.01)


def free_port() -> int:
    """A port that no process listens at."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def own_address() -> str:
    """An address of this machine that is none of its loopback, if it has one."""
    import socket

    with socket.socket(type=socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            return "127.0.0.1"
        address: str = probe.getsockname()[0]
        return address


def lines(text: str) -> Iterator[str]:
    return (line for line in text.splitlines() if line.strip())


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return str(pid)
