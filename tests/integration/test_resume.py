"""An interrupted run saves its step and exits 75; the same command with --resume ends as if nothing had been."""

import json
import shlex
import signal
from contextlib import closing
from pathlib import Path

import pytest

from stageline.broker.control.sqlite_store import SqliteStore
from support.workspace import DATA, Command, Workspace, free_port, until, wait_for

RECOVERY = ("--set", "recovery.restarts=3", "--set", "recovery.snapshot_every=40")
STEPS = ("--set", "run.steps=500", "--set", "run.log_every=100")


def result(text: str) -> dict:
    """Result of a run, without the facts that every run has of its own."""
    found = json.loads(text.splitlines()[-1])
    return {key: found[key] for key in ("steps", "loss", "losses", "metrics", "weights_sha256")}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, fork_server) -> dict:
    """Result of the run without faults."""
    with Workspace(tmp_path_factory.mktemp("undisturbed"), fork_server) as workspace:
        return result(workspace.command("train", ".", "--json", "--set", "queues.url=memory://", *STEPS).stdout)


@pytest.mark.slow
def test_an_interrupted_run_goes_on_where_it_was(workspace, capsys, undisturbed):
    train = workspace.start("train", ".", "--json", *STEPS, *RECOVERY)
    until(train.stderr, "running")
    train.send_signal(signal.SIGTERM)
    _, errors = train.communicate()
    assert train.returncode == 75, errors
    assert "steps is saved" in errors
    (run,) = workspace.runs()
    arguments = shlex.join((".", *STEPS, *RECOVERY))
    assert f"Go on with: stageline train {arguments} --resume {run.name}\n" in errors
    assert "failed" not in errors
    assert workspace.here("train", ".", "--resume", *STEPS, *RECOVERY, "--set", "run.steps=499") == 78
    assert "run.steps: 499 here, 500 there" in capsys.readouterr().err
    workspace.write("data.py", DATA.replace("manual_seed(1)", "manual_seed(23)"))
    other = workspace.command("train", ".", "--resume", *STEPS, *RECOVERY)
    assert other.returncode == 78
    assert "data.source: batch(0) gives other values than when the run began: row 0 of inputs" in other.stderr
    workspace.write("data.py", DATA)
    resumed = workspace.command("train", ".", "--json", "--resume", *STEPS, *RECOVERY)
    assert resumed.returncode == 0, resumed.stderr
    assert result(resumed.stdout) == undisturbed


def test_there_must_be_a_run_to_resume(workspace, capsys):
    assert workspace.here("train", ".", "--resume") == 2
    assert "leave out --resume" in capsys.readouterr().err
    assert workspace.here("train", ".", "--resume", "small-1") == 2
    assert "there is no run small-1" in capsys.readouterr().err


@pytest.mark.slow
def test_a_broker_that_is_killed_and_resumes_the_run_leaves_those_at_work_where_they_are(
    workspace, tmp_path, undisturbed
):
    """As a container's broker does: it is started again with the words that it was started with."""
    url = f"tcp://127.0.0.1:{free_port()}"
    sets = (*STEPS, *RECOVERY, "--set", "queues.url=tcp://127.0.0.1:0")

    def start_broker() -> Command:
        broker = workspace.start("broker", ".", "--bind", url, "--run", "by-hand", "--resume", *sets)
        until(broker.stderr, "broker at")
        return broker

    first = start_broker()
    workers = [workspace.start("worker", ".", "--broker", url, *sets, "--index", str(index)) for index in (0, 1)]
    snapshots = tmp_path / "runs" / "by-hand" / "checkpoints"
    wait_for(lambda: any(snapshots.glob("stage-1/step-*")))
    assert [process.poll() for process in (first, *workers)] == [None] * 3
    first.kill()
    first.communicate()
    second = start_broker()
    errors = [process.communicate()[1] for process in workers]
    second.send_signal(signal.SIGTERM)  # it would stay for a while, to answer how the run ended
    errors.insert(0, second.communicate()[1])
    assert [process.returncode for process in (second, *workers)] == [0, 0, 0], errors
    assert "run by-hand continues: its workers are still running" in errors[0]
    assert "generation" not in errors[0]  # no place was given again
    came_to = json.loads((tmp_path / "runs" / "by-hand" / "result.json").read_text())
    assert came_to == {**came_to, **undisturbed}


@pytest.mark.slow
def test_machines_each_of_which_sees_its_own_snapshots_go_back_together(workspace, tmp_path, undisturbed):
    """The broker and two workers are started by hand; the newest checkpoint is damaged on the second machine."""
    url = f"tcp://127.0.0.1:{free_port()}"
    sets = (*STEPS, *RECOVERY, "--set", "queues.url=tcp://127.0.0.1:0")
    home = [tmp_path / f"machine-{index}" for index in (0, 1)]

    def start(*more: str) -> list[Command]:
        broker = workspace.start("broker", ".", "--bind", url, "--run", "by-hand", *sets, *more)
        until(broker.stderr, "broker at")
        worker = ("worker", ".", "--broker", url, *sets)
        of = [workspace.start(*worker, "--index", str(i), "--set", f"run.dir={home[i]}") for i in (0, 1)]
        return [broker, *of]

    def snapshot(index: int, step: int) -> Path:
        return home[index] / "by-hand" / "checkpoints" / f"stage-{index}" / f"step-{step:010d}"

    def has_an_older_one(index: int) -> bool:
        """The first snapshot is gone: the broker's records have two newer complete checkpoints, and both are kept."""
        first = snapshot(index, 40)
        return any(first.parent.glob("step-*")) and not first.exists()

    before = start()
    wait_for(lambda: all(has_an_older_one(index) for index in (0, 1)))
    assert [process.poll() for process in before] == [None] * 3
    for process in before[1:]:
        process.kill()
    before[0].kill()
    for process in before:
        process.communicate()
    with closing(SqliteStore(tmp_path / "runs" / "by-hand" / "broker.sqlite")) as store:
        newest = store.load().facts["registry"]["checkpoints"]["complete"]
    damaged = snapshot(1, newest)
    (damaged / "weights.safetensors").write_bytes(b"")
    both = set.intersection(*({path.name for path in snapshot(k, 0).parent.glob("step-*")} for k in (0, 1)))
    other = max(int(name.removeprefix("step-")) for name in both - {damaged.name})  # newer, if it was not recorded
    after = start("--resume", "--lifeline", "2")  # stderr, which this process reads
    errors = [process.communicate()[1] for process in after]
    assert [process.returncode for process in after] == [0, 0, 0], errors
    assert f"{damaged} cannot be used: weights.safetensors has 0 bytes" in errors[0]
    assert f"checkpoint {newest} cannot be used: the run begins at checkpoint {other} instead" in errors[0]
    came_to = json.loads((tmp_path / "runs" / "by-hand" / "result.json").read_text())
    assert came_to == {**came_to, **undisturbed}
