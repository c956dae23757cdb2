"""The bytes of tensors that operations make are counted for as long as these are there."""

from pathlib import Path

import torch
from torch import nn

from stageline.pipeline.stage.layers.file_memory import FileMemory
from stageline.workers.disk.memory import MappedFiles
from stageline.workers.extras.preflight.trial_stages import LiveBytes

KIB = 1024


def test_what_is_made_counts_until_it_is_gone_and_what_was_there_does_not() -> None:
    x = torch.zeros(256)  # 1 KiB
    live = LiveBytes()
    with live.watched():
        y = x + 1
        z = (y * 2).view(16, 16).t()
        x.add_(y)
    assert (live.now, live.peak) == (2 * KIB, 2 * KIB)
    del y
    assert live.now == KIB
    del z
    assert (live.now, live.peak) == (0, 2 * KIB)


def test_what_backward_makes_and_frees_counts_in_its_peak() -> None:
    linear = nn.Linear(256, 256, bias=False)  # 256 KiB, and as much of gradients
    live = LiveBytes()
    with live.watched():
        y = linear(torch.randn(256, 256)).tanh()  # the input and the output of tanh are kept; that of linear is not
    assert (live.now, live.peak) == (512 * KIB, 768 * KIB)
    with live.watched():
        y.backward(torch.ones(256, 256))
    assert live.peak >= (512 + 256 + 256) * KIB
    del y
    assert live.now == 256 * KIB


def test_memory_of_files_does_not_count(tmp_path: Path) -> None:
    memory, live = FileMemory(MappedFiles(tmp_path, lambda fault: None)), LiveBytes()
    with live.watched():
        moved = memory.moved(torch.ones(2**16))
        assert live.now == 0
        assert live.peak == 2**18
    assert memory.has(moved)
