"""Tensors are read in pieces that are small whatever the tensors are."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from stageline.pipeline.model.weights import reading
from stageline.pipeline.model.weights.reading import pieces_of, read_into, rounds

TENSORS = {
    "table": torch.arange(70.0).reshape(7, 10),
    "line": torch.arange(33),
    "number": torch.tensor(4),
    "none": torch.zeros(0, 3),
    "truth": torch.tensor([True, False, True]),
    "half": torch.arange(12).to(torch.bfloat16).reshape(2, 2, 3),
}


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
@pytest.mark.parametrize("most", [1, 50, 100, 10**6])
def test_what_is_read_is_what_was_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, most: int
) -> None:
    monkeypatch.setattr(reading, "ROUND", most)
    monkeypatch.setattr(reading, "PIECE", most)
    file = tmp_path / f"m{suffix}"
    (save_file if suffix == ".safetensors" else torch.save)(TENSORS, file)
    targets = {name: torch.empty_like(tensor) for name, tensor in TENSORS.items()}
    read_into(file, targets)
    assert all(torch.equal(targets[name], tensor) for name, tensor in TENSORS.items())


def test_a_round_has_no_more_bytes_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "ROUND", 100)
    monkeypatch.setattr(reading, "PIECE", 100)
    pieces = [piece for name, tensor in TENSORS.items() for piece in pieces_of(name, tensor)]
    groups = list(rounds(pieces))
    assert [piece for group in groups for piece in group] == pieces
    assert all(sum(piece.bytes for piece in group) <= 100 for group in groups)
    assert sum(piece.bytes for piece in pieces) == sum(t.numel() * t.element_size() for t in TENSORS.values())
