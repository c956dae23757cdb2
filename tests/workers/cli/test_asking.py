"""Where an answer comes from: a broker that is there, else the records; and no wait for one that is not."""

import os
import signal

import pytest

from stageline.workers.cli import options as asking
from stageline.workers.cli.options import answer_about
from stageline.workers.control.client import BrokerUnreachable
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
