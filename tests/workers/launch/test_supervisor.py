"""Actions of a supervisor for processes that exit or hang, with a broker and processes that are played."""

import signal
import socket
from types import SimpleNamespace

import pytest

from stageline.pipeline.errors import ExitCode
from stageline.workers.control.client import BrokerUnreachable
from stageline.workers.launch import children as hangs
from stageline.workers.launch import supervisor as module
from stageline.workers.launch.supervisor import (
    FINAL_TIMEOUT,
    MAX_BROKER_RESTARTS,
    SAVE_TIMEOUT,
    STEADY,
    STOP_TIMEOUT,
    Supervisor,
)


def row(index: int, pid: int, host: str | None = None, **more: object) -> dict[str, object]:
    """A row of the broker's status, of a process on this machine unless `host` names another."""
    return {"index": index, "pid": pid, "host": host or socket.gethostname(), **more}


class FakeChildren:
    """Two workers and a broker, which end when `returncode` is set."""

    def __init__(self, restarts: bool) -> None:
        self.gone = ""
        self.local = SimpleNamespace(restarts=restarts, resume=False, loading=60.0, gone=lambda: self.gone, script=None)
        self.indexes = {"worker-0": 0, "worker-1": 1}
        self.workers = {name: self.process(100 + index) for name, index in self.indexes.items()}
        self.broker = self.process(99)
        self.started: list[str] = []
        self.lines: dict[str, str] = {}  # what each tells of where it is

    def process(self, pid: int) -> SimpleNamespace:
        process = SimpleNamespace(pid=pid, returncode=None, result=None, signals=[])
        process.poll = lambda: process.returncode
        process.send_signal = process.signals.append
        return process

    def restart_worker(self, name: str, *, running: bool) -> str:
        self.started.append(name)
        self.workers[name] = self.process(200)
        return name

    def start_broker(self, *, resume: bool) -> None:
        self.started.append("broker")

    def end(self, name: str, status: int, result: int | None = None) -> None:
        process = self.broker if name == "broker" else self.workers[name]
        process.returncode, process.result = status, result

    def last_log_line(self, name: str) -> str:
        return f"the log of {name}"

    def last_code_line(self, name: str) -> str | None:
        return self.lines.get(name)


class FakeClient:
    """A broker that answers with `status`, or not at all."""

    def __init__(self) -> None:
        self.status: dict[str, object] | None = {"phase": "running", "workers": []}
        self.exits: list[tuple[int, int, int, int | None, str]] = []
        self.stops: list[bool] = []
        self.reasons: list[str] = []  # of the stops
        self.dismissed = False

    def ask(self, query: str, timeout: float) -> dict[str, object]:
        if self.status is None:
            raise BrokerUnreachable("no broker answered")
        return self.status

    def exited(self, index: int, pid: int, status: int, result: int | None, detail: str) -> None:
        self.exits.append((index, pid, status, result, detail))

    def stop_run(self, reason: str, *, at_step_end: bool = False) -> None:
        self.stops.append(at_step_end)
        self.reasons.append(reason)

    def dismiss(self) -> None:
        self.dismissed = True


class Scene:
    """A supervisor, and a clock that only the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, restarts: bool = True, script: object = None) -> None:
        self.children, self.client, self.now = FakeChildren(restarts), FakeClient(), 0.0
        self.children.local.script = script
        self.supervisor = Supervisor(self.children, self.client)
        for each in (module, hangs):
            monkeypatch.setattr(each, "monotonic", lambda: self.now)
            monkeypatch.setattr(each, "sleep", lambda seconds: None)
        self.asked: list[int] = []
        monkeypatch.setattr(hangs.last_line, "ask", self.asked.append)

    def poll(self, after: float = 0.1, signals: int = 0):
        self.now += after
        return self.supervisor.poll(signals, lambda facts: None)


def test_a_killed_worker_is_reported_once_and_restarted_later_each_time(monkeypatch):
    scene = Scene(monkeypatch)
    scene.children.end("worker-1", -signal.SIGKILL)
    assert scene.poll() is None
    assert scene.children.started == ["worker-1"]
    for restart in range(2):
        scene.children.end("worker-1", -signal.SIGKILL)
        assert scene.poll(after=0.01) is None
        assert len(scene.children.started) == restart + 1
        scene.poll(after=0.051 * 2**restart)
        assert len(scene.children.started) == restart + 2
    assert [exit[:3] for exit in scene.client.exits] == [(1, 101, -9), (1, 200, -9), (1, 200, -9)]


def test_a_spare_that_had_died_before_it_was_given_a_place_is_reported_once_it_has_one(monkeypatch):
    scene = Scene(monkeypatch)
    scene.children.workers["spare-1"] = scene.children.process(300)
    scene.poll()
    scene.children.end("spare-1", -signal.SIGKILL)
    scene.poll()
    assert scene.client.exits == []
    scene.client.status["workers"] = [row(1, 300)]
    for _ in range(3):
        scene.poll()
    assert scene.client.exits == [(1, 300, -9, None, "")]


def test_what_has_exited_is_reported_to_the_next_broker_too(monkeypatch):
    scene = Scene(monkeypatch, script=SimpleNamespace(index=2, pid=50, lifeline=SimpleNamespace(cut=True)))
    scene.client.status["workers"] = [row(0, 100), row(1, 101)]
    scene.poll()
    scene.client.status = None
    scene.children.end("worker-1", -signal.SIGKILL)
    scene.children.end("broker", -signal.SIGKILL)
    scene.poll()
    scene.children.broker.returncode = None
    told = len(scene.client.exits)
    rows = [row(0, 100), row(1, 101)]
    scene.client.status = {"phase": "running", "workers": rows, "script": row(2, 50)}
    for _ in range(3):
        scene.poll()
    assert scene.client.exits[told:] == [(1, 101, -9, None, ""), (2, 50, 0, None, "")]


def test_a_process_that_has_the_number_of_one_that_ended_is_not_reported(monkeypatch):
    scene = Scene(monkeypatch)
    scene.children.end("worker-1", -signal.SIGKILL)
    scene.poll()
    scene.children.workers["worker-1"].pid = 101
    told = len(scene.client.exits)
    scene.poll()
    scene.client.status["workers"] = [row(1, 101)]
    for _ in range(3):
        scene.poll()
    assert scene.client.exits[told:] == []


def test_a_number_that_is_used_twice_is_reported_again_to_the_same_broker(monkeypatch):
    scene = Scene(monkeypatch)
    scene.client.status["workers"] = [row(1, 101)]
    for _ in range(2):
        scene.children.workers["worker-1"].pid = 101
        scene.poll()
        scene.children.end("worker-1", -signal.SIGKILL)
        told = len(scene.client.exits)
        for _ in range(3):
            scene.poll()
        assert scene.client.exits[told:] == [(1, 101, -9, None, "")] * 2  # when it is noticed, and with its place


def test_a_process_of_another_machine_with_the_same_number_is_not_taken_for_one_of_this(monkeypatch):
    """Containers number their processes alike: the exit of a worker here was reported as that of one there, and a
    worker here was killed since one there was lost."""
    scene = Scene(monkeypatch, script=SimpleNamespace(index=2, pid=50, lifeline=SimpleNamespace(cut=True)))
    scene.children.workers["spare-1"] = scene.children.process(300)
    scene.client.status["workers"] = [row(0, 300, host="elsewhere"), row(1, 101, host="elsewhere", standing="lost")]
    scene.client.status["script"] = row(3, 50, host="elsewhere")
    scene.client.status["recovering"] = [row(1, 101, host="elsewhere", since=0.2)]
    scene.poll()
    scene.children.end("spare-1", -signal.SIGKILL)
    for _ in range(3):
        scene.poll(after=1.0)
    assert scene.client.exits == [(2, 50, 0, None, "")]
    assert (scene.asked, scene.children.workers["worker-1"].signals) == ([], [])
    for _ in range(2):
        scene.poll(after=60.0)
    assert 101 in scene.asked  # it has not joined yet, though the one there has


def test_a_worker_that_ran_for_long_is_restarted_at_once_again(monkeypatch):
    scene = Scene(monkeypatch)
    for restart in range(5):
        scene.poll()
        scene.poll(after=STEADY + 1)
        scene.children.end("worker-1", -signal.SIGKILL)
        scene.poll()
        assert len(scene.children.started) == restart + 1


@pytest.mark.parametrize("status", [0, 3, 75, 78])
def test_a_status_that_the_users_code_has_chosen_is_a_loss_like_any(status, monkeypatch):
    scene = Scene(monkeypatch)
    scene.children.end("worker-1", status)
    scene.children.lines["worker-1"] = "forward (model.py, line 3)"
    assert scene.poll() is None
    assert scene.client.exits == [(1, 101, status, None, "in forward (model.py, line 3)")]
    assert scene.children.started == ["worker-1"]


def test_without_restarts_no_exit_is_a_success(monkeypatch):
    scene = Scene(monkeypatch, restarts=False)
    scene.children.end("worker-1", 0)
    scene.poll()
    outcome = scene.poll(after=3.1)
    assert outcome.code == ExitCode.FAILED
    assert outcome.reason == "worker 1 ended without a result (status 0): the log of worker-1"


def test_a_worker_that_returns_before_the_run_is_over_is_started_again_if_the_broker_does_not_end_it(monkeypatch):
    scene = Scene(monkeypatch)
    scene.children.end("worker-1", 0, ExitCode.OK)
    scene.poll()
    assert scene.children.started == []
    scene.poll(after=FINAL_TIMEOUT + 0.1)
    assert scene.children.started == ["worker-1"]


def test_a_worker_whose_plan_is_refused_is_not_restarted_and_ends_the_run(monkeypatch):
    scene = Scene(monkeypatch)
    scene.children.end("worker-0", 78, ExitCode.REFUSED)
    assert scene.poll() is None
    outcome = scene.poll(after=3.1)
    assert (outcome.code, outcome.reason) == (78, "worker 0 has exited: the log of worker-0")
    assert scene.children.started == []


def test_a_worker_that_finds_no_broker_before_the_run_is_explained_by_the_brokers_log(monkeypatch):
    scene = Scene(monkeypatch)
    scene.client.status["phase"] = "waiting"
    scene.children.end("worker-0", 3, ExitCode.NO_BROKER)
    scene.poll()
    outcome = scene.poll(after=3.1)
    assert outcome.code == ExitCode.FAILED
    assert outcome.reason.endswith("Last log line of the broker: the log of broker")


def test_a_replacement_that_finds_no_broker_while_the_run_lasts_is_started_again(monkeypatch):
    scene = Scene(monkeypatch)
    scene.poll()
    scene.children.end("worker-0", 3, ExitCode.NO_BROKER)
    assert scene.poll() is None
    assert scene.children.started == ["worker-0"]


def test_a_lost_worker_that_hangs_is_asked_where_it_is_and_killed(monkeypatch):
    scene = Scene(monkeypatch)
    scene.client.status["recovering"] = [row(1, 101, since=0.2)]
    scene.poll()
    assert (scene.asked, scene.children.workers["worker-1"].signals) == ([], [])
    scene.poll(after=0.4)
    assert (scene.asked, scene.children.workers["worker-1"].signals) == ([101], [])
    scene.poll(after=0.6)
    assert scene.children.workers["worker-1"].signals == [signal.SIGKILL]
    assert (scene.asked, scene.children.workers["worker-0"].signals) == ([101], [])


def test_a_worker_that_hangs_while_loading_is_killed_and_its_loss_names_the_line(monkeypatch):
    scene = Scene(monkeypatch)
    scene.client.status["workers"] = [row(0, 100)]
    scene.poll()
    scene.poll(after=60.1)
    scene.poll(after=0.6)
    assert scene.asked == [101]
    scene.poll(after=0.6)
    assert scene.children.workers["worker-1"].signals == [signal.SIGKILL]
    scene.children.end("worker-1", -9)
    scene.children.lines["worker-1"] = "build (model.py, line 3)"
    scene.poll()
    detail = "since it had not joined within 60 s (recovery.loading), in build (model.py, line 3)"
    assert scene.client.exits == [(1, 101, -9, None, detail)]
    assert scene.children.started == ["worker-1"]


def test_a_process_that_has_yet_to_start_does_not_load(monkeypatch):
    scene = Scene(monkeypatch)
    scene.children.workers["worker-1"].pid = 0
    scene.client.status["workers"] = [row(0, 100)]
    for _ in range(5):
        scene.poll(after=60.0)
    assert (scene.asked, scene.children.workers["worker-1"].signals) == ([], [])


def test_the_reason_of_a_run_whose_worker_hangs_names_its_line(monkeypatch):
    scene = Scene(monkeypatch)
    scene.children.lines["worker-1"] = "forward (model.py, line 3)"
    rows = [row(0, 100, standing="present"), row(1, 101, standing="lost")]
    scene.client.status = {"phase": "failed", "code": 1, "reason": "worker 1 completed no action", "workers": rows}
    assert scene.poll().reason == "worker 1 completed no action\nworker 1 is in forward (model.py, line 3)"
    assert scene.asked == [101]


def test_a_broker_that_keeps_exiting_ends_the_run_with_its_own_reason_first(monkeypatch):
    scene = Scene(monkeypatch)
    scene.client.status = None
    scene.children.end("broker", 1, 1)
    outcomes = [scene.poll() for _ in range(MAX_BROKER_RESTARTS + 1)]
    assert outcomes[:-1] == [None] * MAX_BROKER_RESTARTS
    assert outcomes[-1].reason.startswith("the log of broker. The broker has ended 6 times in a row")
    assert scene.children.started == ["broker"] * MAX_BROKER_RESTARTS


def test_a_broker_that_ends_without_a_result_is_not_believed(monkeypatch):
    scene = Scene(monkeypatch)
    scene.client.status = None
    scene.children.end("broker", 0)
    outcomes = [scene.poll() for _ in range(MAX_BROKER_RESTARTS + 1)]
    assert outcomes[-1].code == ExitCode.FAILED
    assert outcomes[-1].reason.startswith("the broker ended without a result (status 0). Its last log line: ")


def test_a_broker_that_does_not_answer_is_asked_where_it_is_and_killed(monkeypatch):
    scene = Scene(monkeypatch)
    scene.client.status = None
    scene.poll()
    scene.poll(after=60.0)
    assert scene.children.broker.signals == []
    scene.poll()
    assert (scene.asked, scene.children.broker.signals) == ([99], [signal.SIGKILL])


def test_a_broker_that_stayed_up_for_long_may_end_more_often(monkeypatch):
    scene = Scene(monkeypatch)
    for _ in range(2 * MAX_BROKER_RESTARTS):
        scene.children.broker.returncode = None
        scene.poll()
        scene.poll(after=STEADY + 1)
        scene.children.end("broker", -9)
        assert scene.poll() is None


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
    ended = {"phase": "failed", "code": 75, "reason": "interrupted", "workers": []}
    scene.client.status = {**ended, "saving": True}
    assert scene.poll(signals=1) is None
    scene.children.end("worker-0", 75, ExitCode.SAVED)  # the other still writes
    assert scene.poll(signals=1) is None
    assert scene.poll(signals=1, after=FINAL_TIMEOUT + 0.1) is None
    scene.client.status = {**ended, "saving": False}
    assert scene.poll(signals=1).code == ExitCode.SAVED


def test_a_run_that_its_script_has_ended_ends_once_its_workers_have_saved_and_starts_none_of_them_again(monkeypatch):
    scene = Scene(monkeypatch)
    ended = {"phase": "failed", "code": 130, "reason": "the script left", "workers": []}
    scene.client.status = {**ended, "saving": True}
    assert scene.poll() is None
    scene.children.end("worker-1", 130, ExitCode.INTERRUPTED)
    assert scene.poll() is None
    assert scene.poll(after=SAVE_TIMEOUT).code == ExitCode.INTERRUPTED
    assert scene.children.started == []


def test_the_reason_of_a_worker_that_failed_before_it_joined_has_its_last_log_line(monkeypatch):
    scene = Scene(monkeypatch)
    scene.children.end("worker-0", 78, 78)
    scene.client.status = {"phase": "failed", "code": 78, "reason": "worker 0 exited", "workers": []}
    assert scene.poll().reason.splitlines()[1] == "last log line of worker 0: the log of worker-0"


@pytest.mark.parametrize(("checkpoint", "code"), [(None, ExitCode.INTERRUPTED), (20, ExitCode.SAVED)])
def test_a_run_that_is_stopped_ends_although_its_broker_is_gone(checkpoint, code, monkeypatch):
    """It went on until the second Ctrl-C: a broker is not started again once the run is stopped."""
    scene = Scene(monkeypatch)
    scene.client.status = {"phase": "running", "workers": [], "checkpoint": checkpoint}
    assert scene.poll() is None
    scene.client.status = None
    scene.children.end("broker", -signal.SIGKILL)
    assert scene.poll(signals=1) is None
    assert scene.poll(after=STOP_TIMEOUT - 0.5, signals=1) is None
    outcome = scene.poll(after=1.0, signals=1)
    assert outcome.code == code
    assert "interrupted" in outcome.reason
    assert "the log of broker" in outcome.reason


def test_a_run_that_is_stopped_ends_at_once_when_its_broker_fails(monkeypatch):
    scene = Scene(monkeypatch)
    scene.client.status = {"phase": "running", "workers": [], "checkpoint": 20}
    assert scene.poll(signals=1) is None
    scene.client.status = None
    scene.children.end("broker", 1, 1)
    outcome = scene.poll(signals=1)
    assert outcome.code == ExitCode.SAVED
    assert outcome.reason == "interrupted; checkpoint 20 is complete. The broker has ended: the log of broker"


@pytest.mark.parametrize("name", ["worker-1", "broker"])
def test_a_run_ends_at_the_first_loss_after_which_no_process_can_be_started(name, monkeypatch):
    scene = Scene(monkeypatch)
    scene.children.gone = "the template was killed by SIGKILL"
    scene.poll()
    assert scene.client.stops == []
    scene.children.end(name, -signal.SIGKILL)
    scene.poll()
    scene.poll()
    label = name.replace("-", " ").replace("broker", "the broker")
    assert scene.client.reasons == [f"{label} cannot be started again: the template was killed by SIGKILL"]
    assert (scene.client.stops, scene.children.started) == ([False], [])


def test_a_worker_that_is_done_needs_no_other_process(monkeypatch):
    scene = Scene(monkeypatch)
    scene.children.gone = "the template was killed by SIGKILL"
    scene.children.end("worker-0", 0, result=ExitCode.OK)
    scene.poll()
    scene.client.status = {"phase": "finished", "code": 0}
    assert scene.poll().code == ExitCode.OK
    assert scene.client.stops == []


def test_a_run_that_cannot_go_on_ends_although_its_broker_is_gone_too(monkeypatch):
    scene = Scene(monkeypatch)
    scene.children.gone = "the template was killed by SIGKILL"
    scene.client.status = None
    scene.children.end("broker", -signal.SIGKILL)
    scene.poll()
    outcome = scene.poll(after=STOP_TIMEOUT + 1)
    assert outcome.reason.startswith("the broker cannot be started again: the template was killed by SIGKILL; nothing")


def test_the_end_of_the_script_is_reported_once(monkeypatch):
    lifeline = SimpleNamespace(cut=False)
    scene = Scene(monkeypatch, script=SimpleNamespace(index=2, pid=50, lifeline=lifeline))
    scene.poll()
    assert scene.client.exits == []
    lifeline.cut = True
    scene.poll()
    scene.poll()
    assert scene.client.exits == [(2, 50, 0, None, "")]
