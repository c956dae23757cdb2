"""The password in an address reaches the server, and nothing that is shown, kept, or sent to others."""

import json
import signal
from contextlib import closing
from pathlib import Path

import pytest

from stageline.broker.transports.redis.answers import RedisUnfit
from stageline.broker.transports.redis.connection import RedisLink
from stageline.pipeline.addresses import masked
from stageline.pipeline.plan import PlanRefused, differences, read_plan
from stageline.workers.disk.atomic_file import write_json
from stageline.workers.runs import folder as runs
from support.redis_server import RedisServer
from support.workspace import Workspace, until

SECRET = "open-sesame"  # noqa: S105  # of no account
URL = f"redis://trainer:{SECRET}@redis.example:6379/0"
UNCLEAR = "redis://..."


def test_a_plan_gives_its_addresses_away_without_passwords(workspace: Workspace) -> None:
    plan = read_plan(workspace.folder, sets=[f"queues.url={URL}"])
    assert plan.queues.url == URL
    assert SECRET not in json.dumps(plan.as_mapping())


@pytest.mark.parametrize(
    "sets",
    [
        "queues.url=redis://:sec/ret@host",
        "queues.url=reddis://:secret@host",
        'queues.url=["redis://:secret@host"]',
        "queues=redis://:secret@host",
        "broker.url=redis://:secret@host:no",
        "run.steps=redis://:secret@host",
        "redis://:secret@host",
    ],
)
def test_errors_of_a_plan_show_no_passwords(workspace: Workspace, sets: str) -> None:
    with pytest.raises(PlanRefused) as refused:
        read_plan(workspace.folder, sets=[sets])
    assert "secret" not in str(refused.value)
    assert "sec/ret" not in str(refused.value)


def test_a_password_with_signs_that_cut_an_address_is_refused_with_the_way_to_write_them(workspace: Workspace) -> None:
    """A part of it stood in the error: no port was to be made of it."""
    with pytest.raises(PlanRefused, match="%2F"):
        read_plan(workspace.folder, sets=["queues.url=redis://:sec/ret@host:6379/0"])
    with pytest.raises(RedisUnfit, match="%2F") as unfit:
        RedisLink("redis://:sec/ret@host:6379/0")
    assert "ret" not in str(unfit.value).replace("redis", "").replace("refus", "")


def test_a_server_is_named_without_user_password_and_options() -> None:
    assert masked(f"{URL}?password=x&client_name=y") == "redis://trainer@redis.example:6379/0?client_name=y"
    assert masked("redis://:sec/ret@host") == UNCLEAR


def test_differences_between_plans_name_no_passwords() -> None:
    here, there = ({"data": {"from": f"http://:{SECRET}@{host}"}} for host in "ab")
    assert SECRET not in str(differences(here, there)[0])


def test_a_run_is_the_same_run_with_the_password_that_its_folder_does_not_hold(workspace: Workspace) -> None:
    plan = read_plan(workspace.folder, environment={"STAGELINE_QUEUES__URL": URL})
    write_json(workspace.folder / runs.PLAN, plan.as_mapping())
    runs.require_same_plan(plan, workspace.folder)
    other = read_plan(workspace.folder, sets=["run.steps=7"], environment={"STAGELINE_QUEUES__URL": URL})
    with pytest.raises(PlanRefused, match="7 here, 6 there"):
        runs.require_same_plan(other, workspace.folder)


def test_a_password_on_a_command_line_is_warned_of_and_the_way_out_named(workspace: Workspace, capsys) -> None:
    assert workspace.here("plan", ".", "--set", f"queues.url={URL}") == 0
    shown = capsys.readouterr()
    assert "redis://trainer@redis.example:6379/0" in shown.out
    assert "into the environment, as STAGELINE_QUEUES__URL" in shown.err
    assert SECRET not in shown.out + shown.err
    in_environment = read_plan(workspace.folder, environment={"STAGELINE_QUEUES__URL": URL})
    assert "command line" not in "".join(in_environment.warnings)


def test_a_broker_prints_how_to_start_workers_without_the_password(workspace: Workspace) -> None:
    broker = workspace.start(
        "broker", ".", "--set", f"queues.url={URL}", "--set", "run.steps=4", "--bind", "tcp://127.0.0.1:*"
    )
    told = until(broker.stderr, "start every worker with: ")
    assert "run.steps=4" in told
    assert SECRET not in told
    assert "a password into its environment" in until(broker.stderr, "and put")
    for number in (signal.SIGINT, signal.SIGINT):
        broker.send_signal(number)
    broker.communicate()


def test_a_line_with_a_password_is_on_the_standard_output_alone(workspace: Workspace) -> None:
    """It was in the sentence besides, too: `keys invite > line.txt` showed it on the terminal."""
    own = {"STAGELINE_KEY_FILE": str(workspace.folder / "own.key")}
    with RedisServer() as server, closing(server.client()) as client:
        client.config_set("requirepass", SECRET)
        there = f"redis://:{SECRET}@127.1:{server.port}/0#desk"  # a name that does not tell that it is this machine
        broker = workspace.start("broker", ".", STAGELINE_BROKER__URL=there, **own)
        assert "--join @FILE" in until(broker.stderr, "start every worker with: ")
        invited = workspace.command("keys", "invite", **own)
        assert invited.stdout.startswith(f"{there}#k1.")
        assert SECRET not in invited.stderr
        assert "--join @FILE" in invited.stderr
        for number in (signal.SIGINT, signal.SIGINT):
            broker.send_signal(number)
        broker.communicate()


def test_where_the_broker_is_only_its_user_can_read(tmp_path: Path) -> None:
    (tmp_path / runs.BROKER).write_text("of one before\n")
    runs.write_broker_url(tmp_path, "tcp://127.0.0.1:5600", b"secret")
    assert runs.read_broker_url(tmp_path) == "tcp://127.0.0.1:5600"
    assert (tmp_path / runs.BROKER).stat().st_mode & 0o777 == 0o600
    assert {path.name for path in tmp_path.iterdir()} == {runs.BROKER, runs.SECRET}


@pytest.mark.slow
def test_a_password_in_the_environment_reaches_all_workers_and_nothing_else(workspace: Workspace) -> None:
    """Not a command line, where `ps` shows it, nor a file of the run, before it is interrupted and after."""
    settings = ("--set", "run.steps=150", "--set", "recovery.restarts=1", "--set", "recovery.snapshot_every=20")
    with RedisServer(appendfsync="no") as server, closing(server.client()) as client:
        client.config_set("requirepass", SECRET)
        url = server.url.replace("://", f"://:{SECRET}@")
        train = workspace.start("train", ".", *settings, cold=True, STAGELINE_QUEUES__URL=url)
        until(train.stderr, "running")
        lines = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in workspace.processes()]
        assert sum(b"worker" in line for line in lines) >= 2
        train.send_signal(signal.SIGTERM)
        _, errors = train.communicate()
        assert train.returncode == 75, errors
        resumed = workspace.command("train", ".", *settings, "--resume", STAGELINE_QUEUES__URL=url)
        assert resumed.returncode == 0, resumed.stderr
    assert not any(SECRET.encode() in line for line in lines)
    files = [path for path in workspace.runs()[0].rglob("*") if path.is_file()]
    assert {"plan.json", "worker-0.log", "broker.sqlite"} <= {path.name for path in files}
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]
    assert SECRET not in errors + resumed.stdout + resumed.stderr


@pytest.mark.slow
def test_a_password_in_the_brokers_address_on_a_command_line_is_warned_of(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert workspace.here("status", "--broker", f"redis://:{SECRET}@127.0.0.1:1/0") == 3
    said = capsys.readouterr().err
    assert "--broker contains a password" in said
    assert "STAGELINE_BROKER__URL" in said
    assert SECRET not in said
