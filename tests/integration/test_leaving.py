"""Workers leave a run on notice, and others take their places: the weights are those of a run that none has left."""

import signal
from collections.abc import Iterator

import pytest

from stageline.pipeline.errors import ExitCode
from support.leavers import RunWithLeavers
from support.redis_server import RedisServer
from support.workspace import Workspace, wait_for


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.mark.slow
@pytest.mark.parametrize(
    ("transport", "by"),
    [
        ("tcp", "signal"),
        ("redis", "command"),
        pytest.param("tcp", "command", marks=pytest.mark.slow),
        pytest.param("redis", "signal", marks=pytest.mark.slow),
    ],
)
def test_a_worker_that_leaves_saves_its_step_frees_its_place_and_the_run_goes_on_to_the_same_bits(
    workspace: Workspace, transport: str, by: str, request: pytest.FixtureRequest
) -> None:
    run = RunWithLeavers(workspace, "tcp://127.0.0.1:0" if transport == "tcp" else request.getfixturevalue("redis").url)
    run.trains_beyond(5)
    first = run.leaves(1, by)
    assert first > 5
    assert "the place of worker 1 is free: its worker left" in workspace.command("status").stdout
    run.workers[1] = run.start("--name", "second")
    run.trains_beyond(first + 5)
    spare = run.start("--spare")
    wait_for(lambda: len(run.status()["spares"]) == 1)
    run.workers[0].send_signal(signal.SIGTERM)
    assert run.workers[0].wait() == ExitCode.LEFT
    run.workers[0] = spare
    run.takes("0")
    milestones = run.ends()
    assert [(each["what"], each["worker"]) for each in milestones if each["what"] in ("loss", "leave")] == [
        ("leave", 1),
        ("leave", 0),
    ]
    steps = [each["step"] for each in milestones if each["what"] == "checkpoint"]
    assert [each["step"] for each in milestones if each["what"] == "leave"] == steps[:2]


@pytest.mark.slow
def test_a_worker_that_does_not_finish_its_action_leaves_in_time_all_the_same(workspace: Workspace) -> None:
    run = RunWithLeavers(workspace, "tcp://127.0.0.1:0")
    run.trains_beyond(3)
    hasty = run.workers[1]
    run.takes("600")
    wait_for(lambda: "1F" in run.status()["workers"][1]["now"])
    done = workspace.command("run", "leave", "1", "--seconds", "1")
    assert done.returncode == 0, done.stderr
    assert "worker 1 has left; its place is free" in done.stdout
    assert hasty.wait() == ExitCode.LEFT
    run.takes("0")
    run.workers[1] = run.start()
    run.ends()


def test_what_cannot_leave_is_told(workspace: Workspace) -> None:
    run = RunWithLeavers(workspace, "tcp://127.0.0.1:0")
    run.trains_beyond(0)
    spare = run.start("--spare", "--notice-seconds", "60")
    wait_for(lambda: len(run.status()["spares"]) == 1)
    spare.send_signal(signal.SIGTERM)
    assert spare.wait() == ExitCode.LEFT  # it has no place to save
    for words, code, said in [
        (("2",), ExitCode.USAGE, "workers are 0 to 1"),
        (("runs",), ExitCode.USAGE, "number of a worker"),
        ((), ExitCode.USAGE, "WORKER"),
    ]:
        done = workspace.command("run", "leave", *words)
        assert (done.returncode, said in done.stderr) == (code, True), done.stderr
    alone = workspace.command("worker", ".", "--notice-seconds", "5", "--set", "recovery.restarts=0")
    assert (alone.returncode, "recovery.restarts" in alone.stderr) == (ExitCode.USAGE, True), alone.stderr
    run.takes("0")
    run.ends()
