"""The commands, as a user types them: what they print, where, and with which exit code they end."""

import json
from functools import partial
from pathlib import Path

from stageline.workers.cli.app import run
from stageline.workers.control.client import Client
from stageline.workers.runs.folder import read_control_secret
from support.workspace import free_port, until


def test_three_terminals_over_tcp_train_to_the_same_weights_and_can_be_asked_meanwhile(workspace, capsys):
    config = (".", "--set", "queues.url=tcp://127.0.0.1:0", "--set", "run.steps=6")
    broker = workspace.start("broker", *config, "--bind", f"tcp://127.0.0.1:{free_port()}", cold=True)
    url = until(broker.stderr, "broker at").split("broker at ")[1].split(",")[0]
    maps = Path(f"/proc/{broker.pid}/maps").read_text()
    assert "torch" not in maps, "a broker that knows the number of stages has no need of torch"

    assert run(["status", "--broker", url, "--json"]) == 0
    before = json.loads(capsys.readouterr().out)
    assert (before["schema"], before["phase"], before["missing"]) == ("status/1", "waiting", [0, 1])
    assert workspace.here("status") == 0  # finds the newest run of the folder by itself
    assert "waits for worker 0, 1" in capsys.readouterr().out

    workers = [workspace.start("worker", *config, "--broker", url) for _ in (0, 1)]
    for worker in workers:
        _, errors = worker.communicate()
        assert worker.returncode == 0, errors
    assert run(["status", "--broker", url]) == 0
    said = capsys.readouterr().out
    assert "finished" in said
    assert "6 of 6 steps" in said
    assert run(["queue", "ls", "--broker", url]) == 0
    assert capsys.readouterr().out.startswith("queues of run small-")
    with Client(url, partial(read_control_secret, workspace.runs()[-1])) as client:
        facts = client.ask("status")
        client.dismiss()
    _, log = broker.communicate()
    assert broker.returncode == 0
    assert f"weights_sha256 {facts['weights_sha256']}" in log
    (folder,) = workspace.runs()
    assert json.loads((folder / "result.json").read_text())["weights_sha256"] == facts["weights_sha256"]

    assert workspace.here("train", ".", "--json", "--set", "queues.url=memory://") == 0
    assert json.loads(capsys.readouterr().out)["weights_sha256"] == facts["weights_sha256"]
