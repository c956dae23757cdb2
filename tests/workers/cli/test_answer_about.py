"""Where an answer comes from: a broker that is there, else the records; and no wait for one that is not."""

import os
import signal
import threading
from contextlib import closing

import pytest

from stageline.broker.control.messages import Answer
from stageline.broker.control.protocol import encode
from stageline.broker.keys.admission import ServerKeys
from stageline.broker.transports.base import open_server
from stageline.pipeline.errors import ExitCode
from stageline.workers.cli import options as asking
from stageline.workers.cli.app import run
from stageline.workers.cli.options import answer_about
from stageline.workers.control.client import BrokerUnreachable
from stageline.workers.keys.key_file import new_pair
from support.control_channels import received
from support.keyed import BROKER, Admitted
from support.workspace import free_port, until


def test_a_plan_without_a_run_names_the_address_and_the_folder_at_once(workspace, monkeypatch):
    monkeypatch.chdir(workspace.folder)
    monkeypatch.setattr(asking, "Client", None)  # none is asked
    port = free_port()
    monkeypatch.setenv("STAGELINE_BROKER__URL", f"tcp://127.0.0.1:{port}")
    with pytest.raises(BrokerUnreachable, match=f"no broker listens at tcp://127.0.0.1:{port}, and no run of small is"):
        answer_about(".", None, "status")
    with pytest.raises(BrokerUnreachable, match=f"no broker listens at tcp://127.0.0.1:{port} .SL311.$"):
        answer_about(None, None, "status")


def test_a_broker_that_hangs_is_waited_for_and_then_the_records_answer(workspace, monkeypatch):
    broker = workspace.start("broker", ".", "--bind", f"tcp://127.0.0.1:{free_port()}", "--run", "small-1")
    until(broker.stderr, "broker at")
    monkeypatch.chdir(workspace.folder)
    assert answer_about(None, None, "status")["source"] == "broker"
    os.kill(broker.pid, signal.SIGSTOP)
    monkeypatch.setattr(asking, "PATIENCE", 0.2)
    told = answer_about("runs/small-1", None, "why")
    assert (told["source"], told["state"]) == ("records", "starting")
    os.kill(broker.pid, signal.SIGKILL)
    broker.wait()
    assert answer_about(".", None, "why")["state"] == "killed"


@pytest.mark.slow  # waits for an answer until its patience ends
@pytest.mark.parametrize("answers", [1, 2])
def test_a_broker_that_is_gone_after_the_request_to_stop_is_told_as_that(tmp_path, monkeypatch, capsys, answers):
    """It was told as a broker that was never there, although its run had stopped as asked."""
    monkeypatch.setenv("STAGELINE_KEY_FILE", str(tmp_path / "own.key"))
    server = open_server("tcp://127.0.0.1:0", ServerKeys(BROKER, Admitted([new_pair(tmp_path / "own.key")])))

    def serve() -> None:
        with closing(server):
            for asked in range(1, answers + 1):
                (sender, _) = received(server, asked, 60)[-1]  # the second question comes with the request
                server.send([(sender, encode(Answer("status/1", {"run": "small-1", "reason": None})))])
            received(server, 1 if answers == 2 else 2, 60)

    thread = threading.Thread(target=serve)
    thread.start()
    assert run(["run", "stop", "--broker", server.endpoint]) == ExitCode.NO_BROKER
    thread.join()
    told = capsys.readouterr().err
    assert "the broker of run small-1 was asked to stop it" in told
    assert "stageline run show small-1" in told
