"""Whole runs that lack descriptors, disk space or memory for a while: they wait for it, say so, and lose no bit."""

import os
import re
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from support.fork_server import ForkServer
from support.whole_run import WholeRun, expected, plan_in

STEPS = 12

LARGE = """
import torch

def build(plain=build):
    model = plain()
    for layer in model:
        layer.register_buffer("ballast", torch.zeros(2**16))
    return model
"""

LACKING = """
from pathlib import Path

def _need_memory_once(seconds, plain=sleep):
    try:
        (Path(__file__).parent / "lacking").unlink()  # one of the workers does, whichever is first
    except FileNotFoundError:
        pass
    else:
        torch.empty(2**50)
    plain(seconds)

sleep = _need_memory_once
"""

Limit = Callable[[int], tuple[int, int]]  # of a process: which of its limits, and the new one


def no_descriptors(pid: int) -> tuple[int, int]:
    return resource.RLIMIT_NOFILE, max(map(int, os.listdir(f"/proc/{pid}/fd"))) + 1


def no_space(pid: int) -> tuple[int, int]:
    """For files as large as a snapshot's."""
    return resource.RLIMIT_FSIZE, 2**17


@contextmanager
def lowered(pid: int, limit: Limit) -> Iterator[None]:
    """The limit of a process that runs, until the end of the block."""
    which, value = limit(pid)
    before, most = resource.prlimit(pid, which)
    resource.prlimit(pid, which, (value, most))
    yield
    resource.prlimit(pid, which, (before, most))


def large_plan(home: Path, *more: str) -> Path:
    plan = plan_in(home)
    model = plan.parent / "model.py"
    model.write_text("".join([model.read_text(), LARGE, *more]))
    return plan


def pid_of(run: WholeRun, worker: int) -> int:
    return int(run.facts("status")["workers"][worker]["pid"])


def user_of(file: Path) -> int:
    """The process that has a file open."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if str(file) in map(os.readlink, (process / "fd").iterdir()):
                return int(process.name)
    raise AssertionError(f"no process has {file} open")


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "reason"), [(no_descriptors, "Too many open files"), (no_space, "File too large")])
def test_a_worker_that_cannot_write_its_snapshot_for_a_while_says_so_and_loses_no_bit(
    fork_server: ForkServer, tmp_path: Path, limit: Limit, reason: str
) -> None:
    run = WholeRun(fork_server, large_plan(tmp_path), f"run.steps={STEPS}")
    run.until_checkpoint(2)
    with lowered(pid_of(run, 1), limit):
        why = run.wait_for(lambda: (found := run.facts("why")) and reason in found["text"] and found)
        assert re.search(rf"worker 1 cannot (write|delete) .* {run.folder}/checkpoints", why["text"])
        assert re.search(rf"{reason}; tried for \d+ s, gives up in \d+ s", why["text"])
        assert "the run continues by itself" in why["action"]
    assert run.digest() == expected(STEPS, tmp_path / "plan")
    assert run.end()["facts"]["restarts"] == 0


def test_a_broker_that_cannot_keep_its_records_for_a_while_says_so_and_training_goes_on(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    run = WholeRun(fork_server, plan_in(tmp_path), f"run.steps={STEPS}")
    run.until_checkpoint(2)
    with lowered(user_of(run.folder / "broker.sqlite"), lambda pid: (resource.RLIMIT_FSIZE, 2**12)):
        why = run.wait_for(lambda: (found := run.facts("why")) and "the broker" in found["text"] and found)
        records = run.folder / "broker.sqlite"
        assert re.search(rf"the broker cannot keep its records in {records}: .*; tried for \d+ s", why["text"])
        assert str(records) in run.facts("status")["fault"]
    assert run.digest() == expected(STEPS)
    assert run.end()["facts"]["restarts"] == 0


def test_a_worker_without_memory_is_replaced_and_its_microbatch_is_not_left_out(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    plan = large_plan(tmp_path, LACKING)
    run = WholeRun(fork_server, plan, f"run.steps={STEPS}", 'recovery.on_bad_microbatch="skip"')
    run.until_checkpoint(2)
    (plan.parent / "lacking").touch()
    assert run.digest() == expected(STEPS, plan.parent)
    assert run.end()["facts"]["restarts"] == 1
    logs = "".join(file.read_text() for file in run.folder.glob("worker-*.log"))
    assert "can't allocate memory" in logs
