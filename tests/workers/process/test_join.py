"""How a worker that joins gets its plan."""

from pathlib import Path
from typing import Any

import pytest

from stageline.broker.keys.admission import KeyRefusal
from stageline.broker.keys.join_line import keyed
from stageline.pipeline.errors import ExitCode
from stageline.pipeline.plan import Plan, PlanRefused, from_mapping
from stageline.workers.control.client import KeyRefused, NoAnswer
from stageline.workers.control.joining import NotAdmitted
from stageline.workers.extras.consent.allow_file import NoConsent
from stageline.workers.extras.consent.guard import keep_to
from stageline.workers.process import join
from stageline.workers.process.join import CannotJoin, plan_here, work_for_script
from support.keyed import BROKER, WORKER
from support.workspace import Workspace, free_port, until

SETTINGS: dict[str, Any] = {
    "run": {"name": "line", "dir": "/home/anna/runs"},
    "model": {"factory": "model.build", "loss": "model.loss", "stages": 2},
    "data": {"source": "script:batches", "batch_size": 1},
    "optimizer": {"factory": "torch.optim.SGD", "lr": 0.1},
    "queues": {"url": "tcp://0.0.0.0:0", "retain_bytes": "1TiB"},
}


def test_addresses_and_folders_are_those_of_this_machine() -> None:
    plan = plan_here(SETTINGS, "tcp://127.0.0.1:7000", (), {})
    assert (plan.queues.url, plan.broker.url) == ("tcp://127.0.0.1:0", "tcp://127.0.0.1:7000")
    assert (str(plan.run.dir), plan.queues.retain_bytes) == ("runs", 2**30)
    assert plan.digest() == plan_here(SETTINGS, "redis://:secret@127.0.0.1/1", (), {}).digest()


def test_no_other_machine_says_which_weights_are_opened_here() -> None:
    settings = {**SETTINGS, "model": {**SETTINGS["model"], "weights": "/etc/passwd"}}
    with pytest.raises(PlanRefused, match=r"model.weights: the script's workers read .* --set model.weights=PATH"):
        plan_here(settings, "tcp://127.0.0.1:7000", (), {})
    plan = plan_here(settings, "tcp://127.0.0.1:7000", ["model.weights=/data/model"], {})
    assert str(plan.model.weights) == "/data/model"
    sent = {**settings, "queues": {"url": "tcp://0.0.0.0:0"}}
    assert plan.digest() == from_mapping(sent).digest()


def test_what_the_machine_says_itself_comes_first() -> None:
    plan = plan_here(SETTINGS, "redis://127.0.0.1/1", ["run.dir=/data"], {"STAGELINE_QUEUES__URL": "tcp://127.0.0.1:1"})
    assert (str(plan.run.dir), plan.queues.url) == ("/data", "tcp://127.0.0.1:1")


@pytest.mark.slow
def test_a_plans_broker_is_not_joined_but_tells_how(workspace: Workspace) -> None:
    broker = workspace.start("broker", "--bind", (address := f"tcp://127.0.0.1:{free_port()}"))
    until(broker.stderr, "start every worker with")
    done = workspace.command("worker", "--join", address)
    assert done.returncode == ExitCode.REFUSED
    assert "stageline worker CONFIG --join LINE" in done.stderr
    broker.kill()
    broker.wait()


class Brokers:
    """Those at one address, one after the other: each answer is given once."""

    def __init__(self, *answers: dict[str, Any] | KeyRefused | None) -> None:
        self._answers = list(answers)
        self.declined: list[str] = []

    def __call__(self, address: str, pair: object) -> "Brokers":
        return self

    def __enter__(self) -> "Brokers":
        return self

    def __exit__(self, *_: object) -> None:
        """There is nothing to close."""

    def ask(self, what: str, timeout: float) -> dict[str, Any]:
        answer = self._answers.pop(0)
        if answer is None:
            raise NoAnswer("nothing is there")
        if isinstance(answer, KeyRefused):
            raise answer
        return answer

    def decline(self, reason: str) -> None:
        self.declined.append(reason)


def run(name: str, *, over: bool = False, files: dict[str, str] | None = None) -> dict[str, Any]:
    return {"run": name, "settings": SETTINGS, "torch": "2.13.0", "files": files or {"model.py": "5f"}, "over": over}


@pytest.fixture
def same_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join, "demand_same_code", lambda *of: None)


def test_a_run_that_is_over_or_ends_before_there_is_a_place_is_followed_by_the_next_one_at_its_address(
    monkeypatch: pytest.MonkeyPatch, same_code: None
) -> None:
    """The worker exited: the broker that it had found was about to."""
    brokers = Brokers(run("line-1", over=True), None, run("line-2"), run("line-2", over=True), run("line-3"))
    monkeypatch.setattr(join, "Client", brokers)
    refusals = [NotAdmitted("the run is over", ExitCode.SAVED)]

    def work(plan: Plan) -> int:
        if refusals:
            raise refusals.pop()
        return 0

    assert work_for_script("tcp://127.0.0.1:7000", 60.0, (), work) == 0
    assert (brokers._answers, brokers.declined) == ([], [])


def test_a_key_that_is_not_admitted_is_asked_again_and_another_brokers_key_is_not(
    monkeypatch: pytest.MonkeyPatch, same_code: None
) -> None:
    address = keyed("tcp://127.0.0.1:7000", BROKER.public)
    unknown, other = (KeyRefused(why, address, WORKER) for why in (KeyRefusal.NOT_ADMITTED, KeyRefusal.ANOTHER_KEY))
    monkeypatch.setattr(join, "REDIAL", 0.0)
    monkeypatch.setattr(join, "Client", Brokers(unknown, unknown, run("line-1")))
    assert work_for_script(address, 60.0, (), lambda plan: 0, WORKER) == 0
    for answers, patience in (((other,), 60.0), ((unknown,), 0.0)):
        monkeypatch.setattr(join, "Client", Brokers(*answers))
        with pytest.raises(KeyRefused) as refused:
            work_for_script(address, patience, (), lambda plan: 0, WORKER)
        assert refused.value.exit_code == ExitCode.NOT_ADMITTED


def test_a_refusal_by_a_run_that_goes_on_stands_and_other_code_than_was_imported_needs_a_new_process(
    monkeypatch: pytest.MonkeyPatch, same_code: None
) -> None:
    def work(plan: Plan) -> int:
        raise NotAdmitted("all 2 workers have joined", ExitCode.FAILED)

    monkeypatch.setattr(join, "Client", Brokers(run("line-1"), run("line-1")))
    assert work_for_script("tcp://127.0.0.1:7000", 60.0, (), work) == ExitCode.FAILED
    brokers = Brokers(run("line-1"), run("line-2"), run("line-2", files={"model.py": "1f"}))
    monkeypatch.setattr(join, "Client", brokers)
    with pytest.raises(CannotJoin, match="start this worker again"):
        work_for_script("tcp://127.0.0.1:7000", 60.0, (), work)
    assert "the code of run line-2" in brokers.declined[0]


def test_the_owner_of_data_is_asked_before_code_of_the_scripts_plan_is_imported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(join, "demand_same_code", lambda *of: pytest.fail("the code was compared, and then imported"))
    brokers = Brokers(run("line-1"))
    monkeypatch.setattr(join, "Client", brokers)
    with keep_to(tmp_path / "allow.toml", "worker"), pytest.raises(NoConsent):
        work_for_script("tcp://127.0.0.1:7000", 60.0, (), lambda plan: pytest.fail("the worker began"))
    assert "no such file" in brokers.declined[0]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--join", "tcp://127.0.0.1:7000", "--broker", "tcp://127.0.0.1:7000"), "--join goes without --broker"),
        (("--join",), "--join needs the line that was printed"),
        (("--join", "tcp://0.0.0.0:0"), "its port must be the one"),
    ],
)
def test_misuse_is_named(
    workspace: Workspace, arguments: tuple[str, ...], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert workspace.here("worker", *arguments) == ExitCode.USAGE
    assert why in capsys.readouterr().err


def test_a_broker_that_does_not_come_is_waited_for_no_longer_than_the_patience(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert workspace.here("worker", "--join", f"tcp://127.0.0.1:{free_port()}", "--patience", "0") == ExitCode.NO_BROKER
    said = " ".join(capsys.readouterr().err.split())
    assert "no script's broker answered at tcp://127.0.0.1:" in said
    assert "within 1 s: start the script, or name another address after --join" in said
