"""Commands say at once which broker they use, and which they do not."""

import pytest

from support.workspace import Workspace, free_port


def test_train_says_that_it_does_not_use_the_brokers_address_of_the_plan(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = ("train", ".", "--spares", "1", "--set", "recovery.restarts=0")
    assert workspace.here(*refused, "--set", "broker.url=tcp://127.0.0.1:5601") == 2
    told = capsys.readouterr().err
    assert told.count('broker.url = "tcp://127.0.0.1:5601" is not used') == 1
    assert "run `stageline broker` and `stageline worker`" in told
    assert workspace.here(*refused) == 2
    assert "is not used" not in capsys.readouterr().err


@pytest.mark.slow
def test_a_worker_says_at_once_which_broker_it_will_ask_and_later_which_worker_it_is(workspace: Workspace) -> None:
    port = free_port()
    alone = workspace.command(
        "worker", ".", "--set", f"broker.url=tcp://127.0.0.1:{port}-{port + 1}", "--patience", "0"
    )
    assert alone.returncode == 3
    first, *_ = alone.stderr.splitlines()
    assert f"asks the broker at tcp://127.0.0.1:{port}-{port + 1} (of a range of ports, the first is dialled)" in first
    assert "for 0.5 s at most" in first
    trained = workspace.command("train", ".", "--set", "data.check=false")
    assert trained.returncode == 0, trained.stderr
    (run,) = workspace.runs()
    assert (
        f"this process is worker 1 of run {run.name}, known to the broker by the incarnation"
        in (run / "worker-1.log").read_text()
    )
