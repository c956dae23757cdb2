"""A stage whose weights, gradients and optimizer state are memory of files computes the same bits."""

import errno
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stageline.pipeline.features.offload import Offload
from stageline.pipeline.stage.layers.file_memory import FileMemory
from stageline.pipeline.stage.settings import StageSettings
from stageline.pipeline.stage.stage import Stage
from stageline.pipeline.stage.stage_state import StageState
from stageline.pipeline.stage.stage_update import ParameterGroup
from stageline.workers.disk import memory as mapped_files
from stageline.workers.disk.background_writer import WriteFailed
from stageline.workers.disk.memory import MappedFiles

pytestmark = pytest.mark.usefixtures("one_thread")

ADAM = partial(torch.optim.AdamW, lr=0.01)
SIDE = 160  # of a square of float32 that is large enough for a file
BOTH = {"weights": True, "optimizer": True}


def model(*, frozen: bool = False) -> list[nn.Module]:
    torch.manual_seed(0)
    layers = [nn.Linear(SIDE, SIDE), nn.Dropout(0.3), nn.BatchNorm1d(SIDE), nn.Tanh(), nn.Linear(SIDE, SIDE)]
    layers[0].requires_grad_(not frozen)
    return layers


def made(files: MappedFiles | None, wanted: dict[str, bool], *, frozen: bool = False, **options: Any) -> Stage:
    offload = Offload() if files is None else Offload(files=FileMemory(files), **wanted)
    return Stage(model(frozen=frozen), optimizer=ADAM, settings=StageSettings(**options, offload=offload))


def train(stage: Stage, steps: range, *, clips: bool = False, ema: bool = False) -> list[Tensor]:
    """Two microbatches in flight; returns what the stage evaluates to after each step."""
    found = []
    for step in steps:
        inputs = torch.randn(2, 6, SIDE, generator=torch.Generator().manual_seed(step))
        for microbatch, x in enumerate(inputs):
            stage.forward(x.requires_grad_(), step=step, microbatch=microbatch)
        for microbatch in range(2):
            stage.backward(torch.ones(6, SIDE), step=step, microbatch=microbatch)
            if stage._versions.stashed:
                stage.update(step)
        if clips:
            stage.norms()
            stage.clip()
        stage.update(step)
        found.append(stage.evaluate(inputs[0].detach(), ema=ema))
    return found


def tensors_of(value: Any) -> list[Tensor]:
    match value:
        case Tensor():
            return [value]
        case dict():
            return [each for part in value.values() for each in tensors_of(part)]
        case StageState():
            return tensors_of([dict(value.weights), dict(value.buffers), value.optimizer, dict(value.averages)])
        case list() | tuple():
            return [each for part in value for each in tensors_of(part)]
        case _:
            return []


@pytest.mark.parametrize("wanted", [BOTH, {"weights": True, "optimizer": False}, {"weights": False, "optimizer": True}])
@pytest.mark.parametrize(
    "options",
    [{}, {"recompute": "stage"}, {"stash_weights": True}, {"ema_decay": 0.9}, {"clip_norm": 0.5}, {"frozen": True}],
    ids=str,
)
def test_no_bit_changes_in_weights_state_and_evaluation(
    options: dict[str, Any], wanted: dict[str, bool], tmp_path: Path
) -> None:
    files = MappedFiles(tmp_path, lambda fault: None)
    results = []
    for stage in (made(None, wanted, **options), made(files, wanted, **options)):
        outputs = train(stage, range(3), clips="clip_norm" in options, ema="ema_decay" in options)
        results.append([*outputs, *tensors_of(stage.snapshot())])
    assert len(results[0]) == len(results[1])
    assert all(map(torch.equal, *results))


def test_a_group_of_which_the_stage_has_no_parameter_is_passed_over(tmp_path: Path) -> None:
    # An embedding has no bias: the first update raised ValueError.
    group = ParameterGroup(("*.bias",), {"weight_decay": 0.0})
    states = []
    files = FileMemory(MappedFiles(tmp_path, lambda fault: None))
    for offload in (Offload(), Offload(files=files, **BOTH)):
        torch.manual_seed(0)
        settings = StageSettings(groups=[group], offload=offload)
        stage = Stage([nn.Embedding(SIDE, SIDE)], optimizer=ADAM, settings=settings)
        stage.forward(torch.arange(SIDE))
        stage.backward(torch.ones(SIDE, SIDE))
        stage.update()
        states.append(tensors_of(stage.snapshot()))
    assert all(map(torch.equal, *states))


def test_a_snapshot_is_in_files_too_and_a_stage_goes_on_from_it_with_the_same_bits(tmp_path: Path) -> None:
    files = MappedFiles(tmp_path, lambda fault: None)
    stage = made(files, BOTH)
    train(stage, range(2))
    snapshot = stage.snapshot()
    large = [tensor for tensor in tensors_of(snapshot) if tensor.numel() >= SIDE * SIDE]
    assert len(large) == 6
    assert all(files.has(tensor.untyped_storage()) for tensor in large)
    wanted = train(stage, range(2, 4))
    other = made(files, BOTH)
    other.restore(snapshot)
    assert all(map(torch.equal, train(other, range(2, 4)), wanted))
    assert all(map(torch.equal, tensors_of(other.snapshot()), tensors_of(stage.snapshot())))
    kept = [each for entry in other._update.optimizer.state.values() for each in tensors_of(dict(entry))]  # type: ignore[union-attr]
    assert all(files.has(each.untyped_storage()) for each in kept if each.numel() >= SIDE * SIDE)


def test_what_a_stage_sends_shares_no_memory_with_its_weights(tmp_path: Path) -> None:
    class Gives(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(SIDE, SIDE))

        def forward(self, x: Tensor) -> Tensor:
            return self.weight

    files = FileMemory(MappedFiles(tmp_path, lambda fault: None))
    stage = Stage([Gives()], optimizer=ADAM, settings=StageSettings(offload=Offload(files=files, **BOTH)))
    sent = stage.forward(torch.ones(1))
    stage.backward(torch.ones(SIDE, SIDE))
    stage.update()
    assert (sent == 1).all()


def test_a_gradient_that_has_no_file_is_named_by_the_disks_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Autograd hands on what a hook raises; the backward can be run again from the snapshot."""

    def refused(descriptor: int, size: int) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    stage = made(MappedFiles(tmp_path, lambda fault: None), BOTH)
    stage.forward(torch.randn(6, SIDE))
    monkeypatch.setattr(mapped_files, "_reserve", refused)
    with pytest.raises(WriteFailed, match=f"cannot make a file of {SIDE * SIDE * 4} bytes in .*: Read-only"):
        stage.backward(torch.ones(6, SIDE))
