"""How a worker that joins gets its plan."""

from typing import Any

import pytest

from stageline.pipeline.errors import ExitCode
from stageline.pipeline.plan import PlanRefused, from_mapping
from stageline.workers.process.join import plan_here
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


def test_a_plans_broker_is_not_joined_but_tells_how(workspace: Workspace) -> None:
    broker = workspace.start("broker", "--bind", (address := f"tcp://127.0.0.1:{free_port()}"))
    until(broker.stderr, "start every worker with")
    done = workspace.command("worker", "--join", address)
    assert done.returncode == ExitCode.REFUSED
    assert "stageline worker CONFIG --broker URL" in done.stderr
    broker.kill()
    broker.wait()


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ((".", "--join", "tcp://127.0.0.1:7000"), "--join goes without CONFIG"),
        (("--join", "tcp://127.0.0.1:7000", "--broker", "tcp://127.0.0.1:7000"), "--join goes without --broker"),
        (("--join",), "--join needs the address"),
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
