"""A small plan in a folder of its own, real commands run on it, and a look afterwards at what they left behind."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from stageline.workers.cli.app import run

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

_MARK = "STAGELINE_TEST"  # in the environment of every process that a test starts, and of those that these start


class Workspace:
    """A folder with a plan (`stageline.toml`, `model.py`, `data.py`) to run commands in.

    On leaving, no process that was started here may be left, and no file in the folder for temporary ones: a socket.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._mark = uuid.uuid4().hex
        self._started: list[subprocess.Popen[str]] = []
        for name, text in (("stageline.toml", PLAN), ("model.py", MODEL), ("data.py", DATA)):
            (folder / name).write_text(text)

    def __enter__(self) -> Self:
        self.temporary = Path(tempfile.mkdtemp(prefix="desk-", dir="/tmp"))  # short: sockets go there
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        left = self.processes()
        words = [_command_line(pid) for pid in left]
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self._started:
            process.communicate()
        files = [str(path) for path in self.temporary.rglob("*") if not path.is_dir()]
        shutil.rmtree(self.temporary)
        if kind is None:
            assert not words, f"still running: {words}"
            assert not files, f"left behind: {files}"

    def start(self, *arguments: str, **environment: str) -> "subprocess.Popen[str]":
        """A command in a process of its own."""
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "stageline", *arguments],
            cwd=self.folder,
            env={**os.environ, "TMPDIR": str(self.temporary), _MARK: self._mark, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._started.append(process)
        return process

    def command(self, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        """The same, to its end."""
        process = self.start(*arguments, **environment)
        stdout, stderr = process.communicate()
        return subprocess.CompletedProcess(arguments, process.returncode, stdout, stderr)

    def here(self, *arguments: str) -> int:
        """A command in this process, in the desk's folder; it returns its exit code. Quicker: torch is here already."""
        os.environ[_MARK] = self._mark
        try:
            with contextlib.chdir(self.folder):
                return run(arguments)
        finally:
            del os.environ[_MARK]

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def runs(self) -> list[Path]:
        """The folders of the runs so far."""
        return sorted((self.folder / "runs").glob("*"))

    def processes(self) -> list[int]:
        """All that are alive of those started here, however they came to be."""
        return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit() and self._is_ours(path)]

    def _is_ours(self, process: Path) -> bool:
        try:
            return f"{_MARK}={self._mark}".encode() in (process / "environ").read_bytes()
        except OSError:  # gone, or somebody else's
            return False


def until(stream: Iterable[str], words: str) -> str:
    """Reads lines of a command's output up to one that holds `words`; returns that one."""
    seen = []
    for line in stream:
        if words in line:
            return line
        seen.append(line)
    raise AssertionError(f"it ended without {words!r}: {''.join(seen)}")


def free_port() -> int:
    """A port that nobody listens at."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def lines(text: str) -> Iterator[str]:
    return (line for line in text.splitlines() if line.strip())


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return str(pid)
