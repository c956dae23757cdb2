"""Real processes, forked from a real template process; commands that end at once stand for brokers and workers."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest

from stageline.workers.launch.forking import ForkedProcess
from stageline.workers.launch.template import Template
from support.paths import TESTS


@pytest.fixture(scope="module")
def template() -> Iterator[Template]:
    with Template() as template:
        template.warm()
        yield template


@pytest.fixture
def log(tmp_path: Path) -> Iterator[TextIO]:
    with (tmp_path / "log").open("a") as log:
        yield log


_open: list[int] = []


@pytest.fixture(autouse=True)
def close_pipes() -> Iterator[None]:
    yield
    while _open:
        os.close(_open.pop())


def start_hanging(template: Template, log: TextIO, folder: Path) -> ForkedProcess:
    """A process that is known to have started its command, which waits in the model's file."""
    plan = shutil.copytree(TESTS / "support" / "tiny", folder / "hangs")
    fifo = plan / "fifo"
    os.mkfifo(fifo)
    (plan / "model.py").write_text(f"open({str(fifo)!r}).read()")
    hanging = template(["worker", str(plan), "--patience", "0"], log)
    with fifo.open("w") as file:  # opened once the command reads it
        _open.append(os.dup(file.fileno()))
    while not hanging.pid:
        assert hanging.poll() is None
    return hanging


@pytest.mark.slow
def test_a_command_runs_in_a_session_of_its_own_and_its_result_is_known(template: Template, log: TextIO) -> None:
    done = template(["worker", "--help"], log)
    assert (done.wait(60), done.result) == (0, 0)
    assert "Usage: stageline worker" in Path(log.name).read_text()
    wrong = template(["worker", "--no-such-option"], log)
    assert (wrong.wait(60), wrong.result) == (2, 2)
    assert len({os.getpid(), template.pid, done.pid, wrong.pid}) == 4


@pytest.mark.slow
def test_the_template_has_no_thread(template: Template, log: TextIO) -> None:
    template(["worker", "--help"], log).wait(60)
    assert len(os.listdir(f"/proc/{template.pid}/task")) == 1


@pytest.mark.slow
def test_what_the_users_files_import_is_imported_once_and_leaves_no_thread(template: Template, log: TextIO) -> None:
    """Each trial and each worker imported scikit-learn by itself; what is slow of it, and has threads, is scipy's."""
    template.preload(["scipy.linalg", "scipy.no_such_module"])
    done = template(["worker", "--help"], log)
    assert (done.wait(60), done.result) == (0, 0)
    assert "/scipy/" in Path(f"/proc/{template.pid}/maps").read_text()
    assert len(os.listdir(f"/proc/{template.pid}/task")) == 1


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_process_that_is_killed_has_no_result(template: Template, log: TextIO, tmp_path: Path, number: int) -> None:
    hanging = start_hanging(template, log, tmp_path)
    assert os.getsid(hanging.pid) == hanging.pid
    hanging.send_signal(number)
    assert hanging.wait(60) in (-number, 130)
    assert hanging.result is None


FORKS = """
import os, time
from pathlib import Path

def build():
    if pid := os.fork():
        (Path(__file__).parent / "forked").write_text(str(pid))
        os._exit(0)
    time.sleep(10**6)
"""


def test_what_a_users_code_forks_ends_with_its_process(template: Template, log: TextIO, tmp_path: Path) -> None:
    """It stayed for good."""
    plan = shutil.copytree(TESTS / "support" / "tiny", tmp_path / "plan")
    (plan / "model.py").write_text(FORKS)
    worker = template(["worker", str(plan), "--patience", "0"], log)
    assert (worker.wait(60), worker.result) == (0, None)
    left = Path("/proc") / (plan / "forked").read_text() / "cmdline"
    while left.exists() and left.read_bytes():  # nothing once it is dead; the test's time limit is the bound
        continue


HASHES = """
import os
from pathlib import Path

def build():
    (Path(__file__).parent / "hash").write_text(str(hash("a")))
    os._exit(0)
"""


def test_a_set_has_the_same_order_in_the_processes_of_every_template(
    template: Template, log: TextIO, tmp_path: Path
) -> None:
    """Rows in the order of a set were others once a run was resumed, and two forks of one process agree on them."""
    plan = shutil.copytree(TESTS / "support" / "tiny", tmp_path / "plan")
    (plan / "model.py").write_text(HASHES)
    template(["worker", str(plan), "--patience", "0"], log).wait(60)
    environment = {**os.environ, "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0")}
    expected = subprocess.run(
        [sys.executable, "-c", "print(hash('a'))"], env=environment, capture_output=True, text=True, check=True
    )
    assert (plan / "hash").read_text() == expected.stdout.strip()


@pytest.mark.slow
def test_what_a_killed_template_has_forked_goes_on_and_what_it_was_asked_for_another_template_forks(
    template: Template, log: TextIO, tmp_path: Path
) -> None:
    hanging, before = start_hanging(template, log, tmp_path), template.pid
    os.kill(before, signal.SIGSTOP)
    asked = template(["worker", "--help"], log)
    os.kill(before, signal.SIGKILL)
    assert (asked.wait(60), asked.result) == (0, 0)
    assert template.pid != before
    assert hanging.poll() is None
    hanging.kill()
    assert hanging.wait(60) == -signal.SIGKILL


@pytest.mark.slow
def test_a_process_that_is_not_wanted_any_more_does_not_start_and_the_sockets_go_with_the_last(log: TextIO) -> None:
    with Template() as template:
        folder = template.sockets
        assert folder.is_dir()
        template.warm()
        os.kill(template.pid, signal.SIGSTOP)
        asked = template(["worker", "--help"], log)
        asked.kill()
        os.kill(template.pid, signal.SIGCONT)
        assert (asked.returncode, asked.result, asked.pid) == (-signal.SIGKILL, None, 0)
        assert template(["worker", "--help"], log).wait(60) == 0
    assert Path(log.name).read_text().count("Usage:") == 1
    assert not folder.exists()
