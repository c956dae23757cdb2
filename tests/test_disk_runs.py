"""Whole runs whose disk is full, or has lost what they wrote."""

from collections.abc import Callable
from pathlib import Path

import pytest

from nursery import Nursery
from whole import WholeRun, expected, plan_in

STEPS = 12

LARGE = """
import resource
from pathlib import Path

import torch

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


def test_a_disk_that_is_full_ends_the_run_with_its_name_and_what_is_there_can_be_used(
    nursery: Nursery, tmp_path: Path
) -> None:
    plan = plan_in(tmp_path)
    model = plan.parent / "model.py"
    model.write_text(model.read_text() + LARGE)
    going = WholeRun(nursery, plan, f"run.steps={STEPS}")
    going.until_checkpoint(4)
    (plan.parent / "full").touch()
    outcome = going.end()
    assert outcome["code"] == 1
    assert "could not write its snapshot of step" in outcome["reason"]
    assert str(going.folder / "checkpoints") in outcome["reason"]
    assert "File too large" in outcome["reason"]
    (plan.parent / "full").unlink()
    resumed = WholeRun(nursery, plan, f"run.steps={STEPS}", resume=True)
    assert resumed.digest() == expected(STEPS, plan.parent)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def unreadable(file: Path) -> None:
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize(
    ("harm", "name"),
    [(flip, "weights.safetensors"), (unreadable, "training.safetensors"), (Path.unlink, "manifest.json")],
)
def test_a_run_whose_checkpoint_is_damaged_does_not_go_on_and_names_the_file(
    harm: Callable[[Path], None], name: str, nursery: Nursery, tmp_path: Path
) -> None:
    plan = plan_in(tmp_path)
    going = WholeRun(nursery, plan, "run.steps=100")
    going.until_checkpoint(4)
    going.stop()
    stopped = going.end()
    assert stopped["code"] == 75
    newest = going.folder / "checkpoints" / "stage-1" / f"step-{stopped['facts']['checkpoint']:010d}"
    harm(newest / name)
    outcome = WholeRun(nursery, plan, "run.steps=100", resume=True).end()
    assert outcome["code"] == 1
    assert str(newest) in outcome["reason"]
    assert name in outcome["reason"]
    assert outcome["facts"]["restarts"] == 0
