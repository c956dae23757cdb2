"""The processes of a local run: records of what they were asked to do stand for them."""

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import pytest

from stageline.workers.launch import children as module
from stageline.workers.launch.children import Children, LocalRun


class FakeProcess:
    """Ends at the signal that it is given; without one, never."""

    def __init__(self, arguments: list[str], log: TextIO, ends_at: int) -> None:
        self.arguments, self.pid, self.returncode, self.result = arguments, 1, None, None
        self.signals: list[int] = []
        self._ends_at = ends_at
        print(f"started as {arguments[0]}", file=log, flush=True)

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        self.signals.append(number)
        if number == self._ends_at:
            self.returncode = -number


def children(folder: Path, spares: int = 0, ends_at: int = signal.SIGTERM) -> Children:
    def spawn(arguments: Sequence[str], log: TextIO) -> FakeProcess:
        return FakeProcess(list(arguments), log, ends_at)

    local = LocalRun(["plan.toml"], 2, folder, spawn, folder, 60.0, spares=spares)
    return Children(local, kill_now=lambda: True)


def test_the_broker_every_worker_and_the_spares_are_started(tmp_path):
    with children(tmp_path, spares=1) as started:
        assert started.broker.arguments[:4] == ["broker", "plan.toml", "--bind", f"ipc://{tmp_path}/broker"]
        assert list(started.workers) == ["worker-0", "worker-1", "spare-1"]
        assert started.workers["worker-1"].arguments[:4] == ["worker", "plan.toml", "--index", "1"]
        assert "--spare" in started.workers["spare-1"].arguments


def test_a_worker_is_restarted_in_its_place_or_as_a_spare_if_one_has_that(tmp_path):
    with children(tmp_path) as started:
        assert started.restart_worker("worker-1", running=True) == "worker-1"
    with children(tmp_path, spares=1) as started:
        assert started.restart_worker("worker-1", running=False) == "worker-1"
        assert started.restart_worker("worker-1", running=True) == "spare-2"
        assert started.restart_worker("spare-2", running=True) == "spare-3"


@pytest.mark.parametrize(
    ("ends_at", "signals"),
    [(signal.SIGTERM, [signal.SIGTERM]), (signal.SIGKILL, [signal.SIGTERM, signal.SIGKILL])],
)
def test_what_does_not_exit_is_terminated_and_then_killed(ends_at, signals, tmp_path):
    with children(tmp_path, ends_at=ends_at) as started:
        worker = started.workers["worker-0"]
    assert worker.signals == started.broker.signals == signals


def test_processes_get_time_to_exit_by_themselves(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "EXIT_TIMEOUT", 0.1)
    with children(tmp_path) as started:
        started._kill_now = lambda: False
        for process in (*started.workers.values(), started.broker):
            process.returncode = 0
    assert started.broker.signals == []


def test_the_last_log_line_says_what_went_wrong_or_where_the_log_is(tmp_path):
    with children(tmp_path) as started:
        assert started.last_log_line("worker-0") == "started as worker"
        (tmp_path / "worker-0.log").write_text("")
        assert started.last_log_line("worker-0") == f"nothing is in its log, {tmp_path}/worker-0.log"


def test_only_what_the_present_process_has_logged_is_read(tmp_path):
    with children(tmp_path) as started:
        with (tmp_path / "worker-1.log").open("a") as log:
            log.write("stageline: os._exit(0) was called in forward (/u/model.py, line 3)\n")
        assert str(started.last_code_line("worker-1")) == "forward (/u/model.py, line 3)"
        started.restart_worker("worker-1", running=True)
        assert started.last_code_line("worker-1") is None
        assert started.last_log_line("worker-1") == "started as worker"
