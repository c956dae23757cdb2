"""A user's script whose model trains on processes forked from it, and what happens to them on the way."""

import json
import os
import re
import shutil
import signal
from collections.abc import Sequence
from contextlib import closing
from time import monotonic, sleep
from typing import Any

import pytest

from support.paths import EXAMPLES, TESTS
from support.redis_server import RedisServer
from support.reference import reference_digest
from support.workspace import Command, Workspace

SCRIPT = TESTS / "support" / "script" / "train.py"


def start(workspace: Workspace, *arguments: str, **environment: str) -> Command:
    return workspace.start("script", str(SCRIPT), *arguments, **environment)


def result(workspace: Workspace, *arguments: str, **environment: str) -> dict[str, Any]:
    script = start(workspace, *arguments, **environment)
    said, errors = script.communicate()
    assert script.returncode == 0, errors
    return dict(json.loads(said))


def wait_until_all_have_ended(workspace: Workspace) -> None:
    deadline = monotonic() + 60
    while workspace.processes():
        assert monotonic() < deadline, workspace.kill()
        sleep(0.1)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, fork_server: Any) -> dict[str, Any]:
    with Workspace(tmp_path_factory.mktemp("inline"), fork_server) as workspace:
        return result(workspace, "inline")


@pytest.mark.parametrize(
    "happens",
    [
        pytest.param([], marks=pytest.mark.slow),
        pytest.param(["evaluate", "3"], marks=pytest.mark.slow),
        pytest.param(["validate", "7"], marks=pytest.mark.slow),  # 18 MB, where 5 may be retained
        pytest.param(["mismatch", "4"], marks=pytest.mark.slow),
        pytest.param(["kill", "worker-0", "7"], marks=pytest.mark.slow),
        ["kill", "worker-1", "12"],
        pytest.param(["kill", "broker", "8"], marks=pytest.mark.slow),
    ],
    ids="-".join,
)
def test_a_script_on_processes_computes_what_it_does_inline(
    workspace: Workspace, undisturbed: dict[str, Any], happens: Sequence[str]
) -> None:
    """The script tells of its workers alone on a stderr that is no terminal."""
    said, errors = start(workspace, "processes", *happens).communicate()
    assert json.loads(said) == undisturbed, errors
    told = [line for line in errors.splitlines() if line.startswith("stageline: ")]
    losses = [
        line for line in told if re.search(r"worker [01] \(stage [01]\) was killed by SIGKILL .*; its repl", line)
    ]
    assert len(losses) == ("worker" in "".join(happens) or "validate" in happens)
    rest = [line for line in told if line not in losses]
    assert len(rest) <= len(losses)  # none, if the script ended first
    assert all(re.search(r"worker [01] \(stage [01]\) computes again, in process \d+", line) for line in rest)


@pytest.mark.slow
@pytest.mark.parametrize("at", ["tcp", "redis"])
def test_a_script_whose_queues_others_can_reach_computes_what_it_does_inline(
    at: str, workspace: Workspace, undisturbed: dict[str, Any]
) -> None:
    """The script has keys of a place, too, and so has the worker that takes the place of one that is killed."""
    with RedisServer() as server:
        url = "tcp://0.0.0.0:0" if at == "tcp" else f"redis://127.1:{server.port}/0"
        said, errors = start(workspace, "processes", "kill", "worker-1", "12", STAGELINE_QUEUES__URL=url).communicate()
        assert json.loads(said) == undisturbed, errors
        with closing(server.client()) as client:
            marks = {fields[b"h"][:4] for key in client.keys("*-0") for _, fields in client.xrange(key)}
            assert client.dbsize() == 0 or at == "redis"
            assert marks <= {b"SLSE"}


def test_an_exception_in_the_loop_ends_the_processes_and_is_the_users(workspace: Workspace) -> None:
    script = start(workspace, "processes", "raise", "6")
    said, errors = script.communicate()
    assert script.returncode == 1
    folder = f"runs/{next((workspace.folder / 'runs').iterdir()).name}"
    assert said == f"Line(run {folder}, 2 workers, step 6)\n"
    (ended,) = (line for line in errors.splitlines() if line.startswith("stageline: "))
    assert ended.startswith(
        f"stageline: the run is in {folder}; go on with: Line.resume('{folder}', ...) in the script"
    )
    assert ended.endswith("It begins at step 6")
    assert errors.strip().endswith("ValueError: a mistake in the loop")


HASTY = """
from pathlib import Path

import torch
from torch import nn

from stageline import Line


def optimizer(parameters):
    \"\"\"In a worker; it has not joined before the script has left its loop.\"\"\"
    while not Path("left").exists():
        pass
    return torch.optim.SGD(parameters, lr=0.1)


model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
with Line(model, cut=[2], loss=nn.functional.cross_entropy, optimizer=optimizer) as line:
    for _ in range(3):
        line.step(torch.randn(8, 4), torch.randint(3, (8,)))
    Path("left").touch()
    raise ValueError("a mistake in the loop")
"""


def test_steps_that_were_called_before_the_workers_had_joined_are_not_lost(workspace: Workspace) -> None:
    """The run ended with nothing saved, since no step had begun."""
    workspace.write("hasty.py", HASTY)
    script = workspace.start("script", str(workspace.folder / "hasty.py"))
    _, errors = script.communicate()
    assert errors.strip().endswith("ValueError: a mistake in the loop")
    assert "It begins at step 3" in errors


@pytest.mark.slow
def test_a_failure_that_the_script_has_not_met_is_named_at_its_end(workspace: Workspace) -> None:
    """It was told to correct the cause, and of none."""
    failing = HASTY.replace("torch.randn(8, 4), torch", "torch.randn(8, 5), torch")
    workspace.write("hasty.py", failing)
    _, errors = workspace.start("script", str(workspace.folder / "hasty.py")).communicate()
    assert errors.strip().endswith("ValueError: a mistake in the loop")
    assert "; it has failed: worker 0 (stage 0) failed: stage 0 failed in 0F0 of step 0, layer 0: Runtime" in errors
    met = (
        failing.partition("    for _")[0]
        + """
    Path("left").touch()
    print(line.step(torch.randn(8, 5), torch.randint(3, (8,))))
"""
    )
    workspace.write("hasty.py", met)
    _, errors = workspace.start("script", str(workspace.folder / "hasty.py")).communicate()
    assert errors.count("mat1 and mat2 shapes cannot be multiplied") == 1


HELD = """
import os
import signal
import sys

import torch
from torch import nn

from stageline import Line


class Held(nn.Linear):
    def forward(self, x):
        open("gate").close()  # in a worker, until the test opens it
        return super().forward(x)


model = nn.Sequential(Held(4, 8), nn.Linear(8, 3))
with Line(model, cut=[1], loss=nn.functional.cross_entropy, optimizer=torch.optim.SGD) as line:
    line.step(torch.randn(8, 4), torch.randint(3, (8,)))
    os.kill(os.getpid(), signal.SIGINT) if sys.argv[1] == "interrupt" else 1 / 0
"""


@pytest.mark.slow
@pytest.mark.parametrize(("how", "error"), [("interrupt", "KeyboardInterrupt"), ("raise", "ZeroDivisionError")])
def test_a_script_that_waits_for_the_end_of_its_run_speaks_of_ctrl_c_only_after_ctrl_c(
    workspace: Workspace, how: str, error: str
) -> None:
    """After any exception it told to press Ctrl-C once more."""
    workspace.write("held.py", HELD)
    os.mkfifo(workspace.folder / "gate")
    script = workspace.start("script", str(workspace.folder / "held.py"), how)
    assert script.stderr is not None
    told = next(line for line in script.stderr if "the workers finish their step and save it" in line)
    (workspace.folder / "gate").open("w").close()
    _, errors = script.communicate()
    assert error in errors
    assert ("Ctrl-C" in told) is (how == "interrupt")
    assert (error in told) is (how == "raise")


def test_a_script_whose_launcher_is_killed_does_not_wait_for_ever(workspace: Workspace) -> None:
    """Whichever is noticed first: the launcher that is gone, or a worker that ends for that reason."""
    script = start(workspace, "processes", "kill-launcher", "6")
    _, errors = script.communicate()
    assert script.returncode == 1
    assert "was killed by SIGKILL" in errors.splitlines()[-1]
    assert "RunFailed: the launcher of the run" in errors.splitlines()[-1]


@pytest.mark.slow
def test_a_worker_that_fails_before_the_script_has_joined_is_named_at_once(workspace: Workspace) -> None:
    """The script waited a minute for the broker, which had ended, and told to start one."""
    script = start(workspace, "processes", "optimizer")
    _, errors = script.communicate()
    assert script.returncode == 1
    assert ": optimizer returned an object of type int without step" in errors
    assert "no broker" not in errors


@pytest.mark.slow
def test_after_ctrl_c_in_the_loop_the_run_goes_on_after_the_last_step_that_was_called(
    workspace: Workspace, undisturbed: dict[str, Any]
) -> None:
    """It went on at step 5, of which a snapshot was due. The last two steps were under way."""
    script = start(workspace, "processes", "interrupt", "9")
    _, errors = script.communicate()
    assert script.returncode in (-signal.SIGINT, 130, 1)
    assert "KeyboardInterrupt" in errors
    resumed = result(workspace, "processes", "resume")
    assert (resumed["first"], resumed["losses"]) == (9, undisturbed["losses"][9:])
    assert (resumed["weights"], resumed["averages"]) == (undisturbed["weights"], undisturbed["averages"])


@pytest.mark.slow
def test_a_script_that_is_killed_leaves_no_process(workspace: Workspace) -> None:
    script = start(workspace, "processes", "kill", "script", "6")
    script.communicate()
    assert script.returncode == -signal.SIGKILL
    wait_until_all_have_ended(workspace)


@pytest.mark.slow
def test_a_run_whose_script_was_killed_goes_on_after_the_steps_that_its_workers_have_done(
    workspace: Workspace, undisturbed: dict[str, Any]
) -> None:
    start(workspace, "processes", "kill", "script", "12").communicate()
    resumed = result(workspace, "processes", "resume")  # its workers may still be there, or have gone
    assert resumed["first"] in (10, 11, 12)  # by which calls had arrived
    assert resumed["losses"] == undisturbed["losses"][resumed["first"] :]
    assert (resumed["weights"], resumed["averages"]) == (undisturbed["weights"], undisturbed["averages"])


@pytest.mark.slow
def test_a_run_whose_processes_were_all_killed_goes_on_at_its_newest_checkpoint_with_the_same_rows_alone(
    workspace: Workspace, undisturbed: dict[str, Any]
) -> None:
    start(workspace, "processes", "kill-launcher", "12").communicate()
    other = start(workspace, "processes", "resume-other", CUT="[1, 4]")  # with the rows of other steps
    _, errors = other.communicate()
    assert other.returncode == 1
    assert "is not the one that this run was given for it before: inputs" in errors
    resumed = result(workspace, "processes", "resume")
    assert resumed["first"] in (5, 10)  # by how far its workers came
    assert resumed["losses"] == undisturbed["losses"][resumed["first"] :]
    assert (resumed["weights"], resumed["averages"]) == (undisturbed["weights"], undisturbed["averages"])


@pytest.mark.slow
def test_a_run_killed_before_its_first_checkpoint_begins_again_with_other_stages(
    workspace: Workspace, undisturbed: dict[str, Any]
) -> None:
    """It was refused, where the same stages begin again."""
    start(workspace, "processes", "kill-launcher", "3").communicate()
    (run,) = workspace.runs()
    script = start(workspace, "processes", "resume", CUT="[1, 4]")
    said, errors = script.communicate()
    assert script.returncode == 0, errors
    assert f"{run.name} has no complete checkpoint" in errors
    found = json.loads(said)
    assert (found["first"], found["losses"], found["weights"]) == (0, undisturbed["losses"], undisturbed["weights"])


@pytest.mark.slow
def test_a_saved_checkpoint_is_a_beginning_when_the_run_is_long_gone(
    workspace: Workspace, undisturbed: dict[str, Any]
) -> None:
    script = start(workspace, "processes", "save", "13")
    said, errors = script.communicate()
    assert json.loads(said) == undisturbed
    assert "saved is there already, and not empty" in errors
    (run,) = workspace.runs()
    shutil.rmtree(run)
    saved = run.parent.parent / "saved"
    before = {file: file.read_bytes() for file in saved.rglob("*") if file.is_file()}
    assert [file.name for file in saved.parent.iterdir() if "saved" in file.name] == ["saved"]
    for cut in ("[3]", "[2]"):
        resumed = result(workspace, "processes", "resume", "saved", CUT=cut)
        assert (resumed["first"], resumed["losses"]) == (13, undisturbed["losses"][13:])
        assert (resumed["weights"], resumed["averages"]) == (undisturbed["weights"], undisturbed["averages"])
    assert before == {file: file.read_bytes() for file in saved.rglob("*") if file.is_file()}


@pytest.mark.slow
def test_digits_from_a_script_and_from_a_plan_have_one_digest(workspace: Workspace) -> None:
    script = workspace.start("script", str(EXAMPLES / "script_digits.py"))
    said, errors = script.communicate()
    assert script.returncode == 0, errors
    assert "epoch 20: loss" in said
    (run,) = workspace.runs()
    assert json.loads((run / "result.json").read_text())["weights_sha256"] == reference_digest(EXAMPLES / "digits")
