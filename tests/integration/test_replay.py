"""A microbatch of a run is run again, alone, and has the bits that it had: whatever was killed meanwhile."""

import os
import re
import shlex
from pathlib import Path

import pytest

from stageline.workers.extras.recording.records import REASON, NotRecorded, RecordDirectory
from stageline.workers.extras.recording.replay import ReplayTarget, replay
from support.fork_server import ForkServer
from support.paths import EXAMPLES
from support.workspace import MODEL

STEPS, EVERY = 12, 3
PICKY = f"""{MODEL}
import torch

class Picky(nn.Module):
    def forward(self, x):
        print("picky", flush=True)
        breakpoint()
        if torch.is_grad_enabled() and x.shape[0] == 1:
            raise ValueError("one row only")
        return x

def picky():
    return nn.Sequential(*build(), Picky())

def loss(outputs, targets):
    value = nn.functional.cross_entropy(outputs, targets)
    return value * float("nan") if outputs.shape[0] == 1 else value
"""


def recorded(fork_server: ForkServer, folder: Path, mode: str, *more: str, **kills: int) -> Path:
    """The folder of a run of three stages on two workers that recorded all; `more` sets keys of its plan."""
    sets = (
        f"run.steps={STEPS}",
        f"run.dir={folder}",
        f"schedule.microbatches={3 if mode == 'sync' else 1}",
        f"schedule.mode={mode}",
        "model.cut=[3, 8]",
        "workers.0.stages=[0]" if mode == "async" else "workers.0.stages=[0, 2]",
        "workers.1.stages=[1]",
        *(("workers.2.stages=[2]",) if mode == "async" else ()),
        "recovery.record=all",
        "recovery.restarts=5",
        f"recovery.snapshot_every={EVERY}",
        *more,
    )
    config = EXAMPLES / "digits" / "stageline.toml"
    killed = [(f"worker-{name[-1]}", after) for name, after in kills.items()]
    outcome = fork_server.train(config, *sets, folder=folder / "run", kills=killed)
    assert outcome["code"] == 0, outcome["reason"]
    assert outcome["not killed"] == []
    return folder / "run"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "kills"),
    [
        ("sync", {}),
        ("sync", {"worker1": 55}),
        ("async", {}),
        ("async", {"worker0": 25, "worker1": 31}),
    ],
    ids=str,
)
def test_every_microbatch_since_the_last_but_one_checkpoint_has_its_bits_again(fork_server, tmp_path, mode, kills):
    run = recorded(fork_server, tmp_path, mode, **kills)
    for step in range(STEPS - EVERY, STEPS):
        every_stage_has_its_bits_again(run, step, microbatches=3 if mode == "sync" else 1)


def every_stage_has_its_bits_again(run: Path, step: int, microbatches: int) -> None:
    for stage in range(3):
        for microbatch in range(microbatches):
            replayed = replay(run, ReplayTarget(stage, step, microbatch))
            assert [outcome.same for outcome in replayed.outcomes] == [True, True if stage else None]
            assert replayed.reproduced


@pytest.mark.slow
def test_microbatches_after_a_round_of_evaluation_have_their_bits_again(fork_server, tmp_path):
    """Messages of evaluation are not recorded; with `keep_best` there is a snapshot just before each round."""
    rounds = (f"evaluation.every={EVERY - 1}", "evaluation.keep_best=true", "evaluation.patience=9")
    run = recorded(fork_server, tmp_path, "sync", *rounds)
    every_stage_has_its_bits_again(run, STEPS - 1, microbatches=3)


@pytest.mark.slow
def test_what_is_older_than_the_checkpoint_before_the_last_is_forgotten(fork_server, tmp_path):
    run = recorded(fork_server, tmp_path, "sync")
    begins = [begin for begin, _ in RecordDirectory(run, 1).segments()]
    assert begins[-1] == STEPS - EVERY
    assert begins[0] > 0
    with pytest.raises(NotRecorded, match=f"recorded are messages of the steps {begins[0]} to {STEPS - 1}"):
        replay(run, ReplayTarget(1, begins[0] - 1, 0))


@pytest.mark.parametrize("url", ["memory://", pytest.param("ipc://", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("plan", "words"),
    [("model.factory=model.py:picky", "ValueError: one row only"), ("model.loss=model.py:loss", "step 5 is nan")],
)
def test_a_microbatch_that_stops_the_run_can_be_run_again(workspace, capfd, monkeypatch, url, plan, words):
    monkeypatch.setenv("PYTHONBREAKPOINT", "0")
    workspace.write("model.py", PICKY)
    failed = workspace.command("train", ".", "--set", f"queues.url={url}", "--set", plan)
    assert failed.returncode == 1
    assert words in failed.stderr
    (command,) = [line for line in failed.stderr.splitlines() if "stageline replay" in line]
    arguments = shlex.split(command.partition("stageline ")[2])
    assert arguments[2:] == ["--stage", "1", "--step", "5", "--microbatch", "0"]
    assert workspace.here(*arguments) == 0
    said = capfd.readouterr()
    assert f"in the run: {'stage 1 failed' if 'one row' in words else 'the loss'}" in said.out
    assert "picky" not in said.out
    for place, wrong in (("--stage", "no stage 9"), ("--step", "no step 9"), ("--microbatch", "no microbatch 9")):
        changed = [*arguments]
        changed[changed.index(place) + 1] = "9"
        assert workspace.here(*changed) == 2
        assert wrong in capfd.readouterr().err
    changed = [*arguments]
    changed[changed.index("--step") + 1] = "4"
    assert workspace.here(*changed) == 2
    assert "and bad-0000000005-0" in capfd.readouterr().err
    reason = RecordDirectory(workspace.folder / arguments[1], 1).bad(5, 0) / REASON
    reason.write_text(re.sub(r'"1[FB]0"', '"1G0"', reason.read_text()))
    assert workspace.here(*arguments) == NotRecorded.exit_code
    assert "1G0, which failed, is an operation of a feature" in capfd.readouterr().err


@pytest.mark.slow
def test_a_breakpoint_stops_at_the_microbatch_and_only_there(workspace):
    workspace.write("model.py", PICKY)
    recovery = ("recovery.record=all", "recovery.restarts=1", "recovery.snapshot_every=3", "data.batch_size=8")
    sets = [word for each in (*recovery, "model.factory=model.py:picky") for word in ("--set", each)]
    trained = workspace.command("train", ".", *sets, PYTHONBREAKPOINT="0")
    assert trained.returncode == 0, trained.stderr
    workspace.write("stops.py", "import os\ndef note():\n    os.write(1, b'stopped\\n')\n")
    (run,) = workspace.runs()
    again = workspace.command(
        *("replay", str(run), "--stage", "1", "--step", "5", "--microbatch", "2"),
        cold=True,
        PYTHONBREAKPOINT="stops.note",
        PYTHONPATH=os.pathsep.join([str(workspace.folder), os.environ.get("PYTHONPATH", "")]),
    )
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("stopped") == 1
    assert again.stderr.count("picky") == 1
    assert again.stderr.startswith(f"stageline: executes {workspace.folder / 'model.py'}, torch.nn.functional, ")


def test_with_record_none_nothing_is_left(workspace):
    workspace.write("model.py", PICKY)
    none = ("--set", "recovery.record=none", "--set", "queues.url=memory://", "--set", "model.loss=model.py:loss")
    assert workspace.here("train", ".", *none) == 1
    (run,) = workspace.runs()
    assert not (run / "recorded").exists()
