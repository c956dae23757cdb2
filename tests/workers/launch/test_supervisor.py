"""What a supervisor does about processes that exit or hang, with a broker and processes that are played."""

import signal
from types import SimpleNamespace

import pytest

from stageline.pipeline.errors import ExitCode
from stageline.workers.control.client import BrokerUnreachable
from stageline.workers.launch import supervisor as module
from stageline.workers.launch.supervisor import MAX_BROKER_RESTARTS, Supervisor


class FakeChildren:
    """Two workers and a broker, which end when `returncode` is set."""

    def __init__(self, restarts: bool) -> None:
        self.local = SimpleNamespace(restarts=restarts, resume=False)
        self.indexes = {"worker-0": 0, "worker-1": 1}
        self.workers = {name: self.process(100 + index) for name, index in self.indexes.items()}
        self.broker = self.process(99)
        self.started: list[str] = []

    def process(self, pid: int) -> SimpleNamespace:
        process = SimpleNamespace(pid=pid, returncode=None, signals=[])
        process.poll = lambda: process.returncode
        process.send_signal = process.signals.append
        return process

    def restart_worker(self, name: str, *, running: bool) -> str:
        self.started.append(name)
        self.workers[name] = self.process(200)
        return name

    def start_broker(self, *, resume: bool) -> None:
        self.started.append("broker")

    def last_log_line(self, name: str) -> str:
        return f"the log of {name}"


class FakeClient:
    """A broker that answers with `status`, or not at all."""

    def __init__(self) -> None:
        self.status: dict[str, object] | None = {"phase": "running", "workers": []}
        self.exits: list[tuple[int, int, int]] = []
        self.stops: list[bool] = []
        self.dismissed = False

    def ask(self, query: str, timeout: float) -> dict[str, object]:
        if self.status is None:
            raise BrokerUnreachable("no broker answered")
        return self.status

    def exited(self, index: int, pid: int, status: int) -> None:
        self.exits.append((index, pid, status))

    def stop_run(self, reason: str, *, at_step_end: bool = False) -> None:
        self.stops.append(at_step_end)

    def dismiss(self) -> None:
        self.dismissed = True


class Scene:
    """A supervisor, and a clock that only the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, restarts: bool = True) -> None:
        self.children, self.client, self.now = FakeChildren(restarts), FakeClient(), 0.0
        self.supervisor = Supervisor(self.children, self.client)
        monkeypatch.setattr(module, "monotonic", lambda: self.now)
        monkeypatch.setattr(module, "sleep", lambda seconds: None)

    def poll(self, after: float = 0.1, signals: int = 0):
        self.now += after
        return self.supervisor.poll(signals, lambda facts: None)


def test_a_killed_worker_is_reported_once_and_restarted_later_each_time(monkeypatch):
    scene = Scene(monkeypatch)
    for restart in range(3):
        scene.children.workers["worker-1"].returncode = -signal.SIGKILL
        assert scene.poll(after=0.01) is None
        assert len(scene.client.exits) == restart + 1
        assert len(scene.children.started) == restart
        scene.poll(after=0.051 * 2**restart)
        assert len(scene.children.started) == restart + 1
    assert scene.client.exits == [(1, 101, -9), (1, 200, -9), (1, 200, -9)]


def test_a_worker_whose_plan_is_refused_is_not_restarted_and_ends_the_run(monkeypatch):
    scene = Scene(monkeypatch)
    scene.children.workers["worker-0"].returncode = ExitCode.REFUSED
    assert scene.poll() is None
    outcome = scene.poll(after=3.1)
    assert (outcome.code, outcome.reason) == (78, "worker 0 has exited: the log of worker-0")
    assert scene.children.started == []


def test_a_worker_that_finds_no_broker_is_explained_by_the_brokers_log(monkeypatch):
    scene = Scene(monkeypatch)
    scene.children.workers["worker-0"].returncode = ExitCode.NO_BROKER
    scene.poll()
    outcome = scene.poll(after=3.1)
    assert outcome.code == ExitCode.FAILED
    assert outcome.reason.endswith("Last log line of the broker: the log of broker")


def test_a_lost_worker_that_hangs_is_killed(monkeypatch):
    scene = Scene(monkeypatch)
    scene.client.status["recovering"] = [{"pid": 101, "since": 0.5}]
    scene.poll()
    assert scene.children.workers["worker-1"].signals == []
    scene.poll(after=0.6)
    assert scene.children.workers["worker-1"].signals == [signal.SIGKILL]
    assert scene.children.workers["worker-0"].signals == []


def test_a_broker_that_keeps_exiting_ends_the_run(monkeypatch):
    scene = Scene(monkeypatch)
    scene.client.status = None
    scene.children.broker.returncode = 1
    outcomes = [scene.poll() for _ in range(MAX_BROKER_RESTARTS + 1)]
    assert outcomes[:-1] == [None] * MAX_BROKER_RESTARTS
    assert outcomes[-1].reason == "the broker does not stay up: the log of broker"
    assert scene.children.started == ["broker"] * MAX_BROKER_RESTARTS


@pytest.mark.parametrize(("restarts", "saves"), [(True, True), (False, False)])
def test_the_first_interrupt_stops_the_run_and_the_second_ends_it(restarts, saves, monkeypatch):
    scene = Scene(monkeypatch, restarts=restarts)
    assert scene.poll(signals=1) is None
    assert scene.poll(signals=1) is None
    assert scene.client.stops == [saves]
    assert scene.poll(signals=2).code == ExitCode.INTERRUPTED


def test_an_interrupted_run_ends_once_its_workers_have_saved(monkeypatch):
    scene = Scene(monkeypatch)
    scene.poll(signals=1)
    scene.client.status = {"phase": "failed", "code": 75, "reason": "interrupted", "workers": []}
    assert scene.poll(signals=1) is None
    for worker in scene.children.workers.values():
        worker.returncode = ExitCode.SAVED
    assert scene.poll(signals=1).code == ExitCode.SAVED


def test_the_reason_of_a_worker_that_failed_before_it_joined_has_its_last_log_line(monkeypatch):
    scene = Scene(monkeypatch)
    scene.children.workers["worker-0"].returncode = 78
    scene.client.status = {"phase": "failed", "code": 78, "reason": "worker 0 exited before it joined", "workers": []}
    assert scene.poll().reason.splitlines()[1] == "last log line of worker 0: the log of worker-0"
