"""`stageline run stop` ends a run at a step, from the run's machine or by a key with the right to stop."""

import json
import re

import jsonschema
import pytest

from stageline.broker.keys.join_line import keyed
from stageline.pipeline.errors import ExitCode
from stageline.workers.cli.schemas import schema_of
from support.machines import line_in
from support.workspace import Command, Workspace, until, wait_for

PACE = {"last_minute", "best", "left", "bubble"}
LONG = ("--set", "run.steps=100000")


def trained(workspace: Workspace) -> bool:
    """True once a step is over."""
    return any(each.stat().st_size for each in workspace.folder.rglob("metrics.jsonl"))


@pytest.mark.slow
def test_a_run_that_is_stopped_has_the_checkpoint_of_its_last_step(workspace: Workspace) -> None:
    train = workspace.start("train", *LONG)
    wait_for(lambda: trained(workspace))
    shown = json.loads(workspace.command("run", "show", "--json").stdout)
    jsonschema.validate(shown, schema_of("run-show/1"))
    assert (shown["state"], shown["reason"], set(shown["pace"])) == ("running", None, PACE)
    kept = workspace.command("run", "rm", shown["run"], "--yes")
    assert kept.returncode == ExitCode.FAILED
    assert "stageline run stop" in kept.stderr
    done = workspace.command("run", "stop", "--reason", "the machine is needed", "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    saved = re.findall(r"the machine is needed; the state after (\d+) steps is saved", facts["reason"])
    assert saved == [str(facts["finished_floor"])] == [str(facts["checkpoint"])]
    assert train.wait() == ExitCode.SAVED
    again = workspace.command("run", "stop")
    assert again.returncode == ExitCode.NO_BROKER
    assert "no broker at present" in again.stderr
    assert workspace.command("run", "rm", shown["run"], "--yes").returncode == 0
    assert workspace.runs() == []


@pytest.mark.slow
def test_a_key_with_the_right_to_stop_stops_a_run_from_another_machine_and_one_without_does_not(
    workspace: Workspace,
) -> None:
    keys = {name: {"STAGELINE_KEY_FILE": str(workspace.folder / f"{name}.key")} for name in ("desk", "lab", "owner")}
    sets = ("--set", "queues.url=tcp://127.0.0.1:0", *LONG)
    broker = workspace.start("broker", ".", "--bind", "tcp://0.0.0.0:0", *sets, **keys["desk"])
    line = line_in(until(broker.stderr, "start every worker with"))
    workers = [_joining(workspace, f"lab-{each}", sets, keys["lab"], line.text) for each in range(2)]
    wait_for(lambda: trained(workspace))
    address = keyed(line.address, line.broker)
    refused = workspace.command("run", "stop", "--broker", address, **keys["lab"])
    assert refused.returncode == ExitCode.NOT_ADMITTED
    assert "no right to stop" in refused.stderr
    public = json.loads(workspace.command("keys", "new", "--json", **keys["owner"]).stdout)["key"]
    given = ("--right", "stop", "--as", "owner")
    assert workspace.command("keys", "admit", public, *given, **keys["desk"]).returncode == 0
    done = workspace.command("run", "stop", "--broker", address, "--reason", "enough", **keys["owner"])
    assert done.returncode == 0, done.stderr
    assert re.search(r"enough \(owner\); the state after \d+ steps is saved", done.stdout)
    assert [each.wait() for each in (*workers, broker)] == [ExitCode.SAVED] * 3
    log = [json.loads(each) for each in (workspace.runs()[0] / "keys.log").read_text().splitlines()]
    assert [(each["key"], each["detail"]) for each in log if each["what"] == "stopped"] == [(public, "enough")]


def _joining(workspace: Workspace, name: str, sets: tuple[str, ...], key: dict[str, str], line: str) -> Command:
    environment = {**key, "STAGELINE_JOIN": line}
    return workspace.start("worker", ".", "--set", f"run.dir={name}", *sets, **environment)
