"""Tensors that move into files keep their bits, strides and alignment; those that share memory still do."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from stageline.pipeline.stage.layers.file_memory import FileMemory
from stageline.pipeline.stage.layers.memory import skew_of
from stageline.workers.disk.memory import MappedFiles

SIDE = 160  # of a square of float32 that is large enough for a file


@pytest.fixture
def files(tmp_path: Path) -> MappedFiles:
    return MappedFiles(tmp_path, lambda fault: None)


def there(files: MappedFiles, tensor: Tensor) -> bool:
    return files.has(tensor.untyped_storage())


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(SIDE, SIDE),
        lambda: torch.randn(SIDE, SIDE + 7).t(),
        lambda: torch.randn(SIDE, 2 * SIDE)[:, :SIDE],
        lambda: torch.randn(SIDE * SIDE + 3)[3:],
        lambda: torch.randn(2, 20, 40, 50).to(memory_format=torch.channels_last),
        lambda: torch.randn(4 * SIDE, SIDE).to(torch.bfloat16),
    ],
    ids=["plain", "transposed", "with gaps", "off the boundary", "channels last", "bfloat16"],
)
def test_a_tensor_moves_once_and_lies_as_before(make: Callable[[], Tensor], files: MappedFiles) -> None:
    memory, tensor = FileMemory(files), make()
    moved = memory.moved(tensor)
    assert there(files, moved)
    assert torch.equal(moved, tensor)
    assert (moved.stride(), moved.dtype, skew_of(moved)) == (tensor.stride(), tensor.dtype, skew_of(tensor))
    assert memory.moved(moved) is moved


def test_small_and_overlapping_tensors_stay(files: MappedFiles) -> None:
    memory = FileMemory(files)
    for tensor in (torch.randn(8), torch.randn(2 * SIDE * SIDE).unfold(0, SIDE, 1)):
        assert memory.moved(tensor) is tensor


def test_gradients_move_as_they_are_added_up_and_have_the_same_bits(files: MappedFiles) -> None:
    plain, other = nn.Linear(SIDE, SIDE), nn.Linear(SIDE, SIDE)
    other.load_state_dict(plain.state_dict())
    FileMemory(files).take_parameters(other)
    assert there(files, other.weight)
    for x in torch.randn(3, 4, SIDE):
        for layer in (plain, other):
            layer(x).square().sum().backward()
    assert other.weight.grad is not None
    assert plain.weight.grad is not None
    assert there(files, other.weight.grad)
    assert torch.equal(other.weight.grad, plain.weight.grad)


@pytest.mark.parametrize("as_buffer", [True, False], ids=["a buffer", "an attribute"])
def test_parameters_that_share_memory_stay_and_go_on_sharing_it(as_buffer: bool, files: MappedFiles) -> None:
    """An attribute that is a view of its layer's weight was left with the weight's former values."""
    layer = nn.Linear(SIDE, SIDE)
    view = layer.weight.detach()[:2]
    if as_buffer:
        layer.register_buffer("view", view)
    else:
        layer.view = view
    del view
    FileMemory(files).take_parameters(layer)
    with torch.no_grad():
        layer.weight.fill_(3.0)
    assert (layer.view == 3.0).all()
    assert not there(files, layer.weight)
