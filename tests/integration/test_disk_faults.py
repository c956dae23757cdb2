"""Whole runs whose disk is full, or has lost what they wrote."""

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.fork_server import ForkServer
from support.whole_run import WholeRun, expected, plan_in
from support.workspace import Workspace, until, wait_for

STEPS = 12

LARGE = """
import resource
from pathlib import Path

import torch

from stageline.pipeline import retry

retry.BOUND = 1.0  # from the start: what is queued to be written has its bound from then on

def _fill_the_disk(seconds, plain=sleep):
    if (Path(__file__).parent / "full").exists():
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**17, resource.RLIM_INFINITY))
    plain(seconds)

def build(plain=build):
    model = plain()
    for layer in model:
        layer.register_buffer("ballast", torch.zeros(2**16))
    return model

sleep = _fill_the_disk
"""


@pytest.mark.slow
def test_a_disk_that_stays_full_ends_the_run_with_its_name_and_what_is_there_can_be_used(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    plan = plan_in(tmp_path)
    model = plan.parent / "model.py"
    model.write_text(model.read_text() + LARGE)
    going = WholeRun(fork_server, plan, f"run.steps={STEPS}")
    going.until_checkpoint(4)
    (plan.parent / "full").touch()
    outcome = going.end()
    assert outcome["code"] == 1
    assert "could not write its snapshot of step" in outcome["reason"]
    assert str(going.folder / "checkpoints") in outcome["reason"]
    assert re.search(r"File too large.* It was tried for [1-3] s", outcome["reason"])
    (plan.parent / "full").unlink()
    resumed = WholeRun(fork_server, plan, f"run.steps={STEPS}", resume=True)
    assert resumed.digest() == expected(STEPS, plan.parent)


WIDE = """
class Widen(nn.Module):
    def forward(self, x):
        return nn.functional.pad(x, (0, 2**15))

class Narrow(nn.Module):
    def forward(self, x):
        return x[:, :5]

def build(plain=build):
    return nn.Sequential(Widen(), Narrow(), *plain())
"""


@pytest.mark.slow
def test_a_disk_that_has_no_room_for_what_is_tapped_is_named_and_the_run_goes_on_when_it_has(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    plan = plan_in(tmp_path)
    model = plan.parent / "model.py"
    plain_build = LARGE[LARGE.index("def build") : LARGE.index("sleep = ")]
    model.write_text(model.read_text() + LARGE.replace(plain_build, "") + WIDE)
    sets = (f"run.steps={STEPS}", 'taps.layers=["0"]', "taps.every=1")
    going = WholeRun(fork_server, plan, *sets)
    going.until_checkpoint(4)
    (plan.parent / "full").touch()
    outcome = going.end()
    assert outcome["code"] == 1
    tapped = r"taps/stage-0/step-\d+-\d\.safetensors could not be written: .*File too large.* It was tried for [1-3] s"
    assert re.search(tapped, outcome["reason"])
    (plan.parent / "full").unlink()
    resumed = WholeRun(fork_server, plan, *sets, resume=True)
    assert resumed.end()["code"] == 0
    names = {path.name for path in (going.folder / "taps" / "stage-0").iterdir()}
    assert names == {f"step-{step}-{microbatch}.safetensors" for step in range(STEPS) for microbatch in range(2)}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of 8 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid():
        pytest.skip("a file system can only be mounted by root")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", disk], check=True)
    try:
        yield disk
    finally:
        subprocess.run(["umount", disk], check=True)


def fill(disk: Path) -> Path:
    """A file that takes all room that is left, to the byte."""
    ballast = disk / "ballast"
    subprocess.run(["dd", "if=/dev/zero", f"of={ballast}", "bs=4096"], capture_output=True)  # ends when it is full
    return ballast


SOON = """
from stageline.pipeline import retry

retry.BOUND = {bound}

def build(plain=build):
    layers = [*plain()]
    return [nn.Sequential(*layers[:4]), nn.Sequential(*layers[4:])]
"""


@pytest.mark.slow
def test_a_disk_that_stays_full_is_told_once_and_ends_the_run_when_its_broker_gives_up_with_the_cause_in_its_records(
    workspace: Workspace, tmp_path: Path, small_disk: Path
) -> None:
    """`train` printed twelve equal lines and started five more brokers; `why` said later that the run was killed."""
    plan = plan_in(tmp_path)
    plan.write_text(plan.read_text().replace("cut = [4]", ""))  # the broker loads the model, to count its stages
    model = plan.parent / "model.py"
    model.write_text(model.read_text() + SOON.format(bound=8.0))
    command = ["train", str(plan), "--json"]
    for each in ("run.steps=2000", f"run.dir={small_disk}"):
        command += ["--set", each]
    train = workspace.start(*command)
    wait_for(lambda: [*small_disk.glob("*/checkpoints/stage-1/step-*4")])
    ballast = fill(small_disk)
    (folder,) = small_disk.glob("tiny-*")
    _, log = train.communicate()
    assert train.wait() == 1
    cause = f"the broker cannot keep its records in {folder}/broker.sqlite: "
    lines = log.splitlines()
    assert [cause in line for line in lines].count(True) == 2, log  # when it begins, and as the reason of the end
    assert re.search(r"tried for \d+ s", lines[-2])
    steps = [line for line in lines if "samples/s" in line]
    assert len({line.partition(",")[0] for line in steps}) == len(steps), log
    assert (folder / "broker.log").read_text().count("cannot keep its records") == 2  # one broker has tried
    why = workspace.command("why", str(folder)).stdout
    assert cause in why
    assert "was killed" not in why
    assert "--resume" in why
    ballast.unlink()
    resumed = workspace.start(*command, "--resume", folder.name)
    until(resumed.stderr, "step ")
    assert "cannot keep" not in workspace.command("why", str(folder)).stdout
    resumed.send_signal(signal.SIGTERM)
    resumed.communicate()
    assert resumed.wait() == 75
    assert "cannot keep" not in workspace.command("why", str(folder)).stdout


@pytest.mark.slow
@pytest.mark.parametrize("broker_knows", [False, True])
def test_a_run_that_is_stopped_while_the_disk_of_workers_and_broker_is_full_ends_and_can_be_resumed(
    broker_knows: bool, workspace: Workspace, tmp_path: Path, small_disk: Path
) -> None:
    """It ended after a minute, once the broker had given up its records: it did not hear that it was to stop."""
    command = ["train", str(plan_in(tmp_path)), "--json"]
    for each in (f"run.steps={STEPS}", f"run.dir={small_disk}"):
        command += ["--set", each]
    train = workspace.start(*command)
    wait_for(lambda: [*small_disk.glob("*/checkpoints/stage-1/step-*4")])
    ballast = fill(small_disk)
    (folder,) = small_disk.glob("tiny-*")
    if broker_knows:
        wait_for(lambda: "waits for its records" in (folder / "broker.log").read_text())
    train.send_signal(signal.SIGTERM)
    _, log = train.communicate()
    assert train.wait() == 75
    ended = (
        r" The broker has ended: interrupted while the broker waited for its "
        rf"records: cannot keep its records in {folder}/broker.sqlite: .* is full\. Mend that, and resume the run"
    )
    # A broker that has heard of no step after the newest checkpoint says that its state is saved.
    known = rf"checkpoint \d+ is complete\.{ended}" if broker_knows else r"(checkpoint|the state after) \d+ (is|steps)"
    assert re.search(f"interrupted; {known}", log), log
    ballast.unlink()
    resumed = workspace.command(*command, "--resume", folder.name)
    assert json.loads(resumed.stdout.splitlines()[-1])["weights_sha256"] == expected(STEPS, tmp_path / "plan")
