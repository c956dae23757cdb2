"""A step of some parameters at a time gives the bits of one step of all, and leaves the optimizer as that would."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook

from stageline.pipeline.stage import stage_update as partial_steps
from stageline.pipeline.stage.layers.file_memory import FileMemory
from stageline.pipeline.stage.stage_update import UpdatedFiles
from stageline.workers.disk.memory import MappedFiles

pytestmark = pytest.mark.usefixtures("one_thread")

optim = torch.optim
Optimizer = torch.optim.Optimizer
Make = Callable[[list[dict[str, Any]]], Optimizer]


class CountingSGD(optim.SGD):
    """Another's optimizer: it counts its steps in a group."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.param_groups[0]["count"] = self.param_groups[0].get("count", 0) + 1


def stepped(make: Make, memory: FileMemory | None) -> tuple[Optimizer, list[Tensor]]:
    drawn = torch.Generator().manual_seed(0)
    parameters = [torch.randn(160, 160, generator=drawn).requires_grad_() for _ in range(4)]
    optimizer = make([{"params": parameters[:3]}, {"params": parameters[3:], "weight_decay": 0.1}])
    schedule = lr_scheduler.ExponentialLR(optimizer, 0.5)
    for _ in range(3):
        for parameter in parameters[:-2] + parameters[-1:]:  # one gets no gradient
            parameter.grad = torch.randn(160, 160, generator=drawn)
        optimizer.step() if memory is None else UpdatedFiles(memory, state=True).step(optimizer)
        schedule.step()
    return optimizer, [each.detach() for each in parameters]


@pytest.mark.parametrize(
    "make",
    [
        lambda groups: optim.SGD(groups, lr=0.1, momentum=0.9),
        lambda groups: optim.AdamW(groups, lr=0.1, amsgrad=True),
        lambda groups: optim.Adam(groups, lr=0.1, fused=True),
        lambda groups: optim.RMSprop(groups, lr=0.1, momentum=0.5, centered=True),
        lambda groups: optim.Adagrad(groups, lr=0.1),
        lambda groups: optim.ASGD(groups, lr=0.1),
        lambda groups: CountingSGD(groups, lr=0.1, momentum=0.9),
    ],
    ids=["SGD", "AdamW", "Adam, fused", "RMSprop", "Adagrad", "ASGD", "another's"],
)
def test_no_bit_changes(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial_steps, "_PART", 1)
    files = MappedFiles(tmp_path, lambda fault: None)
    (plain, wanted), (other, found) = stepped(make, None), stepped(make, FileMemory(files))
    assert all(map(torch.equal, found, wanted))
    saved, same = plain.state_dict(), other.state_dict()
    assert saved["param_groups"] == same["param_groups"]
    assert saved["state"].keys() == same["state"].keys()
    large = 0
    for number, entry in saved["state"].items():
        for name, value in entry.items():
            kept = same["state"][number][name]
            assert torch.equal(kept, value) if isinstance(value, Tensor) else kept == value
            if isinstance(value, Tensor) and value.numel() > 1:
                assert files.has(kept.untyped_storage())
                large += 1
    assert large


def test_a_step_that_raises_leaves_all_groups_whole(tmp_path: Path) -> None:
    parameters = [torch.zeros(3, requires_grad=True) for _ in range(2)]
    optimizer = optim.SGD([{"params": parameters[:1]}, {"params": parameters[1:]}], lr=0.1)
    parameters[0].grad = torch.zeros(3)
    optimizer.param_groups[0]["lr"] = "much"
    with pytest.raises(TypeError):
        UpdatedFiles(FileMemory(MappedFiles(tmp_path, lambda fault: None)), state=True).step(optimizer)
    assert [group["params"] for group in optimizer.param_groups] == [[each] for each in parameters]


def test_a_hook_that_all_optimizers_have_is_called_once_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was called for each part of each group."""
    monkeypatch.setattr(partial_steps, "_PART", 1)
    called: list[Optimizer] = []
    hook = register_optimizer_step_post_hook(lambda optimizer, args, kwargs: called.append(optimizer))
    try:
        memory = FileMemory(MappedFiles(tmp_path, lambda fault: None))
        optimizer, _ = stepped(lambda groups: optim.SGD(groups, lr=0.1), memory)
    finally:
        hook.remove()
    assert called == 3 * [optimizer]
