"""The line that a process was in is read from its log, however it ended."""

import subprocess
import sys
from pathlib import Path

import pytest

from stageline.pipeline.code_lines import CodeLine
from stageline.pipeline.process import last_line

USER = """
import os, ctypes, json, signal, sys
from stageline.pipeline.process.last_line import exit_is_failure, install

def leaves():
    os._exit(7)

def crashes():
    json.JSONEncoder(default=lambda _: ctypes.string_at(0)).encode(object())

def hangs():
    print("hangs", flush=True)
    while True:
        signal.pthread_sigmask(signal.SIG_BLOCK, [])

def forks():
    if not os.fork():
        os._exit(5)
    os.wait()

def leaves_a_run():
    with exit_is_failure():
        os._exit(0)

install()
globals()[sys.argv[1]]()
"""


@pytest.fixture
def user(tmp_path: Path) -> Path:
    (tmp_path / "user.py").write_text(USER)
    return tmp_path / "user.py"


def start(user: Path, function: str) -> subprocess.Popen[bytes]:
    with (user.parent / "log").open("ab") as log:
        return subprocess.Popen([sys.executable, str(user), function], stdout=subprocess.PIPE, stderr=log)


def line_of(text: str) -> int:
    return USER.splitlines().index(text) + 1


@pytest.mark.parametrize(
    ("function", "status", "text", "named"),
    [
        ("leaves", 7, "    os._exit(7)", "leaves"),
        ("leaves_a_run", 1, "        os._exit(0)", "leaves_a_run"),
        ("crashes", -11, "    json.JSONEncoder(default=lambda _: ctypes.string_at(0)).encode(object())", "<lambda>"),
    ],
)
def test_a_process_that_ends_in_the_users_code_tells_its_line(
    user: Path, function: str, status: int, text: str, named: str
) -> None:
    (user.parent / "log").write_text("an earlier line\n")
    since = (user.parent / "log").stat().st_size
    with start(user, function) as process:
        assert process.wait() == status
    assert last_line.read(user.parent / "log", since) == CodeLine(str(user), line_of(text), named)


def test_a_process_that_hangs_tells_its_line_when_asked(user: Path) -> None:
    with start(user, "hangs") as process:
        assert process.stdout is not None
        process.stdout.readline()
        last_line.ask(process.pid)
        while (found := last_line.read(user.parent / "log")) is None:
            assert process.poll() is None
        process.kill()
    assert (found.file, found.function) == (str(user), "hangs")


def test_a_process_that_the_users_code_has_forked_tells_nothing(user: Path) -> None:
    with start(user, "forks") as process:
        assert process.wait() == 0
    assert (user.parent / "log").read_text() == ""


def test_the_last_stack_counts_and_of_it_the_users_innermost_file(tmp_path: Path) -> None:
    stack = "Stack (most recent call first):\n"
    log = tmp_path / "log"
    log.write_text(
        f'{stack}  File "/u/old.py", line 1 in old\n'
        f'text\n{stack}  File "{subprocess.__file__}", line 5 in run\n'
        f'  File "{last_line.__file__}", line 6 in ask\n  File "/u/model.py", line 7 in forward\n'
        '  File "/u/train.py", line 8 in main\nand more text\n'
    )
    assert str(last_line.read(log)) == "forward (/u/model.py, line 7)"


def test_without_a_line_of_the_users_a_library_is_named_and_stageline_never(tmp_path: Path) -> None:
    log = tmp_path / "log"
    own = f'Stack (most recent call first):\n  File "{last_line.__file__}", line 6 in ask\n'
    log.write_text(own)
    assert last_line.read(log) is None
    log.write_text(own.replace("first):\n", f'first):\n  File "{subprocess.__file__}", line 5 in run\n'))
    assert str(last_line.read(log)) == f"run ({subprocess.__file__}, line 5)"


def test_what_has_called_stageline_is_not_where_it_was(tmp_path: Path) -> None:
    """A worker that crashed in stageline was said to be "in invoke (core.py, line 911)", which is click's."""
    log = tmp_path / "log"
    own = f'Stack (most recent call first):\n  File "{last_line.__file__}", line 6 in ask\n'
    log.write_text(f'{own}  File "{subprocess.__file__}", line 5 in run\n')
    assert last_line.read(log) is None


def test_a_log_that_is_not_there_tells_nothing_and_a_process_that_is_gone_is_not_asked(tmp_path: Path) -> None:
    assert last_line.read(tmp_path / "none") is None
    with subprocess.Popen(["true"]) as ended:
        pass
    last_line.ask(ended.pid)
    last_line.ask(0)  # to a whole group of processes, this one among them
